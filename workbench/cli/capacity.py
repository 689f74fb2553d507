"""`workbench capacity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.options import (
    AsJson,
    ConfigFile,
    Context,
    Device,
    LabelRate,
    Model,
    Overrides,
    Save,
    configured,
)
from workbench.cli.output import give, numbers, say, table


def capacity(
    audio: Annotated[list[str] | None, typer.Argument(help="Audio to speak; the shipped speech by default.")] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="pipeline: the recogniser; resident: the resident engine's own loop; nemo-loop: NeMo's own step in a loop; twin: simulated."
        ),
    ] = "pipeline",
    costs: Annotated[Path | None, typer.Option(help="Cost record for --engine twin.")] = None,
    seconds: Annotated[float, typer.Option(help="Length of every run; the record says so if below 120.")] = 120.0,
    late_share: Annotated[float, typer.Option(help="Most chunks late by one chunk, as a share.")] = 0.001,
    final_p95_ms: Annotated[float, typer.Option(help="Most time to the final result, p95.")] = 1000.0,
    start: Annotated[int, typer.Option(help="First number of streams.")] = 8,
    repeats: Annotated[int, typer.Option(help="Runs that the largest passing level must pass.")] = 2,
    resolution: Annotated[float, typer.Option(help="Gap between passed and failed that is near enough.")] = 0.03,
    same_process: Annotated[bool, typer.Option("--same-process", help="Load the model once for all levels.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Model = None,
    context: Context = None,
    device: Device = None,
    label_rate: LabelRate = None,
    as_json: AsJson = False,
    output: Save = None,
) -> None:
    """The most live streams that keep a stated rule, by doubling and bisection. Ctrl-C keeps the levels so far.

    Example: `workbench capacity --model nemotron-0.6b --context 56,0 --label-rate 3 -s asr.cuda_graphs=true -o capacity.json`
    """
    from workbench.measure.capacity import CapacityRule, SearchPlan
    from workbench.measure.capacity_run import CapacityRun, capacity_configured
    from workbench.tuning.run import simulate_configured

    chosen = configured(config, overrides, model, context, device, label_rate)
    rule = CapacityRule(seconds, late_share, final_p95_ms, chosen.load.starts)
    plan = SearchPlan(start=start, repeats=repeats, resolution=resolution)
    run = CapacityRun(engine, rule, plan, not same_process, tuple(audio) if audio else None, output)
    simulate = None if costs is None else lambda level: simulate_configured(level, costs)
    record = capacity_configured(chosen, run, simulate)
    say(record.notes)
    give(record, as_json, output, lambda: (table(record), numbers(record)))
    if record.counters["ended"] == "interrupted":
        raise typer.Exit(130)
