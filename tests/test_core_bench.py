"""The core benchmark counts what really happened and refuses to report a core that loses work."""

from __future__ import annotations

import dataclasses

import pytest

from workbench.batching.microbatcher import Batch, MicroBatcher
from workbench.errors import ConfigError, RecordError
from workbench.measure import core_bench
from workbench.results import Record


def test_record(tmp_path: object) -> None:
    record = core_bench.run_core_bench(items=1000, keys=7, max_batch_size=4, repeats=3)
    numbers = record.numbers
    assert numbers["items_per_second"] >= numbers["items_per_second_median"] >= numbers["items_per_second_min"] > 0
    assert numbers["item_cost_us"] * numbers["items_per_second"] == pytest.approx(1e6)
    assert record.counters["batches"] == sum(record.counters["reasons"].values())
    assert record.counters["reasons"]["capacity"] == sum(len(range(key, 1000, 7)) // 4 for key in range(7))
    assert Record.load(record.save(f"{tmp_path}/core.json")).numbers == numbers


@pytest.mark.parametrize("wrong", ["items", "keys", "max_batch_size", "repeats"])
def test_counts_are_checked(wrong: str) -> None:
    with pytest.raises(ConfigError, match="allowed are counts of 1 or more"):
        core_bench.run_core_bench(**{wrong: 0})


class Losing(MicroBatcher[int]):
    """Drops the last item of every batch."""

    def next_batch(self, now: float) -> Batch[int] | None:
        batch = super().next_batch(now)
        return batch and dataclasses.replace(batch, items=batch.items[:-1])


class Reordering(MicroBatcher[int]):
    """Turns every batch around."""

    def next_batch(self, now: float) -> Batch[int] | None:
        batch = super().next_batch(now)
        return batch and dataclasses.replace(batch, items=batch.items[::-1])


@pytest.mark.parametrize("broken", [Losing, Reordering])
def test_a_core_that_loses_or_reorders_work_is_refused(
    broken: type[MicroBatcher[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_bench, "MicroBatcher", broken)
    with pytest.raises(RecordError, match="did not come out"):
        core_bench.run_core_bench(items=100, keys=3, repeats=1)
