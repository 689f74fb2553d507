"""The least time a streaming encoder step can take: bytes that must move and arithmetic that must be done, against measured ceilings (pure).

    work = step_work(StepDimensions(layers=24, width=1024, ...), batch=32)
    work.floor_ms(bytes_per_s=4.2e12, flops_per_s=4.0e14)

Counted: every weight read once; keys, values and convolution inputs of the window read once and the new ones written; two operations per
multiply-add; of the positional projections, which depend on the context alone, only the result. Not counted: activations between kernels, launches, the subsampling's activations. No implementation that reads its weights from
memory runs below this; what caches between steps is a different floor. With `int8` the layers' projections are read as int8 with an fp16 scale
per 32, everything else at `bytes_per_value`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepDimensions:
    """Shapes of the encoder and of one step. window: cached frames; frames: new encoder frames; weights: parameters that a step reads; int8: whether
    the layers' projections are read as int8, which a step of a lone frame can do."""

    layers: int
    width: int
    feed_forward: int
    kernel: int
    window: int
    frames: int
    weights: int
    bytes_per_value: int
    int8: bool = False


@dataclass(frozen=True)
class FloorWork:
    """Bytes that must move and floating-point operations of one step."""

    bytes: int
    flops: int

    def floor_ms(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The larger of the two times, in milliseconds."""
        return 1e3 * max(self.bytes / bytes_per_s, self.flops / flops_per_s)


def step_work(d: StepDimensions, batch: int) -> FloorWork:
    """Work of one step of `batch` streams with keys and values kept after projection."""
    keys = d.window + d.frames
    projections = (
        4 * d.width * d.feed_forward  # two feed-forward blocks, in and out
        + 4 * d.width * d.width  # query, key, value, output
        + 3 * d.width * d.width  # pointwise convolutions: in to twice the width, out
    )
    # Depthwise taps; content scores, positional scores and weighted values.
    per_frame = projections + d.kernel * d.width + 3 * keys * d.width
    macs = d.layers * batch * d.frames * per_frame
    state = d.layers * batch * d.width * (2 * (keys + d.frames) + (d.kernel - 1) + 2 * d.frames)
    positions = d.layers * (keys + d.frames - 1) * d.width
    int8 = d.layers * projections if d.int8 else 0  # a byte each, and two for every 32
    return FloorWork(d.bytes_per_value * (d.weights - int8 + positions + state) + int8 + int8 // 16, 2 * macs)
