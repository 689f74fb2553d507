"""Teaches NeMo's own classes about the graphed step, so that NeMo's usage and switches reach it.

What is added, once per process and only where NeMo lacks it:
  StreamingEncoder.set_streaming_cuda_graphs            the setter, also on NeMo's cache-aware inference wrappers
  ASRModel.maybe_enable_cuda_graphs, disable_cuda_graphs  also switch the encoder's graphs, hence the train/validation/test hooks too
  streaming pipelines                                   read `asr.use_cuda_graphs` from their configuration
  label-looping decoders                                captured in memory of their own (decoder_shield)

    import workbench.encoder.nemo_api          # installs all of it
    asr_model.encoder.set_streaming_cuda_graphs(True)
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from typing import Any

from workbench.encoder.decoder_shield import shield_decoders
from workbench.encoder.graphed import GraphedEncoderStep, attached_step, find_encoder, set_streaming_cuda_graphs

SETTER = "set_streaming_cuda_graphs"
_installed: list[str] = []


def install() -> list[str]:
    """Add what this NeMo lacks; returns the names of what was added (the same list on later calls)."""
    if not _installed:
        streaming = import_module("nemo.collections.asr.parts.mixins.streaming").StreamingEncoder
        if not hasattr(streaming, SETTER):
            _installed.extend(_add_to_encoders(streaming))
            _installed.extend(_add_to_pipelines())
        _installed.extend(shield_decoders())
    return list(_installed)


def install_if_loaded() -> None:
    """Install where NeMo's speech collection is in use; other encoders need none of it."""
    if "nemo.collections.asr.models.asr_model" in sys.modules:
        install()


def _add_to_encoders(streaming: Any) -> list[str]:
    setattr(streaming, SETTER, _setter())
    import_module("nemo.collections.common.parts.optional_cuda_graphs").WithOptionalCudaGraphs.register(
        GraphedEncoderStep
    )
    model = import_module("nemo.collections.asr.models.asr_model").ASRModel
    model.maybe_enable_cuda_graphs = _also_enable(model.maybe_enable_cuda_graphs)
    model.disable_cuda_graphs = _also_disable(model.disable_cuda_graphs)
    return ["StreamingEncoder", "ASRModel"]


def _add_to_pipelines() -> list[str]:
    try:
        wrappers = import_module("nemo.collections.asr.inference.model_wrappers.cache_aware_asr_inference_wrapper")
        builder = import_module("nemo.collections.asr.inference.factory.base_builder").BaseBuilder
    except ImportError:
        return []  # the inference pipelines are optional in NeMo
    setattr(wrappers.CacheAwareASRInferenceWrapper, SETTER, _setter())
    builder._build_asr = classmethod(_also_switch_on(builder.__dict__["_build_asr"].__func__))
    return ["CacheAwareASRInferenceWrapper", "BaseBuilder"]


def _setter() -> Any:
    def set_graphs(self: Any, enabled: bool = True, **options: Any) -> Any:
        """Switch the graphed streaming step; options as in `workbench.encoder.graphed.set_streaming_cuda_graphs`."""
        return set_streaming_cuda_graphs(self, enabled, **options)

    set_graphs.__name__ = SETTER
    set_graphs.added_by_workbench = True  # type: ignore[attr-defined]
    return set_graphs


def _step_of(model: Any) -> GraphedEncoderStep | None:
    return attached_step(getattr(model, "encoder", None))


def _also_enable(original: Any) -> Any:
    @functools.wraps(original)
    def maybe_enable_cuda_graphs(self: Any, force_reinit: bool = False) -> bool:
        changed = original(self, force_reinit=force_reinit)
        step = _step_of(self)
        return (step.maybe_enable_cuda_graphs() if step else False) or changed

    return maybe_enable_cuda_graphs


def _also_disable(original: Any) -> Any:
    @functools.wraps(original)
    def disable_cuda_graphs(self: Any) -> bool:
        changed = original(self)
        step = _step_of(self)
        return (step.disable_cuda_graphs() if step else False) or changed

    return disable_cuda_graphs


def _also_switch_on(original: Any) -> Any:
    @functools.wraps(original)
    def _build_asr(cls: Any, cfg: Any, decoding_cfg: Any) -> Any:
        wrapper = original(cls, cfg, decoding_cfg)
        if cfg.asr.get("use_cuda_graphs", False):
            find_encoder(wrapper)  # says what is wrong when the configured model cannot stream
            wrapper.set_streaming_cuda_graphs(True)
        return wrapper

    return _build_asr
