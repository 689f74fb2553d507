"""`workbench demo` and `workbench transcribe`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli.options import (
    PARTIAL,
    AsJson,
    Audio,
    ConfigFile,
    Context,
    Device,
    Model,
    Overrides,
    Save,
    configured,
)
from workbench.cli.output import give, numbers, say
from workbench.config import load_config, replace


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

    chosen = configured(config, overrides, model, context, device)
    if cuda_graphs:
        chosen = replace(chosen, **{"asr.cuda_graphs": True})
    if concurrency > 1:
        slots = max(chosen.asr.batching.state_arena_slots, concurrency)
        chosen = replace(chosen, **{"asr.batching.enabled": True, "asr.batching.state_arena_slots": slots})
    found, rows, notes, graphs, start_s = find_audio(audio), [], (), {}, time.perf_counter()
    stopped: tuple[str, ...] = ()
    if found.items:
        with Recognizer.open(chosen) as recognizer:
            say(recognizer.loaded.notes)
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
            say(['no reference text: --wer needs a manifest whose lines have "text"'])
    give(record, as_json, output, lambda: numbers(record, wanted=("wer",) if wer else ()))
    if stopped:
        raise typer.Exit(130)
    if not rows or all(row.error for row in rows):
        raise typer.Exit(2)
    if skipped:
        raise typer.Exit(PARTIAL)


def _collect(transcripts: Any, total: int, rows: list[Any], show: bool) -> tuple[str, ...]:
    """Append transcripts to `rows`, printing their text as they come. Ctrl-C keeps those so far: the note that says so, else none."""
    try:
        for row in _bar(transcripts, "transcribe", total):
            rows.append(row)
            if show and row.error is None:
                print(f"{_one_line(row.path)}\t{row.text}", flush=True)
    except KeyboardInterrupt:
        note = f"interrupted: {len(rows)} of {total} recordings were transcribed"
        say([note])
        return (note,)
    return ()


def _one_line(path: object) -> str:
    """A path as one field of one line: line breaks and tabs in file names are escaped."""
    return str(path).translate({ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t"})


def _bar(rows: Any, title: str, total: int) -> Any:
    from tqdm import tqdm

    return tqdm(
        rows, desc=title, total=total, unit="clip", file=sys.stderr, dynamic_ncols=True, disable=not sys.stderr.isatty()
    )
