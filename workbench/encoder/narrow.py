"""Products of one row with a large weight, as a Triton kernel that streams the weight once and does the rest on the way.

Why: at one stream of 80 ms chunks a step is reading 2.4 GB of weights; a library product of one row reaches part of the memory's bandwidth and needs
further kernels for normalisation, activation and residual. Here they are folded in: layer normalisation by its algebra,
`norm(x) W' = (x V' - mean * sum(V)) / deviation + (b W' + bias)` with V = W * w, so that one pass over x and V is enough.

    hidden = norm_linear(residual, folded, activate=True, dtype=torch.bfloat16)      # SiLU(linear(norm(residual)))
    residual = linear_residual(hidden, linear, residual, factor=0.5)                 # residual + 0.5 * linear(hidden)

On Hopper each kernel is launched while the one before it runs (programmatic dependent launch): it fetches its weights first and only then waits
for its input. Whatever is read before that wait must be written by no kernel of the step.

Shapes: x [1, 1, K], weight [N, K], out [1, 1, N]; residual and sums in fp32. Products and sums are in fp32 whatever the weight's dtype, no matrix unit.
A weight in int8 (`int8.py`) is read as it is: each group's products are summed and then scaled, and the norm weight w multiplies x instead of the weight.
More rows than one are a library's work: with two to thirty-two rows this approach on the matrix unit was slower (studies/LOG.md).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton: kernels then start one after the other
    gdc_launch_dependents = gdc_wait = None

from workbench.encoder.int8 import GROUP, Int8Matrix

if TYPE_CHECKING:
    from workbench.encoder.resident import FoldedLinear, Linear


@triton.jit
def _finish(
    acc,
    sum_x,
    sum_xx,
    n,
    inside,
    K_SIZE,
    sums_ptr,
    bias_ptr,
    eps,
    NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATE: tl.constexpr,
):
    # acc [..., N] of raw products; sum_x and sum_xx broadcast against it.
    if NORM:
        mean = sum_x / K_SIZE
        deviation = tl.sqrt(tl.maximum(sum_xx / K_SIZE - mean * mean, 0.0) + eps)
        acc = (acc - mean * tl.load(sums_ptr + n, mask=inside, other=0.0)) / deviation
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATE:
        acc = acc * tl.sigmoid(acc)
    return acc


@triton.jit
def _tile(ptr, n, at, inside, SIZE: tl.constexpr):
    # Rows n and columns `at` of a matrix whose rows have SIZE values.
    mask = inside[:, None] & (at < SIZE)[None, :]
    return tl.load(ptr + n[:, None].to(tl.int64) * SIZE + at[None, :], mask=mask, other=0.0)


@triton.jit
def _one_row_kernel(
    x_ptr, w_ptr, scales_ptr, factors_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr, factor, eps, n_size,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATE: tl.constexpr, RESIDUAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # GROUP inputs of a weight row share a scale; 1: the weight has no scales.
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < n_size
    acc = tl.zeros((BLOCK_N, BLOCK_K // GROUP), tl.float32)
    sum_x = tl.zeros((BLOCK_K,), tl.float32)
    sum_xx = tl.zeros((BLOCK_K,), tl.float32)
    k = tl.arange(0, BLOCK_K)
    group = tl.arange(0, BLOCK_K // GROUP)
    w = _tile(w_ptr, n, k, inside, K_SIZE)
    if GROUP > 1:
        scale = _tile(scales_ptr, n, group, inside, K_SIZE // GROUP)
        if NORM:
            factors = tl.load(factors_ptr + k, mask=k < K_SIZE, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for step in tl.static_range((K_SIZE + BLOCK_K - 1) // BLOCK_K):
        at = step * BLOCK_K + k
        if step > 0:
            w = _tile(w_ptr, n, at, inside, K_SIZE)
            if GROUP > 1:
                scale = _tile(scales_ptr, n, step * (BLOCK_K // GROUP) + group, inside, K_SIZE // GROUP)
                if NORM:
                    factors = tl.load(factors_ptr + at, mask=at < K_SIZE, other=0.0)
        x = tl.load(x_ptr + at, mask=at < K_SIZE, other=0.0).to(tl.float32)
        if NORM:
            sum_x += x
            sum_xx += x * x
            if GROUP > 1:
                x *= factors
        products = w.to(tl.float32) * x[None, :]
        if GROUP > 1:
            grouped = tl.reshape(products, (BLOCK_N, BLOCK_K // GROUP, GROUP))
            products = tl.sum(grouped, axis=2) * scale.to(tl.float32)
        acc += products
    total = _finish(
        tl.sum(acc, axis=1),
        tl.sum(sum_x, axis=0),
        tl.sum(sum_xx, axis=0),
        n,
        inside,
        K_SIZE,
        sums_ptr,
        bias_ptr,
        eps,
        NORM,
        HAS_BIAS,
        ACTIVATE,
    )
    if RESIDUAL:
        total = tl.load(residual_ptr + n, mask=inside, other=0.0) + factor * total
    tl.store(out_ptr + n, total.to(out_ptr.dtype.element_ty), mask=inside)


def norm_linear(residual: torch.Tensor, folded: FoldedLinear, activate: bool, dtype: torch.dtype) -> torch.Tensor:
    """Linear of the layer-normalised residual [1, 1, K], then SiLU where wanted -> [1, 1, N] in `dtype`."""
    out = torch.empty(*residual.shape[:-1], folded.bias.size(0), dtype=dtype, device=residual.device)
    extras = (folded.sums, folded.bias, folded.factors)
    _launch(residual, folded.weight, extras, (residual, 0.0), out, (True, activate, False, folded.eps))
    return out


def linear_residual(x: torch.Tensor, linear: Linear, residual: torch.Tensor, factor: float) -> torch.Tensor:
    """residual + factor * linear(x) in fp32: x [1, 1, K], residual [1, 1, N]."""
    out = torch.empty_like(residual)
    weight = linear.weight if linear.int8 is None else linear.int8
    _launch(x, weight, (None, linear.bias, None), (residual, factor), out, (False, False, True, 0.0))
    return out


@functools.cache
def overlapped() -> bool:
    """Whether this GPU and this Triton can launch a kernel while the one before it runs (compute capability 9 and later)."""
    return gdc_wait is not None and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def launch_options() -> dict[str, Any]:
    """What every kernel of the step is launched with."""
    return {"PDL": True, "launch_pdl": True} if overlapped() else {"PDL": False}


def _launch(x: Any, weight: Any, extras: Any, added: Any, out: Any, switches: Any) -> None:
    (sums, bias, factors), (residual, factor), (norm, activate, add, eps) = extras, added, switches
    values, scales, group = (
        (weight.values, weight.scales, GROUP) if isinstance(weight, Int8Matrix) else (weight, None, 1)
    )
    n_size, k_size = values.shape
    block = one_row_blocks(n_size, k_size)
    _one_row_kernel[(triton.cdiv(n_size, block["BLOCK_N"]),)](
        x, values, scales, factors, sums, bias, residual, out, factor, eps, n_size,
        NORM=norm, HAS_BIAS=bias is not None, ACTIVATE=activate, RESIDUAL=add, GROUP=group, K_SIZE=k_size, **launch_options(), **block,
    )  # fmt: skip


def one_row_blocks(n_size: int, k_size: int) -> dict[str, int]:
    """Launch parameters of a one-row product: a program reads whole weight rows, so that all of them are on their way before it waits."""
    block_k = min(4096, triton.next_power_of_2(k_size))
    block_n = max(1, 8192 // block_k if n_size < 2048 else 16384 // block_k)
    return {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 8 if block_k > 2048 else 4}
