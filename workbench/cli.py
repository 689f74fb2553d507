"""The command line: `workbench demo | transcribe | profile | bench | capacity | tune | confirm | best | twin | show | doctor`.

Verbs are thin: they read options, call the library and print. Heavy imports happen inside them, so `--help` answers at once. Results go to
standard output (a table, or one JSON object with --json); progress and messages go to standard error. Exit codes: 0 done, 1 a run-time
failure, 2 wrong input, 3 done in part (some inputs were skipped and are listed), 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import __version__
from workbench.config import Config, load_config, replace
from workbench.errors import ArenaFull, InputError, QueueFull, StepTimeout, StreamClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from workbench.results import Record

PARTIAL = 3
FIGURE_TYPES = (".png", ".svg", ".pdf")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)
profile_app = typer.Typer(invoke_without_command=True, help="Where the time of a step goes.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure throughput, paced latency and the scheduler core.")
app.add_typer(profile_app, name="profile")
app.add_typer(bench_app, name="bench")

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML with the sections asr: and load:.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Override one key: asr.batching.max_batch_size=8. Repeatable.")
]
Model = Annotated[
    str | None, typer.Option(help="demo, a named shape (tiny, nemotron-0.6b, …), a .nemo path, or a hub name.")
]
Context = Annotated[str | None, typer.Option(help="Left and right context in 80 ms frames, e.g. 56,0.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Audio = Annotated[list[str], typer.Argument(help="Audio files, folders, globs or NeMo manifests.", show_default=False)]
LabelRate = Annotated[
    float | None,
    typer.Option(help="Random weights: labels per second of audio that the decoder is made to emit, e.g. 3."),
]


def _writable(path: Path | None) -> Path | None:
    """Refuse an output that could not be written before anything is measured, not after."""
    from workbench.results import check_writable

    return None if path is None else check_writable(path)


Save = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Also write the record to this file.", callback=_writable),
]


def main() -> None:
    """Entry point: typed errors become one line and an exit code, never a traceback."""
    try:
        code = app(standalone_mode=False) or 0
        if code == 130:  # newer typers turn Ctrl-C into this exit code and say nothing
            _fail("interrupted", 130)
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except InputError as error:
        _fail(str(error), 2)
    except (QueueFull, ArenaFull, StreamClosed, StepTimeout) as error:
        _fail(f"{type(error).__name__}: {error}", 1)
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stderr.close()
        os._exit(1)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}", 1)
    except Exception as error:
        # Usage errors: their class lives in click or, in newer typers, in a private copy of it.
        if not (hasattr(error, "show") and hasattr(error, "exit_code")):
            raise
        error.show()
        sys.exit(error.exit_code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Profile, graph, batch and tune streaming speech recognition on GPUs."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the results; an unfinished run in it is resumed.")] = Path(
        "demo"
    ),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew: the earlier results are replaced.")] = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """The main job on the shipped model and speech: transcribe, profile, measure, tune, confirm, report.

    Example: `workbench demo --out runs/first`
    """
    from workbench.demo import run_demo

    run_demo(load_config(config, overrides or ()), out, fresh)


@app.command()
def transcribe(
    audio: Audio,
    config: ConfigFile = None,
    overrides: Overrides = None,
    model: Model = None,
    context: Context = None,
    device: Device = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Streams open at once; more than 1 turns batching on.")] = 1,
    wer: Annotated[bool, typer.Option("--wer", help="Word error rate against the manifest's texts.")] = False,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Replay steady encoder steps as CUDA graphs.")
    ] = False,
    compare_vs_offline: Annotated[
        bool, typer.Option("--compare-vs-offline", help="Count streams whose text differs offline.")
    ] = False,
    as_json: AsJson = False,
    output: Save = None,
) -> None:
    """Transcribe recordings as live streams; bad files are named and skipped.

    Examples: `workbench transcribe clips/ --concurrency 8`, `workbench transcribe test.jsonl --wer --context 56,13 --json`
    """
    from workbench.model.speech import find_audio
    from workbench.runtime.recognizer import Recognizer
    from workbench.runtime.transcribe import transcribe as run
    from workbench.runtime.transcribe import transcript_record

    chosen = _configured(config, overrides, model, context, device)
    if cuda_graphs:
        chosen = replace(chosen, **{"asr.cuda_graphs": True})
    if concurrency > 1:
        slots = max(chosen.asr.batching.state_arena_slots, concurrency)
        chosen = replace(chosen, **{"asr.batching.enabled": True, "asr.batching.state_arena_slots": slots})
    found, rows, notes, graphs, start_s = find_audio(audio), [], (), {}, time.perf_counter()
    stopped: tuple[str, ...] = ()
    if found.items:
        with Recognizer.open(chosen) as recognizer:
            _say(recognizer.loaded.notes)
            start_s = time.perf_counter()
            transcripts = run(recognizer, found.items, concurrency, compare_vs_offline)
            stopped = _collect(transcripts, len(found.items), rows, show=not as_json)
            notes, graphs = (*recognizer.loaded.notes, *stopped), recognizer.graph_counters()
    took_s = time.perf_counter() - start_s
    record = transcript_record(chosen, rows, [str(error) for error in found.errors], notes)
    record.numbers.update(took_s=round(took_s, 3), rtfx=round(record.numbers["audio_s"] / took_s, 3))
    record.counters["graphs"] = graphs
    skipped = record.counters["skipped"]
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    if not record.numbers.get("wer_clips"):
        for name in ("wer_clips", "wer_words"):
            del record.numbers[name]
        if wer:
            _say(['no reference text: --wer needs a manifest whose lines have "text"'])
    _give(record, as_json, output, lambda: _numbers(record, wanted=("wer",) if wer else ()))
    if stopped:
        raise typer.Exit(130)
    if not rows or all(row.error for row in rows):
        raise typer.Exit(2)
    if skipped:
        raise typer.Exit(PARTIAL)


@profile_app.callback()
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

    _writable(trace)
    chosen = _configured(config, overrides, model, context, device)
    chosen = replace(chosen, **{"asr.cuda_graphs": graphed or chosen.asr.cuda_graphs})
    record = profile_configured(chosen, batch, trace)
    _say(record.notes)
    _give(record, as_json, output, lambda: (_table(record), _numbers(record), print(f"{'trace':28} {trace}")))


@profile_app.command("graphed-table")
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
    _give(record, as_json, output, lambda: _table(record))


@bench_app.command("asr")
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

    chosen = _configured(config, overrides, model, context, device)
    compare = Compare(batching=compare_batching, nemo=compare_nemo)
    record = run(chosen, audio or (), mode, _integers(concurrency, "--concurrency"), compare)
    _say([*record.notes, *(f"skipped: {reason}" for reason in record.counters["skipped"])])
    _give(record, as_json, output, lambda: (_table(record), _numbers(record)))
    if record.counters["skipped"]:
        raise typer.Exit(PARTIAL)


@bench_app.command("paced")
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

    chosen = _configured(config, overrides, model, context, device, label_rate)
    with _seconds_bar("paced", chosen.load.seconds) as progress:
        record = paced_configured(chosen, audio, progress)
    _say(record.notes)
    _give(record, as_json, output, lambda: _numbers(record))


@bench_app.command("overload")
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

    chosen = _configured(config, overrides, model, context, device)
    with _seconds_bar("overload", seconds) as progress:
        record = overload_configured(chosen, audio, seconds, factor, progress)
    _say(record.notes)
    _give(record, as_json, output, lambda: _numbers(record))


@bench_app.command("core")
def bench_core(as_json: AsJson = False, output: Save = None) -> None:
    """Items per second of the scheduler core alone."""
    from workbench.measure.core_bench import run_core_bench

    record = run_core_bench()
    _give(record, as_json, output, lambda: _numbers(record))


@bench_app.command("costs")
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

    sizes, seconds = _integers(batches, "--batches"), _integers(lengths, "--lengths") if lengths else []
    chosen = _configured(config, overrides, model, context, device, label_rate)
    record = costs_configured(chosen, sizes, lengths_s=seconds)
    _say(record.notes)
    _give(record, as_json, output, lambda: _table(record))


@bench_app.command("twin")
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

    chosen = _configured(config, overrides, model, context, device, label_rate)
    loads = tuple(_integers(streams, "--streams"))
    check = TwinCheck(streams=loads, seconds=seconds, most_other_cores=most_other_cores)
    record = check_configured(chosen, check, _integers(batches, "--batches"))
    _say(record.notes)
    _give(record, as_json, output, lambda: (_table(record), _numbers(record)))


@app.command()
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

    chosen = _configured(config, overrides, model, context, device, label_rate)
    rule = CapacityRule(seconds, late_share, final_p95_ms, chosen.load.starts)
    plan = SearchPlan(start=start, repeats=repeats, resolution=resolution)
    run = CapacityRun(engine, rule, plan, not same_process, tuple(audio) if audio else None, output)
    simulate = None if costs is None else lambda level: simulate_configured(level, costs)
    record = capacity_configured(chosen, run, simulate)
    _say(record.notes)
    _give(record, as_json, output, lambda: (_table(record), _numbers(record)))
    if record.counters["ended"] == "interrupted":
        raise typer.Exit(130)


@app.command()
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
    _say(record.notes)
    _give(record, as_json, None, lambda: print(result.headline))
    print(f"results: {', '.join(map(str, written))}", file=sys.stderr)
    if result.best is None:
        raise typer.Exit(1)


@app.command()
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


@app.command()
def best(study: Annotated[Path, typer.Argument(help="Study folder (or its YAML).")]) -> None:
    """Print the best configuration of a study as YAML that `--config` reads: of its database, or the one that was committed with it."""
    from workbench.tuning.outcome import best_of

    print(best_of(study), end="")


@app.command()
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
    _say(record.notes)
    _give(record, as_json, output, lambda: _numbers(record))


@app.command()
def show(
    record_file: Annotated[Path, typer.Argument(metavar="RECORD", help="A result record.")],
    figure: Annotated[
        Path | None, typer.Option(help="Also draw the record, to this file (.png, .svg or .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a saved record: what was run, where, and the numbers; draw it again if wanted.

    Example: `workbench show studies/h200/capacity.json --figure capacity.png`
    """
    from workbench.results import Record

    record = Record.load(record_file)
    _say(record.notes)
    if figure is not None:
        try:
            _draw(record, figure)
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
    _give(record, as_json, None, lambda: (print(about), _numbers(record), _table(record)))


@app.command()
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


def _configured(
    config: Path | None,
    overrides: list[str] | None,
    model: str | None,
    context: str | None,
    device: str | None,
    label_rate: float | None = None,
) -> Config:
    chosen = load_config(config, overrides or ())
    changes: dict[str, Any] = {}
    if model is not None:
        changes["asr.model"] = model
    if context is not None:
        sides = _integers(context, "--context")
        if len(sides) != 2:
            from workbench.errors import ConfigError

            raise ConfigError(f"--context: got {context!r}; allowed are two numbers, left and right, e.g. 56,0")
        changes["asr.att_context_size"] = sides
    if device is not None:
        changes["asr.device"] = device
    if label_rate is not None:
        changes["asr.label_rate_hz"] = label_rate
    return replace(chosen, **changes)


def _collect(transcripts: Any, total: int, rows: list[Any], show: bool) -> tuple[str, ...]:
    """Append transcripts to `rows`, printing their text as they come. Ctrl-C keeps those so far: the note that says so, else none."""
    try:
        for row in _bar(transcripts, "transcribe", total):
            rows.append(row)
            if show and row.error is None:
                print(f"{_one_line(row.path)}\t{row.text}", flush=True)
    except KeyboardInterrupt:
        note = f"interrupted: {len(rows)} of {total} recordings were transcribed"
        _say([note])
        return (note,)
    return ()


def _one_line(path: object) -> str:
    """A path as one field of one line: line breaks and tabs in file names are escaped."""
    return str(path).translate({ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"})


def _integers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.strip("[] ").split(",")]
    except ValueError:
        raise InputError(f"{option}: got {text!r}; allowed are integers separated by commas") from None


def _give(record: Record, as_json: bool, output: Path | None, human: Callable[[], object]) -> None:
    try:
        if output is not None:
            record.save(output)
            print(f"record: {output}", file=sys.stderr)
    finally:  # a disk that filled up while measuring takes the file and not the numbers
        if as_json:
            print(json.dumps({**record.numbers, **dataclasses.asdict(record)}, indent=1, default=str))
        else:
            human()


def _numbers(record: Record, wanted: tuple[str, ...] = ()) -> None:
    for name, value in record.numbers.items():
        if not wanted or name.startswith(wanted):
            print(f"{name:28} {value:.4g}" if isinstance(value, float) else f"{name:28} {value}")


def _table(record: Record) -> None:
    from rich.console import Console
    from rich.table import Table

    if not record.rows:
        return
    columns = list(dict.fromkeys(n for row in record.rows for n, v in row.items() if not _long(v)))
    table = Table(*columns)
    for row in record.rows:
        cells = (row.get(name, "") for name in columns)
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 16 * len(columns)).print(table)


def _draw(record: Record, path: Path) -> None:
    from workbench.show.record_figure import record_figure

    if path.suffix not in FIGURE_TYPES:
        raise InputError(f"--figure: got {path.name!r}; allowed are names that end in {', '.join(FIGURE_TYPES)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    record_figure(record).savefig(path, dpi=150)
    print(f"figure: {path}", file=sys.stderr)


def _long(value: Any) -> bool:
    """Whether a cell is too much for a table: samples, nested data."""
    return isinstance(value, dict) or (isinstance(value, list) and len(value) > 3)


def _say(notes: Any) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _bar(rows: Any, title: str, total: int) -> Any:
    from tqdm import tqdm

    return tqdm(
        rows, desc=title, total=total, unit="clip", file=sys.stderr, dynamic_ncols=True, disable=not sys.stderr.isatty()
    )


def _seconds_bar(title: str, seconds: float) -> Any:
    from workbench.measure.progress import seconds_bar

    return seconds_bar(title, seconds)


def _fail(message: str, code: int) -> None:
    print(f"workbench: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
