"""The resident engine under a capacity search: one engine for levels that fit it, its rows' size known before, the equality beside the numbers."""

from __future__ import annotations

import pytest
from small_models import loaded, rnnt, shipped_clips, tdt

from workbench.config import load_config
from workbench.errors import ConfigError
from workbench.measure.capacity import CapacityRule, SearchPlan, find_capacity
from workbench.measure.capacity_engines import EngineSpec, model_levels
from workbench.measure.resident_levels import ResidentLevels, engine_ladder
from workbench.model.shapes import build_model
from workbench.runtime.resident_engine import ResidentEngine, row_bytes


@pytest.mark.parametrize("make", [lambda: rnnt(layers=2), lambda: rnnt(layers=1, context=(56, 13)), tdt])
def test_the_bytes_of_a_row_are_known_before_it_is_allocated(make):
    model = make()
    engine = ResidentEngine(model, rows=3, ladder=(1,), max_symbols=3)
    decoder = engine.decoder.rings
    values = decoder.h[:, 0].numel() + decoder.c[:, 0].numel() + decoder.output[0].numel()
    assert row_bytes(model) == engine.encoder.rings.row_bytes + values * 4 + decoder.jump.element_size()


def test_the_ladder_is_the_buckets_or_powers_of_two():
    assert engine_ladder(load_config({}, ["asr.batch_buckets=[3, 24]"])) == (3, 24)
    assert engine_ladder(load_config({}, ["asr.batching.max_batch_size=12"])) == (1, 2, 4, 8, 12)
    assert engine_ladder(load_config())[-1] == 256
    with pytest.raises(ConfigError, match="batch ladder"):
        engine_ladder(load_config({}, ["asr.batch_buckets=[4, 4]"]))


def test_a_search_runs_levels_with_their_transcripts_compared():
    model, clips = rnnt(layers=1, context=(56, 3)), shipped_clips(3, most_s=0.8)
    rule = CapacityRule(seconds=2.0, late_share_max=0.5)
    spec = EngineSpec("resident", load_config({}, ["asr.model=tiny", "asr.max_symbols=3"]), most_rows=4)
    plan = SearchPlan(start=2, most_streams=4, repeats=1)
    record = find_capacity(model_levels(spec, rule, model, clips), rule, plan)
    assert [row["streams"] for row in record.rows] == [2, 4]
    assert record.numbers["capacity_streams"] == 4
    for row in record.rows:
        assert row["transcript_mismatches"] == 0 < row["transcripts_compared"]
        assert row["labels_per_audio_s"] > 0


def test_a_level_runs_on_the_weights_that_the_configuration_names():
    model, clips = loaded(build_model("tiny", layers=1, d_model=192), (56, 3)), shipped_clips(2, most_s=0.5)
    rule, levels = CapacityRule(seconds=0.6, late_share_max=0.99), ResidentLevels(most_rows=2)
    keys = ["asr.encoder=resident", "asr.weights=int8", "load.seconds=0.6", "load.streams=2"]
    record = levels.level(model, load_config({}, ["asr.model=tiny", *keys]), clips, rule, lambda seconds: None)
    assert levels._engine.encoder.weights == "int8"
    assert record.config["asr"]["weights"] == "int8"
    assert record.numbers["transcript_mismatches"] == 0


def test_an_engine_serves_every_level_that_fits_it():
    model, clips = rnnt(layers=1, context=(56, 3)), shipped_clips(2, most_s=0.5)
    rule = CapacityRule(seconds=0.6, late_share_max=0.99)
    levels = ResidentLevels(most_rows=1)
    engines = []
    for streams in (2, 1, 3):
        config = load_config({}, ["asr.model=tiny", "load.seconds=0.6", f"load.streams={streams}"])
        levels.level(model, config, clips, rule, lambda seconds: None)
        engines.append(levels._engine)
    assert engines[0] is engines[1] and engines[2] is not engines[0] and engines[2].rows == 3
