"""The ladder of captured batch sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.batching.buckets import bucket_for, checked_ladder, default_ladder, padding_rows
from workbench.errors import ConfigError


@pytest.mark.parametrize(
    ("cap", "ladder"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (24, (1, 2, 4, 8, 16, 24))]
)
def test_default_ladder(cap: int, ladder: tuple[int, ...]) -> None:
    assert default_ladder(cap) == ladder


@given(st.integers(1, 3000), st.data())
def test_the_lowest_rung_that_holds_the_batch(cap: int, data: st.DataObject) -> None:
    ladder = checked_ladder(default_ladder(cap), cap)
    size = data.draw(st.integers(1, cap))
    bucket = bucket_for(size, ladder)
    assert bucket in ladder and [rung for rung in ladder if size <= rung < bucket] == []
    assert padding_rows(size, ladder) == bucket - size < max(1, bucket / 2)


@pytest.mark.parametrize("size", [0, -1, 9])
def test_sizes_off_the_ladder(size: int) -> None:
    with pytest.raises(ValueError, match=f"got {size}; allowed is 1 to 8"):
        bucket_for(size, (2, 8))


@pytest.mark.parametrize("sizes", [[], [0, 1], [2, 2, 8], [4, 2, 8], [1, 2, 4]])
def test_wrong_ladders(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match="batch ladder: got"):
        checked_ladder(sizes, cap=8)


def test_no_ladder_without_a_batch() -> None:
    with pytest.raises(ConfigError, match="got 0"):
        default_ladder(0)
