"""The life of every item of a batching stage: how long it waited, with whom it ran, and which rule released it.

    done.append((batch, end_s))                # a driver notes each Batch and when it was finished
    queue_waterfall(done, axes)

One row per item in the order of arrival: a thin line while it waits, a bar while its batch runs, the first letter of the reason at the
end. Batches alternate in colour and hatch, so that neighbours stay apart in print.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.batching.microbatcher import Batch
from workbench.errors import RecordError
from workbench.show.plots import MUTED, STYLES, figure_axes


def queue_waterfall(done: Sequence[tuple[Batch[Any], float]], axes: Axes | None = None) -> Figure:
    """Waiting and execution of the items of `done`: pairs of a batch and the time in seconds at which it was finished.

    Raises RecordError for no batch.
    """
    if not done:
        raise RecordError("no batch was released, so there is nothing to draw")
    rows = sorted(
        (batch.formed_at - waited_s, batch.formed_at, end_s, number)
        for number, (batch, end_s) in enumerate(done)
        for waited_s in batch.waited_s
    )
    origin_s = rows[0][0]
    figure, axes = figure_axes(axes, (8.0, 1.2 + 0.14 * len(rows)))
    last_row = {number: row for row, (*_, number) in enumerate(rows)}
    for row, (arrived_s, formed_s, end_s, number) in enumerate(rows):
        colour, _, _, hatch = STYLES[number % 2]
        at = [(value - origin_s) * 1e3 for value in (arrived_s, formed_s, end_s)]
        axes.plot(at[:2], [row, row], color=MUTED, linewidth=1)
        axes.plot([at[0]], [row], marker="|", color=MUTED, markersize=6)
        axes.barh(row, at[2] - at[1], left=at[1], height=0.8, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        if row == last_row[number]:
            axes.text(at[2], row, f" {done[number][0].reason}", va="center", fontsize=7)
    axes.margins(x=0.14)  # room for the word behind the last batch
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(xlabel="time, ms", ylabel="chunk, in order of arrival")
    return figure
