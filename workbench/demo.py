"""The main job, end to end: load, transcribe, profile, measure costs, tune on the twin, confirm live, report.

    run_demo(Config(), Path("demo"), fresh=False)

Every stage leaves a record in the output folder and is skipped when a finished one is there, so that an interrupted run goes on where it
stopped and a second run only says where everything is. The load is set from this machine's own step costs: more live streams than
one-at-a-time steps could serve, which is where batching matters.
"""

from __future__ import annotations

import fcntl
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.config import Config, load_config, replace, to_dict, to_yaml
from workbench.errors import InputError, RecordError, StudyError
from workbench.model.load import resolve_device
from workbench.model.shapes import SHAPES
from workbench.results import Record

if TYPE_CHECKING:
    from workbench.tuning.result import StudyResult

STUDY = Path(__file__).parents[1] / "studies" / "demo"
STAGES = ("transcribe", "profile", "costs", "tune", "confirm", "report")
# Seconds of shipped speech that are transcribed, and of each confirming run, on a machine without a GPU.
CPU_SPEECH_S, GPU_SPEECH_S = 24.0, 240.0
CONFIRM_S = 8.0
# A busy machine can make the load generator late; such a run is refused and tried again.
PACED_TRIES = 3
CPU_BATCHES, GPU_BATCHES = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64, 128)
# The demo's load: as many live streams as keep the device busy for this share of a chunk when all of them step in one batch.
BUSY_SHARE = 0.35
# Look-ahead where the user names none: on a CPU 160 ms a chunk leaves room for several streams.
CPU_CONTEXT, GPU_CONTEXT = (56, 1), (56, 0)


@dataclass
class Demo:
    """One run of the demo in folder `out`."""

    config: Config
    out: Path
    recognizer: Any = None

    def opened(self) -> Any:
        """The recogniser, loaded once and only if a stage needs it."""
        if self.recognizer is None:
            from workbench.runtime.recognizer import Recognizer

            say(f"  loading {self.config.asr.model} …")
            rows = max(self.batches) if self.on_cuda else max(CPU_BATCHES)
            slots = max(rows, self.config.asr.batching.state_arena_slots)
            self.recognizer = Recognizer.open(replace(self.config, **{"asr.batching.state_arena_slots": slots}))
            self.recognizer.warm_up()
            for note in self.recognizer.loaded.notes:
                say(f"  note: {note}")
        return self.recognizer

    @property
    def on_cuda(self) -> bool:
        """Whether the demo runs on a GPU."""
        return resolve_device(self.config.asr.device) != "cpu"

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes of the cost table."""
        return GPU_BATCHES if self.on_cuda else CPU_BATCHES

    def record(self, name: str, make: Callable[[], Record]) -> Record:
        """The record `name`, made now unless a finished one is there."""
        path = self.out / f"{name}.json"
        if path.exists():
            say(f"  kept   {path}")
            return Record.load(path)
        record = make()
        record.save(path)
        say(f"  wrote  {path}")
        return record


def say(text: str) -> None:
    """A line for the person who watches."""
    print(text, file=sys.stderr, flush=True)


def run_demo(config: Config, out: Path, fresh: bool) -> None:
    """Run or resume the demo in `out`. Raises InputError if the folder holds a demo of another configuration."""
    if config.asr.att_context_size is None and config.asr.model in ("demo", *SHAPES):
        on_cuda = resolve_device(config.asr.device) != "cpu"
        config = replace(config, **{"asr.att_context_size": list(GPU_CONTEXT if on_cuda else CPU_CONTEXT)})
    with _alone(out):
        _run_alone(config, out, fresh)


def _run_alone(config: Config, out: Path, fresh: bool) -> None:
    _prepare(config, out, fresh)
    demo = Demo(config, out)
    if (out / "report.html").exists():
        say(f"This demo is complete. To start anew: workbench demo --out {out} --fresh")
        _where(out)
        return
    steps = (_transcribe, _profile, _costs, _tune, _confirm, _report)
    try:
        for number, (title, step) in enumerate(zip(STAGES, steps, strict=True), start=1):
            say(f"[{number}/{len(STAGES)}] {title}: {step.__doc__}")
            step(demo)
    except KeyboardInterrupt:
        say(f"\ninterrupted: finished stages and trials are kept; go on with: workbench demo --out {out}")
        raise
    finally:
        if demo.recognizer is not None:
            demo.recognizer.close()
    _where(out)


def _transcribe(demo: Demo) -> None:
    """stream real human speech through the model"""
    from tqdm import tqdm

    from workbench.model.speech import SHIPPED_SPEECH, read_manifest
    from workbench.runtime.transcribe import transcribe, transcript_record

    def make() -> Record:
        recognizer, limit_s = demo.opened(), GPU_SPEECH_S if demo.on_cuda else CPU_SPEECH_S
        items, total_s = [], 0.0
        for item in sorted(read_manifest(SHIPPED_SPEECH).items, key=lambda i: str(i.path)):
            seconds = _duration_s(item.path)
            if total_s + seconds <= limit_s:
                items.append(item)
                total_s += seconds
        rows = list(
            tqdm(transcribe(recognizer, items), total=len(items), desc="  transcribe", unit="clip", disable=not _tty())
        )
        return transcript_record(demo.config, rows, [], recognizer.loaded.notes)

    record = demo.record("transcripts", make)
    numbers = record.numbers
    wer = f", word error rate {numbers['wer']:.1%}" if "wer" in numbers else ""
    say(f"  {numbers['transcribed']} clips, {numbers['audio_s']:.0f} s of speech{wer}")


def _profile(demo: Demo) -> None:
    """where the time of one steady step goes"""
    from workbench.measure.step_profile import profile_recognizer

    record = demo.record("profile", lambda: profile_recognizer(demo.opened(), 1, demo.out / "trace_eager.json.gz"))
    say(f"  {_profile_line(record)}")
    if demo.on_cuda:
        graphed = demo.record("profile_graphed", lambda: _graphed_profile(demo))
        say(f"  as a CUDA graph: {_profile_line(graphed)}")


def _graphed_profile(demo: Demo) -> Record:
    from workbench.encoder.graphed import set_streaming_cuda_graphs
    from workbench.measure.step_profile import profile_recognizer

    recognizer = demo.opened()
    set_streaming_cuda_graphs(recognizer.loaded.model, True)
    return profile_recognizer(recognizer, 1, demo.out / "trace_graphed.json.gz")


def _costs(demo: Demo) -> None:
    """measure a step at every batch size"""
    from workbench.measure.costs import measure_costs
    from workbench.measure.progress import count_bar
    from workbench.measure.steps import speech_clips

    def make() -> Record:
        recognizer = demo.opened()
        with count_bar("  costs") as progress:
            return measure_costs(
                recognizer, speech_clips(recognizer.loaded.geometry.sample_rate_hz), demo.batches, 8, progress
            )

    steady = {row["batch"]: row["ms_p50"] for row in demo.record("costs", make).rows if row["shape"] == "steady"}
    largest = max(steady)
    say(f"  a step takes {steady[1]:.1f} ms for 1 stream, {steady[largest]:.1f} ms for {largest}")


def _tune(demo: Demo) -> None:
    """search the batching configuration on the digital twin"""
    from workbench.tuning.result import best_yaml
    from workbench.tuning.run import run_study

    result = run_study(demo_load(demo), _study_folder(demo.out), demo.out / "costs.json")
    result.record().save(demo.out / "study.json")
    best = demo.out / "best.yaml"
    best.write_text(best_yaml(result) if result.best is not None else _fallback_yaml(result), encoding="utf-8")
    say(f"  wrote  {best}")
    say(f"  {result.headline}")


def _fallback_yaml(result: StudyResult) -> str:
    """Where no trial kept every limit: the one that came closest, said as what it is."""
    closest = result.closest[0] if result.closest else None
    config = replace(result.default_config, **closest.params) if closest is not None else result.default_config
    what = f"trial {closest.number}, which came closest" if closest is not None else "the default configuration"
    return f"# {result.headline}.\n# This is {what}.\n{to_yaml(config)}"


def _confirm(demo: Demo) -> None:
    """run the default and the best configuration live, in real time"""
    from workbench.tuning.run import simulate_configured

    study = Record.load(demo.out / "study.json")
    base = demo_load(demo)
    load = {"load.seconds": CONFIRM_S, "load.streams": base.load.streams}
    configs = {
        "default": replace(base, **{**study.counters["default_params"], **load}),
        "best": replace(load_config(demo.out / "best.yaml"), **load),
    }
    for name, config in configs.items():
        demo.record(f"twin_{name}", lambda config=config: simulate_configured(config, demo.out / "costs.json"))
    # Interleaved and mirrored: a slow half minute of a shared machine falls on both alike.
    for number, name in enumerate(("default", "best", "best", "default"), start=1):
        record = demo.record(f"live/{number}_{name}", lambda name=name: _live(demo, name, configs[name]))
        for note in record.notes:
            say(f"  note: {note}")
    for name in configs:
        runs = [Record.load(path) for path in sorted((demo.out / "live").glob(f"*_{name}.json"))]
        quieter = min(runs, key=lambda run: run.numbers.get("latency_p95_ms", float("inf")))
        quieter.save(demo.out / f"paced_{name}.json")
        if quieter.numbers:
            p50, p95 = quieter.numbers["latency_p50_ms"], quieter.numbers["latency_p95_ms"]
            say(f"  {name}: latency p50 {p50:.1f} ms, p95 {p95:.1f} ms (the quieter of {len(runs)} runs)")


def _live(demo: Demo, name: str, config: Config) -> Record:
    """One live run, tried again while the load generator was late; the record of a configuration that could not be run says why."""
    from workbench.measure.paced import run_paced
    from workbench.measure.progress import seconds_bar
    from workbench.measure.steps import speech_clips
    from workbench.runtime.recognizer import Recognizer

    loaded, reason = demo.opened().loaded, ""
    clips = speech_clips(loaded.geometry.sample_rate_hz)
    for _ in range(PACED_TRIES):
        with Recognizer(loaded, config) as recognizer, seconds_bar(f"  {name}, live", config.load.seconds) as progress:
            recognizer.warm_up()
            try:
                return run_paced(recognizer, clips, config.load, progress)
            except RecordError as error:
                reason = str(error)
        say(f"  not counted: {reason}")
    return Record(kind="paced", config=to_dict(config), notes=[f"the {name} configuration: {reason}"])


def _report(demo: Demo) -> None:
    """put everything on one page"""
    from workbench.show.demo_report import write_demo_report

    say(f"  wrote  {write_demo_report(demo.out)}")


def demo_load(demo: Demo) -> Config:
    """The user's configuration with the load of the demo: more live streams than steps one at a time could serve, if batches can."""
    from workbench.measure.twin import CostTable

    costs = Record.load(demo.out / "costs.json")
    streams = max(2, CostTable.from_record(costs).busy_streams(costs.numbers["chunk_ms"] / 1e3, BUSY_SHARE))
    slots = max(2 * streams, demo.config.asr.batching.state_arena_slots)
    return replace(
        demo.config, **{"load.streams": streams, "asr.batching.enabled": True, "asr.batching.state_arena_slots": slots}
    )


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the folder: two demos in one would overwrite each other's records."""
    lock = out.with_name(f".{out.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"--out: another demo is running in {out}; wait for it or use another --out") from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _prepare(config: Config, out: Path, fresh: bool) -> None:
    if fresh and out.exists():
        if not (out / "demo.yaml").exists() and any(out.iterdir()):
            raise InputError(f"--out: {out} is not a demo's folder; --fresh would delete what is in it")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    marker = out / "demo.yaml"
    if marker.exists() and marker.read_text(encoding="utf-8") != to_yaml(config):
        raise InputError(f"--out: {out} holds a demo of another configuration ({marker}); use --fresh or another --out")
    marker.write_text(to_yaml(config), encoding="utf-8")


def _study_folder(out: Path) -> Path:
    """The demo's study in the output folder, so that its database lies beside the results."""
    folder = out / "study"
    if not (folder / "study.yaml").exists():
        if not STUDY.is_dir():
            raise StudyError(f"{STUDY} is absent; the demo's study is part of the repository, run it from a clone")
        folder.mkdir(exist_ok=True)
        shutil.copy(STUDY / "study.yaml", folder / "study.yaml")
    return folder


def _where(out: Path) -> None:
    """The finding, which the live runs decide, and where things lie."""
    from workbench.show.demo_report import demo_records, verdict

    print(f"{verdict(demo_records(out))[0]}.")
    databases = sorted((out / "study").glob("*.db"))
    for title, path in (
        ("report", out / "report.html"),
        ("best on the digital twin", out / "best.yaml"),
        *(("study database", path) for path in databases),
    ):
        if path.exists():
            print(f"{title}: {path}")


def _profile_line(record: Record) -> str:
    n = record.numbers
    if "kernels_per_step" in n:
        return (
            f"{n['step_p50_ms']:.2f} ms a step, {n['launches_per_step']:.0f} launches, {n['kernels_per_step']:.0f} kernels, GPU idle "
            f"{n['gpu_idle_share']:.0%}"
        )
    return f"{n['step_p50_ms']:.2f} ms a step, {n['operators_per_step']:.0f} operators"


def _duration_s(path: Path) -> float:
    import soundfile

    info = soundfile.info(path)
    return float(info.frames / info.samplerate)


def _tty() -> bool:
    return sys.stderr.isatty()
