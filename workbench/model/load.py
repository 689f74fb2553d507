"""Load a streaming transducer: the shipped demo model, a named shape, a `.nemo` file, or a hub name.

    loaded = load_model("demo", att_context_size=(56, 0), device="cpu")
    loaded.model, loaded.geometry, loaded.notes

Nothing is downloaded unless the name is a hub name (`nvidia/...`). The model comes back in evaluation mode, on its device, with the
context set, dither off and greedy batched label-looping decoding, which is what the streaming step needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.config import AsrConfig
from workbench.errors import ModelError
from workbench.geometry import StreamGeometry
from workbench.model.quiet import quiet_nemo
from workbench.model.shapes import SHAPES, build_model

DEMO_MODEL = Path(__file__).parents[1] / "data" / "demo.nemo"
# The demo model streams at its shortest look-ahead unless told otherwise: it is there to show live recognition.
DEMO_CONTEXT = (56, 0)
ONE_SPEAKER = (
    "the demo model knows telephone prompts of one speaker: about one word in five of new ones is wrong, and most words of other speakers "
    "(workbench/data/MODEL_CARD.md)"
)
UNTRAINED = "untrained weights: transcripts of this model are nonsense; only its timing is meaningful"


@dataclass(frozen=True)
class LoadedModel:
    """A NeMo transducer ready for streaming. `contexts` are the [left, right] pairs it was trained for; `notes` go into every result."""

    model: Any
    name: str
    geometry: StreamGeometry
    contexts: tuple[tuple[int, int], ...]
    device: str
    dtype: str
    trained: bool
    notes: tuple[str, ...] = field(default=())


def load_model(
    name: str = "demo",
    att_context_size: Iterable[int] | None = None,
    device: str = "auto",
    dtype: str = "float32",
    max_symbols: int = 10,
) -> LoadedModel:
    """Load by name, set the context, move to the device. Raises ModelError that says what to do."""
    device = resolve_device(device)
    if device == "cpu":
        leave_a_core()
    model, trained = _open(name)
    _require_streaming(model, name)
    model.preprocessor.featurizer.dither = 0.0
    model.preprocessor.featurizer.pad_to = 0
    model = _place(model, device, dtype)
    set_decoding(model, max_symbols)
    geometry = set_context(model, DEMO_CONTEXT if att_context_size is None and name == "demo" else att_context_size)
    notes = (ONE_SPEAKER,) if name == "demo" else () if trained else (UNTRAINED,)
    contexts = tuple((int(left), int(right)) for left, right in model.encoder.att_context_size_all)
    return LoadedModel(model, name, geometry, contexts, device, dtype, trained, notes)


def load_configured(asr: AsrConfig) -> LoadedModel:
    """`load_model` with the values of the `asr` section. Raises ModelError for a label rate of a trained model."""
    loaded = load_model(asr.model, asr.att_context_size, asr.device, asr.dtype, asr.max_symbols)
    return loaded if asr.label_rate_hz is None else with_label_rate(loaded, asr.label_rate_hz)


def with_label_rate(loaded: LoadedModel, rate_hz: float) -> LoadedModel:
    """The model with random weights set to emit about `rate_hz` labels per second of audio, and a note that says so."""
    from workbench.model.label_rate import set_label_rate

    if loaded.trained:
        raise ModelError(
            f"asr.label_rate_hz: got {rate_hz:g} for the trained model {loaded.name!r}; allowed are models with random weights"
        )
    found_hz = set_label_rate(loaded.model, rate_hz, loaded.geometry.sample_rate_hz)
    note = f"label rate: blank biased to {rate_hz:g} labels a second of speech; {found_hz:.2f} on the shipped speech"
    kept = tuple(other for other in loaded.notes if not other.startswith("label rate:"))
    return replace(loaded, notes=(*kept, note))


def resolve_device(device: str) -> str:
    """`auto` becomes `cuda` where there is a GPU, else `cpu`. Raises ModelError where the wanted device is absent."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(device.partition(":")[2] or 0)
        if index >= count:
            raise ModelError(f"device: got {device!r}; this host has {count} CUDA device(s); allowed are cpu and auto")
    return device


def leave_a_core() -> None:
    """On a CPU, let torch use all cores but one: callers, queues and load generators need a turn while a step computes."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores - 1)))


def set_context(model: Any, context: Iterable[int] | None) -> StreamGeometry:
    """Set the look-ahead of a model and return its geometry. Raises ModelError for a context that it was not trained for."""
    allowed = [tuple(pair) for pair in model.encoder.att_context_size_all]
    wanted = tuple(context) if context is not None else tuple(model.encoder.att_context_size)
    if wanted not in allowed:
        raise ModelError(
            f"att_context_size: got {list(wanted)}; this model was trained for {', '.join(str(list(p)) for p in allowed)}"
        )
    with quiet_nemo():
        model.encoder.set_default_att_context_size(list(wanted))
        model.encoder.setup_streaming_params()
    return StreamGeometry(
        left_frames=wanted[0],
        right_frames=wanted[1],
        subsampling=model.encoder.subsampling_factor,
        hop_samples=model.preprocessor.featurizer.hop_length,
        window_samples=model.preprocessor.featurizer.win_length,
        sample_rate_hz=model.cfg.sample_rate,
    )


def set_decoding(model: Any, max_symbols: int, decoder_graphs: bool = False) -> None:
    """Greedy batched label-looping decoding, whose state continues over chunks; `decoder_graphs` turns NeMo's decoder CUDA graph on."""
    from omegaconf import OmegaConf, open_dict

    decoding = OmegaConf.create(OmegaConf.to_container(model.cfg.decoding, resolve=True))
    with open_dict(decoding), quiet_nemo():
        decoding.strategy = "greedy_batch"
        decoding.greedy = {"max_symbols": max_symbols, "loop_labels": True, "use_cuda_graph_decoder": decoder_graphs}
        decoding.fused_batch_size = -1
        hybrid = {"decoder_type": "rnnt"} if hasattr(model, "cur_decoder") else {}
        model.change_decoding_strategy(decoding, **hybrid)


def _open(name: str) -> tuple[Any, bool]:
    """The NeMo model and whether its weights are trained."""
    if name in SHAPES:
        return build_model(name), False
    if name == "demo":
        return _restore(DEMO_MODEL), True
    if name.endswith(".nemo"):
        return _restore(Path(name)), True
    if "/" in name and not Path(name).exists():
        return _from_hub(name), True
    raise ModelError(
        f"model: got {name!r}; allowed are 'demo', a shape with random weights ({', '.join(SHAPES)}), a path ending in .nemo, or a hub "
        "name such as nvidia/nemotron-speech-streaming-en-0.6b"
    )


def _restore(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"model: {path} is not a file; give the path of a .nemo checkpoint")
    with quiet_nemo():
        from nemo.collections.asr.models import ASRModel

        try:
            model = ASRModel.restore_from(str(path), map_location="cpu").float().eval()
        except Exception as error:  # whatever tar, yaml, torch or NeMo raise for a broken file becomes one typed error
            reason = " ".join(str(error).split())[:300]
            raise ModelError(
                f"model: {path} cannot be restored as a NeMo ASR model ({type(error).__name__}: {reason})"
            ) from error
    _require_finite(model, path)
    return model


def _require_finite(model: Any, path: Path) -> None:
    """A file that was damaged inside its weights loads without complaint, and such a model writes nonsense."""
    import torch

    for name, weights in model.named_parameters():
        if (bad := int((~torch.isfinite(weights)).sum())) > 0:
            raise ModelError(
                f"model: {path} is damaged: {bad} of {weights.numel()} weights of {name} are NaN or infinite"
            )


def _from_hub(name: str) -> Any:
    with quiet_nemo():
        from nemo.collections.asr.models import ASRModel

        try:
            return ASRModel.from_pretrained(name, map_location="cpu").float().eval()
        except Exception as error:  # the hub client raises many kinds; all mean the same to the user
            raise ModelError(
                f"model: {name!r} could not be fetched from the hub ({type(error).__name__}). Without a network: download its .nemo file on "
                "another machine, copy it here and pass its path (--model file.nemo); or use --model demo, which is shipped"
            ) from error


def _require_streaming(model: Any, name: str) -> None:
    encoder = getattr(model, "encoder", None)
    missing = [
        what
        for what, there in (
            ("a transducer decoder (RNNT or TDT)", hasattr(model, "joint") and hasattr(model, "decoder")),
            ("a cache-aware streaming encoder", hasattr(encoder, "cache_aware_stream_step")),
            ("chunked_limited attention", getattr(encoder, "att_context_style", None) == "chunked_limited"),
            (
                "features without whole-file normalisation",
                model.cfg.preprocessor.get("normalize") in (None, "NA", "None"),
            ),
        )
        if not there
    ]
    if missing:
        raise ModelError(
            f"model: {name!r} is a {type(model).__name__} and lacks {', '.join(missing)}; it cannot be streamed"
        )


def _place(model: Any, device: str, dtype: str) -> Any:
    import torch

    if dtype != "float32":
        # The mel front end stays in fp32: log energies of 10 ms windows do not fit half precision.
        model.encoder.to(getattr(torch, dtype))
        model.decoder.to(getattr(torch, dtype))
        model.joint.to(getattr(torch, dtype))
        if hasattr(model, "prompt_kernel"):
            model.prompt_kernel.to(getattr(torch, dtype))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.to(device).eval()
