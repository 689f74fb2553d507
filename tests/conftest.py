"""Shared fixtures: one model per session, since building it costs seconds, and a skip for tests that need a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


def pytest_collection_modifyitems(config, items):
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def project():
    """Root of the repository."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny_model():
    """The `tiny` shape as a LoadedModel on the CPU at 80 ms; tests that change the context set it back."""
    from workbench.model.load import load_model

    # Random weights emit as many labels as they may; two a frame keep the greedy loop short and its state busy.
    return load_model("tiny", att_context_size=(56, 0), device="cpu", max_symbols=2)


@pytest.fixture(scope="session")
def noise():
    """Deterministic speech-like noise: `noise(seconds, seed)` -> float32 [samples] at 16 kHz."""

    def make(seconds, seed=0):
        rng = np.random.default_rng(seed)
        samples = rng.standard_normal(int(seconds * 16000)).astype(np.float32)
        envelope = 0.05 + 0.1 * np.abs(np.sin(np.arange(samples.size) / 4000))
        return (samples * envelope).astype(np.float32)

    return make
