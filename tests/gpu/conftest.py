"""Models on the GPU, built once a session; every test of this folder is marked gpu and skipped where there is none."""

from __future__ import annotations

import pytest
import torch

from workbench.encoder.graphed import detach


def pytest_collection_modifyitems(items):
    for item in items:
        if "/gpu/" in str(item.path):
            item.add_marker(pytest.mark.gpu)
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _on_gpu(name, **changes):
    from workbench.model.shapes import build_model

    return build_model(name, **changes).cuda().eval()


@pytest.fixture(scope="session")
def tiny_gpu():
    return _on_gpu("tiny")


@pytest.fixture(scope="session")
def large_gpu():
    return _on_gpu("nemotron-0.6b")


@pytest.fixture
def tiny(tiny_gpu):
    """The tiny model, at [56, 0], detached again afterwards."""
    tiny_gpu.eval().encoder.set_default_att_context_size([56, 0])
    with torch.inference_mode():
        yield tiny_gpu
    detach(tiny_gpu.encoder)
    tiny_gpu.eval()
