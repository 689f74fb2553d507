"""Timelines and idle bars are tested by what they draw: spans, rows, labels with units, and brightness apart."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from workbench.errors import RecordError
from workbench.measure.trace import CAUSES, Event, Trace, analyse, load_trace
from workbench.results import Record
from workbench.show.timeline import BUSY, CAUSE_STYLE, idle_bar_figure, timeline_figure

CPU_TRACE = Path(__file__).parent / "data" / "traces" / "cpu_linear_norm_relu.json.gz"


@pytest.fixture
def trace() -> Trace:
    """Step 1 is 1000–2000 µs: a launch and a graph launch; kernels on two streams, one left over from before the step."""

    def kernel(start: float, duration: float, correlation: int, stream: int) -> Event:
        return Event("k", "kernel", f"0/{stream}", start, duration, correlation, stream, 0)

    def call(name: str, start: float, correlation: int) -> Event:
        return Event(name, "cuda_runtime", "1/1", start, 10, correlation)

    return Trace(
        (
            *(Event("workbench.step", "user_annotation", "1/1", start, 1000) for start in (0, 1000)),
            *(call("cudaLaunchKernel", 10, 1), kernel(900, 200, 1, 13)),
            *(call("cudaLaunchKernel", 1300, 2), kernel(1400, 100, 2, 7)),
            *(call("cudaGraphLaunch", 1350, 3), kernel(1600, 100, 3, 7), kernel(1750, 50, 3, 7)),
        ),
        "made",
    )


def spans(figure: Figure) -> set[tuple[float, float, float]]:
    """(middle of the row, from ms, to ms) of every bar of a timeline."""
    found = set()
    for bars in figure.axes[0].collections:
        assert isinstance(bars, PolyCollection)
        for path in bars.get_paths():
            box = path.get_extents()
            found.add((round((box.y0 + box.y1) / 2, 6), round(box.x0, 6), round(box.x1, 6)))
    return found


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_rows_bars_and_gaps_of_a_step(trace: Trace) -> None:
    figure = timeline_figure(trace, step=1)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "host thread 1",
        "stream 7",
        "stream 13",
        "idle, by cause",
    ]
    assert spans(figure) == {
        *((0, 0.3, 0.31), (0, 0.35, 0.36)),
        *((1, 0.4, 0.5), (1, 0.6, 0.7), (1, 0.75, 0.8)),
        (2, 0, 0.1),
        *((3, 0.1, 0.4), (3, 0.5, 0.6), (3, 0.7, 0.75), (3, 0.8, 1)),
    }
    assert axes.get_xlim() == (0, 1)
    assert "(ms)" in axes.get_xlabel()
    assert axes.get_title(loc="left") == "2 launch calls → 3 kernels · GPU busy 35 % of 1.00 ms"
    assert legend(figure) == [
        "launch call",
        "graph launch call",
        "kernel",
        *(CAUSE_STYLE[cause][2] for cause in CAUSES),
    ]


def test_a_cpu_trace_shows_operators(tmp_path: Path) -> None:
    figure = timeline_figure(load_trace(CPU_TRACE), step=2)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["operators", "idle, by cause"]
    assert legend(figure) == ["operator", "idle: between operators (Python)", "idle: end of step"]
    figure.savefig(tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 5000


@pytest.mark.parametrize("step", [-1, 2])
def test_a_step_that_is_not_there_is_refused(trace: Trace, step: int) -> None:
    with pytest.raises(RecordError, match=f"step {step}: made has the steps 0 to 1"):
        timeline_figure(trace, step=step)


def test_idle_bars_fill_the_step(trace: Trace) -> None:
    numbers = analyse(trace).numbers()
    record = Record(kind="profile", numbers={**numbers, "step_p50_ms": 36.12}, environment={}, command="")
    figure = idle_bar_figure({"eager": record, "graphed": record})
    axes = figure.axes[0]
    for row in (0, 1):
        widths = [bar.get_width() for bar in axes.patches if bar.get_y() == pytest.approx(row - 0.3)]
        assert widths == pytest.approx(
            [100 * numbers[key] for key in ("gpu_busy_share", *(f"idle_{c}_share" for c in CAUSES))]
        )
        assert sum(widths) == pytest.approx(100)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["eager", "graphed"]
    assert [text.get_text() for text in axes.texts] == ["2 launches\np50 36.1 ms"] * 2
    assert axes.get_xlabel().endswith("%")
    assert len(legend(figure)) == 4


def test_idle_bars_of_a_cpu_have_no_kernel_gaps() -> None:
    numbers = {**analyse(load_trace(CPU_TRACE)).numbers(), "step_p50_ms": 0.5}
    figure = idle_bar_figure({"cpu": Record(kind="profile", numbers=numbers, environment={}, command="")})
    assert legend(figure) == ["busy", "idle: between operators (Python)", "idle: end of step"]
    assert figure.axes[0].texts[0].get_text() == "29 operators\np50 0.5 ms"


def test_other_records_are_refused_by_label() -> None:
    with pytest.raises(RecordError, match=r"mine: a record of kind 'paced' without gpu_busy_share"):
        idle_bar_figure({"mine": Record(kind="paced", environment={}, command="")})
    with pytest.raises(RecordError, match="no records"):
        idle_bar_figure({})


def test_busy_and_the_causes_differ_in_brightness_and_in_hatching() -> None:
    """Relative luminance of neighbours differs by more than 0.1, and no two share brightness and hatching."""

    def luminance(colour: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    styles = [(luminance(BUSY), ""), *((luminance(CAUSE_STYLE[cause][0]), CAUSE_STYLE[cause][1]) for cause in CAUSES)]
    for (first, hatch), (second, other) in itertools.combinations(styles, 2):
        assert abs(first - second) > 0.1
        assert hatch != other or abs(first - second) > 0.13
