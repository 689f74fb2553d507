"""The report and its figures: they show what the records hold, stand alone, and do not flatter."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from workbench.errors import RecordError
from workbench.results import Record
from workbench.show import plots, study_plots
from workbench.show.demo_report import verdict, write_demo_report
from workbench.tuning.report import INK_DARK, INK_LIGHT, Chart, Report, Section, Table, cell_text, svg, write_report

SIZE = "asr.batching.max_batch_size"
HOST = {"python": "3.11", "packages": {"torch": "2.13"}}
UNTRAINED = "untrained weights: transcripts are nonsense"


def run_record(p95_ms: float = 40.0, kind: str = "paced", **counters: Any) -> Record:
    """A run whose latencies are uniform below p95 / 0.95."""
    top = p95_ms / 0.95
    numbers = {
        **{f"latency_p{p}_ms": top * p / 100 for p in (50, 95, 99)},
        **{"latency_n": 900, "final_p50_ms": 20.0, "final_p95_ms": 60.0, "late_chunks": 9, "late_share": 0.01},
        **{"streams": 7, "load_s": 12.0, "chunk_ms": 80.0, "generator_late_p99_ms": 0.4},
    }
    rows = [
        {"share": share, "latency_ms": top * share, "final_ms": 2 * top * share}
        for share in np.linspace(0, 1, 21).tolist()
    ]
    batches = {"batch_sizes": {"1": 30, "2": 20, "10": 3}, "batches": 53, "batch_size_mean_items": 100 / 53}
    found = {**batches, "reasons": {"deadline": 53}, "execution_p50_ms": 11.0, **counters}
    return Record(kind=kind, numbers=numbers, rows=rows, counters=found, environment=HOST, notes=[UNTRAINED])


def study_record(default: float = 50.0, best: float = 40.0) -> Record:
    """Five trials: default, best, one repeated point, one breaking a limit, one failed."""
    values = [default, best, best, 9000.0, None]
    params = [1024, 8, 8, 1, 64]
    rows = [
        {
            "trial": number,
            "state": "complete",
            "params": {SIZE: params[number]},
            "values": {} if value is None else {"latency_p95_ms": value},
            "feasible": value is not None and number != 3,
            "excess": {},
            "is_default": number == 0,
            "duplicate_of": 1 if number == 2 else None,
            "failure": None if value is not None else "StudyError: nothing measured",
            "numbers": {} if value is None else {"latency_p50_ms": value / 2, "latency_p95_ms": value},
            "why": {"reasons": {"capacity": 3, "drain": 1}, "batch_size_mean_items": 2.5},
        }
        for number, value in enumerate(values)
    ]
    winner = 1 if best < default else 0
    numbers: dict[str, Any] = {"trials": 5, "trials_failed": 1, "trials_infeasible": 1, "trials_pooled": 1}
    numbers |= {
        "default_trial": 0,
        "best_trial": winner,
        "default_latency_p95_ms": default,
        "best_latency_p95_ms": values[winner],
    }
    counters = {
        "headline": "latency_p95_ms 40: 20.0 % less than the default's 50",
        "space": {SIZE: {"int": [1, 1024], "log": True}},
        "objectives": [{"number": "latency_p95_ms", "direction": "minimise"}],
        "constraints": ["late_share <= 0.01"],
        "default_params": {SIZE: 1024},
        "best_params": {SIZE: params[winner]},
        "pareto_trials": [winner],
    }
    return Record(
        kind="study", numbers=numbers, rows=rows, counters=counters, notes=["only one was tried"], environment=HOST
    )


def costs_record() -> Record:
    """Two kinds of step at three batch sizes."""
    rows = [
        {"stage": "step", "shape": shape, "batch": batch, "ms_p50": 10.0 + batch, "ms_p95": 12.0 + batch}
        for shape in ("first", "steady")
        for batch in (1, 4, 16)
    ]
    return Record(kind="costs", rows=rows, environment=HOST)


def transcripts_record(text: str = "at the sound of a long tone <b>") -> Record:
    """One transcript with a wrong and an added word, and one recording that could not be read."""
    good = {
        "path": "clips/tone.flac",
        "duration_s": 3.5,
        "text": text,
        "reference": "At the sound of the long tone.",
        "error": None,
    }
    bad = {
        "path": "clips/empty.wav",
        "duration_s": 0.0,
        "text": None,
        "reference": None,
        "error": "clips/empty.wav: no audio",
    }
    numbers = {"transcribed": 1, "audio_s": 3.5, "wer": 0.5, "wer_words": 7, "wer_clips": 1}
    return Record(kind="transcripts", numbers=numbers, rows=[good, bad], environment=HOST)


def profile_record() -> Record:
    """A CPU profile."""
    numbers = {"step_p50_ms": 21.5, "chunk_ms": 80, "operators_per_step": 1200, "thread_busy_share": 0.6}
    numbers |= {"idle_host_late_share": 0.39, "idle_kernel_gap_share": 0.0, "idle_end_share": 0.01}
    row = {"kind": "operator", "name": "aten::mm", "calls_per_step": 40.0, "ms_per_step": 9.0, "share": 0.5}
    return Record(kind="profile", numbers=numbers, rows=[row], environment=HOST)


def demo_folder(folder: Path, **records: Record) -> Path:
    """A demo's folder with everything but the profile, replaced or added to by `records`."""
    found = {
        "transcripts": transcripts_record(),
        "costs": costs_record(),
        "study": study_record(),
        "paced_default": run_record(50.0),
        "paced_best": run_record(40.0),
        **records,
    }
    for name, record in found.items():
        record.save(folder / f"{name}.json")
    (folder / "best.yaml").write_text("asr:\n  batching:\n    max_batch_size: 8\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a whole demo."""
    return write_demo_report(demo_folder(tmp_path_factory.mktemp("demo")))


class Outline(HTMLParser):
    """Text in order, and every address that the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.addresses, self.classes = "", list[str](), list[tuple[str, str]]()
        self._class = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._class = dict(attrs).get("class") or ""
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data
        if data.strip():
            self.classes.append((self._class, data.strip()))


def outline(page: Path) -> Outline:
    """The parsed page."""
    parsed = Outline()
    parsed.feed(page.read_text(encoding="utf-8"))
    return parsed


def test_the_page_stands_alone_and_carries_every_chart_in_two_inks(page: Path) -> None:
    assert page.name == "report.html"
    addresses = outline(page).addresses
    assert all(address.startswith(("#", "data:image/svg+xml;base64,")) for address in addresses)
    pictures = [
        base64.b64decode(address.partition(",")[2]).decode() for address in addresses if address.startswith("data:")
    ]
    assert len(pictures) == 2 * 7  # curves, bars, sizes, twin, history, slices, costs
    assert sum(INK_LIGHT in picture for picture in pictures) == sum(INK_DARK in picture for picture in pictures) == 7
    assert not list(page.parent.glob(".report*"))


def test_the_finding_and_the_warnings_come_before_every_section(page: Path) -> None:
    text = outline(page).text
    order = [
        "20% less p95 latency than the default: p95 40.0 ms against 50.0 ms, live",
        "p95 chunk latency, default",
        UNTRAINED,
    ]
    places = [text.index(part) for part in [*order, "7 live streams spoke for 12 s", "Objective: minimise"]]
    assert places == sorted(places)
    assert text.index("only one was tried") > places[-1]  # a study's own notes stand with the study
    assert text.count(UNTRAINED) == 1
    assert "max_batch_size: 8" in text and "torch" in text and "2.13" in text
    assert all(f"paced_{name}" in text for name in ("default", "best"))


def test_parts_that_were_not_run_are_left_out(tmp_path: Path) -> None:
    costs_record().save(tmp_path / "costs.json")
    text = outline(write_demo_report(tmp_path)).text
    assert "What a step costs" in text and "No configuration was tuned yet" in text
    assert not any(title in text for title in ("Live latency", "Tuning", "Transcripts"))
    with pytest.raises(RecordError, match="run the demo first"):
        write_demo_report(tmp_path / "empty")


def test_a_run_that_was_refused_and_a_profile_are_shown(tmp_path: Path) -> None:
    refused = Record(kind="paced", notes=["the best configuration: generator lagged"], environment=HOST)
    page = write_demo_report(demo_folder(tmp_path, paced_best=refused, profile=profile_record()))
    text = outline(page).text
    assert "The best configuration was not confirmed by live runs" in text and "generator lagged" in text
    assert "Where the time of a step goes" in text and "aten::mm" in text


@pytest.mark.parametrize(
    ("default_ms", "best_ms", "changes", "expected"),
    [
        (50.0, 40.0, {}, "20% less p95 latency than the default"),
        (50.0, 49.0, {}, "as good as the default within noise"),
        (50.0, 51.0, {}, "as good as the default within noise"),
        (50.0, 60.0, {}, "worse than the default: .* Keep the default"),
        (50.0, 60.0, {"execution_p50_ms": 14.0}, "do not compare: the machine was busy"),
        (50.0, 40.0, {"execution_p50_ms": 7.0}, "do not compare: the machine was busy"),
        (
            50.0,
            40.0,
            {"execution_p50_ms": 14.0, "batch_size_mean_items": 4.0},
            "20% less",
        ),  # larger batches take longer
    ],
)
def test_the_verdict_is_that_of_the_live_runs(
    default_ms: float, best_ms: float, changes: dict[str, Any], expected: str
) -> None:
    records = {
        "study": study_record(),
        "paced_default": run_record(default_ms),
        "paced_best": run_record(best_ms, **changes),
    }
    assert re.search(expected, verdict(records)[0])


def test_the_verdict_names_a_default_that_nothing_beats_and_a_study_without_a_feasible_trial() -> None:
    assert "No configuration found was better" in verdict({"study": study_record(40.0, 40.0)})[0]
    hopeless = study_record()
    hopeless.numbers["best_trial"] = None
    assert verdict({"study": hopeless})[0] == "No configuration kept every limit"


def test_transcripts_mark_words_and_escape_what_was_recognised(page: Path) -> None:
    marked = [(kind, text) for kind, text in outline(page).classes if kind in ("same", "wrong", "added", "missing")]
    assert marked == [("same", "at the sound of"), ("wrong", "a"), ("same", "long tone"), ("added", "b")]
    assert "clips/empty.wav: no audio" in outline(page).text


def test_missing_words_are_struck_and_a_text_without_reference_is_shown_as_it_is(tmp_path: Path) -> None:
    record = transcripts_record("at the sound of long tone")
    record.rows[1].update(error=None, text="<i>hm</i>")
    record.save(tmp_path / "transcripts.json")
    parsed = outline(write_demo_report(tmp_path))
    assert ("missing", "the") in parsed.classes and "<i>hm</i>" in parsed.text
    assert "<i>hm" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_cells_are_readable() -> None:
    values = {
        None: "–",
        "": "–",
        True: "yes",
        3: "3",
        0.123456: "0.1235",
        12345.6: "12346",
        "a": "a",
        (1, 2.5): "1, 2.5",
    }
    assert {value: cell_text(value) for value in values} == values


def test_a_report_of_parts_escapes_and_replaces_an_older_one(tmp_path: Path) -> None:
    table = Table(("<script>", "ms"), [["a & b", 1.5]], "caption")
    page = write_report(tmp_path / "r.html", Report("T", "old"))
    write_report(page, Report("T & Co", "new", sections=(Section("One", ("p < q",), (), (table,), "x: <1>"),)))
    text = page.read_text(encoding="utf-8")
    assert "old" not in outline(page).text and "<script>" not in text and "p &lt; q" in text
    assert "a & b" in outline(page).text and "x: <1>" in outline(page).text


def test_curves_show_the_distribution_and_mark_its_p95() -> None:
    runs = {"default": run_record(50.0), "best": run_record(40.0)}
    axes = plots.latency_curves(runs).axes[0]
    lines = {line.get_label(): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    assert list(lines) == ["default (p95 50 ms)", "best (p95 40 ms)"]
    assert np.asarray(lines["best (p95 40 ms)"].get_xdata())[-1] == pytest.approx(40 / 0.95)
    assert "ms" in axes.get_xlabel() and "%" in axes.get_ylabel()
    without_rows = Record(kind="paced", numbers={"latency_p50_ms": 20.0, "latency_p95_ms": 40.0}, environment=HOST)
    assert "p95 40 ms" in str(plots.latency_curves({"x": without_rows}).axes[0].lines[0].get_label())


def test_batch_sizes_are_shares_of_the_chunks() -> None:
    axes = plots.batch_sizes({"a": run_record(), "b": run_record()}).axes[0]
    heights = [bar.get_height() for bar in axes.containers[0]]  # type: ignore[attr-defined]
    assert heights == pytest.approx([30.0, 40.0, 30.0]) and sum(heights) == pytest.approx(100)


def test_cost_curves_divide_by_the_batch() -> None:
    whole, each = plots.cost_curves(costs_record()).axes
    assert np.asarray(whole.lines[0].get_ydata()).tolist() == [11.0, 14.0, 26.0]
    assert np.asarray(each.lines[0].get_ydata()).tolist() == [11.0, 3.5, 26.0 / 16]
    assert whole.lines[0].get_label() == "steady"


def test_the_twin_is_compared_in_per_cent_of_the_real_run() -> None:
    figure = plots.twin_against_real({"default": (run_record(45.0, "twin"), run_record(50.0))})
    assert [text.get_text() for text in figure.axes[0].texts] == ["-10 %", "-10 %"]


def test_history_shows_every_trial_and_a_hopeless_one_does_not_flatten_the_rest() -> None:
    axes = study_plots.history(study_record()).axes[0]
    drawn = {points.get_label(): np.asarray(points.get_offsets()).tolist() for points in axes.collections}
    assert drawn["trial"] == [[0.0, 50.0], [1.0, 40.0]] and drawn["same point again"] == [[2.0, 40.0]]
    assert [x for x, _ in drawn["breaks a limit"]] == [3.0] and [x for x, _ in drawn["failed"]] == [4.0]
    assert axes.get_ylim()[1] < 60
    best = next(line for line in axes.lines if line.get_label() == "best so far")
    assert np.asarray(best.get_ydata()).tolist() == [50.0, 40.0, 40.0]


def test_slices_mark_default_and_best() -> None:
    axes = study_plots.parameter_slices(study_record()).axes[0]
    drawn = {points.get_label(): np.asarray(points.get_offsets()).tolist() for points in axes.collections}
    assert drawn["default"] == [[1024.0, 50.0]] and drawn["best"] == [[8.0, 40.0]]
    assert axes.get_xlabel() == "max_batch_size" and axes.get_ylabel() == "latency p95, ms"


def test_a_front_needs_two_objectives_and_joins_its_trials() -> None:
    study = study_record()
    with pytest.raises(RecordError, match="two objectives"):
        study_plots.pareto(study)
    study.counters["objectives"].append({"number": "streams", "direction": "maximise"})
    study.counters["pareto_trials"] = [0, 1]
    for row in study.rows:
        if row["values"]:
            row["values"]["streams"] = float(row["params"][SIZE])
    line = study_plots.pareto(study).axes[0].lines[0]
    assert np.asarray(line.get_xydata()).tolist() == [[40.0, 8.0], [50.0, 1024.0]]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.latency_curves({}),
        lambda: plots.latency_curves({"x": Record(kind="costs", environment=HOST)}),
        lambda: plots.latency_bars({"x": Record(kind="costs", environment=HOST)}),
        lambda: plots.batch_sizes({"x": Record(kind="paced", environment=HOST)}),
        lambda: plots.cost_curves(run_record()),
        lambda: plots.twin_against_real({}),
        lambda: study_plots.history(run_record()),
        lambda: study_plots.parameter_slices(Record(kind="study", counters=study_record().counters, environment=HOST)),
    ],
)
def test_a_record_without_what_a_figure_needs_is_refused(draw: Any) -> None:
    with pytest.raises(RecordError):
        draw()


def test_series_stay_apart_in_grey_and_by_line_and_hatch() -> None:
    grey = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in (to_rgb(style[0]) for style in plots.STYLES[:2])]
    assert abs(grey[0] - grey[1]) > 0.2
    for position in (1, 2, 3):
        assert len({str(style[position]) for style in plots.STYLES}) == len(plots.STYLES)


def test_figures_can_be_drawn_into_given_axes_and_as_the_same_bytes_again() -> None:
    figure = Figure()
    given = figure.subplots(1, 2)
    assert plots.latency_bars({"a": run_record()}, axes=given[0]) is figure
    once, again = (svg(plots.batch_sizes({"a": run_record()}), INK_DARK) for _ in range(2))
    assert once == again
    dark = svg(Chart(plots.batch_sizes({"a": run_record()}), "").figure, INK_DARK).decode()
    assert INK_DARK in dark and INK_LIGHT not in dark
