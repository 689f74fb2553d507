"""`workbench tune | confirm | best | twin`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.options import (
    PARTIAL,
    AsJson,
    ConfigFile,
    Overrides,
    Save,
)
from workbench.cli.output import give, numbers, say
from workbench.config import load_config


def tune(
    study: Annotated[Path, typer.Argument(help="Study folder (or its YAML).")],
    costs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Cost record for the twin, or a folder of them; repeatable. By default the study's own, else measured now."
        ),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Overrides the budget of the study.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Any Optuna RDB URL; SQLite in the study folder by default.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run or resume a tuning study on the digital twin; leaves results.json, report.html, best.yaml and trials.csv in its folder.

    `--set` wins over the study's `base:`, which wins over `--config`. Example: `workbench tune studies/demo --trials 60`
    """
    from workbench.show.study_results import write_study
    from workbench.tuning.run import run_study

    result = run_study(load_config(config), study, costs, trials, storage, overrides or ())
    written = write_study(result, study)
    record = result.record()
    say(record.notes)
    give(record, as_json, None, lambda: print(result.headline))
    print(f"results: {', '.join(map(str, written))}", file=sys.stderr)
    if result.best is None:
        raise typer.Exit(1)


def confirm(
    studies: Annotated[list[Path], typer.Argument(help="Study folders that were run on the twin.", show_default=False)],
    seconds: Annotated[float, typer.Option(min=0.5, help="Of one real run.")] = 8.0,
    rounds: Annotated[int, typer.Option(min=1, help="Real runs of each configuration.")] = 3,
    finalists: Annotated[int, typer.Option(min=1, help="Of each study, its best among them.")] = 2,
    budget_s: Annotated[
        float, typer.Option(min=1, help="Seconds a study; no run is begun that would pass it.")
    ] = 600.0,
    most_streams: Annotated[int, typer.Option(min=1, help="Never more live streams, for a smaller machine.")] = 100_000,
    as_json: AsJson = False,
) -> None:
    """Run default, compared configurations and finalists of studies for real, in turns; a model is loaded once for all.

    Example: `workbench confirm studies/latency_80ms studies/pareto --seconds 6 --rounds 2`
    """
    from workbench.show.study_results import confirm_studies
    from workbench.tuning.confirm import ConfirmOptions

    options = ConfirmOptions(seconds, rounds, finalists, budget_s, most_streams)
    found, failed = confirm_studies(studies, options)
    failed |= {name: "no real run could be measured" for name, data in found.items() if not _has_real_runs(data)}
    if as_json:
        print(json.dumps(found, indent=1, default=str))
    else:
        for name, data in found.items():
            print(f"{name}: {data['headline']}")
    for study, reason in failed.items():
        print(f"failed: {study}: {reason}", file=sys.stderr)
    if failed:
        raise typer.Exit(PARTIAL if any(map(_has_real_runs, found.values())) else 1)


def _has_real_runs(outcome: dict[str, Any]) -> bool:
    """Whether any configuration of a study's outcome was measured for real."""
    return any(isinstance(value, dict) and (value.get("live") or {}).get("runs") for value in outcome.values())


def best(study: Annotated[Path, typer.Argument(help="Study folder (or its YAML).")]) -> None:
    """Print the best configuration of a study as YAML that `--config` reads: of its database, or the one that was committed with it."""
    from workbench.tuning.outcome import best_of

    print(best_of(study), end="")


def twin(
    costs: Annotated[
        list[Path], typer.Argument(help="A cost record (`workbench bench costs`), several, or a folder of them.")
    ],
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    output: Save = None,
) -> None:
    """Simulate live traffic with measured step costs.

    Example: `workbench twin runs/costs.json -s load.streams=200 -s asr.batching.enabled=true -s asr.batching.state_arena_slots=400`
    """
    from workbench.tuning.run import simulate_configured

    record = simulate_configured(load_config(config, overrides or ()), costs)
    say(record.notes)
    give(record, as_json, output, lambda: numbers(record))
