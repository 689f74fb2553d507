"""One experiment on NeMo's graph-captured decoder in a process of its own, since an illegal access ends a CUDA process.

    python tests/gpu/decoder_fault.py empty_cache --shield no

Events between two groups of decoder steps: none; empty_cache; torch_graph (any capture by `torch.cuda.graph`, which empties the cache
first); graphed_step (our capture, attached to the encoder alone). Prints one JSON line; exit code 0 means that every step survived and
decoded the same tokens as without graphs.
"""

from __future__ import annotations

import argparse
import json
import random

import torch
from mixed_steps import Session, build, churn

from workbench.encoder.decoder_shield import shield_decoders
from workbench.encoder.graphed import StepShape, attach
from workbench.encoder.options import GraphOptions
from workbench.encoder.steady import steady_call

EVENTS = ("none", "empty_cache", "torch_graph", "graphed_step")


def cause(event, model):
    if event == "empty_cache":
        torch.cuda.empty_cache()
    elif event == "torch_graph":
        value, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value.add_(1)
    elif event == "graphed_step":
        attach(model.encoder, GraphOptions()).precapture([StepShape(batch=4)])


def cached_bytes_on_other_streams():
    """Free memory of the ordinary cache that belongs to streams other than the default one: where loop bodies' temporaries went."""
    ordinary = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == (0, 0) and s["stream"] != 0]
    return sum(s["total_size"] - s["active_size"] for s in ordinary)


@torch.inference_mode()
def experiment(event):
    model, rng = build(layers=1), random.Random(0)
    session = Session(model, 4)
    calls = [steady_call(model.encoder, StepShape(batch=4)) for _ in range(20)]
    for call in calls[:3]:
        session.step(model, call)
    torch.cuda.synchronize()
    computer = model.decoding.decoding.decoding_computer
    yield {
        "mode": str(computer.cuda_graphs_mode),
        "graph": computer.full_graph is not None,
        "cached": cached_bytes_on_other_streams(),
    }
    cause(event, model)
    for call in calls[3:]:
        session.step(model, call)
        churn(rng, empty_share=0)
        torch.cuda.synchronize()
    tokens = session.tokens()
    computer.force_cuda_graphs_mode("no_graphs")
    again = Session(model, 4)
    again.state = session.start
    for call in calls:
        again.step(model, call)
    yield {"tokens": sum(map(len, tokens)), "equal": tokens == again.tokens()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("event", choices=EVENTS)
    parser.add_argument("--shield", choices=["yes", "no"], default="no")
    options = parser.parse_args()
    if options.shield == "yes":
        shield_decoders()
    result = {"event": options.event, "shield": options.shield, "outcome": "survived"}
    try:
        for part in experiment(options.event):
            result.update(part)
    except RuntimeError as error:  # torch.AcceleratorError among them
        result["outcome"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    print(json.dumps(result), flush=True)
    raise SystemExit(result["outcome"] != "survived" or not result["equal"])


if __name__ == "__main__":
    main()
