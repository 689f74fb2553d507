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
# # Start here
#
# | tutorial | the question | takes |
# |---|---|---|
# | [1 · Your first stream](01_first_stream.ipynb) | how does text appear while somebody speaks, and is it the text of the whole recording? | 30 s |
# | [2 · Where the time of a step goes](02_where_time_goes.ipynb) | why is a GPU idle most of a step? | 40 s |
# | [3 · The graphed step](03_graphed_step.ipynb) | what if a thousand launches were one? | 30 s |
# | [4 · How batching works](04_batching.ipynb) | who waits for whom, and why did a batch leave? | 10 s |
# | [5 · Paced latency and capacity](05_paced_latency.ipynb) | how late is the text, and how many streams fit? | 40 s |
# | [6 · Tuning with Optuna](06_tuning.ipynb) | which settings are best for this load? | 20 s |
# | [7 · The digital twin](07_digital_twin.ipynb) | can a simulation be believed? | 45 s |
# | [8 · Reading our H200 results](08_h200_results.ipynb) | what was measured on a GPU, and what was not? | 10 s |
# | [9 · The fast path](09_fast_path.ipynb) | how near can a step come to the floor, and is it still right? | 30 s |
#
# No GPU and no network is needed. Each can be read as it is, with its committed output, or run with *Run → Run All Cells*.
#
# **Panels**, in a new notebook:
# ```python
# from workbench.show.panels import live_panel, study_panel, timeline_panel
# live_panel()                                   # live streams with knobs
# timeline_panel("../demo/trace_eager.json.gz")  # after `make demo`: one step of a profile
# study_panel("../demo/study.json")              # after `make demo`: the trials of its study
# ```
