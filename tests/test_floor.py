"""The floor of a step: known counts, and the limit that binds."""

from __future__ import annotations

import dataclasses

import pytest

from workbench.measure.floor import FloorWork, StepDimensions, step_work

SHAPE = StepDimensions(
    layers=24, width=1024, feed_forward=4096, kernel=9, window=56, frames=1, weights=600_000_000, bytes_per_value=4
)


def test_multiply_adds_of_a_step_are_those_counted_by_hand():
    """0.58 GMAC a stream-step at 80 ms and 8.2 at 1.12 s, subsampling left out (0.6 B model, keys and values cached)."""
    assert step_work(SHAPE, 1).flops / 2e9 == pytest.approx(0.58, abs=0.03)
    assert step_work(dataclasses.replace(SHAPE, frames=14), 1).flops / 2e9 == pytest.approx(8.2, abs=0.3)


def test_weights_are_read_once_and_state_per_stream():
    one, many = step_work(SHAPE, 1), step_work(SHAPE, 33)
    assert many.flops == 33 * one.flops
    state = (many.bytes - one.bytes) / 32
    positions = 4 * 24 * 1024 * 57  # distances -56 to 0, projected before
    assert one.bytes == pytest.approx(4 * SHAPE.weights + positions + state)
    assert state == pytest.approx(11.8e6, rel=0.1)  # keys and values of the window in fp32


def test_int8_projections_are_a_byte_each_and_two_a_group_of_32():
    half = dataclasses.replace(SHAPE, bytes_per_value=2)
    saved = step_work(half, 1).bytes - step_work(dataclasses.replace(half, int8=True), 1).bytes
    projections = 24 * (2 * 2 * 1024 * 4096 + (3 + 1 + 2 + 1) * 1024 * 1024)
    assert saved == projections * (2 - 1 - 2 / 32)


def test_the_larger_limit_binds():
    work = FloorWork(bytes=4_000_000, flops=1_000_000)
    assert work.floor_ms(bytes_per_s=4e9, flops_per_s=1e12) == pytest.approx(1.0)
    assert work.floor_ms(bytes_per_s=4e12, flops_per_s=1e8) == pytest.approx(10.0)
