"""Thousands of streaming steps in which graphed encoder steps and NeMo's graph-captured decoder alternate, with memory churn between.

    python tests/gpu/mixed_steps.py --steps 10000 --out studies/h200/graphed_mixed.json

Two sessions of different batch size take turns; sessions end and new ones begin; the decoder grows and is captured anew; the
allocator's cache is emptied and NaN-filled tensors come and go, so that a kernel reading freed memory shows. Every 50th encoder step is
held against the eager one by `torch.equal`, every 10th session is decoded again by a model without any graph.
"""

from __future__ import annotations

import argparse
import random
import time

import torch

from workbench.encoder.graphed import StepShape, set_streaming_cuda_graphs
from workbench.encoder.steady import steady_call
from workbench.model.load import set_decoding
from workbench.model.shapes import build_model
from workbench.results import Record

BATCHES = (1, 2, 3, 4, 8, 16, 32)
SESSION_STEPS = 20
MAX_SYMBOLS = 2


def build(layers=2, decoder_graphs=True):
    model = build_model("tiny", layers=layers).cuda()
    model.encoder.set_default_att_context_size([56, 0])
    set_decoding(model, MAX_SYMBOLS, decoder_graphs=decoder_graphs)
    return model


class Session:
    """`batch` streams that have come to the steady state; `inputs` keeps what was fed so that it can be decoded again."""

    def __init__(self, model, batch):
        self.batch, self.hypotheses, self.inputs = batch, None, []
        self.state = model.encoder.get_initial_cache_state(batch_size=batch)
        self.start = self.state

    def step(self, model, call):
        signal, lengths = call.inputs[:2]
        self.inputs.append((signal, lengths))
        out = model.conformer_stream_step(
            signal, lengths, *self.state, keep_all_outputs=False, previous_hypotheses=self.hypotheses
        )
        self.state, self.hypotheses = out[2:5], out[5]

    def tokens(self):
        return [[int(t) for t in h.y_sequence] for h in self.hypotheses]


def decoded_again(reference, session):
    again = Session(reference, session.batch)
    again.state = session.start
    for signal, lengths in session.inputs:
        again.step(reference, steady_call(reference.encoder, StepShape(batch=1))._replace(inputs=(signal, lengths)))
    return again.tokens()


def churn(rng, empty_share=0.1):
    """Leave NaNs wherever the allocator has free memory, and sometimes give that memory back to the device."""
    for _ in range(3):
        torch.full((rng.randrange(1, 1 << 22),), float("nan"), device="cuda")
    if rng.random() < empty_share:
        torch.cuda.empty_cache()


@torch.inference_mode()
def run_mixed(steps, layers=2, seed=0, batches=BATCHES, check_every=50, decode_every=10):
    """Returns numbers and counters; `encoder_mismatches` and `transcript_mismatches` must be 0."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rng, model, reference = random.Random(seed), build(layers), build(layers)
    reference.load_state_dict(model.state_dict())
    # The reference decodes without graphs but over rows padded like those of the graph: other shapes would round differently.
    reference.decoding.decoding.decoding_computer.force_cuda_graphs_mode("no_graphs")
    step = set_streaming_cuda_graphs(model)
    found = {
        "encoder_checks": 0,
        "encoder_mismatches": 0,
        "sessions_decoded_again": 0,
        "transcript_mismatches": 0,
        "tokens": 0,
    }
    growing = [Session(model, batch) for batch in sorted(batches)]  # the decoder is captured anew for each of these
    sessions, waiting, finished, seconds = [], growing, 0, []
    largest = Session(reference, max(batches))
    largest.step(reference, steady_call(reference.encoder, StepShape(batch=max(batches))))
    for index in range(steps):
        while len(sessions) < 2:
            sessions.append(waiting.pop(0) if waiting else Session(model, rng.choice(batches)))
        session = sessions[index % 2]
        call = steady_call(model.encoder, StepShape(batch=session.batch))
        if index % check_every == check_every - 1:
            inputs = call.inputs._replace(
                cache_channel=session.state[0], cache_time=session.state[1], cache_channel_len=session.state[2]
            )
            got, want = (
                step.step(*inputs, False),
                type(model.encoder).cache_aware_stream_step(model.encoder, *inputs, False),
            )
            found["encoder_checks"] += 1
            found["encoder_mismatches"] += not all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        begin_s = time.perf_counter()
        session.step(model, call)
        seconds.append(time.perf_counter() - begin_s)
        churn(rng)
        if len(session.inputs) == SESSION_STEPS:
            sessions.remove(session)
            finished += 1
            found["tokens"] += sum(map(len, session.tokens()))
            if finished > len(batches) and finished % decode_every == 0:
                found["sessions_decoded_again"] += 1
                found["transcript_mismatches"] += session.tokens() != decoded_again(reference, session)
    torch.cuda.synchronize()
    computer = model.decoding.decoding.decoding_computer
    decoder_mode = str(computer.cuda_graphs_mode)
    window = max(1, min(500, steps // 4))
    middle = lambda part: sorted(part)[len(part) // 2] * 1e3  # noqa: E731
    return {
        **found,
        "steps": steps,
        "sessions": finished,
        "decoder_mode": decoder_mode,
        "decoder_graph_held": computer.full_graph is not None,
        "step_p50_ms_early": middle(seconds[window : 2 * window]),
        "step_p50_ms_late": middle(seconds[-window:]),
        "reserved_bytes_end": torch.cuda.memory_reserved(),
    }, step.report()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=max(BATCHES))
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    batches = tuple(batch for batch in BATCHES if batch <= options.max_batch)
    numbers, counters = run_mixed(options.steps, options.layers, batches=batches)
    print(numbers)
    print(counters)
    if options.out:
        config = {
            "model": "tiny",
            "layers": options.layers,
            "context": [56, 0],
            "batches": list(batches),
            "max_symbols": MAX_SYMBOLS,
        }
        Record("graphed_mixed", config, numbers, counters=counters, notes=["untrained weights"]).save(options.out)
    raise SystemExit(numbers["encoder_mismatches"] + numbers["transcript_mismatches"] > 0)


if __name__ == "__main__":
    main()
