"""Parts of a sitting that measure the resident engine, on a small model: the cast is undone, steps add up, a search leaves its record."""

from __future__ import annotations

import pytest
import torch
from small_models import prompted, rnnt, shipped_clips

from workbench.config import load_config
from workbench.measure.capacity import CapacityRule, SearchPlan
from workbench.measure.resident_parts import ResidentSearch, in_dtype, step_rows


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_another_precision_is_undone_to_the_last_bit_also_after_an_error():
    loaded = prompted()
    before = {name: (value.data_ptr(), value.clone()) for name, value in tensors(loaded.model).items()}
    with pytest.raises(RuntimeError, match="broken"), in_dtype(loaded, "bfloat16") as half:
        assert half.dtype == "bfloat16" and half.model.joint.pred.weight.dtype == torch.bfloat16
        assert half.model.preprocessor.featurizer.fb.dtype == torch.float32
        half.model.joint.joint_net[-1].bias.data += 1
        raise RuntimeError("broken")
    after = tensors(loaded.model)
    assert after.keys() == before.keys()
    for name, (pointer, value) in before.items():
        assert after[name].data_ptr() == pointer and torch.equal(after[name], value)
    with in_dtype(loaded, "float32") as same:
        assert same is loaded


def test_steps_are_timed_for_every_batch_and_split():
    model, clips = rnnt(layers=1), shipped_clips(3)
    rows = step_rows(model, clips, batches=(1, 3), steps=5, max_symbols=3)
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["step_n"] == 5 and 0 < row["begin_p50_ms"] <= row["step_p50_ms"]
        assert row["graph_ms"] is None and row["outside_graph_ms"] is None and row["context"] == [56, 0]


def test_a_search_leaves_its_record_after_every_level():
    config = load_config({}, ["asr.model=tiny", "asr.max_symbols=3", "asr.batch_buckets=[1,4]"])
    search = ResidentSearch(config, CapacityRule(0.8, 0.9), SearchPlan(start=1, most_streams=2, repeats=1), 60.0)
    saved, said = [], []
    search.run(rnnt(layers=1, context=(56, 3)), shipped_clips(2, most_s=0.5), saved.append, said.append)
    assert len(saved) == len(said) + 1 == 3
    runs = saved[-1].counters["runs_in_full"]
    assert [run["streams"] for run in runs] == [1, 2] and all("busy_share" in run for run in runs)
    assert saved[-1].counters["ended"] == "most_streams"
