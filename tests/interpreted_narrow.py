"""The one-row products run by Triton's interpreter, against plain PyTorch: prints the relative error of every case as one JSON object.

Triton decides when it is imported whether it interprets, so this runs in a process of its own: TRITON_INTERPRET=1 python interpreted_narrow.py
"""

from __future__ import annotations

import itertools
import json

import torch

from workbench.encoder import narrow, resident_ops
from workbench.encoder.int8 import dequantise, quantise
from workbench.encoder.resident import FoldedLinear, Linear

# One block of inputs, blocks with an open end, and inputs that take two steps of a program.
SHAPES = ((33, 64), (7, 96), (3, 4128))


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def cases(outputs, inputs, int8):
    generator = torch.Generator().manual_seed(inputs)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    weight, bias, factors = draw(outputs, inputs) / inputs**0.5, draw(outputs), 1 + 0.3 * draw(inputs)
    residual, x, added = 3 * draw(1, 1, inputs) + 0.5, draw(1, 1, inputs), draw(1, 1, outputs)
    matrix = quantise(weight) if int8 else None
    scaled = (dequantise(matrix) if int8 else weight) * factors
    folded = FoldedLinear(matrix or scaled, scaled.sum(dim=1), bias, 1e-5, factors if int8 else None)
    for activate in (False, True):
        got, want = (ops.norm_linear(residual, folded, activate, torch.float32) for ops in (narrow, resident_ops))
        yield f"norm_linear, SiLU {activate}", error(got, want)
    plain = dequantise(matrix) if int8 else weight
    for dtype, given in itertools.product((torch.float32, torch.bfloat16), (bias, None)):
        linear = Linear(plain.to(dtype), None if given is None else given.to(dtype), matrix)
        got, want = (ops.linear_residual(x.to(dtype), linear, added, 0.5) for ops in (narrow, resident_ops))
        yield f"linear_residual in {dtype}, bias {given is not None}", error(got, want)


if __name__ == "__main__":
    found = {
        f"{outputs} x {inputs}, int8 {int8}: {name}": value
        for int8 in (False, True)
        for outputs, inputs in SHAPES
        for name, value in cases(outputs, inputs, int8)
    }
    print(json.dumps(found))
