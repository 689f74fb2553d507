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
# # 6 · Tuning with Optuna
#
# **What you will see:** a study from its YAML to its best configuration. Every trial is a run of live streams on the digital twin, with
# step costs that were measured; the charts show what was tried, which key matters, and what a low latency costs.
#
# Takes some seconds; no model is loaded.

# %%
# %matplotlib inline
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import optuna
import yaml

from workbench.config import Config, load_config
from workbench.measure.twin import CostTable, twin_runner
from workbench.results import Record
from workbench.show.plots import cost_curves
from workbench.show.study_plots import history, parameter_slices, pareto
from workbench.tuning.result import best_yaml
from workbench.tuning.run import geometry_of, shipped_lengths
from workbench.tuning.spec import parse_study
from workbench.tuning.storage import load_optuna_study
from workbench.tuning.study import tune

# %% [markdown]
# ## What is measured
# Milliseconds of a step by kind and batch size: the shipped demo model on two CPU cores, which did other work as well. Everything below is
# computed from this table.

# %%
costs = Record.load("records/costs_demo_cpu.json")
table = CostTable.from_record(costs)
print("measured by:", costs.command)
print("note:", *costs.notes)
cost_curves(costs)

# %% [markdown]
# ## What is searched
# A study is one YAML file. Any key of the configuration can be varied; any number of a run can be an objective or a limit. Here two
# objectives pull in opposite directions: latency, and how busy the worker is.

# %%
spec = parse_study(
    yaml.safe_load("""
name: tutorial
base:
  asr: {att_context_size: [56, 1], batching: {enabled: true, state_arena_slots: 32}}
  load: {streams: 4, seconds: 20}
space:
  asr.batching.max_batch_size: {int: [1, 1024], log: true}
  asr.batching.max_queue_delay_us: {int: [0, 60000], step: 2500}
objectives:
  - {number: latency_p95_ms, direction: minimise}
  - {number: busy_share, direction: minimise}
constraints:
  - {number: late_share, at_most: 0.01}
budget: {trials: 40, seed: 0}
""")
)
print("varied:", ", ".join(spec.space))
print("limits:", ", ".join(constraint.describe() for constraint in spec.constraints))

# %% [markdown]
# ## Run it
# The default configuration is always the first trial, so that a gain has something to be stated against. Every trial sees equal traffic.

# %%
folder = TemporaryDirectory()
evaluate = twin_runner(table, geometry_of(costs), shipped_lengths())
result = tune(Config(), spec, evaluate, folder=folder.name, progress=False, measured_with=table.digest())
study = result.record()
assert study.rows[0]["is_default"] and len(study.rows) == spec.budget.trials
print("trials:", len(study.rows), "· the first is the default:", study.rows[0]["is_default"])

# %% [markdown]
# ## What was found
# Trials far above the others are drawn at the upper edge; a cross broke a limit.

# %%
# NBVAL_IGNORE_OUTPUT
print(result.headline)
history(study)

# %%
parameter_slices(study)

# %% [markdown]
# ## The front: what low latency costs
# Waiting for company makes batches larger and the worker's day shorter. The joined trials are those that no other beats in both objectives.

# %%
fig, ax = plt.subplots(figsize=(6, 3.4))
pareto(study, ax)
ax.set_xlim(0, 3 * study.numbers["default_latency_p95_ms"])
plt.show()

# %%
assert len(result.pareto) >= 2
latency, busy = zip(*sorted(trial.values for trial in result.pareto), strict=True)
assert list(busy) == sorted(busy, reverse=True)
print("along the front, lower latency always means a busier worker:", list(busy) == sorted(busy, reverse=True))

# %% [markdown]
# ## Which key matters?
# The share of an objective's variation over all trials that a key explains (fANOVA, Hutter, Hoos and Leyton-Brown, ICML 2014, as Optuna has it).

# %%
trials = load_optuna_study(spec, folder.name)
evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
fig, panels = plt.subplots(1, 2, figsize=(10, 2.2), sharex=True, layout="constrained")
for axes, number in zip(panels, range(2), strict=True):
    shares = optuna.importance.get_param_importances(
        trials, evaluator=evaluator, target=lambda trial, number=number: trial.values[number]
    )
    axes.barh(
        [key.rpartition(".")[2] for key in sorted(shares)], [shares[key] for key in sorted(shares)], color="#0072B2"
    )
    axes.set(xlabel="importance, share of 1", title=spec.objectives[number].number)
plt.show()
assert abs(sum(shares.values()) - 1) < 1e-6

# %% [markdown]
# ## Interrupted? Run it again
# Every finished trial is in the database. The same call goes on where it stopped; with the budget spent there is nothing left to do.

# %%
again = tune(Config(), spec, evaluate, folder=folder.name, progress=False, measured_with=table.digest())
assert [trial.values for trial in again.trials] == [trial.values for trial in result.trials]
points = {tuple(trial.params.values()) for trial in result.trials}
measured = [trial for trial in result.trials if trial.duplicate_of is None]
assert len(measured) == len(points)
print("nothing was run again:", len(again.trials) == len(result.trials))
print("no point was measured twice:", len(measured) == len(points))

# %% [markdown]
# ## The best configuration
# It loads like any other configuration file.

# %%
# NBVAL_IGNORE_OUTPUT
text = best_yaml(result)
print(text)

# %%
best = load_config(yaml.safe_load(text))
default = result.trials[0]
assert result.best.feasible and (not default.feasible or result.best.values[0] <= default.values[0])
assert best.asr == result.best_config.asr
folder.cleanup()
print("keeps the limit, and is no worse than the default:", result.best.feasible)

# %% [markdown]
# ## Try
# - `repeats: 3` in the budget: default and finalists are then compared on fresh traffic, and a gain within the noise is called so.
# - Another load: `streams: 8`. Does the default still keep its limit?
# - A study of your own in a folder: `workbench tune studies/demo`, and its trials in `workbench.show.panels.study_panel`.
