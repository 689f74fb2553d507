"""A run whose generator is late is given up exactly when its p99 is certain, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from workbench.config import LoadConfig, load_config
from workbench.errors import GeneratorLagged
from workbench.measure.lag import LagWatch
from workbench.measure.loadgen import check_generator
from workbench.measure.paced import PacedOptions, run_paced
from workbench.runtime.recognizer import Recognizer


@pytest.mark.parametrize("chunks", [1, 2, 99, 100, 101, 102, 150, 1000, 4001])
def test_a_run_is_lost_when_even_a_perfect_rest_leaves_the_p99_above_the_bound_and_not_before(chunks: int) -> None:
    watch = LagWatch(chunks, 0.005)
    for _ in range(watch.enough - 1):
        watch.sent(0.0051)
    assert not watch.lost
    just_late = np.zeros(chunks)
    just_late[: watch.enough - 1] = np.nextafter(0.005, 1.0)
    check_generator(just_late, 0.005)
    watch.sent(0.005)
    assert not watch.lost, "on the bound is in time"
    watch.sent(0.0051)
    assert watch.lost
    late = np.zeros(chunks)
    late[: watch.enough] = np.nextafter(0.005, 1.0)
    with pytest.raises(GeneratorLagged):
        check_generator(late, 0.005)


def test_a_lost_paced_run_ends_at_once_and_its_recogniser_serves_the_next(
    tiny_model: Any, noise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config({"asr": {"batching": {"enabled": True, "state_arena_slots": 8}}})
    load = LoadConfig(streams=2, seconds=60.0)
    with Recognizer(tiny_model, config) as recognizer:
        monkeypatch.setattr("workbench.measure.paced.lateness_bound_s", lambda chunk_s: -1.0)
        with pytest.raises(GeneratorLagged, match=r"generator lagged: \d+ of \d+ chunks .* of 60 s"):
            run_paced(recognizer, [noise(1.0)], load, options=PacedOptions(compare=False, stop_lagging=True))
        assert recognizer.arena.used == 0
        with recognizer.stream() as stream:
            stream.push(noise(1.0))
            assert stream.finish()[-1].kind == "final"
