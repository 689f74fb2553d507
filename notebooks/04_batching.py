# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · How batching works
#
# **What you will see:** the scheduler that live traffic goes through, driven by a clock that we move by hand. One by one its knobs
# are turned, and a picture shows who waited for whom, and why each batch left.
#
# Takes a few seconds; no model is loaded. The step costs were measured on one H200 (graphed step of a 0.6 B model, 80 ms chunks), the arrivals
# are those of 24 live streams that speak the shipped recordings.

# %%
import math
from collections import deque

import matplotlib.pyplot as plt
import numpy as np

from workbench.batching.ingress import IngressCohorts
from workbench.batching.microbatcher import MicroBatcher
from workbench.config import BatchingConfig, LoadConfig, effective_batch_cap
from workbench.errors import QueueFull
from workbench.geometry import StreamGeometry
from workbench.measure.loadgen import build_schedule
from workbench.results import Record
from workbench.show.queue import queue_waterfall
from workbench.tuning.run import shipped_lengths

# %% [markdown]
# ## A batcher has no clock
# Time is an argument. Ask too early and the answer is `None`; at the deadline of the oldest item, whatever is there leaves together.

# %%
batcher = MicroBatcher(max_batch_size=4, max_queue_delay_s=0.005, max_queue_depth=64)
batcher.submit("chunk of stream A", key="steady", now=0.000)
batcher.submit("chunk of stream B", key="steady", now=0.003)
print("at 4 ms:", batcher.next_batch(now=0.004))
print("next deadline:", batcher.next_deadline(), "s")
batch = batcher.next_batch(now=0.005)
print("at 5 ms:", batch.items, "· reason:", batch.reason)
assert len(batch.items) == 2 and batch.reason == "deadline"

# %% [markdown]
# ## Why batch at all
# A step for 32 streams costs twice a step for one, not 32 times. The points are measured; between them we take a straight line.

# %%
record = Record.load("../studies/h200/graphed_step.json")
measured_ms = {
    r["batch"]: r["graphed_ms_p50"] for r in record.rows if r["context"] == [56, 0] and r["dtype"] == "float32"
}
geometry = StreamGeometry(56, 0)
streams = np.arange(1, 33)
step_s = np.interp(np.arange(33), list(measured_ms), list(measured_ms.values())) / 1e3

fig, ax = plt.subplots(figsize=(6, 2.6))
ax.plot(streams, step_s[1:] * 1e3, color="#0072B2", label="one step for all")
ax.plot(list(measured_ms), list(measured_ms.values()), "o", color="#0072B2", label="measured")
ax.plot(streams, step_s[1] * 1e3 * streams, linestyle="--", color="#E69F00", label="one step for each")
ax.axhline(geometry.chunk_ms, color="#808080", linewidth=1, linestyle=":", label="one chunk of audio")
ax.set(xlabel="streams", ylabel="ms", ylim=(0, 130))
ax.legend(frameon=False, ncols=2)
plt.show()
assert step_s[32] < 32 * step_s[1] / 8

# %% [markdown]
# ## Turn every knob
# 24 live streams, 120 ms in which all of them speak. The loop below is a whole driver: it sleeps (moves the clock) until something
# arrives or falls due, submits what has arrived, and runs whatever the batcher releases.

# %%
schedule = build_schedule(LoadConfig(streams=24, seconds=1.0), geometry, shipped_lengths())
arrivals_s = [t for t in schedule.due_s[~schedule.final].tolist() if 0.6 <= t < 0.72]
base = {"max_batch_size": 32, "max_queue_delay_s": 0.0, "max_queue_depth": 2048}
settings = {
    **{f"size {n}": {"max_batch_size": n} for n in (1, 2, 32)},
    **{f"delay {ms} ms": {"max_queue_delay_s": ms / 1e3} for ms in (0, 10, 30)},
    "delay 30 ms, cohort 4": {"max_queue_delay_s": 0.03, "cohort": 4},
}

runs = {}
for name, knobs in settings.items():
    options = {**base, **knobs}
    cohort = options.pop("cohort", 0)
    batcher, waiting, now, done = MicroBatcher(**options), deque(arrivals_s), 0.0, []
    while waiting or batcher.queued:
        deadline_s = batcher.next_deadline()
        now = max(now, min(waiting[0] if waiting else math.inf, math.inf if deadline_s is None else deadline_s))
        while waiting and waiting[0] <= now:
            batcher.submit("chunk", key="steady", now=waiting.popleft(), cohort=cohort)
        if (batch := batcher.next_batch(now)) is not None:
            now += step_s[len(batch.items)]
            batcher.finish(batch, now)
            done.append((batch, now))
    runs[name] = done
assert all(sum(len(batch.items) for batch, _ in done) == len(arrivals_s) for done in runs.values())
print(len(arrivals_s), "chunks,", len(runs), "settings; every chunk ran exactly once in each")

# %% [markdown]
# ## `max_batch_size`: the most chunks in a step
# Too small, and the work does not fit into the time: each chunk waits longer than the one before. The grey line is waiting, the bar is
# the step; the word behind a batch is the rule that released it.

# %%
fig, panels = plt.subplots(1, 3, figsize=(12, 4.2), sharex=True, sharey=True, layout="constrained")
for axes, name in zip(panels, ("size 1", "size 2", "size 32"), strict=True):
    queue_waterfall(runs[name], axes)
    axes.set_title(f"max_batch_size: {name.split()[1]}", fontsize=10)
plt.show()
ends_s = {name: done[-1][1] for name, done in runs.items()}
assert ends_s["size 1"] > ends_s["size 2"] >= ends_s["size 32"]
print("the last chunk is done later with size 1:", ends_s["size 1"] > ends_s["size 2"])

# %% [markdown]
# ## `max_queue_delay_us`: how long the oldest chunk may wait for company
# 0 means: whatever is queued when the worker is free. A delay gathers larger batches and makes the first of them wait; while the
# worker is busy anyway, waiting costs nothing.

# %%
fig, panels = plt.subplots(1, 3, figsize=(12, 4.2), sharex=True, sharey=True, layout="constrained")
for axes, name in zip(panels, ("delay 0 ms", "delay 10 ms", "delay 30 ms"), strict=True):
    queue_waterfall(runs[name], axes)
    axes.set_title(f"max_queue_delay_us: {int(name.split()[1]) * 1000}", fontsize=10)
plt.show()
reasons = {name: sorted({batch.reason for batch, _ in runs[name]}) for name in ("delay 0 ms", "delay 30 ms")}
print(reasons)
assert reasons["delay 0 ms"] == ["drain"]
assert len(runs["delay 30 ms"]) < len(runs["delay 0 ms"])

# %% [markdown]
# ## A known cohort: leave when complete
# Whoever knows how many chunks come together says so, and the batch leaves with the last of them instead of at its deadline. Network
# streams opt in: `ingress_cohort_delay_us` is the window in which they are let in together.

# %%
fig, panels = plt.subplots(1, 2, figsize=(10, 4.2), sharex=True, sharey=True, layout="constrained")
for axes, name in zip(panels, ("delay 30 ms", "delay 30 ms, cohort 4"), strict=True):
    queue_waterfall(runs[name], axes)
    axes.set_title(name, fontsize=10)
plt.show()
waits_ms = {name: 1e3 * np.mean([w for batch, _ in runs[name] for w in batch.waited_s]) for name in settings}
assert {batch.reason for batch, _ in runs["delay 30 ms, cohort 4"]} >= {"cohort"}
assert waits_ms["delay 30 ms, cohort 4"] < waits_ms["delay 30 ms"]
print("the cohort waits less:", waits_ms["delay 30 ms, cohort 4"] < waits_ms["delay 30 ms"])

# %%
cohorts = IngressCohorts(BatchingConfig(ingress_cohort_delay_us=20_000))
for stream in "abc":
    cohorts.register(stream, now=0.0)
wave = cohorts.arrive("a", now=0.000, audio_s=0.08)
cohorts.arrive("b", now=0.004, audio_s=0.08)
print("two of three are here; the wave waits for", cohorts.target, "· closed:", wave.closed)
cohorts.arrive("c", now=0.009, audio_s=0.08)
print("all are here · closed:", wave.closed, "· reason:", wave.reason, "· size:", wave.size)
assert wave.closed and wave.size == 3

# %% [markdown]
# ## `max_queue_depth`: refuse at once what cannot be kept
# Beyond it the submitter gets a typed error immediately. What was accepted completes.

# %%
batcher = MicroBatcher(max_batch_size=4, max_queue_delay_s=0.005, max_queue_depth=8)
refusals = []
for number in range(11):
    try:
        batcher.submit(number, key="steady", now=0.001)
    except QueueFull as refusal:
        refusals.append(str(refusal))
print("queued:", batcher.queued, "· refused:", len(refusals), "·", refusals[0])
assert batcher.queued == 8 and len(refusals) == 3

# %% [markdown]
# ## Keys: only equal work shares a batch
# A first chunk has fewer mel frames than a steady one, so the two cannot be one tensor. Each key has its own queue: work that is
# complete is not held behind the deadline of another key.

# %%
batcher = MicroBatcher(max_batch_size=2, max_queue_delay_s=0.5, max_queue_depth=64)
for item, key in (("A first", 9), ("B steady", 25), ("C steady", 25)):
    batcher.submit(item, key=key, now=0.0)
batch = batcher.next_batch(now=0.0)
print(batch.items, "· key", batch.key, "· reason", batch.reason, "· still queued:", batcher.queued)
assert batch.items == ("B steady", "C steady") and batcher.queued == 1

# %% [markdown]
# ## `state_arena_slots`: a knob that limits another
# Every open stream holds a row of state, so no batch can be larger than the arena. Ask which key is the limit.

# %%
for slots in (16, 64):
    cap, key = effective_batch_cap(BatchingConfig(enabled=True, max_batch_size=32, state_arena_slots=slots))
    print(f"state_arena_slots {slots}: largest batch {cap}, set by {key}")
assert effective_batch_cap(BatchingConfig(enabled=True, max_batch_size=32))[0] == 16

# %% [markdown]
# ## `offline_bucket_ms`: equal lengths by adding zeros
# Whole recordings share a batch when they are equally long. Rounding lengths up makes fewer lengths, and costs computing on zeros.
# These are the shipped recordings.

# %%
lengths_ms = np.asarray(shipped_lengths()) / 16
buckets_ms = np.asarray([100, 250, 500, 1000, 2000, 4000])
padded = [np.ceil(lengths_ms / bucket) * bucket for bucket in buckets_ms]
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
left.plot(buckets_ms, [len(set(p)) for p in padded], marker="o", color="#0072B2")
left.set(xlabel="offline_bucket_ms", ylabel="different lengths", xscale="log")
left.set_xticks(buckets_ms, buckets_ms, rotation=45)
right.plot(buckets_ms, [100 * (1 - lengths_ms.sum() / p.sum()) for p in padded], marker="s", color="#E69F00")
right.set(xlabel="offline_bucket_ms", ylabel="zeros among the samples, %", xscale="log")
right.set_xticks(buckets_ms, buckets_ms, rotation=45)
for axes in (left, right):
    axes.minorticks_off()
plt.show()
assert len(set(padded[-1])) < len(set(padded[0]))

# %% [markdown]
# ## Try
# - 60 streams instead of 24: which `max_batch_size` keeps up now?
# - `cohort` 12 with a delay of 10 ms: which rule releases the batches?
# - The same knobs on live traffic: tutorial 5, and the live panel (`from workbench.show.panels import live_panel`).
