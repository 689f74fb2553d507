"""Every record can be drawn again, from its file alone."""

from __future__ import annotations

import pytest

from workbench.errors import ConfigError, RecordError
from workbench.measure.campaign import gathered, sizes_from
from workbench.measure.capacity import CapacityRule, LevelRun, SearchPlan, find_capacity
from workbench.measure.step_table import StepCell
from workbench.results import Record
from workbench.show.record_figure import record_figure


def capacity(limit, engine="pipeline"):
    """A capacity record of an engine that carries `limit` streams."""

    def run_at(streams):
        late = 0 if streams <= limit else 200
        numbers = {"late_chunks": late, "late_share": late / 1000, "latency_n": 900, "final_n": 100}
        return Record("paced", {}, {**numbers, "latency_p95_ms": 1.5 * streams, "final_p95_ms": 20.0}, environment={})

    record = find_capacity(run_at, CapacityRule(seconds=8), SearchPlan(start=8))
    record.config["engine"] = engine
    return record


def legends(figure):
    """Every legend entry of a figure."""
    return [text.get_text() for axes in figure.axes if axes.get_legend() for text in axes.get_legend().get_texts()]


def test_every_committed_record_can_be_drawn(project, tmp_path):
    found = [*project.glob("studies/h200/*.json"), *project.glob("notebooks/records/*.json")]
    assert len(found) > 3
    for path in found:
        figure = record_figure(Record.load(path))
        figure.savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 2000, path
        assert any(axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes), path


def test_a_capacity_curve_marks_what_passed_and_what_failed():
    figure = record_figure(capacity(100))
    late, latency = figure.axes
    assert legends(figure) == ["pipeline: 100"]
    assert late.get_ylabel().endswith("%") and latency.get_ylabel().endswith("ms")
    insides = {line.get_markerfacecolor() for line in late.lines if line.get_marker() == "o"}
    assert len(insides) == 2 and "white" in insides


def test_several_searches_show_what_each_carried_and_what_failed_next_by_chunk_length():
    records = {"fused_80ms": capacity(100), "nemo_loop_80ms": capacity(40), "fused_1120ms": capacity(900)}
    record = gathered(records)
    assert record.numbers["fused_80ms_streams"] == 100
    figure = record_figure(record)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["chunks of 80 ms", "", "chunks of 1120 ms", ""]
    bars, latency = figure.axes[:2]
    assert [text.get_text() for text in bars.get_yticklabels()] == ["fused", "nemo loop"]
    assert [patch.get_width() for patch in bars.patches] == [100, record.numbers["nemo_loop_80ms_streams"]]
    assert [text.get_text().endswith(" failed)") for text in bars.texts] == [True, True]
    assert {line.get_markerfacecolor() for line in bars.lines} == {"white"}
    styles = {(line.get_color(), line.get_linestyle()) for line in latency.lines if line.get_label()[0] != "_"}
    assert len(styles) == 2 and set(legends(figure)) == {"fused", "nemo loop"}


def test_a_search_that_met_no_limit_says_or_more():
    low = capacity(100)
    low.rows[:] = [row for row in low.rows if row["passed"] == "yes"]
    bars = record_figure(gathered({"fused_80ms": low, "staged_80ms": capacity(50)})).axes[0]
    assert [text.get_text().partition(" (")[0] for text in bars.texts] == ["100 or more", "50"]


def test_a_table_of_fast_steps_leaves_out_what_was_not_timed():
    row = {"context": [56, 0], "batch": 1, "dtype": "float32", "eager_ms_p50": 25.0, "graphed_ms_p50": 4.0}
    int8 = {**row, "dtype": "bfloat16+int8", "eager_ms_p50": None, "graphed_ms_p50": None}
    rows = [dict(cells, fast_ms_p50=1.0, floor_ms=0.5) for cells in (row, int8)]
    axes = record_figure(Record("fast_table", rows=rows)).axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["80 ms, batch 1, fp32", "80 ms, batch 1, bf16, int8 weights"]
    assert sorted(patch.get_width() for patch in axes.patches) == [0.5, 0.5, 1.0, 1.0, 4.0, 25.0]


def test_rows_without_a_drawing_of_their_own_are_told_by_their_first_median_and_labels():
    row = {"context": [56, 0], "batch": 1, "tf32": True, "step_p50_ms": 2.0, "step_n": 60, "outside_graph_ms": 0.1}
    axes = record_figure(Record("unheard of", rows=[row])).axes[0]
    assert axes.get_xlabel() == "step p50, ms" and axes.get_yticklabels()[0].get_text() == "[56, 0] 1"


def test_what_a_run_was_asked_for_is_no_bar_and_an_overload_tells_fates_and_seconds_apart():
    numbers = {"seconds": 90.0, "rounds": 2, "recovered_ms": 4.0, "idle_ms": 2.0}
    axes = record_figure(Record("unheard of", numbers=numbers)).axes[0]
    assert sorted(label.get_text() for label in axes.get_yticklabels()) == ["idle", "recovered"]
    numbers = {
        "seconds": 90.0,
        "factor": 4.0,
        "offered": 20,
        "accepted": 8,
        "refused_queue_full": 12,
        "recovery_s": 0.3,
    }
    left, right = record_figure(Record("overload", numbers=numbers)).axes
    assert [patch.get_width() for patch in left.patches] == [20, 12, 8] and "in 90 s at 4 ×" in left.get_xlabel()
    assert [patch.get_width() for patch in right.patches] == [0.3] and right.get_xlabel().endswith(", s")


def test_one_level_of_a_bench_is_bars_and_several_are_a_line():
    rows = [{"concurrency": n, "rtfx": 5.0 * n} for n in (1, 4)]
    assert len(record_figure(Record("bench", rows=rows)).axes[0].lines) == 1
    assert [p.get_width() for p in record_figure(Record("bench", rows=rows[1:])).axes[0].patches] == [20.0]
    numbers = {"streams": 4, "batched_rtfx": 19.0, "unbatched_rtfx": 6.0}
    axes = record_figure(Record("bench", rows=rows[1:], numbers=numbers)).axes[0]
    assert [p.get_width() for p in axes.patches] == [19.0, 6.0]


def test_levels_that_were_not_measured_are_drawn_as_crosses_or_refused():
    row = LevelRun(64, None, "generator lagged").row()
    with pytest.raises(RecordError, match="nothing to draw"):
        record_figure(Record("capacity", rows=[row]))
    record = capacity(100)
    record.rows.append(row)
    assert "x" in [line.get_marker() for line in record_figure(record).axes[0].lines]


def test_chunks_of_which_no_level_was_measured_stand_beside_those_that_were(tmp_path):
    measured, row = capacity(100).rows[0], LevelRun(64, None, "generator lagged").row()
    searches = [{**measured, "search": "a_80ms"}, {**row, "search": "a_1120ms"}, {**row, "search": "b_1120ms"}]
    figure = record_figure(Record("capacity", rows=searches))
    figure.savefig(tmp_path / "capacity.png")
    assert [text.get_text() for text in figure.axes[3].texts] == ["not measured"] and not figure.axes[1].texts
    assert [text.get_text() for text in figure.axes[2].texts] == ["none passed"] * 2


def test_runs_without_clips_are_drawn(tmp_path):
    row = {"run": "eager", "context": [56, 0], "clips": 0, "texts_unlike_eager_fp32": 0}
    figure = record_figure(Record("transcribed_speech", rows=[row]))
    figure.savefig(tmp_path / "texts.png")
    assert figure.axes[0].get_xlim() == (0.0, 1.0)


def test_pairs_of_the_twin_show_their_difference():
    row = {"batching": "at once", "streams": 4}
    for point in ("p50", "p95"):
        row |= {f"latency_{point}_real_ms": 20.0, f"latency_{point}_twin_ms": 21.0, f"latency_{point}_difference": 0.05}
    unmeasured = {"batching": "at once", "streams": 64}
    figure = record_figure(Record("twin_check", rows=[row, unmeasured]))
    assert [text.get_text() for text in figure.axes[0].texts].count("+5.0 %") == 1
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["4 · at once"]


def test_a_table_of_steps_is_split_into_busy_and_idle():
    row = {"context": [56, 0], "batch": 1, "step_p50_ms": 25.0, "gpu_busy_ms_per_step": 3.0, "launches_per_step": 1300}
    record = Record("profile_table", rows=[{**row, "graphed": False}, {**row, "graphed": True, "step_p50_ms": 4.0}])
    axes = record_figure(record).axes[0]
    widths = [patch.get_width() for patch in axes.patches]
    assert sorted(widths) == [1.0, 3.0, 3.0, 22.0]


@pytest.mark.parametrize("kind", ["capacity", "twin_check", "graphed_table", "bench", "profile_table", "unheard of"])
def test_a_record_with_nothing_to_draw_is_refused(kind):
    with pytest.raises(RecordError, match="nothing to draw"):
        record_figure(Record(kind))


def test_the_sizes_of_a_sitting_come_from_json_and_know_their_names():
    sizes = sizes_from({"model": "tiny", "batches": [1, 2], "cells": [[[56, 0], 1], [[56, 13], 2]]})
    assert sizes.batches == (1, 2) and sizes.cells == (StepCell((56, 0), 1), StepCell((56, 13), 2))
    assert sizes.paced_streams == sizes_from({}).paced_streams
    with pytest.raises(ConfigError, match="got modle; allowed are model"):
        sizes_from({"modle": "tiny"})
