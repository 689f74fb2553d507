"""Matrix products of a few rows with a large weight, as Triton kernels that stream the weight once and do the rest on the way.

Why: at one stream a step is reading 2.4 GB of weights; a library product of a few rows reaches part of the memory's bandwidth and needs
further kernels for normalisation, activation and residual. Here they are folded in: layer normalisation by its algebra,
`norm(x) W' = (x V' - mean * sum(V)) / deviation + (b W' + bias)` with V = W * w, so that one pass over x and V is enough.

    hidden = norm_linear(residual, folded, activate=True, dtype=torch.bfloat16)      # SiLU(linear(norm(residual)))
    residual = linear_residual(hidden, linear, residual, factor=0.5)                 # residual + 0.5 * linear(hidden)

Shapes: x [..., K], weight [N, K], out [..., N]; residual and sums in fp32. One row: products and sums in fp32, no matrix unit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from workbench.encoder.resident import FoldedLinear, Linear

MOST_ROWS = 32  # beyond this a library product is as fast or faster


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
def _one_row_kernel(
    x_ptr, w_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr, factor, eps, n_size,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATE: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_SIZE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < n_size
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    sum_x = tl.zeros((BLOCK_K,), tl.float32)
    sum_xx = tl.zeros((BLOCK_K,), tl.float32)
    for first in range(0, K_SIZE, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < K_SIZE, other=0.0).to(tl.float32)
        w = tl.load(
            w_ptr + n[:, None].to(tl.int64) * K_SIZE + k[None, :],
            mask=inside[:, None] & (k < K_SIZE)[None, :],
            other=0.0,
        )
        acc += w.to(tl.float32) * x[None, :]
        if NORM:
            sum_x += x
            sum_xx += x * x
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


@triton.jit
def _few_rows_kernel(
    x_ptr, w_ptr, sums_ptr, bias_ptr, residual_ptr, out_ptr, factor, eps, m_size, n_size,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATE: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, K_SIZE: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = m < m_size, n < n_size
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    sum_x = tl.zeros((BLOCK_M,), tl.float32)
    sum_xx = tl.zeros((BLOCK_M,), tl.float32)
    for first in range(0, K_SIZE, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        in_k = k < K_SIZE
        x = tl.load(x_ptr + m[:, None] * K_SIZE + k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
        w = tl.load(
            w_ptr + n[None, :].to(tl.int64) * K_SIZE + k[:, None], mask=in_n[None, :] & in_k[:, None], other=0.0
        )
        acc = tl.dot(x.to(w.dtype), w, acc, input_precision=PRECISION)
        if NORM:
            wide = x.to(tl.float32)
            sum_x += tl.sum(wide, axis=1)
            sum_xx += tl.sum(wide * wide, axis=1)
    total = _finish(
        acc,
        sum_x[:, None],
        sum_xx[:, None],
        n[None, :],
        in_n[None, :],
        K_SIZE,
        sums_ptr,
        bias_ptr,
        eps,
        NORM,
        HAS_BIAS,
        ACTIVATE,
    )
    mask = in_m[:, None] & in_n[None, :]
    at = m[:, None] * n_size + n[None, :]
    if RESIDUAL:
        total = tl.load(residual_ptr + at, mask=mask, other=0.0) + factor * total
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def norm_linear(residual: torch.Tensor, folded: FoldedLinear, activate: bool, dtype: torch.dtype) -> torch.Tensor:
    """Linear of the layer-normalised residual [..., K], then SiLU where wanted -> [..., N] in `dtype`."""
    out = torch.empty(*residual.shape[:-1], folded.weight.size(0), dtype=dtype, device=residual.device)
    _launch(
        residual, folded.weight, (folded.sums, folded.bias), (residual, 0.0), out, (True, activate, False, folded.eps)
    )
    return out


def linear_residual(x: torch.Tensor, linear: Linear, residual: torch.Tensor, factor: float) -> torch.Tensor:
    """residual + factor * linear(x) in fp32: x [..., K], residual [..., N]."""
    out = torch.empty_like(residual)
    _launch(x, linear.weight, (linear.weight, linear.bias), (residual, factor), out, (False, False, True, 0.0))
    return out


def _launch(x: Any, weight: Any, extras: Any, added: Any, out: Any, switches: Any) -> None:
    (sums, bias), (residual, factor), (norm, activate, add, eps) = extras, added, switches
    n_size, k_size = weight.shape
    rows = x.numel() // k_size
    flags = {"NORM": norm, "HAS_BIAS": bias is not None, "ACTIVATE": activate, "RESIDUAL": add}
    pointers = (x, weight, sums, weight if bias is None else bias, residual, out, factor, eps)
    if rows == 1:
        block_k = min(1024, triton.next_power_of_2(k_size))
        block_n = 8 if n_size >= 2048 else 4
        _one_row_kernel[(triton.cdiv(n_size, block_n),)](
            *pointers, n_size, **flags, BLOCK_N=block_n, BLOCK_K=block_k, K_SIZE=k_size, num_warps=4
        )
        return
    block_m = 16 if rows <= 16 else 32
    block_k = 128 if weight.dtype == torch.float32 else 256
    exact = weight.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    block_n = 32 if n_size >= 3072 else 16
    _few_rows_kernel[(triton.cdiv(n_size, block_n), triton.cdiv(rows, block_m))](
        *pointers, rows, n_size, **flags, K_SIZE=k_size, PRECISION="ieee" if exact else "tf32",
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=4,
    )  # fmt: skip
