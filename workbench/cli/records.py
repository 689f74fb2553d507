"""`workbench show` and `workbench doctor`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.options import (
    AsJson,
)
from workbench.cli.output import draw, give, numbers, say, table
from workbench.errors import InputError


def show(
    record_file: Annotated[Path, typer.Argument(metavar="RECORD", help="A result record.")],
    figure: Annotated[
        Path | None, typer.Option(help="Also draw the record, to this file (.png, .svg or .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a saved record, or the results.json of a study: what was run, where, and the numbers; draw a record again if wanted.

    Example: `workbench show studies/h200/capacity.json --figure capacity.png`
    """
    from workbench.results import Record
    from workbench.show.outcome_record import outcome_record

    record = (None if figure else outcome_record(record_file)) or Record.load(record_file)
    say(record.notes)
    if figure is not None:
        try:
            draw(record, figure)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{record_file}: the record is damaged, no figure can be drawn ({type(error).__name__}: {error})"
            ) from error
    gpu = record.environment.get("gpu")
    host = (
        gpu.get("name") if isinstance(gpu, dict) else None
    ) or f"{record.environment.get('cpu_cores', '?')} CPU cores"
    about = f"{record.kind}, {record.created_utc}, {host}, commit {record.environment.get('commit')}\n{record.command}"
    give(record, as_json, None, lambda: (print(about), numbers(record), table(record)))


def doctor(as_json: AsJson = False) -> None:
    """What this machine has, what is missing and what that costs."""
    from workbench.doctor import examine

    findings = examine()
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
        return
    for finding in findings:
        print(f"{finding.state:8} {finding.name:22} {finding.found}")
        if finding.cost:
            print(f"{'':8} {'':22} {finding.cost}")
