"""Triton kernels of the resident step, with the signatures of `resident_ops`: one launch each, nothing but what must be read is read.

Why: after graphing, a step's time at small batch is the number of kernels (about 1.3 µs each), at large batch the traffic of keys and
values. So: residual sum and normalisation(s) are one kernel; attention reads the ring where it lies, adds the positional term and
writes the new frames, one program per row and head; GLU, ring, depthwise convolution, layer norm and SiLU are one kernel.

Programs of padding rows all write the same scratch row, which nobody reads. Slots written in a step are never slots read in that step.
Shapes as in `resident.py`; TRITON_INTERPRET=1 runs them on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from workbench.encoder.narrow import gdc_launch_dependents, gdc_wait, launch_options, linear_residual, norm_linear
from workbench.encoder.subsampling import subsampling

if TYPE_CHECKING:
    from workbench.encoder.resident import Norm, Relative, StepFrame


__all__ = [
    "FOLDS_LONE_FRAMES",
    "attention",
    "convolution",
    "linear_residual",
    "norm",
    "norm_linear",
    "residual_norm",
    "residual_two_norms",
    "subsampling",
]


FOLDS_LONE_FRAMES = True


@triton.jit
def _normalised(x, inside, width, weight, bias, eps):
    mean = tl.sum(x, axis=0) / width
    centred = tl.where(inside, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / width
    return centred * (1.0 / tl.sqrt(variance + eps)) * weight + bias


@triton.jit
def _residual_norms_kernel(
    residual_ptr, branch_ptr, sum_ptr, out_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, factor, eps1, eps2, width,
    MODE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # MODE 0: out = norm1(residual); 1: sum = residual + factor * branch, out = norm1(sum); 2: sum = norm1(that), out = norm2(sum); 3: out = sum.
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    w1 = tl.load(w1_ptr + column, mask=inside, other=0.0)
    b1 = tl.load(b1_ptr + column, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(residual_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if MODE > 0:
        x += factor * tl.load(branch_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if MODE == 1:
        tl.store(sum_ptr + row + column, x, mask=inside)
    y = _normalised(x, inside, width, w1, b1, eps1)
    if MODE >= 2:
        tl.store(sum_ptr + row + column, y, mask=inside)
    if MODE == 2:
        w2 = tl.load(w2_ptr + column, mask=inside, other=0.0)
        b2 = tl.load(b2_ptr + column, mask=inside, other=0.0)
        y = _normalised(y, inside, width, w2, b2, eps2)
    tl.store(out_ptr + row + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def norm(x: torch.Tensor, parameters: Norm, dtype: torch.dtype) -> torch.Tensor:
    """Layer normalisation over the last dimension, computed in fp32, given in `dtype`."""
    out = torch.empty_like(x, dtype=dtype)
    _launch_norms(0, x, x, x, out, 0.0, parameters, parameters)
    return out


def residual_norm(
    residual: torch.Tensor, branch: torch.Tensor, factor: float, parameters: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual + factor * branch in fp32, its normalisation in the branch's dtype)."""
    total, out = torch.empty_like(residual), torch.empty_like(branch)
    _launch_norms(1, residual, branch, total, out, factor, parameters, parameters)
    return total, out


def residual_two_norms(
    residual: torch.Tensor, branch: torch.Tensor, factor: float, first: Norm, second: Norm | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(n = first norm of residual + factor * branch in fp32, second norm of n in `dtype`; n itself in `dtype` without a second)."""
    total, out = torch.empty_like(residual), torch.empty_like(residual, dtype=dtype)
    _launch_norms(3 if second is None else 2, residual, branch, total, out, factor, first, second or first)
    return total, out


def _launch_norms(
    mode: int, residual: Any, branch: Any, total: Any, out: Any, factor: float, first: Norm, second: Norm
) -> None:
    width = residual.size(-1)
    block = triton.next_power_of_2(width)
    _residual_norms_kernel[(residual.numel() // width,)](
        residual, branch, total, out, first.weight, first.bias, second.weight, second.bias, factor, first.eps, second.eps, width,
        MODE=mode, BLOCK=block, num_warps=4, **launch_options(),
    )  # fmt: skip


@triton.jit
def _attention_one_kernel(
    qkv_ptr, kv_ptr, rows_ptr, start_ptr, valid_ptr, positions_ptr, u_ptr, v_ptr, out_ptr,
    scale, left, width, head_width, kv_row, LEFT_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One new frame: scores are sums over the head, no matrix unit needed. Program (row of the batch, head).
    b, head = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, HEAD_BLOCK)
    in_head = k < head_width
    column = head * head_width + k
    keys = left + 1
    start = tl.load(start_ptr + b)
    valid = tl.load(valid_ptr + b)
    ring = kv_ptr + tl.load(rows_ptr + b) * kv_row

    # Old key j is frame start - left + j at distance left - j, entry keys - 1 - distance = j of the table.
    j = tl.arange(0, LEFT_BLOCK)
    old = (j < left) & (j >= left - start)
    slot = (start + 1 + j) % keys
    mask = old[:, None] & in_head[None, :]
    at = slot[:, None] * width + column[None, :]
    table = positions_ptr + head * (2 * keys - 1) * head_width
    place = tl.load(
        table + j[:, None] * head_width + k[None, :], mask=(j < left)[:, None] & in_head[None, :], other=0.0
    )
    place_new = tl.load(table + left * head_width + k, mask=in_head, other=0.0).to(tl.float32)
    key = tl.load(ring + at, mask=mask, other=0.0)
    value = tl.load(ring + keys * width + at, mask=mask, other=0.0)
    u = tl.load(u_ptr + column, mask=in_head, other=0.0)
    v = tl.load(v_ptr + column, mask=in_head, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    new = qkv_ptr + b.to(tl.int64) * 3 * width + column
    q = tl.load(new, mask=in_head, other=0.0).to(tl.float32)
    k_new = tl.load(new + width, mask=in_head, other=0.0)
    v_new = tl.load(new + 2 * width, mask=in_head, other=0.0)
    q_u, q_v = q + u, q + v
    score = tl.sum(key.to(tl.float32) * q_u[None, :] + place.to(tl.float32) * q_v[None, :], axis=1) * scale
    score = tl.where(old, score, float("-inf"))
    score_new = tl.sum(k_new.to(tl.float32) * q_u + place_new * q_v, axis=0) * scale
    score_new = tl.where(valid > 0, score_new, float("-inf"))
    top = tl.maximum(tl.max(score, axis=0), score_new)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(score - top)
    weight_new = tl.exp(score_new - top)
    out = tl.sum(value.to(tl.float32) * weight[:, None], axis=0) + weight_new * v_new.to(tl.float32)
    total = tl.sum(weight, axis=0) + weight_new
    out = out / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + b.to(tl.int64) * width + column, out.to(out_ptr.dtype.element_ty), mask=in_head)

    here = ring + (start % keys) * width + column
    tl.store(here, k_new, mask=in_head)
    tl.store(here + keys * width, v_new, mask=in_head)


@triton.jit
def _attention_many_kernel(
    qkv_ptr, kv_ptr, rows_ptr, start_ptr, valid_ptr, place_ptr, u_ptr, v_place_ptr, out_ptr,
    scale, left, new, batch, width, head_width, kv_row,
    NEW_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # T new frames: content scores by the matrix unit; positional scores q . p come ready for all distances and are read shifted.
    b, head = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, HEAD_BLOCK)
    in_head = k < head_width
    column = head * head_width + k
    keys = left + new
    span = 2 * keys - 1
    start = tl.load(start_ptr + b)
    valid = tl.load(valid_ptr + b)
    ring = kv_ptr + tl.load(rows_ptr + b) * kv_row
    fresh = qkv_ptr + b.to(tl.int64) * new * 3 * width

    i = tl.arange(0, NEW_BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q = tl.load(fresh + i[:, None] * 3 * width + column[None, :], mask=(i < new)[:, None] & in_head[None, :], other=0.0)
    u = tl.load(u_ptr + column, mask=in_head, other=0.0)
    q_u = (q.to(tl.float32) + u[None, :]).to(q.dtype)

    j = tl.arange(0, KEY_BLOCK)
    old = (j < left) & (j >= left - start)
    recent = (j >= left) & (j < left + valid)
    from_ring = old[:, None] & in_head[None, :]
    from_fresh = recent[:, None] & in_head[None, :]
    in_ring = ((start + new + j) % keys)[:, None] * width + column[None, :]
    in_fresh = (j - left)[:, None] * 3 * width + column[None, :]
    key = tl.load(ring + in_ring, mask=from_ring, other=0.0) + tl.load(
        fresh + width + in_fresh, mask=from_fresh, other=0.0
    )
    score = tl.dot(q_u, tl.trans(key), input_precision=PRECISION, out_dtype=tl.float32)
    # Entry keys - 1 - (left + i - j) of the table.
    entry = j[None, :] + (new - 1 - i)[:, None]
    usable = (i < new)[:, None] & (j < keys)[None, :]
    place = (head.to(tl.int64) * batch * new + b * new) * span
    score += tl.load(place_ptr + place + i[:, None] * span + entry, mask=usable, other=0.0).to(tl.float32)
    score += tl.load(v_place_ptr + head * span + entry, mask=usable, other=0.0)
    score = tl.where((old | recent)[None, :] & (i < new)[:, None], score * scale, float("-inf"))
    top = tl.max(score, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(score - top[:, None])
    total = tl.sum(weight, axis=1)
    weight = weight / tl.where(total > 0, total, 1.0)[:, None]
    value = tl.load(ring + keys * width + in_ring, mask=from_ring, other=0.0)
    value += tl.load(fresh + 2 * width + in_fresh, mask=from_fresh, other=0.0)
    out = tl.dot(weight.to(value.dtype), value, input_precision=PRECISION, out_dtype=tl.float32)
    out_at = (b.to(tl.int64) * new + i)[:, None] * width + column[None, :]
    mine = (i < new)[:, None] & in_head[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=mine)

    written = fresh + i[:, None] * 3 * width + column[None, :]
    here = ring + ((start + i) % keys)[:, None] * width + column[None, :]
    tl.store(here, tl.load(written + width, mask=mine, other=0.0), mask=mine)
    tl.store(here + keys * width, tl.load(written + 2 * width, mask=mine, other=0.0), mask=mine)


def attention(
    qkv_BT3D: torch.Tensor,
    kv_R2CD: torch.Tensor,
    frame: StepFrame,
    relative: Relative,
    left: int,
) -> torch.Tensor:
    """Relative attention of the new frames over the ring and themselves -> [B, T, D]; see `resident_ops.attention`."""
    positions_HPK, bias_u_HK, bias_v_HK = relative.positions, relative.bias_u, relative.bias_v
    batch, new, width = qkv_BT3D.size(0), qkv_BT3D.size(1), qkv_BT3D.size(2) // 3
    heads, _, head_width = positions_HPK.shape
    out = torch.empty(batch, new, width, dtype=qkv_BT3D.dtype, device=qkv_BT3D.device)
    scale, kv_row = head_width**-0.5, kv_R2CD.stride(0)
    head_block = max(16, triton.next_power_of_2(head_width))
    state = (qkv_BT3D, kv_R2CD, frame.rows, frame.start, frame.valid)
    if new == 1:
        _attention_one_kernel[(batch, heads)](
            *state, positions_HPK, bias_u_HK, bias_v_HK, out, scale, left, width, head_width, kv_row,
            LEFT_BLOCK=triton.next_power_of_2(left), HEAD_BLOCK=head_block, num_warps=4, **launch_options(),
        )  # fmt: skip
        return out
    q_HXK = qkv_BT3D[:, :, :width].reshape(batch * new, heads, head_width).transpose(0, 1)
    place_HXP = torch.matmul(q_HXK, positions_HPK.transpose(1, 2))
    precise = qkv_BT3D.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    _attention_many_kernel[(batch, heads)](
        *state, place_HXP, bias_u_HK, relative.bias_scores, out, scale, left, new, batch, width, head_width, kv_row,
        NEW_BLOCK=max(16, triton.next_power_of_2(new)), KEY_BLOCK=max(16, triton.next_power_of_2(left + new)), HEAD_BLOCK=head_block,
        PRECISION="ieee" if precise else "tf32", num_warps=4, **launch_options(),
    )  # fmt: skip
    return out


@triton.jit
def _gated(gated_ptr, frame, column, width, inside):
    value = tl.load(gated_ptr + frame * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gated_ptr + frame * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    return value * tl.sigmoid(gate)


@triton.jit
def _convolution_kernel(
    gated_ptr, ring_ptr, rows_ptr, start_ptr, valid_ptr, taps_ptr, taps_bias_ptr, w_ptr, b_ptr, out_ptr, eps, new, width, size, ring_row,
    HISTORY: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Program (row of the batch, new frame t): the taps reach back to t - HISTORY, into the ring where that is before the chunk.
    b, t = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    start = tl.load(start_ptr + b)
    valid = tl.load(valid_ptr + b)
    ring = ring_ptr + tl.load(rows_ptr + b) * ring_row
    gated = gated_ptr + b.to(tl.int64) * new * 2 * width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total += tl.load(taps_bias_ptr + column, mask=inside, other=0.0)
    for n in tl.static_range(HISTORY + 1):
        at = t - HISTORY + n
        tap = tl.load(taps_ptr + n * width + column, mask=inside, other=0.0)
        is_new = inside & (at >= 0) & (at < valid)
        is_old = inside & (at < 0) & (start + at >= 0)
        value = _gated(gated, tl.maximum(at, 0), column, width, is_new).to(ring_ptr.dtype.element_ty)
        if n == HISTORY:
            tl.store(ring + ((start + t) % size) * width + column, value, mask=inside)
        past = tl.load(ring + ((start + at + size) % size) * width + column, mask=is_old, other=0.0)
        total += tap * (tl.where(is_new, value, 0.0).to(tl.float32) + past.to(tl.float32))
    w = tl.load(w_ptr + column, mask=inside, other=0.0)
    bias = tl.load(b_ptr + column, mask=inside, other=0.0)
    y = _normalised(tl.where(inside, total, 0.0), inside, width, w, bias, eps)
    y = y * tl.sigmoid(y)
    tl.store(out_ptr + (b.to(tl.int64) * new + t) * width + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def convolution(
    gated_BT2D: torch.Tensor,
    ring_RWD: torch.Tensor,
    frame: StepFrame,
    taps: tuple[torch.Tensor, torch.Tensor | None],
    parameters: Norm,
) -> torch.Tensor:
    """GLU, causal depthwise convolution over the ring and the new frames, layer norm, SiLU -> [B, T, D]; see `resident_ops.convolution`."""
    taps_ND, bias_D = taps
    batch, new, width = gated_BT2D.size(0), gated_BT2D.size(1), gated_BT2D.size(2) // 2
    out = torch.empty(batch, new, width, dtype=gated_BT2D.dtype, device=gated_BT2D.device)
    block = triton.next_power_of_2(width)
    _convolution_kernel[(batch, new)](
        gated_BT2D, ring_RWD, frame.rows, frame.start, frame.valid, taps_ND, taps_ND if bias_D is None else bias_D, parameters.weight,
        parameters.bias, out, parameters.eps, new, width, ring_RWD.size(1), ring_RWD.stride(0),
        HISTORY=taps_ND.size(0) - 1, HAS_BIAS=bias_D is not None, BLOCK=block, num_warps=4, **launch_options(),
    )  # fmt: skip
    return out
