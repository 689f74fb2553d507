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
# # 3 · The graphed step
#
# **What you will see:** the thousand launches of a step replaced by one. A steady step has the same shapes every time, so it can be
# captured once in a CUDA graph and replayed, with the same bits as result. Times come from a record of one H200; when a step may be
# replayed, and when not, is decided by code that runs here too.
#
# Takes about half a minute on two CPU cores. With a CUDA device the last measurement is made live.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch

from workbench.config import load_config
from workbench.encoder.graphed import StepShape, attached_step, set_streaming_cuda_graphs, steady_call
from workbench.encoder.guard import PointerGuard
from workbench.encoder.key import step_key
from workbench.measure.graphed_table import run_graphed_table, table_cells
from workbench.measure.trace import analyse, load_trace
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer
from workbench.show.record_figure import record_figure
from workbench.show.timeline import timeline_figure

# %% [markdown]
# ## One H200: the table
# The encoder step alone, streams in steady state. Every row was first found equal to eager by `torch.equal`. "Bare replay" launches the
# captured work and nothing else: the difference is what copying, keys and guards cost. Streams are batch × chunk / p50, an upper bound
# without decoding, audio and scheduling.

# %%
record = Record.load("../studies/h200/graphed_step.json")
table = pd.DataFrame(record.rows)
table["row"] = [f"{(row['context'][1] + 1) * 80} ms, batch {row['batch']}, {row['dtype']}" for row in record.rows]
columns = {
    "eager_ms_p50": "eager, ms",
    "graphed_ms_p50": "graphed, ms",
    "bare_replay_ms_p50": "bare replay, ms",
    "speedup": "speed-up, ×",
    "streams_eager": "streams, eager",
    "streams_graphed": "streams, graphed",
}
table.set_index("row")[list(columns)].rename(columns=columns).round(2)

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(12, 3.6), layout="constrained", width_ratios=(3, 2))
at = np.arange(len(table))
left.barh(at - 0.2, table.eager_ms_p50, 0.38, color="#E69F00", hatch="////", edgecolor="white", label="eager")
left.barh(at + 0.2, table.graphed_ms_p50, 0.38, color="#0072B2", label="graphed")
left.set_yticks(at, table.row)
left.invert_yaxis()
left.set_xlabel("one encoder step, p50, ms")
left.margins(x=0.3)
left.legend(frameon=False)
seen = table.dropna(subset=["launches_eager"])
right.barh(
    np.arange(len(seen)) - 0.2, 100 * seen.gpu_idle_eager, 0.38, color="#E69F00", hatch="////", edgecolor="white"
)
right.barh(np.arange(len(seen)) + 0.2, 100 * seen.gpu_idle_graphed, 0.38, color="#0072B2")
right.set_yticks(np.arange(len(seen)), seen.row)
right.invert_yaxis()
right.set_xlabel("GPU idle, % of the step")
plt.show()
assert (table.speedup > 1.9).all() and (seen.launches_graphed == 1).all()
assert (seen.kernels_graphed == seen.kernels_eager).all() and (seen.gpu_idle_graphed < seen.gpu_idle_eager).all()
print(
    "one launch instead of more than",
    100 * int(seen.launches_eager.min() // 100),
    "with the same kernels, in every row",
)

# %% [markdown]
# ## A graphed step in its trace
# The whole step of tutorial 2 again (front end, encoder, decoder), with the encoder as one graph launch. While the graph runs, the GPU waits only between
# kernels; what the host still launches one by one is the front end before it and the decoder after it.

# %%
traces = {name: load_trace(f"../studies/h200/traces/trace_{name}.json.gz") for name in ("eager", "graphed")}
found = {name: analyse(trace).numbers() for name, trace in traces.items()}
timeline_figure(traces["graphed"], step=1)

# %%
names = ("launches_per_step", "graph_launches_per_step", "kernels_per_step", "gpu_busy_ms_per_step", "gpu_idle_share")
print(pd.DataFrame(found).loc[list(names)].round(3).to_string())
assert found["graphed"]["launches_per_step"] == 104 and found["graphed"]["graph_launches_per_step"] == 1
assert found["graphed"]["kernels_per_step"] == found["eager"]["kernels_per_step"] == 1335

# %% [markdown]
# Unprofiled times of whole steps, on the same slow host. With a longer look-ahead the decoder launches more: it works frame by frame.

# %%
whole = Record.load("../studies/h200/profile_steps.json")
pairs = list(zip(whole.rows[::2], whole.rows[1::2], strict=True))
assert all(graphed["step_p50_ms"] < eager["step_p50_ms"] for eager, graphed in pairs)
assert all(graphed["launches_per_step"] < eager["launches_per_step"] / 2 for eager, graphed in pairs)
record_figure(whole)

# %% [markdown]
# ## What it costs: memory
# A graph keeps its temporaries. Peaks include weights, caches and the capture itself.

# %%
overhead_mb = (table.bytes_graphed_peak - table.bytes_eager_peak) / 1e6
fig, ax = plt.subplots(figsize=(8, 2.8))
ax.barh(table.row, overhead_mb, color="#009E73")
ax.invert_yaxis()
ax.set_xlabel("more peak memory than eager, MB")
plt.show()
assert (overhead_mb < 0.15 * table.bytes_eager_peak / 1e6).all()

# %% [markdown]
# ## The key: what must be equal to replay
# Everything that is baked into a captured step: shapes, dtypes, devices, context, precision switches. How full a cache is, is data: one graph
# serves the filling and the steady state.

# %%
recognizer = Recognizer.open(load_config({"asr": {"att_context_size": [56, 1]}}))
encoder = recognizer.loaded.model.encoder
drop = encoder.streaming_cfg.drop_extra_pre_encoded
inputs = steady_call(encoder, StepShape(batch=2)).inputs
half_full = inputs._replace(cache_channel_len=inputs.cache_channel_len // 2)
three = steady_call(encoder, StepShape(batch=3)).inputs
keys = {
    name: step_key(encoder, tensors, drop)
    for name, tensors in (("full", inputs), ("half", half_full), ("three", three))
}
print("another fill of the cache, same graph:", keys["half"] == keys["full"])
print("another batch size, same graph:       ", keys["three"] == keys["full"])
assert keys["half"] == keys["full"] != keys["three"]

# %% [markdown]
# ## The guard: what a graph holds by address
# A graph reads its weights where they were when it was captured. Loading values in place is seen by the next replay; replacing a tensor
# would leave the graph reading freed memory, so the guard notices and the graphs are dropped.

# %%
guard, weight = PointerGuard(encoder), encoder.layers[0].norm_out.weight
with torch.no_grad():
    weight.mul_(1.0)
print("changed in place, moved:", guard.moved())
kept, weight.data = weight.data, weight.data.clone()
print("replaced, moved:        ", guard.moved())
assert guard.moved()
weight.data = kept
assert not guard.moved()

# %% [markdown]
# ## Counters: nothing falls back silently
# The step is switched on and eight steps run. (A recogniser also graphs the first chunk of an utterance: `GraphOptions.first_chunk`.) On a CUDA device the first one of a shape is a warm-up, the second is captured, and the others
# are replayed; here every one of them says that it is not on CUDA.

# %%
step = set_streaming_cuda_graphs(recognizer.loaded.model, True, warmup_steps=1)
with torch.inference_mode():
    for _ in range(8):
        outputs = encoder.cache_aware_stream_step(*inputs, False)
report = step.report()
eager_steps = sum(report["eager"].values())
assert eager_steps + report["replayed"] == 8
on_cuda = recognizer.loaded.device != "cpu"
assert report["eager"] == ({"warmup": 1} if on_cuda else {"not_cuda": 8})
print("every step is counted:", eager_steps + report["replayed"], "of 8")

# %% [markdown]
# ## Off again: the encoder is exactly as before

# %%
set_streaming_cuda_graphs(recognizer.loaded.model, False)
assert attached_step(encoder) is None and "cache_aware_stream_step" not in vars(encoder)
print("attached:", attached_step(encoder))
recognizer.close()

# %% [markdown]
# ## Live, where there is a GPU
# The same table for two shapes of the small model; without a GPU the record above stands.

# %%
# NBVAL_IGNORE_OUTPUT
if torch.cuda.is_available():
    live = run_graphed_table("tiny", table_cells([(56, 0)], [1, 8]))
    for row in live.rows:
        print(
            row["batch"],
            f"eager {row['eager_ms_p50']:.2f} ms, graphed {row['graphed_ms_p50']:.2f} ms, {row['speedup']:.1f}×",
        )
else:
    print("no CUDA device here; the record is of", record.environment["gpu"]["name"])

# %% [markdown]
# ## Try
# - Your own model on a GPU: `workbench profile graphed-table --model fastconformer-114m`.
# - In transcription: `workbench transcribe my.wav --cuda-graphs --compare-vs-offline`.
# - Every option, guard and reason in words: `docs/graphed_step.md`.
