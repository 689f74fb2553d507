"""Results as tables, lines or JSON on standard output; notes, bars and figures' names on standard error."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from workbench.results import Record


FIGURE_TYPES = (".png", ".svg", ".pdf")


def give(record: Record, as_json: bool, output: Path | None, human: Callable[[], object]) -> None:
    """Save a record if asked, then print it: one JSON object, or what `human` prints."""
    try:
        if output is not None:
            record.save(output)
            print(f"record: {output}", file=sys.stderr)
    finally:  # a disk that filled up while measuring takes the file and not the numbers
        if as_json:
            print(json.dumps({**record.numbers, **dataclasses.asdict(record)}, indent=1, default=str))
        else:
            human()


def numbers(record: Record, wanted: tuple[str, ...] = ()) -> None:
    """The numbers of a record, one a line; `wanted`: only those that begin with one of these."""
    for name, value in record.numbers.items():
        if not wanted or name.startswith(wanted):
            print(f"{name:28} {value:.4g}" if isinstance(value, float) else f"{name:28} {value}")


def table(record: Record) -> None:
    """The rows of a record; cells that hold samples or nested data are left out."""
    from rich.console import Console
    from rich.table import Table

    if not record.rows:
        return
    columns = list(dict.fromkeys(n for row in record.rows for n, v in row.items() if not _long(v)))
    cells = {name: [_cell(row.get(name, "")) for row in record.rows] for name in columns}
    console = Console(width=None if sys.stdout.isatty() else 16 * len(columns))
    parts = [columns]
    if sys.stdout.isatty():
        for name in [name for name in columns if len(record.rows) > 1 and len(set(cells[name])) == 1]:
            print(f"in every row: {name} {cells.pop(name)[0]}")
        parts = parted({name: max(map(len, [name, *texts])) for name, texts in cells.items()}, console.width)
    for part in parts:
        table = Table(*part)
        for texts in zip(*(cells[name] for name in part), strict=True):
            table.add_row(*texts)
        console.print(table)


def parted(widths: Mapping[str, int], available: int) -> list[list[str]]:
    """Columns of these widths as tables that fit into `available` characters, in order; the first column leads each of them."""
    names = list(widths)
    parts, left = [names[:1]], available - 1
    for name in names[1:]:
        frame = 3  # a line and two blanks
        if len(parts[-1]) == 1:
            left = available - 1 - widths[names[0]] - frame
        if len(parts[-1]) > 1 and widths[name] + frame > left:
            parts.append(names[:1])
            left = available - 1 - widths[names[0]] - frame
        parts[-1].append(name)
        left -= widths[name] + frame
    return parts


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(record: Record, path: Path) -> None:
    """Draw a record to a file. Raises InputError for a type of file that is not drawn."""
    from workbench.show.record_figure import record_figure

    if path.suffix not in FIGURE_TYPES:
        raise InputError(f"--figure: got {path.name!r}; allowed are names that end in {', '.join(FIGURE_TYPES)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    record_figure(record).savefig(path, dpi=150)
    print(f"figure: {path}", file=sys.stderr)


def _long(value: Any) -> bool:
    """Whether a cell is too much for a table: samples, nested data."""
    return isinstance(value, dict) or (isinstance(value, list) and len(value) > 3)


def say(notes: Any) -> None:
    """What must be read with the numbers."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def seconds_bar(title: str, seconds: float) -> Any:
    """A bar over seconds of a run, as a context manager that gives the callback."""
    from workbench.measure.progress import seconds_bar

    return seconds_bar(title, seconds)
