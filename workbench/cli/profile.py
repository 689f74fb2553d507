"""`workbench profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli.options import (
    AsJson,
    ConfigFile,
    Context,
    Device,
    Model,
    Overrides,
    Save,
    configured,
    writable,
)
from workbench.cli.output import give, numbers, say, table
from workbench.config import replace


def profile(
    context_: typer.Context,
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Model = None,
    context: Context = None,
    device: Device = None,
    batch: Annotated[int, typer.Option(min=1, help="Streams in the step.")] = 1,
    trace: Annotated[Path, typer.Option(help="Where the Chrome trace is kept (opens in Perfetto).")] = Path(
        "runs/step.json.gz"
    ),
    graphed: Annotated[bool, typer.Option("--cuda-graphs", help="Profile the graphed step (CUDA).")] = False,
    as_json: AsJson = False,
    output: Save = None,
) -> None:
    """Time one steady step without a profiler, then profile it: launches, kernels, idle time by cause, stages.

    Example: `workbench profile --model nemotron-0.6b --context 56,0 --batch 8`
    """
    if context_.invoked_subcommand:
        return
    from workbench.measure.step_profile import profile_configured

    writable(trace)
    chosen = configured(config, overrides, model, context, device)
    chosen = replace(chosen, **{"asr.cuda_graphs": graphed or chosen.asr.cuda_graphs})
    record = profile_configured(chosen, batch, trace)
    say(record.notes)
    give(record, as_json, output, lambda: (table(record), numbers(record), print(f"{'trace':28} {trace}")))


def graphed_table(
    model: Annotated[str, typer.Option(help="A named shape or a model.")] = "nemotron-0.6b",
    as_json: AsJson = False,
    output: Save = None,
) -> None:
    """Eager against graphed step over contexts and batch sizes, with launches, idle share and memory (needs CUDA).

    Example: `workbench profile graphed-table --output studies/h200/graphed_step.json`
    """
    from workbench.measure.graphed_table import run_graphed_table

    record = run_graphed_table(model)
    give(record, as_json, output, lambda: table(record))
