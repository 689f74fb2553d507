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
# # 2 · Where the time of a step goes
#
# **What you will see:** one streaming step taken apart. On a GPU a step is more than a thousand tiny kernels, and the GPU spends most of
# the step waiting for the next launch. On this machine the same tools show the operators and, between them, Python.
#
# Takes about half a minute on two CPU cores. With a CUDA device the same cells profile the GPU.

# %%
# %matplotlib inline
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np

from workbench.config import load_config
from workbench.measure.profile import annotate, profile_steps
from workbench.measure.steps import PreparedSteps, speech_clips
from workbench.measure.trace import analyse, load_trace
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer
from workbench.show.timeline import idle_bar_figure, timeline_figure

# %% [markdown]
# ## On an H200: a thousand launches, and a GPU that waits
# The record holds the encoder step of a 0.6 B model as NeMo runs it (eager), measured on one H200: how often the host launches a
# kernel in a step, and which share of the step the GPU has nothing to do.

# %%
record = Record.load("../studies/h200/graphed_step.json")
rows = [row for row in record.rows if "launches_eager" in row]
names = [f"{(row['context'][1] + 1) * 80} ms chunk\nbatch {row['batch']}" for row in rows]
idle = np.asarray([row["gpu_idle_eager"] for row in rows])
eager_ms = np.asarray([row["eager_ms_p50"] for row in rows])

fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
left.bar(names, [row["launches_eager"] for row in rows], color="#0072B2")
left.set_ylabel("kernel launches in a step")
right.bar(names, eager_ms * (1 - idle), color="#222222", label="GPU busy")
right.bar(
    names,
    eager_ms * idle,
    bottom=eager_ms * (1 - idle),
    color="#E69F00",
    hatch="////",
    edgecolor="white",
    label="GPU idle",
)
right.set_ylabel("one step, ms")
right.margins(y=0.3)
right.legend(frameon=False, ncols=2, loc="upper left")
for axes in (left, right):
    axes.tick_params(axis="x", labelsize=8)
plt.show()
assert all(row["launches_eager"] > 1000 for row in rows) and idle.min() > 0.5
print("hardware:", record.environment["gpu"]["name"], "· model:", record.config["model"])
print("more than 1000 launches and more than half of the time idle in every row:", bool(idle.min() > 0.5))

# %% [markdown]
# The step hardly gets longer when 32 streams share it: the time goes into launching, and a launch costs the same for one stream as for 32.

# %%
per_launch_us = eager_ms * 1e3 / [row["launches_eager"] for row in rows]
fig, ax = plt.subplots(figsize=(6, 2.4))
ax.bar(names, per_launch_us, color="#009E73")
ax.set_ylabel("µs of step per launch")
ax.tick_params(axis="x", labelsize=7)
plt.show()
assert per_launch_us.max() < 1.6 * per_launch_us.min()

# %% [markdown]
# ## One real H200 step, read from its trace
# The profiler's trace of a whole step (front end, encoder, decoder; one stream, 80 ms, eager) is kept in the repository. The analysis below needs no GPU: it
# joins every kernel to the call that launched it and asks of every gap what the GPU was waiting for. In the last row it nearly always waited for the host.
# That host was slow: without a profiler the step took 56 ms (the encoder alone takes 23 to 36 ms in other records). A hair of outline keeps kernels of 2 µs visible, so stream 7 looks
# busier than it is.

# %%
gpu_trace = load_trace("../studies/h200/traces/trace_eager.json.gz")
gpu_step = analyse(gpu_trace)
timeline_figure(gpu_trace, step=1)

# %%
counted, table = gpu_step.numbers(), Record.load("../studies/h200/profile_steps.json")
kept = table.rows[0]
for name in ("launches_per_step", "kernels_per_step", "gpu_busy_ms_per_step", "gpu_idle_share", "idle_host_late_share"):
    print(f"{name:24}{counted[name]:>10.3f}")
gpu_stages = [row for row in gpu_step.rows() if row["kind"] == "stage"]
for row in gpu_stages:
    print(f"{row['name']:24}{row['launches_per_step']:>6.0f} launches, {row['ms_per_step']:5.2f} ms of GPU work")
assert all(abs(counted[name] - kept[name]) < 1e-9 for name in counted)
assert counted["kernels_per_step"] == counted["launches_per_step"] == 1335 and counted["idle_host_late_share"] > 0.9
print("the trace gives the numbers of its record again:", True)

# %% [markdown]
# ## Here: one steady step, prepared
# A stream is brought to where all caches are full; then the same step can be run again and again.

# %%
recognizer = Recognizer.open(load_config({"asr": {"att_context_size": [56, 1]}}))
device, encoder = recognizer.loaded.device, recognizer.loaded.model.encoder
steps = PreparedSteps(recognizer, speech_clips(16000), batch=1)
steps.fill()
items = steps.items("steady")
print("chunk:", recognizer.loaded.geometry.chunk_ms, "ms · layers:", len(encoder.layers))

# %% [markdown]
# ## Time first, then profile
# `profile_steps` times the step without a profiler, then records a few steps under one. Named modules become stages.

# %%
# NBVAL_IGNORE_OUTPUT
folder = TemporaryDirectory()
trace_path = Path(folder.name) / "step.json.gz"
stages = {"pre-encoder": encoder.pre_encode, **{f"layer {i}": layer for i, layer in enumerate(encoder.layers)}}
decoder, joint = recognizer.loaded.model.decoder.prediction["dec_rnn"], recognizer.loaded.model.joint.joint_net
stages |= {"predictor": decoder, "joint": joint}
with annotate(stages):
    profile = profile_steps(lambda: recognizer.stage.run(items), device=device, trace_path=trace_path)
numbers = profile.numbers
print(f"{device}: step p50 {numbers['step_p50_ms']:.1f} ms without a profiler")
for name in ("operators_per_step", "launches_per_step", "kernels_per_step"):
    if name in numbers:
        print(f"{name}: {numbers[name]:.0f}")

# %% [markdown]
# ## One step as a picture
# Every bar is an operator (on a GPU: a kernel), and the row below says why nothing ran in between.

# %%
# NBVAL_IGNORE_OUTPUT
trace = load_trace(trace_path)
timeline_figure(trace, step=1)

# %%
# NBVAL_IGNORE_OUTPUT
idle_bar_figure({device: profile})

# %% [markdown]
# ## The costliest operators, and the stages
# The front end, the encoder and the decoder are always stages; the pre-encoder and the layers are parts of the encoder, predictor and joint of the
# decoder.

# %%
# NBVAL_IGNORE_OUTPUT
top = [row for row in profile.rows if row["kind"] in ("operator", "kernel")][:10][::-1]
inside = [row for row in profile.rows if row["kind"] == "stage"]
names = ["workbench.frontend", "workbench.encoder", *stages, "workbench.decoder"]
order = [row for name in names for row in inside if row["name"] == name][::-1]
fig, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
left.barh(
    [f"{row['name'][:28]} ×{row['calls_per_step']:.0f}" for row in top],
    [row["ms_per_step"] for row in top],
    color="#0072B2",
)
left.set_xlabel("own time in a profiled step, ms")
right.barh(
    [row["name"] for row in order],
    [row["host_ms_per_step"] for row in order],
    color="#E69F00",
    hatch="//",
    edgecolor="white",
)
right.set_xlabel("host's time inside a stage, ms")
plt.show()

# %% [markdown]
# ## Facts
# Busy and idle make up the whole step, and the numbers come out of the kept trace again, on any machine, without a GPU.

# %%
owner = "gpu" if "gpu_busy_share" in numbers else "thread"
parts = [
    numbers[f"{owner}_busy_share"],
    *(numbers.get(f"idle_{cause}_share", 0.0) for cause in ("host_late", "kernel_gap", "end")),
]
assert abs(sum(parts) - 1) < 1e-6
again = analyse(trace).numbers()
assert all(abs(again[name] - numbers[name]) < 1e-9 for name in again)
assert set(stages) <= {row["name"] for row in inside}
print("busy + idle = the whole step:", abs(sum(parts) - 1) < 1e-6)
print("the trace alone gives the same numbers:", len(again) > 0)

# %%
steps.close()
recognizer.close()
folder.cleanup()

# %% [markdown]
# ## Try
# - A larger batch: `PreparedSteps(…, batch=8)`. Which operators grow, and which stay?
# - The trace in Perfetto: `workbench profile --trace step.json.gz`, then open the file at ui.perfetto.dev.
# - Look around in it here: `from workbench.show.panels import timeline_panel`.
# - What happens when the launches are replaced by one, in the same picture: tutorial 3.
