"""Int8 weights: the stated bound holds for every weight, whatever its group looks like; wrong shapes are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from workbench.encoder.int8 import GROUP, Int8Matrix, dequantise, quantise
from workbench.errors import ModelError


@st.composite
def weights(draw):
    """fp32 matrices whose groups span many magnitudes, zeros and fp16's smallest steps included."""
    shape = (draw(st.integers(1, 4)), GROUP * draw(st.integers(1, 3)))
    values = draw(arrays(np.float32, shape, elements=st.floats(-1, 1, width=32)))
    powers = draw(arrays(np.int64, (shape[0], shape[1] // GROUP), elements=st.integers(-30, 22)))
    return (values * np.repeat(2.0**powers, GROUP, axis=1)).astype(np.float32)


@settings(deadline=None)
@given(weights())
def test_every_weight_is_within_half_a_step_of_its_scale(w):
    matrix = quantise(torch.from_numpy(w))
    q, s = matrix.values.numpy().astype(np.float64), np.repeat(matrix.scales.numpy().astype(np.float64), GROUP, axis=1)
    assert (np.abs(q * s - w) <= s / 2).all()
    assert np.array_equal(dequantise(matrix).numpy(), (q * s).astype(np.float32))
    assert np.array_equal(q * s, (q * s).astype(np.float32))  # exact in fp32


@settings(deadline=None)
@given(weights())
def test_the_scale_is_the_smallest_that_cuts_nothing_off(w):
    matrix = quantise(torch.from_numpy(w))
    scales = matrix.scales.numpy()
    largest = np.abs(w.astype(np.float64)).reshape(w.shape[0], -1, GROUP).max(axis=2)
    assert (127 * scales.astype(np.float64) >= largest).all()
    below = np.nextafter(scales, np.float16(-1))
    assert ((127 * below.astype(np.float64) < largest) | (scales == 0)).all()
    assert (scales.astype(np.float64) <= largest / 127 * (1 + 2**-10) + 2**-24).all()
    assert (matrix.values.numpy()[np.repeat(scales == 0, GROUP, axis=1)] == 0).all()
    assert int(matrix.values.min()) >= -127


def test_dequantised_weights_quantise_to_themselves():
    matrix = quantise(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    matrix.values[:, ::GROUP] = 127  # every group uses its whole range
    again = quantise(dequantise(matrix))
    assert torch.equal(again.values, matrix.values) and torch.equal(again.scales, matrix.scales)


@pytest.mark.parametrize("shape", [(4,), (4, 31), (4, 0), (4, 32, 1), (4, 48)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ModelError, match=r"got shape \[.*allowed is \[out, in\] with a multiple of 32 inputs"):
        quantise(torch.zeros(shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 127 * 65504 * 1.01])
def test_values_that_no_scale_fits_are_refused(value):
    weight = torch.ones(2, 64)
    weight[1, 40] = value
    with pytest.raises(ModelError, match="allowed are finite values up to 8319008"):
        quantise(weight)


def test_parts_that_do_not_fit_together_are_refused():
    matrix = quantise(torch.ones(2, 64))
    with pytest.raises(ModelError, match=r"int8 scales: got shape \[2, 1\]; allowed is \[2, 2\]"):
        Int8Matrix(matrix.values, matrix.scales[:, :1])
    with pytest.raises(ModelError, match=r"allowed are torch\.int8, torch\.float16"):
        Int8Matrix(matrix.values, matrix.scales.float())
