"""`workbench doctor`: what this machine has, what is missing, and what each missing part would cost.

for finding in examine():
    print(finding.state, finding.name, finding.found, finding.cost)
"""

from __future__ import annotations

import importlib
import shutil
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from workbench.model.load import DEMO_MODEL
from workbench.model.speech import SHIPPED_SPEECH

# Label-looping decoder graphs with while-nodes need both (NeMo falls back to smaller graphs otherwise).
_WHILE_NODE_DRIVER = 560
_TESTED = {"nemo_toolkit": "3.0.0", "lightning": "2.4.0", "optuna": "5.0.0"}


@dataclass(frozen=True)
class Finding:
    """One part. state: ok, missing or warning; cost: what follows from a state that is not ok."""

    name: str
    state: str
    found: str
    cost: str = ""


def examine() -> list[Finding]:
    """Look at everything the workbench can use."""
    from workbench.model.quiet import quiet_nemo

    with quiet_nemo():
        import torch

        cuda = torch.cuda.is_available()
        return [
            *_packages(),
            _gpu(torch, cuda),
            _memory(torch, cuda),
            _graphs(torch, cuda),
            _decoder_graphs(torch, cuda),
            _triton(cuda),
            _shipped(),
            _tool("nvidia-smi", "driver and clocks are not recorded in results", cuda),
        ]


def _packages() -> list[Finding]:
    out = []
    for name in ("torch", "nemo_toolkit", "lightning", "optuna", "numpy"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            out.append(
                Finding(name, "missing", "not installed", "nothing runs without it: pip install -r requirements.lock")
            )
            continue
        tested = _TESTED.get(name)
        odd = tested is not None and version.split("+")[0] != tested
        cost = f"the tests ran with {tested}; other versions usually work" if odd else ""
        out.append(Finding(name, "warning" if odd else "ok", version, cost))
    return out


def _gpu(torch: Any, cuda: bool) -> Finding:
    if not cuda:
        built = torch.version.cuda
        found = f"none (torch is built for CUDA {built})" if built else "none (torch is a CPU build)"
        return Finding("gpu", "missing", found, "steps run on the CPU: tens of milliseconds each; no kernels to count")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("gpu", "ok", f"{', '.join(names)}; CUDA {torch.version.cuda}, driver {_driver() or 'unknown'}")


def _memory(torch: Any, cuda: bool) -> Finding:
    if not cuda:
        import psutil

        return Finding("free memory", "ok", f"{psutil.virtual_memory().available / 2**30:.1f} GiB of host memory")
    free, total = torch.cuda.mem_get_info()
    return Finding("free memory", "ok", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB on the GPU")


def _graphs(torch: Any, cuda: bool) -> Finding:
    if not cuda:
        return Finding("encoder graphs", "missing", "no CUDA", "the graphed step is not used; everything runs eager")
    try:
        graph, x = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = x + 1
        graph.replay()
        torch.cuda.synchronize()
        works = bool((y == 2).all())
    except RuntimeError as error:
        return Finding("encoder graphs", "warning", f"capture failed: {error}", "a step keeps its ~1,300 launches")
    return Finding(
        "encoder graphs", "ok" if works else "warning", "a capture replays correctly" if works else "a replay was wrong"
    )


def _decoder_graphs(torch: Any, cuda: bool) -> Finding:
    if not cuda:
        return Finding(
            "decoder graphs", "missing", "no CUDA", "NeMo's label-looping decoder runs as a loop on the host"
        )
    try:
        from nemo.core.utils.cuda_python_utils import check_cuda_python_cuda_graphs_conditional_nodes_supported as check

        check()
    except ImportError as error:
        return Finding(
            "decoder graphs",
            "warning",
            f"no while-nodes ({error})",
            "decoder graphs fall back to one launch per loop turn",
        )
    except (OSError, RuntimeError) as error:
        return Finding(
            "decoder graphs",
            "warning",
            f"no while-nodes ({error})",
            f"needs driver >= {_WHILE_NODE_DRIVER} and cuda-python >= 12.3",
        )
    return Finding("decoder graphs", "ok", "full graph with while-nodes")


def _triton(cuda: bool) -> Finding:
    try:
        return Finding("triton", "ok", importlib.import_module("triton").__version__)
    except ImportError:
        cost = "fused kernels are not used; plain PyTorch runs instead" if cuda else "no loss without a GPU"
        return Finding("triton", "missing", "not installed", cost)


def _shipped() -> Finding:
    absent = [path.name for path in (DEMO_MODEL, SHIPPED_SPEECH) if not path.is_file()]
    if absent:
        return Finding(
            "shipped model, speech",
            "missing",
            f"{', '.join(absent)} not found",
            "reinstall: `--model demo` will not work",
        )
    clips = sum(1 for line in SHIPPED_SPEECH.read_text(encoding="utf-8").splitlines() if line.strip())
    return Finding(
        "shipped model, speech", "ok", f"{DEMO_MODEL.name} ({DEMO_MODEL.stat().st_size / 2**20:.1f} MiB), {clips} clips"
    )


def _tool(name: str, cost: str, wanted: bool) -> Finding:
    path = shutil.which(name)
    if path or not wanted:
        return Finding(
            name, "ok" if path else "missing", "found" if path else "not found", "" if path else "no loss without a GPU"
        )
    return Finding(name, "warning", "not found", cost)


def _driver() -> str | None:
    from workbench.results import environment

    return dict(environment().get("gpu", {})).get("driver")
