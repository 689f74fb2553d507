"""Keeps the memory of NeMo's graph-captured label-looping decoder mapped for as long as its graph lives.

NeMo captures the bodies of its while loops on streams of their own. PyTorch's allocator recognises a capture by its id, a conditional
body has another id, and so the bodies' temporaries come from the ordinary cache and are returned to it after the capture. The graph
keeps their addresses: once the cache is emptied (every `torch.cuda.graph` does that first, and so do low memory and many programs) or
the blocks are given to somebody else, the next replay reads unmapped or foreign memory. Experiments: docs/graphed_step.md.

The remedy: capture inside a memory pool that belongs to the decoder and outlives its graph.

    shield_decoders()        # process-wide, idempotent; decoders captured afterwards are safe
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

POOL = "_workbench_graph_memory"
_ROOT = "nemo.collections.asr.parts.submodules"
# Every computer of NeMo 3.0.0 that captures conditional loops.
COMPUTERS = (
    ("transducer_decoding.rnnt_label_looping", "GreedyBatchedRNNTLabelLoopingComputer"),
    ("transducer_decoding.tdt_label_looping", "GreedyBatchedTDTLabelLoopingComputer"),
    ("rnnt_malsd_batched_computer", "ModifiedALSDBatchedRNNTComputer"),
    ("tdt_malsd_batched_computer", "ModifiedALSDBatchedTDTComputer"),
    ("ctc_batched_beam_decoding", "BatchedBeamCTCComputer"),
    ("ctc_greedy_decoding", "GreedyBatchedCTCInfer"),
)


def shield_decoders() -> list[str]:
    """Wrap the capture of every known decoder class; returns the names of the classes that are shielded now."""
    shielded = []
    for module_name, class_name in COMPUTERS:
        try:
            computer = getattr(import_module(f"{_ROOT}.{module_name}"), class_name)
        except (ImportError, AttributeError):
            continue  # another NeMo: nothing of that name to protect
        method = vars(computer).get("_full_graph_compile")
        if method is None:
            continue
        if not hasattr(method, "shielded"):
            computer._full_graph_compile = _in_own_pool(method)
        shielded.append(class_name)
    return shielded


def _in_own_pool(capture: Any) -> Any:
    @functools.wraps(capture)
    def capture_in_own_pool(self: Any) -> Any:
        import torch

        with torch.cuda.device(self.state.device):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool, self.state.device):
                result = capture(self)
        setattr(self, POOL, pool)  # replaces the pool of an earlier graph, which this capture has replaced
        return result

    capture_in_own_pool.shielded = True  # type: ignore[attr-defined]
    return capture_in_own_pool


def renew_decoder_graph(model: Any) -> bool:
    """Make a model's decoder capture anew if it did so before the shield was up; returns whether it had to."""
    decoding = getattr(getattr(model, "decoding", None), "decoding", None)
    computer = getattr(decoding, "decoding_computer", None) or getattr(decoding, "_decoding_computer", None)
    if getattr(computer, "full_graph", None) is None or hasattr(computer, POOL):
        return False
    computer.reset_cuda_graphs_state()
    return True
