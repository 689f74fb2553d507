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
# # 5 · Paced latency and capacity
#
# **What you will see:** live streams that speak in real time, latency counted from the moment at which a chunk's last sample was spoken, and
# why the usual benchmark, which waits for each answer before it asks again, cannot see a queue. Then the largest number of streams that
# keeps a stated rule.
#
# Takes about 40 seconds on two CPU cores.

# %%
# %matplotlib inline
import math

import matplotlib.pyplot as plt
import numpy as np

from workbench.config import Config, LoadConfig, load_config, replace
from workbench.errors import RecordError
from workbench.measure.loadgen import build_schedule, summarise
from workbench.measure.paced import run_paced
from workbench.measure.steps import speech_clips
from workbench.measure.twin import CostTable, twin_runner
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer
from workbench.show.plots import batch_sizes, latency_curves
from workbench.tuning.run import geometry_of, shipped_lengths

# %% [markdown]
# ## The load is written down beforehand
# Each stream speaks the shipped recordings back to back. A chunk is due when the last sample that it needs has been spoken, whether or not the
# recogniser keeps up. A circle is the end of an utterance.

# %%
config = load_config(
    {
        "asr": {"att_context_size": [56, 6], "batching": {"enabled": True, "state_arena_slots": 16}},
        "load": {"streams": 6, "seconds": 8.0},
    }
)
recognizer = Recognizer.open(config)
clips = speech_clips(16000)
schedule = build_schedule(config.load, recognizer.loaded.geometry, [clip.size for clip in clips])
fig, ax = plt.subplots(figsize=(9, 2.4))
inside = ~schedule.final
ax.plot(schedule.due_s[inside], schedule.stream[inside], "|", markersize=12, color="#0072B2", label="chunk due")
ax.plot(
    schedule.due_s[~inside], schedule.stream[~inside], "o", mfc="none", color="#D55E00", label="end of an utterance"
)
ax.set(xlabel="time, s", ylabel="stream")
ax.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
plt.show()
assert (np.diff(schedule.due_s) >= 0).all() and schedule.final.sum() == len(schedule.utterances)
print(len(schedule), "rows,", len(schedule.utterances), "utterances; a chunk is", round(schedule.chunk_s * 1e3), "ms")

# %% [markdown]
# ## Run it, in real time

# %%
# NBVAL_IGNORE_OUTPUT
recognizer.warm_up()
live = None
for _ in range(3):
    try:
        live = run_paced(recognizer, clips, config.load)
        break
    except RecordError as refusal:
        print("refused:", refusal)
recognizer.close()
live = live or Record.load("records/paced_560ms_cpu.json")  # of an earlier run, where the machine is too busy for one
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
latency_curves({"6 streams": live}, left)
batch_sizes({"6 streams": live}, right)
plt.show()
for name in ("latency_p50_ms", "latency_p95_ms", "final_p95_ms", "generator_late_p99_ms", "transcript_mismatches"):
    print(f"{name}: {live.numbers[name]:.1f}")

# %%
numbers = live.numbers
assert numbers["latency_n"] == int(inside.sum()) and numbers["final_n"] == len(schedule.utterances)
assert numbers["generator_late_p99_ms"] <= numbers["generator_bound_ms"]
assert live.counters["items"] == sum(int(size) * count for size, count in live.counters["batch_sizes"].items())
print("every chunk and every ending was answered:", numbers["latency_n"] + numbers["final_n"] == len(schedule))

# %% [markdown]
# ## A generator that was late is refused
# If the load itself lags, its latencies would be the generator's own.

# %%
try:
    summarise(schedule, schedule.due_s + 0.2, schedule.due_s + 0.3)
except RecordError as refusal:
    print(refusal)

# %% [markdown]
# ## Why the closed loop lies
# A closed-loop benchmark sends the next chunk when the last answer is there. It sees how long a step takes, and when the machine is
# overloaded it simply asks more slowly. Speakers do not. Below, the digital twin with the measured costs of the demo model at 160 ms: the solid
# line counts from the due time, the dashed one is all that a closed loop would see.

# %%
costs = Record.load("records/costs_demo_cpu.json")
base = replace(
    Config(load=LoadConfig(streams=1, seconds=20.0)),
    **{"asr.batching.enabled": True, "asr.batching.state_arena_slots": 64, "asr.batching.max_batch_size": 16},
)
simulate = twin_runner(CostTable.from_record(costs), geometry_of(costs), shipped_lengths())
counts = range(1, 25)
runs = {count: simulate(replace(base, **{"load.streams": count})) for count in counts}
due_ms = np.asarray([run.numbers["latency_p95_ms"] for run in runs.values()])
closed_ms = np.asarray([run.counters["execution_p95_ms"] for run in runs.values()])

fig, ax = plt.subplots(figsize=(7, 3))
ax.plot(counts, due_ms, marker="o", color="#0072B2", label="open loop: from the due time")
ax.plot(counts, closed_ms, marker="s", linestyle="--", color="#E69F00", label="closed loop: the step alone")
ax.axhline(160, color="#808080", linewidth=1, linestyle=":")
ax.set(xlabel="live streams", ylabel="p95, ms", yscale="log")
ax.legend(frameon=False)
plt.show()
assert (due_ms >= closed_ms).all() and due_ms[-1] > 4 * closed_ms[-1]
print("at 24 streams the closed loop sees less than a quarter of the wait:", bool(due_ms[-1] > 4 * closed_ms[-1]))

# %% [markdown]
# ## Capacity: the most streams that keep a rule
# The rule here: at most 0.1 % of the chunks late by more than a chunk, and p95 of the final result within a second.

# %%
late = np.asarray([100 * run.numbers["late_share"] for run in runs.values()])
final_ms = np.asarray([run.numbers["final_p95_ms"] for run in runs.values()])
keeps = (late <= 0.1) & (final_ms <= 1000)
capacity = int(np.argmin(keeps))  # how many from the first one on keep the rule without a gap
fig, ax = plt.subplots(figsize=(7, 2.6))
ax.plot(counts, late, marker="o", color="#0072B2")
ax.axvspan(0.5, capacity + 0.5, color="#009E73", alpha=0.2, label="keeps the rule")
ax.set(xlabel="live streams", ylabel="chunks late, %", xlim=(0.5, 24.5))
ax.legend(frameon=False, loc="upper left")
plt.show()
assert 1 <= capacity < 24 and keeps[:capacity].all()
print("capacity on the twin:", capacity, "streams")

# %% [markdown]
# ## How sure is a percentile?
# "p99 is below the limit" with 99 % confidence needs this many samples without a single miss. A short run cannot say it.

# %%
needed = math.ceil(math.log(0.01) / math.log(0.99))
assert needed == 459
print("samples needed:", needed, "· this run has enough:", live.numbers["latency_n"] >= needed)

# %% [markdown]
# ## Aligned starts flatter
# Streams in step arrive together and fill a batch at once; real callers do not speak in step.

# %%
sizes = {
    starts: simulate(replace(base, **{"load.streams": 6, "load.starts": starts})).counters["batch_size_mean_items"]
    for starts in ("staggered", "aligned")
}
fig, ax = plt.subplots(figsize=(5, 1.6))
ax.barh(list(sizes), list(sizes.values()), color=["#0072B2", "#E69F00"])
ax.set_xlabel("mean chunks in a batch, 6 streams")
plt.show()
assert sizes["aligned"] > sizes["staggered"]
print("aligned streams make larger batches:", sizes["aligned"] > sizes["staggered"])

# %% [markdown]
# ## Try
# - Your own load: `workbench bench paced -s load.streams=8 -s load.seconds=60 -s asr.batching.enabled=true`.
# - `asr.batching.enabled: false` in the first cell: what does the batch cost, what does it bring?
# - Turn the knobs while the load runs: `from workbench.show.panels import live_panel`.
