"""Small charts as SVG text for panels that redraw several times a second: no figure, no canvas, a millisecond each.

    line_chart("latency p95", "ms", times_s, {"p95": values})       # "<svg …>" for an HTML widget
    bar_chart("chunks in a batch", {"1": 40.0, "2": 60.0}, "%")

Text and axes take the colour of the page (`currentColor`), so that they can be read in light and dark themes; series differ by colour and dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 340, 150
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 24, 22
# After Okabe and Ito; the blue is a little lighter, so that it stands out from dark pages as well as from white ones.
SERIES = (("#1F86C9", ""), ("#E69F00", "6 3"), ("#009E73", "2 2"))


def line_chart(title: str, unit: str, times_s: Sequence[float], series: Mapping[str, Sequence[float | None]]) -> str:
    """Lines over seconds; None leaves a gap. The heading carries each series' last value with its unit."""
    values = [value for line in series.values() for value in line if value is not None]
    top = nice_top(max(values, default=1.0))
    begin, end = (times_s[0], max(times_s[-1], times_s[0] + 1.0)) if times_s else (0.0, 1.0)
    parts = _frame(top, unit, f"{begin:.0f}", f"{end:.0f} s")
    legend = []
    for (name, line), (colour, dash) in zip(series.items(), SERIES, strict=False):
        for run in _runs(times_s, line):
            points = " ".join(f"{_x((t - begin) / (end - begin)):.1f},{_y(v / top):.1f}" for t, v in run)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            )
        last = next((value for value in reversed(line) if value is not None), None)
        shown = "–" if last is None else f"{last:.3g} {unit}"
        label = f"{escape(name)} " if len(series) > 1 else ""
        legend.append(f'<tspan fill="{colour}">&#9632;</tspan><tspan> {label}{shown}  </tspan>')
    return _svg(title, "".join(legend), parts)


def bar_chart(title: str, bars: Mapping[str, float], unit: str) -> str:
    """One bar per entry, in the order given."""
    top = nice_top(max(bars.values(), default=1.0))
    parts = _frame(top, unit, "", "")
    width = (WIDTH - LEFT - RIGHT) / max(len(bars), 1)
    for number, (name, value) in enumerate(bars.items()):
        left, height = LEFT + number * width, (HEIGHT - TOP - BOTTOM) * value / top
        parts.append(
            f'<rect x="{left + 0.1 * width:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" width="{0.8 * width:.1f}" height="{height:.1f}" '
            f'fill="{SERIES[0][0]}"/><text x="{left + width / 2:.1f}" y="{HEIGHT - 7}" text-anchor="middle">{escape(name)}</text>'
        )
    return _svg(title, "", parts)


def nice_top(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, … above a value: axes that do not twitch with every tick."""
    if value <= 0:
        return 1.0
    power = 10.0 ** (len(f"{int(value)}") - 1) if value >= 1 else 10.0 ** -(len(f"{int(1 / value)}"))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= value)


def _runs(times_s: Sequence[float], line: Sequence[float | None]) -> list[list[tuple[float, float]]]:
    """The stretches of a line without gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for time_s, value in zip(times_s, line, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((time_s, value))
    return [run for run in runs if run]


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - min(share, 1.0) * (HEIGHT - TOP - BOTTOM)


def _frame(top: float, unit: str, begin: str, end: str) -> list[str]:
    """Axis, the middle line and labels."""
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = _y(share)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-opacity="0.25"/>'
        )
        parts.append(
            f'<text x="{LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{share * top:g}{" " + unit if share == 1 else ""}</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 7}">{begin}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 7}" text-anchor="end">{end}</text>')
    return parts


def _svg(title: str, legend: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" style="max-width: 100%" role="img" '
        f'aria-label="{escape(title)}" font-size="10" font-family="sans-serif" fill="currentColor">'
        f'<text x="4" y="13" font-size="12" font-weight="600">{escape(title)}</text>'
        f'<text x="{WIDTH - RIGHT}" y="13" text-anchor="end" xml:space="preserve">{legend}</text>{"".join(parts)}</svg>'
    )
