"""The resident step's operations in plain PyTorch: slow and correct, for any device; the kernels are held against them.

    residual, hidden = residual_norm(residual, branch, 0.5, norm)
    attended = attention(qkv_BT3D, kv_R2CD, frame, (positions, bias_u, bias_v), left=56)
    mixed = convolution(gated_BT2D, ring_RWD, frame, (taps, None), norm)

Shapes as in `resident.py`. `attention` and `convolution` write the new frames into the rings of `frame.rows`, in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from workbench.encoder.int8 import Int8Matrix, dequantise

if TYPE_CHECKING:
    from workbench.encoder.resident import FoldedLinear, Linear, Norm, Relative, StepFrame

FOLDS_LONE_FRAMES = False  # folding saves launches, of which there are none here


def subsampling(encoder: Any, dtype: torch.dtype) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The encoder's own subsampling: (mel [B, F, M], mel lengths [B], drop, frames) -> frames drop … of it [B, T, D], valid ones [B] (int64)."""

    def subsample(
        mel: torch.Tensor, lengths: torch.Tensor, drop: int, frames: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, lengths = encoder.pre_encode(x=mel.transpose(1, 2), lengths=lengths)
        return x[:, drop : drop + frames].to(dtype), (lengths.to(torch.int64) - drop).clamp(min=0, max=frames)

    return subsample


def norm(x: torch.Tensor, parameters: Norm, dtype: torch.dtype) -> torch.Tensor:
    """Layer normalisation over the last dimension, computed in fp32, given in `dtype`."""
    return functional.layer_norm(x.float(), x.shape[-1:], parameters.weight, parameters.bias, parameters.eps).to(dtype)


def residual_norm(
    residual: torch.Tensor, branch: torch.Tensor, factor: float, parameters: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual + factor * branch in fp32, its normalisation in the branch's dtype)."""
    residual = residual + factor * branch.float()
    return residual, norm(residual, parameters, branch.dtype)


def residual_two_norms(
    residual: torch.Tensor, branch: torch.Tensor, factor: float, first: Norm, second: Norm | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(n = first norm of residual + factor * branch in fp32, second norm of n in `dtype`; n itself in `dtype` without a second)."""
    out = norm(residual + factor * branch.float(), first, torch.float32)
    return out, out.to(dtype) if second is None else norm(out, second, dtype)


def norm_linear(residual: torch.Tensor, folded: FoldedLinear, activate: bool, dtype: torch.dtype) -> torch.Tensor:
    """Linear of the layer-normalised residual [..., K], then SiLU where wanted -> [..., N] in `dtype`; see `narrow.py`."""
    x = residual.float()
    mean = x.mean(dim=-1, keepdim=True)
    deviation = (x.square().mean(dim=-1, keepdim=True) - mean.square()).clamp(min=0).add(folded.eps).sqrt()
    if isinstance(folded.weight, Int8Matrix):
        products = functional.linear(x * folded.factors, dequantise(folded.weight))
    else:
        products = functional.linear(x.to(folded.weight.dtype), folded.weight).float()
    out = (products - mean * folded.sums) / deviation + folded.bias
    return (functional.silu(out) if activate else out).to(dtype)


def linear_residual(x: torch.Tensor, linear: Linear, residual: torch.Tensor, factor: float) -> torch.Tensor:
    """residual + factor * linear(x) in fp32: x [..., K], residual [..., N]."""
    if linear.int8 is None:
        return residual + factor * functional.linear(x, linear.weight, linear.bias).float()
    bias = None if linear.bias is None else linear.bias.float()
    return residual + factor * functional.linear(x.float(), dequantise(linear.int8), bias)


def attention(
    qkv_BT3D: torch.Tensor,
    kv_R2CD: torch.Tensor,
    frame: StepFrame,
    relative: Relative,
    left: int,
) -> torch.Tensor:
    """Relative attention of the new frames over the ring and themselves -> [B, T, D].

    Keys are taken in order of time: key j is frame `start - left + j`; frames before the stream's first and new frames past `valid`
    are masked. Query i sees key j at distance left + i - j, whose projection is entry C - 1 - distance of the table.
    """
    positions_HPK, bias_u_HK, bias_v_HK = relative.positions, relative.bias_u, relative.bias_v
    batch, new, width = qkv_BT3D.size(0), qkv_BT3D.size(1), qkv_BT3D.size(2) // 3
    heads, keys = positions_HPK.size(0), kv_R2CD.size(2)
    device = qkv_BT3D.device
    q_BTD, k_BTD, v_BTD = qkv_BT3D.split(width, dim=2)
    slots_BT = (frame.start[:, None] + torch.arange(new, device=device)) % keys
    kv_R2CD[frame.rows[:, None], 0, slots_BT] = k_BTD
    kv_R2CD[frame.rows[:, None], 1, slots_BT] = v_BTD
    count = left + new
    j = torch.arange(count, device=device)
    order_BC = (frame.start[:, None] - left + j) % keys
    seen_BC = (j >= left - frame.start[:, None]) & (j < left + frame.valid[:, None])
    kv_B2CD = kv_R2CD[frame.rows[:, None], :, order_BC].transpose(1, 2).float()
    kv_B2CD = torch.where(seen_BC[:, None, :, None], kv_B2CD, 0.0)
    key_BHCK, value_BHCK = (kv_B2CD[:, n].view(batch, count, heads, -1).transpose(1, 2) for n in (0, 1))
    q_BTHK = q_BTD.float().view(batch, new, heads, -1)
    content = (q_BTHK + bias_u_HK).transpose(1, 2) @ key_BHCK.transpose(2, 3)
    distance_TC = left + torch.arange(new, device=device)[:, None] - j
    table_HTCK = positions_HPK.float()[:, keys - 1 - distance_TC]
    place = torch.einsum("bthk,htck->bhtc", q_BTHK + bias_v_HK, table_HTCK)
    scores = (content + place) / math.sqrt(width // heads)
    weights = scores.masked_fill(~seen_BC[:, None, None], float("-inf")).softmax(dim=-1)
    out = weights.nan_to_num(0.0) @ value_BHCK  # a row of nothing but padding sees no key
    return out.transpose(1, 2).reshape(batch, new, width).to(qkv_BT3D.dtype)


def convolution(
    gated_BT2D: torch.Tensor,
    ring_RWD: torch.Tensor,
    frame: StepFrame,
    taps: tuple[torch.Tensor, torch.Tensor | None],
    parameters: Norm,
) -> torch.Tensor:
    """GLU, causal depthwise convolution over the ring and the new frames, layer norm, SiLU -> [B, T, D]. taps: [kernel, D], bias [D]."""
    taps_ND, bias_D = taps
    new, size, history = gated_BT2D.size(1), ring_RWD.size(1), taps_ND.size(0) - 1
    steps = torch.arange(-history, new, device=gated_BT2D.device)
    value = functional.glu(gated_BT2D.float(), dim=2)
    value = torch.where((steps[history:] < frame.valid[:, None])[..., None], value, 0.0).to(ring_RWD.dtype)
    slots = (frame.start[:, None] + steps) % size
    ring_RWD[frame.rows[:, None], slots[:, history:]] = value
    window = ring_RWD[frame.rows[:, None], slots].float()
    window = torch.where((frame.start[:, None] + steps >= 0)[..., None], window, 0.0)
    mixed = sum(window[:, n : n + new] * taps_ND[n] for n in range(history + 1))
    if bias_D is not None:
        mixed = mixed + bias_D
    return functional.silu(norm(mixed, parameters, torch.float32)).to(gated_BT2D.dtype)
