"""Weights as int8 with one fp16 scale per 32 inputs of a row: a matrix in 8.5 bits a value.

    matrix = quantise(weight)              # [out, in] -> values int8 [out, in], scales fp16 [out, in / 32]
    near = dequantise(matrix)              # values * scales, exact in fp32

Symmetric, rounded to nearest. The scale of a group is the smallest fp16 number that is not below max|weight| / 127: nothing is cut off, and so
|dequantise(quantise(w)) - w| <= scale / 2 for every weight, exactly. That bounds what the group loses: with scale <= (max|w| / 127) * (1 + 2^-10)
+ 2^-24, half a step of exact scales and the rounding of the scale to fp16. A group of zeros has the scale zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workbench.errors import ModelError

GROUP = 32
WEIGHTS = ("native", "int8")
_MOST = 127


@dataclass(frozen=True)
class Int8Matrix:
    """A quantised matrix: values [out, in] (int8), scales [out, in / 32] (fp16). Raises ModelError where the two do not fit together."""

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        _check_shape(self.values)
        wanted = (self.values.size(0), self.values.size(1) // GROUP)
        if tuple(self.scales.shape) != wanted:
            raise ModelError(f"int8 scales: got shape {list(self.scales.shape)}; allowed is {list(wanted)}")
        if (self.values.dtype, self.scales.dtype) != (torch.int8, torch.float16):
            raise ModelError(
                f"int8 matrix: got values {self.values.dtype}, scales {self.scales.dtype}; allowed are torch.int8, torch.float16"
            )


def quantise(weight: torch.Tensor) -> Int8Matrix:
    """The nearest int8 matrix of a weight [out, in]. Raises ModelError for another shape, and for values that are not finite or beyond
    127 times the largest fp16."""
    _check_shape(weight)
    groups = weight.double().view(weight.size(0), -1, GROUP)  # quotients so exact that rounding them is exact
    largest = groups.abs().amax(dim=2)
    nearest = (largest / _MOST).half()
    # The next larger fp16, where the nearest is below: positive numbers are ordered as their bits.
    scales = (nearest.view(torch.int16) + (nearest.double() * _MOST < largest).short()).view(torch.float16)
    if not scales.isfinite().all():
        raise ModelError(
            f"weights to quantise: got a largest magnitude of {float(largest.max()):g}; allowed are finite values up to {_MOST * 65504}"
        )
    steps = scales.double().masked_fill(scales == 0, 1.0)
    values = (groups / steps[..., None]).round().to(torch.int8)
    return Int8Matrix(values.view(weight.shape), scales)


def dequantise(matrix: Int8Matrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """values * scales [out, in], exact in fp32 and then rounded to `dtype`."""
    groups = matrix.values.view(matrix.values.size(0), -1, GROUP).float() * matrix.scales.float()[..., None]
    return groups.view(matrix.values.shape).to(dtype)


def _check_shape(matrix: torch.Tensor) -> None:
    if matrix.dim() != 2 or matrix.size(1) == 0 or matrix.size(1) % GROUP:
        raise ModelError(
            f"int8 weights: got shape {list(matrix.shape)}; allowed is [out, in] with a multiple of {GROUP} inputs"
        )
