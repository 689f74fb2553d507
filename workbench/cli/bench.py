"""`workbench bench asr | paced | overload | core | costs | twin`."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.cli.options import (
    PARTIAL,
    AsJson,
    ConfigFile,
    Context,
    Device,
    LabelRate,
    Model,
    Overrides,
    Save,
    configured,
    integers,
)
from workbench.cli.output import give, numbers, say, seconds_bar, table


def bench_asr(
    audio: Annotated[
        list[str] | None, typer.Argument(help="Audio to recognise; the shipped speech by default.")
    ] = None,
    mode: Annotated[str, typer.Option(help="stream or offline.")] = "stream",
    concurrency: Annotated[str, typer.Option(help="Levels, e.g. 1,8,16,32.")] = "1,8",
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Model = None,
    context: Context = None,
    device: Device = None,
    compare_batching: Annotated[
        bool, typer.Option("--compare-batching", help="Also the gain of batching at the highest level (speedup).")
    ] = False,
    compare_nemo: Annotated[
        bool, typer.Option("--compare-nemo", help="Also a lone unbatched stream against NeMo's bare loop.")
    ] = False,
    as_json: AsJson = False,
    output: Save = None,
) -> None:
    """Throughput at several numbers of concurrent callers on one recogniser, with transcript mismatches.

    Examples: `workbench bench asr clips/ --mode stream --concurrency 1,8,16 --json`, `... --concurrency 16 --compare-batching`
    """
    from workbench.measure.bench import bench_asr as run
    from workbench.measure.compare import Compare

    chosen = configured(config, overrides, model, context, device)
    compare = Compare(batching=compare_batching, nemo=compare_nemo)
    record = run(chosen, audio or (), mode, integers(concurrency, "--concurrency"), compare)
    say([*record.notes, *(f"skipped: {reason}" for reason in record.counters["skipped"])])
    give(record, as_json, output, lambda: (table(record), numbers(record)))
    if record.counters["skipped"]:
        raise typer.Exit(PARTIAL)


def bench_paced(
    audio: Annotated[list[str] | None, typer.Argument(help="Audio to speak; the shipped speech by default.")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Model = None,
    context: Context = None,
    device: Device = None,
    label_rate: LabelRate = None,
    as_json: AsJson = False,
    output: Save = None,
) -> None:
    """Live streams in real time; latency counts from when each chunk was due.

    Example: `workbench bench paced -s load.streams=8 -s load.seconds=20 -s asr.batching.enabled=true --json`
    """
    from workbench.measure.bench import paced_configured

    chosen = configured(config, overrides, model, context, device, label_rate)
    with seconds_bar("paced", chosen.load.seconds) as progress:
        record = paced_configured(chosen, audio, progress)
    say(record.notes)
    give(record, as_json, output, lambda: numbers(record))


def bench_overload(
    audio: Annotated[list[str] | None, typer.Argument(help="Audio to offer; the shipped speech by default.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long recordings are offered.")] = 30.0,
    factor: Annotated[float, typer.Option(min=1, help="Times the rate that is sustained.")] = 4.0,
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Model = None,
    context: Context = None,
    device: Device = None,
    as_json: AsJson = False,
    output: Save = None,
) -> None:
    """Offer several times the sustainable load: who is refused, whether the accepted complete, and how soon it is over.

    Example: `workbench bench overload -s asr.batching.max_queue_depth=16 -s asr.batching.state_arena_slots=64 --json`
    """
    from workbench.measure.overload import overload_configured

    chosen = configured(config, overrides, model, context, device)
    with seconds_bar("overload", seconds) as progress:
        record = overload_configured(chosen, audio, seconds, factor, progress)
    say(record.notes)
    give(record, as_json, output, lambda: numbers(record))


def bench_core(as_json: AsJson = False, output: Save = None) -> None:
    """Items per second of the scheduler core alone."""
    from workbench.measure.core_bench import run_core_bench

    record = run_core_bench()
    give(record, as_json, output, lambda: numbers(record))


def bench_costs(
    batches: Annotated[str, typer.Option(help="Batch sizes, e.g. 1,2,4,8.")] = "1,2,4,8",
    lengths: Annotated[str | None, typer.Option(help="Also whole recordings of these seconds, e.g. 1,4,16.")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Model = None,
    context: Context = None,
    device: Device = None,
    label_rate: LabelRate = None,
    as_json: AsJson = False,
    output: Save = None,
) -> None:
    """The cost table of a step that the digital twin computes with.

    Example: `workbench bench costs --batches 1,4,16 --output runs/costs.json`
    """
    from workbench.measure.bench import costs_configured

    sizes, seconds = integers(batches, "--batches"), integers(lengths, "--lengths") if lengths else []
    chosen = configured(config, overrides, model, context, device, label_rate)
    record = costs_configured(chosen, sizes, lengths_s=seconds)
    say(record.notes)
    give(record, as_json, output, lambda: table(record))


def bench_twin(
    streams: Annotated[str, typer.Option(help="Loads to compare at, e.g. 4,8,12.")] = "2,4,6",
    seconds: Annotated[float, typer.Option(min=1, help="Real runs of each pair together, of 2 s each.")] = 10.0,
    batches: Annotated[str, typer.Option(help="Batch sizes of the cost table, e.g. 1,2,4,8.")] = "1,2,4,8",
    most_other_cores: Annotated[
        float | None, typer.Option(help="On a shared machine: wait for, and repeat, runs disturbed by more than this.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Model = None,
    context: Context = None,
    device: Device = None,
    label_rate: LabelRate = None,
    as_json: AsJson = False,
    output: Save = None,
) -> None:
    """The digital twin against real paced runs: step costs measured now, then every load under three batchings, p50 and p95 of both.

    Example: `workbench bench twin --model tiny --context 56,0 --streams 2,4,6 --json`
    """
    from workbench.measure.twin_check import TwinCheck, check_configured

    chosen = configured(config, overrides, model, context, device, label_rate)
    loads = tuple(integers(streams, "--streams"))
    check = TwinCheck(streams=loads, seconds=seconds, most_other_cores=most_other_cores)
    record = check_configured(chosen, check, integers(batches, "--batches"))
    say(record.notes)
    give(record, as_json, output, lambda: (table(record), numbers(record)))
