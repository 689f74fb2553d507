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
# # 9 · The fast path
#
# **What you will see:** how much time a step must take, how far the bit-exact graph is from that, what each change gained, and the proof beside
# each gain: the fast step's frames are those of NeMo.
#
# GPU figures come from records of one H200; the equality is computed here, on this machine. Takes about half a minute.

# %%
# %matplotlib inline
import copy

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from workbench.encoder.resident import ResidentEncoder
from workbench.encoder.steady import StepShape, steady_call
from workbench.measure.floor import StepDimensions, step_work
from workbench.model.shapes import build_model
from workbench.results import Record
from workbench.show.step_figures import step_label

record, story, capacity, spoken = (
    Record.load(f"../studies/h200/{name}.json")
    for name in ("fast_step", "fast_story", "capacity", "transcribed_speech")
)
steps = pd.DataFrame(record.rows)
steps["row"] = [step_label(row) for row in record.rows]
native = steps[~steps.dtype.str.contains("int8")]
print(record.environment["gpu"]["name"], "|", "; ".join(record.notes))

# %% [markdown]
# ## The floor first
# Count before optimising. A step must read every weight once and the state of its streams, and it must do its multiply-adds; divided by what this
# GPU moves and computes at best, the larger of the two is the floor. At one stream it is the weights.

# %%
shape = StepDimensions(
    layers=24, width=1024, feed_forward=4096, kernel=9, window=56, frames=1, weights=586_000_000, bytes_per_value=4
)
for streams in (1, 32, 256):
    work = step_work(shape, streams)
    print(f"{streams:4} streams: {work.bytes / 1e9:5.2f} GB to move, {work.flops / 1e9:7.1f} GFLOP to do")
assert step_work(shape, 256).bytes > 2 * step_work(shape, 1).bytes
floor_ms = step_work(shape, 1).bytes / record.numbers["copy_gb_per_s_tf32"] / 1e6
assert abs(floor_ms / native.floor_ms.iloc[0] - 1) < 0.01
print(f"at the measured copy rate one stream needs {floor_ms:.2f} ms")

# %% [markdown]
# ## Where the bit-exact graph stands, and the fast step
# Same run, same GPU, but for the int8 row, which is of another host. The graph removes the launches; the fast step also removes the work.

# %%
at = np.arange(len(steps))
fig, ax = plt.subplots(figsize=(9, 6.4), layout="constrained")
looks = {
    "eager_ms_p50": ("NeMo, eager", "#E69F00", "////"),
    "graphed_ms_p50": ("bit-exact graph", "#0072B2", ""),
    "fast_ms_p50": ("fast step", "#009E73", "...."),
    "floor_ms": ("floor", "#000000", ""),
}
for number, (column, (label, colour, hatch)) in enumerate(looks.items()):
    ax.barh(at + 0.2 * (number - 1.5), steps[column], 0.2, color=colour, hatch=hatch, edgecolor="white", label=label)
ax.set_yticks(at, steps.row)
ax.invert_yaxis()
ax.set_xscale("log")
ax.set_xlabel("encoder step, p50, ms (logarithmic)")
fig.legend(frameon=False, loc="outside upper center", ncols=4)
plt.show()
assert (native.fast_ms_p50 < native.graphed_ms_p50).all() and (steps.floor_ms < steps.fast_ms_p50).all()

# %%
columns = {
    "eager_ms_p50": "eager, ms",
    "graphed_ms_p50": "bit-exact graph, ms",
    "fast_ms_p50": "fast, ms",
    "floor_ms": "floor, ms",
    "over_floor": "fast / floor",
    "kernels_fast": "kernels",
}
steps.set_index("row")[list(columns)].rename(columns=columns).round(2).astype(object).fillna("–")

# %% [markdown]
# **Int8 weights** (last row, `asr.weights: int8`): 0.879 ms where bf16 took 0.978 in the same run, predicted 0.89. The floor nearly halves and the step does
# not: 286 kernels in 0.88 ms are 3 µs each, of which reading weights is now the smaller part. The result is no longer the model's own, see the errors below.

# %%
lone = steps[(steps.batch == 1) & (steps.context.map(lambda context: context == [56, 0]))].set_index("dtype")
assert (
    lone.loc["bfloat16+int8", "fast_ms_p50"] < lone.loc["bfloat16", "fast_ms_p50"] < lone.loc["float32", "fast_ms_p50"]
)
print((lone.fast_ms_p50 / lone.floor_ms).round(1).rename("fast / floor, one stream").to_string())

# %% [markdown]
# ## What each change gained
# 1. Keys and values in a ring per stream, one kernel each for norms, attention and convolution.
# 2. The subsampling in five kernels instead of thirty; constants of attention computed once.
# 3. Kernels launched while the one before them runs: each fetches its weights first and only then waits for its input. And a dead end removed: for two to
#    thirty-two rows our own products on the matrix unit were slower than the library's.

# %%
tried = pd.DataFrame(story.rows)
tried["row"] = [step_label(row) for row in story.rows]
tried.pivot_table(index="row", columns="version", values="fast_ms_p50", aggfunc="last").rename(
    columns=lambda version: f"version {version}, ms"
).astype(object).fillna("–")

# %% [markdown]
# ## The proof
# Relative error over a whole stream, from its first chunk through full caches, against NeMo in fp32 with TF32 off. In exact fp32 the fast step differs by
# rounding; with int8 weights that column is what rounding the weights costs. At the row's own precision it is held against NeMo's own error at that precision.

# %%
errors = {"rel_error_fp32": "fast, exact fp32", "rel_error": "fast, as timed", "rel_error_nemo": "NeMo, as timed"}
assert (native.rel_error_fp32 < 1e-5).all()
assert lone.loc["bfloat16+int8", "rel_error"] < lone.loc["bfloat16+int8", "rel_error_nemo"]
steps.set_index("row")[list(errors)].rename(columns=errors).map("{:.1e}".format)

# %% [markdown]
# And the words: 60 shipped clips by the trained demo model on the GPU, TF32 off, each text held against NeMo's eager step in fp32, at 80 ms and at 1.12 s.

# %%
words = pd.DataFrame(spoken.rows)
words["look-ahead"] = [f"{80 * (right + 1)} ms" for _, right in words.context]
assert (words[words.run.isin(["graphed", "resident"])].texts_unlike_eager_fp32 == 0).all()
assert words.texts_unlike_eager_fp32.max() == words[words.run == "eager_bf16"].texts_unlike_eager_fp32.max()
words["word error rate"] = words.wer.map("{:.1%}".format)
words["texts unlike eager fp32, of 60"] = words.texts_unlike_eager_fp32
words.pivot_table(
    index="run",
    columns="look-ahead",
    values=["texts unlike eager fp32, of 60", "word error rate"],
    aggfunc="first",
    sort=False,
)

# %% [markdown]
# ## The same on this machine
# A small model with random weights, three streams in rows 4, 0 and 2 of five, the others full of NaN. First chunk, then steady ones; NeMo's own step beside it.

# %%
encoder = build_model("tiny", layers=2).encoder.eval()
encoder.set_default_att_context_size([56, 1])
resident = ResidentEncoder(encoder, rows=5)
resident.rings.kv.fill_(float("nan"))
resident.rings.conv.fill_(float("nan"))
rows, worst = torch.tensor([4, 0, 2]), 0.0
state = encoder.get_initial_cache_state(batch_size=3)
drop = encoder.streaming_cfg.drop_extra_pre_encoded
with torch.inference_mode():
    for index in range(40):
        frames = encoder.streaming_cfg.chunk_size[0] if index == 0 else None
        mel, lengths = steady_call(encoder, StepShape(3, mel_frames=frames)).inputs[:2]
        given = 0 if index == 0 else drop
        nemo = encoder.cache_aware_stream_step(mel, lengths, *state, False, given)
        encoder.streaming_cfg.drop_extra_pre_encoded = drop
        state = nemo[2:]
        fast = resident.step(mel, lengths, rows, given)[0].transpose(1, 2)
        worst = max(worst, float((fast - nemo[0]).norm() / nemo[0].norm()))
print("largest relative difference of 40 steps below 1e-5:", worst < 1e-5)
assert worst < 1e-5

# %% [markdown]
# A stream ends, another takes its row: setting the row's frame counter to zero is all. What the ring still holds is never read.

# %%
resident.reset(torch.tensor([0]))
again = ResidentEncoder(copy.deepcopy(encoder), rows=1)
with torch.inference_mode():
    mel, lengths = steady_call(encoder, StepShape(1, mel_frames=encoder.streaming_cfg.chunk_size[0])).inputs[:2]
    reused = resident.step(mel, lengths, torch.tensor([0]), 0)[0]
    fresh = again.step(mel, lengths, torch.tensor([0]), 0)[0]
print("a reused row equals a fresh one, bit for bit:", torch.equal(reused, fresh))
assert torch.equal(reused, fresh)

# %% [markdown]
# ## What takes the time now
# The costliest kernels of the step of one stream and of the largest batch. At one stream they stream weights; at 256 attention and products share it.

# %%
fig, axes = plt.subplots(1, 2, figsize=(12, 3.4), layout="constrained")
for ax, pick in zip(axes, (steps.batch == 1, steps.batch == 256), strict=True):
    chosen = (
        steps[pick & (steps.dtype == "bfloat16")].iloc[0]
        if (steps[pick].dtype == "bfloat16").any()
        else steps[pick].iloc[0]
    )
    kernels = chosen.top_kernels[:6]
    ax.barh([k["name"][:34] for k in kernels], [k["ms_per_step"] for k in kernels], color="#009E73")
    ax.invert_yaxis()
    ax.set_xlabel("ms a step, under the profiler")
    ax.set_title(chosen.row)
plt.show()

# %% [markdown]
# ## Live streams
# The whole engine under open-loop load: front end, encoder, decoder, labels back on the host, a step as soon as any stream is ready. Staggered starts, 120 s in a
# fresh process, labels at the rate of speech, bf16. Both levels kept the rule (at most 0.1 % of chunks late by one chunk, p95 of the final result
# within 1 s) with no chunk late, so these are lower bounds. The recogniser with a thread per stream, on the same step in fp32, is in tutorial 8.

# %%
live = pd.DataFrame([row for row in capacity.rows if row["search"].startswith("resident")])
live["passed"] = live.passed == "yes"
assert live.passed.all() and (live.late_share == 0).all()
columns = {
    "chunk_ms": "chunk, ms",
    "streams": "live streams",
    "latency_p50_ms": "latency p50, ms",
    "latency_p95_ms": "p95, ms",
    "final_p95_ms": "final p95, ms",
    "late_share": "late share",
    "batch_size_mean_items": "streams in a step",
    "step_p50_ms": "step p50, ms",
}
live[list(columns)].rename(columns=columns).round(1)

# %% [markdown]
# ## Try
# - `workbench transcribe --set asr.encoder=resident YOUR.wav`: the same words; where the model has no resident step the reason is told.
# - On a GPU: `python studies/h200/run_fast.py OUT` measures this table, `workbench capacity --engine resident` counts live streams.
# - [docs/fast_path.md](../docs/fast_path.md) has the design, [studies/LOG.md](../studies/LOG.md) what did not work.
