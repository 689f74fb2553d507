"""What makes two streaming steps the same graph, and which steps must not be graphed: pure decisions over shapes and flags.

A captured graph has every shape, dtype, device, Python number and precision switch of its step baked in, so all of them are the key.
The values of `cache_last_channel_len` change while a cache fills; they are a tensor, read by the kernels, and therefore data.

    inputs = StepInputs(mel, mel_lengths, cache_channel, cache_time, cache_channel_len)
    key = step_key(encoder, inputs, drop=2)
    why_eager(encoder, StepCall(inputs, keep_all_outputs=True))     # "keep_all_outputs"

Shapes: signal [B, mel, T], signal_len [B], cache_channel [L, B, left, D], cache_time [L, B, D, kernel - 1], cache_channel_len [B].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class StepInputs(NamedTuple):
    """The tensors of one step, in the order of NeMo's `cache_aware_stream_step`."""

    signal: Any
    signal_len: Any
    cache_channel: Any
    cache_time: Any
    cache_channel_len: Any


class StepCall(NamedTuple):
    """One call of the step: its tensors and its switches (`drop` is the caller's `drop_extra_pre_encoded`)."""

    inputs: StepInputs
    keep_all_outputs: bool = True
    drop: int | None = None
    bypass_pre_encode: bool = False


class StepKey(NamedTuple):
    """Equal keys may share a graph. tensors: (shape, dtype, device) of each input; settings and precision: what is baked in."""

    tensors: tuple[Any, ...]
    settings: tuple[Any, ...]
    precision: tuple[Any, ...]

    def __str__(self) -> str:
        shape, dtype, device = self.tensors[0]
        context, drop = self.settings[0], self.settings[4]
        return f"mel {list(shape)} {str(dtype).removeprefix('torch.')} {device}, context {list(context)}, drop {drop}"


def step_key(encoder: Any, inputs: StepInputs, drop: int) -> StepKey:
    """The key of a steady step; `drop` is the effective `drop_extra_pre_encoded`."""
    cfg = encoder.streaming_cfg
    settings = (
        tuple(encoder.att_context_size),
        cfg.last_channel_cache_size,
        cfg.cache_drop_size,
        cfg.valid_out_len,
        drop,
        False,  # keep_all_outputs: a graph is only ever captured without it
        _adapters(encoder),
    )
    return StepKey(tuple((t.shape, t.dtype, t.device) for t in inputs), settings, precision_flags())


def _adapters(encoder: Any) -> tuple[str, ...]:
    """Names of enabled NeMo adapters: switching one changes the computation and no weight."""
    if not hasattr(encoder, "get_enabled_adapters") or not encoder.is_adapter_available():
        return ()
    return tuple(encoder.get_enabled_adapters())


def _reads_new_precision_api() -> bool:
    try:
        return bool(torch.backends.cuda.matmul.fp32_precision)
    except AttributeError:
        return False


# Reading `allow_tf32` raises once a program has used the newer switches, and the newer ones follow the older: prefer them.
_NEW_PRECISION_API = _reads_new_precision_api()


def precision_flags() -> tuple[Any, ...]:
    """Switches that select other kernels for the same shapes."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if _NEW_PRECISION_API:
        fp32 = (matmul.fp32_precision, cudnn.conv.fp32_precision)
    else:
        fp32 = (matmul.allow_tf32, cudnn.allow_tf32)
    return (
        *fp32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def autocast_on(query: Callable[..., bool] = torch.is_autocast_enabled) -> bool:
    """Whether CUDA autocast is active; older PyTorch takes no device argument and means CUDA."""
    try:
        return query("cuda")
    except TypeError:
        return query()


def effective_drop(encoder: Any, drop: int | None) -> int:
    """The `drop_extra_pre_encoded` that the step will use."""
    return encoder.streaming_cfg.drop_extra_pre_encoded if drop is None else drop


def why_eager(
    encoder: Any, call: StepCall, is_capturing: Callable[[], bool] = lambda: False, first_chunk: bool = False
) -> str | None:
    """The first reason why this step must run eagerly, or None; see `workbench.encoder.options.REASONS`. first_chunk: that one may be graphed."""
    return _outside_steady_state(encoder, call, first_chunk) or _unsafe_here(encoder, call.inputs, is_capturing)


def _outside_steady_state(encoder: Any, call: StepCall, first_chunk: bool) -> str | None:
    inputs = call.inputs
    if inputs.cache_channel is None or inputs.cache_time is None or inputs.cache_channel_len is None:
        return "no_caches"
    if inputs.signal_len is None:
        return "no_lengths"
    if call.bypass_pre_encode:
        return "bypass_pre_encode"
    # The first chunk has no pre-encoder history to drop, so its caller asks to drop nothing.
    if not first_chunk and call.drop == 0 and encoder.streaming_cfg.drop_extra_pre_encoded != 0:
        return "first_chunk"
    return "keep_all_outputs" if call.keep_all_outputs else None


def _unsafe_here(encoder: Any, inputs: StepInputs, is_capturing: Callable[[], bool]) -> str | None:
    if not _on_cuda(inputs):
        return "not_cuda"
    if encoder.training:
        return "training"
    if autocast_on():
        return "autocast"
    # A replay records no autograd graph: a caller who wants gradients must get the eager step.
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *encoder.parameters())):
        return "grad"
    return "capturing" if is_capturing() else None


def _on_cuda(inputs: StepInputs) -> bool:
    return all(t.is_cuda for t in inputs)
