"""How many items a second the scheduler core moves on one CPU core: submit, release, finish, with metrics on and nothing to execute.

    record = run_core_bench(items=50_000, keys=64)
    record.numbers["items_per_second"]

The core must stay far below the cost of a step: at 256 streams and 12.5 chunks a second through four stages it handles 12,800 items a
second. The load is the driver's worst case: keys in turn, and a poll after every submit, of which most find nothing to release. Virtual time
moves 1 µs per item. Other load on a shared machine only ever slows a run, so the best of several short ones is the capability; the
median is reported beside it, and the rate by processor time, which hardly sees that load. Every run checks that each item came out once, in the order of its key.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Hashable

from workbench.batching.microbatcher import Batch, MicroBatcher
from workbench.errors import ConfigError, RecordError
from workbench.results import Record


def run_core_bench(items: int = 50_000, keys: int = 64, max_batch_size: int = 16, repeats: int = 10) -> Record:
    """Measure `repeats` runs of `items` items over `keys` keys; Record of kind `core` with `items_per_second` and its spread.

    Raises ConfigError for a count below 1, RecordError if an item was lost, doubled or reordered.
    """
    options = {"items": items, "keys": keys, "max_batch_size": max_batch_size, "repeats": repeats}
    if min(options.values()) < 1:
        raise ConfigError(f"core bench: got {options}; allowed are counts of 1 or more")
    rates, cpu_rates, counters = [], [], {}
    for _ in range(repeats):
        batcher: MicroBatcher[int] = MicroBatcher(
            max_batch_size=max_batch_size, max_queue_delay_s=0.005, max_queue_depth=2 * keys * max_batch_size
        )
        gc.collect()
        begun_cpu = time.process_time()
        seconds, batches = _run_once(batcher, items, keys)
        cpu_rates.append(items / (time.process_time() - begun_cpu))
        _check(batches, items, keys)
        rates.append(items / seconds)
        counters = {"batches": batcher.metrics.batches, "reasons": batcher.metrics.snapshot()["reasons"]}
    best = max(rates)
    return Record(
        kind="core",
        config=options,
        numbers={
            "items_per_second": best,
            "items_per_second_median": statistics.median(rates),
            "items_per_second_min": min(rates),
            "items_per_cpu_second": max(cpu_rates),
            "item_cost_us": 1e6 / best,
            "batch_size_mean_items": items / counters["batches"],
        },
        counters=counters,
        notes=["items_per_second is the best of the repeats: other load on the machine can only slow a run"],
    )


def _run_once(batcher: MicroBatcher[int], items: int, keys: int) -> tuple[float, list[Batch[int]]]:
    batches: list[Batch[int]] = []
    keep = batches.append
    submit, next_batch, finish = batcher.submit, batcher.next_batch, batcher.finish
    begun = time.perf_counter()
    now = 0.0
    for item in range(items):
        now = item * 1e-6
        submit(item, item % keys, now)
        batch = next_batch(now)
        if batch is not None:
            finish(batch, now)
            keep(batch)
    batcher.close(now)
    while (batch := next_batch(now)) is not None:
        finish(batch, now)
        keep(batch)
    return time.perf_counter() - begun, batches


def _check(batches: list[Batch[int]], items: int, keys: int) -> None:
    seen: dict[Hashable, list[int]] = {}
    for batch in batches:
        seen.setdefault(batch.key, []).extend(batch.items)
    if seen != {key: list(range(key, items, keys)) for key in range(min(keys, items))}:
        raise RecordError(f"core bench: the {items} items did not come out once each, in order")
