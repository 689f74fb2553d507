"""What work is padded up to: the ladder of batch sizes that a graphed stage is captured for, and the lengths of whole recordings.

    ladder = default_ladder(24)        # (1, 2, 4, 8, 16, 24)
    bucket_for(5, ladder)              # 8
    padding_rows(5, ladder)            # 3
    bucketed_samples(40_000, 1000, geometry, most_frames=5000)      # 48_000

A CUDA graph has one fixed batch size. Doubling rungs keep the number of graphs at log2(cap) + 1 and the padding under half of a batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from workbench.errors import ConfigError
from workbench.geometry import StreamGeometry

# Most audio in one offline batch: attention of a whole recording takes memory by the square of its length.
MOST_BATCH_S = 1200.0


def default_ladder(cap: int) -> tuple[int, ...]:
    """Powers of two below `cap` items, then `cap` itself."""
    if cap < 1:
        raise ConfigError(f"cap: got {cap}; allowed is 1 or more")
    return (*(1 << power for power in range((cap - 1).bit_length())), cap)


def checked_ladder(sizes: Sequence[int], cap: int) -> tuple[int, ...]:
    """A user's ladder, if it rises strictly from 1 or more and its top holds a batch of `cap` items; ConfigError if not."""
    if not sizes or sizes[0] < 1 or any(low >= high for low, high in pairwise(sizes)):
        raise ConfigError(f"batch ladder: got {list(sizes)}; allowed are strictly rising sizes of 1 or more")
    if sizes[-1] < cap:
        raise ConfigError(f"batch ladder: got a top of {sizes[-1]}; allowed is {cap} (the largest batch) or more")
    return tuple(sizes)


def bucket_for(size: int, ladder: Sequence[int]) -> int:
    """The lowest rung that holds `size` items. Raises ValueError for a size below 1 or above the top."""
    if not 1 <= size <= ladder[-1]:
        raise ValueError(f"batch size: got {size}; allowed is 1 to {ladder[-1]}")
    return ladder[bisect_left(ladder, size)]


def padding_rows(size: int, ladder: Sequence[int]) -> int:
    """Unused rows when `size` items run at their rung."""
    return bucket_for(size, ladder) - size


def bucketed_samples(samples: int, bucket_ms: int, geometry: StreamGeometry, most_frames: int) -> int:
    """`samples` rounded up to a multiple of `bucket_ms`; unchanged where bucketing is off or would pass `most_frames` encoder frames."""
    bucket = bucket_ms * geometry.sample_rate_hz // 1000
    if bucket <= 0 or samples % bucket == 0:
        return samples
    padded = samples + bucket - samples % bucket
    return padded if geometry.encoded_frames(geometry.mel_frames(padded)) <= most_frames else samples
