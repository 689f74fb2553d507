"""The search for the level of one configuration against ones whose limits are known, sharp and noisy."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.tuning.level_search import RESOLUTION, STEP_UP, LevelSearch, carried_level

LAGGED, REFUSED = 0.7, 0.5


def one_run(search: LevelSearch, capacity: float, pace: float = math.inf, room: float = math.inf) -> None:
    """A run of a configuration that keeps its limits up to `capacity` streams, whose generator speaks `pace` of them and whose device has `room`."""
    if search.level > room:
        search.ran("refused", REFUSED)
    elif search.level > pace:
        search.ran("lagged", LAGGED)
    elif search.level > capacity:
        search.ran("broke", min(0.9, max(0.5, capacity / search.level)))
    else:
        search.ran("kept")


def searched(
    start: int, capacity: float, pace: float = math.inf, room: float = math.inf, most: int = 30_000
) -> LevelSearch:
    """A search that has ended, in no more runs than the way to the level takes at the slowest of its steps, and five."""
    search, true = LevelSearch(start, most), max(1.0, min(capacity, pace, room, most))
    down, up = (
        math.log(ratio) / math.log(step) for ratio, step in ((start / true, 1 / LAGGED), (true / start, STEP_UP))
    )
    for _ in range(math.ceil(max(down, up, 0)) + 5):
        one_run(search, capacity, pace, room)
        if search.closed:
            return search
    raise AssertionError(search)


STARTS, LEVELS = (1, 2, 16, 100, 179, 256, 1240), (1, 2, 3, 7, 20, 89, 115, 150, 179, 250, 1000, 4321)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("true", LEVELS)
def test_the_level_is_found_a_tenth_below_the_true_one_at_most_and_never_above(start: int, true: int) -> None:
    for bound in ({"capacity": true}, {"capacity": 1e9, "pace": true}, {"capacity": 1e9, "room": true}):
        search = searched(start, **bound)
        assert true / RESOLUTION < search.carried <= true or true - search.carried < 1, (bound, search)
        assert search.ceiling is not None and search.ceiling > true
        assert search.held == (search.ceiling if "pace" in bound else None), "only a generator's lag holds it"
        assert search.level == search.carried, "what runs again is what is carried"


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000))
def test_the_lowest_of_limits_pace_and_memory_is_what_is_found(start: int, capacity: int, pace: int, room: int) -> None:
    search, true = searched(start, capacity, pace, room), min(capacity, pace, room)
    assert true / RESOLUTION < search.carried <= true
    if pace < true * RESOLUTION - 1 and min(capacity, room) > RESOLUTION * true + 1:
        assert search.held == search.ceiling
    if pace > RESOLUTION * true + 1:
        assert search.held is None


def test_a_configuration_that_just_missed_at_256_is_not_left_at_89() -> None:
    search, levels = LevelSearch(256), []
    for verdict, share in (
        ("lagged", 0.7),
        ("broke", 0.5),
        ("kept", 1.0),
        ("kept", 1.0),
        ("broke", 1.0),
        ("kept", 1.0),
    ):
        levels.append(search.level)
        search.ran(verdict, share)  # type: ignore[arg-type]
    assert levels == [256, 179, 89, 126, 150, 137]
    assert (search.carried, search.ceiling, search.held, search.closed) == (137, 150, None, True)


def test_what_is_kept_at_once_goes_up_to_the_most_that_is_allowed() -> None:
    search = LevelSearch(100, most=250)
    levels = []
    while not search.closed:
        levels.append(search.level)
        search.ran("kept")
    assert levels == [100, 150, 225, 250] and search.carried == 250 and search.ceiling is None and search.level == 250


def test_a_level_that_breaks_a_limit_when_it_runs_again_is_the_ceiling_and_the_next_below_counts() -> None:
    search = LevelSearch(100)
    for verdict in ("kept", "broke", "kept", "broke", "broke"):  # 100, 150, 122, 135, 128
        search.ran(verdict)  # type: ignore[arg-type]
    assert search.closed and (search.level, search.ceiling) == (122, 128)
    search.ran("broke")
    assert (search.carried, search.ceiling, search.closed, search.level) == (100, 122, False, 110)
    search.ran("broke")
    assert search.closed and search.level == 100
    search.ran("broke", 0.5)
    assert (search.carried, search.level, search.closed) == (0, 50, False), "nothing is left that was kept"


def test_a_run_that_was_not_measured_takes_nothing_from_a_level_that_was_kept() -> None:
    search = LevelSearch(100)
    for verdict in ("kept", "broke", "kept", "broke", "broke", "lagged", "refused"):
        search.ran(verdict)  # type: ignore[arg-type]
    assert search.carried == search.level == 122 and search.ceiling == 128 and search.held is None and search.closed
    search.ran("broke")
    assert search.ceiling == 122 and search.held is None, "the generator lagged there as well, but the limit was broken"
    search = LevelSearch(100)
    search.ran("broke")
    assert search.level == 99, "one less at least"


def test_one_stream_is_tried_twice_and_then_there_is_nothing_left() -> None:
    for verdict in ("broke", "lagged"):
        search = LevelSearch(2)
        search.ran(verdict, 0.9)  # type: ignore[arg-type]
        search.ran(verdict, 0.9)  # type: ignore[arg-type]
        assert search.level == 1 and not search.closed
        search.ran(verdict, 0.9)  # type: ignore[arg-type]
        assert search.closed and search.carried == 0 and search.level == 1
    search = LevelSearch(1)
    search.ran("lagged", 0.7)
    search.ran("kept")
    assert search.carried == 1 and search.held is None and not search.closed and search.level == 2


@pytest.mark.parametrize("start", (60, 256, 900))
def test_with_noise_no_level_counts_that_ever_broke_a_limit_and_none_far_below_the_true_one(start: int) -> None:
    spread, capacity, errors = 0.06, 300.0, []
    for seed in range(200):
        search, rng = LevelSearch(start), random.Random(seed)
        runs = 0
        while runs < 40 and not (search.closed and runs >= 12):  # the repeats of the rounds that are left among them
            one_run(search, capacity * (1 + rng.uniform(-spread, spread)))
            runs += 1
            broke = [level for level, verdict in search.runs if verdict == "broke"]
            assert search.carried < min(broke, default=math.inf)
        assert search.closed and capacity * (1 - spread) / RESOLUTION - 1 < search.carried <= capacity * (1 + spread)
        errors.append(search.carried / capacity - 1)
    assert sum(error > 0.03 for error in errors) < len(errors) / 10, "repeats take back what luck gave"


def test_of_rows_the_highest_level_counts_that_is_below_every_one_that_was_not_kept() -> None:
    assert carried_level([]) == 0 and carried_level([(5, False)]) == 0
    assert carried_level([(179, False), (89, True), (89, True)]) == 89
    assert carried_level([(100, True), (110, True), (110, False), (105, True)]) == 105
    assert carried_level([(100, False), (110, True)]) == 0
