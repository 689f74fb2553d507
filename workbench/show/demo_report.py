"""The demo's report: the records in its folder, told as one page with the finding first.

    write_demo_report("demo")        # reads demo/*.json and demo/best.yaml, writes demo/report.html

Parts that were not run are left out. The finding is what the live runs showed: a best configuration that was better only on the
twin is reported as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.errors import RecordError
from workbench.results import Record
from workbench.show import plots, study_plots
from workbench.show.timeline import idle_bar_figure
from workbench.tuning.report import Chart, Fact, Report, Section, Table, Words, write_report

NAMES = (
    "transcripts",
    "profile",
    "profile_graphed",
    "costs",
    "study",
    "twin_default",
    "twin_best",
    "paced_default",
    "paced_best",
)
# Two live runs of a few seconds differ by this much without a cause; less is not called a difference.
NOISE_SHARE = 0.05
TOP_TRIALS = 10


def write_demo_report(folder: str | Path) -> Path:
    """Write `report.html` from the records in `folder` and return its path. Raises RecordError if there are none."""
    root = Path(folder)
    records = demo_records(root)
    if not records:
        raise RecordError(f"{root}: no records there; run the demo first")
    best = root / "best.yaml"
    best_yaml = best.read_text(encoding="utf-8") if best.exists() else ""
    sections = (
        _latency(records),
        _study(records, best_yaml),
        _costs(records),
        _profile(records),
        _transcripts(records),
    )
    sentence, lead = verdict(records)
    report = Report(
        title=_title(records),
        verdict=sentence,
        lead=lead,
        facts=tuple(_facts(records)),
        warnings=tuple(
            dict.fromkeys(note for name, record in records.items() if name != "study" for note in record.notes)
        ),
        sections=tuple(section for section in sections if section is not None),
        environment=next(reversed(records.values())).environment,
        sources=[(name, record.command, record.created_utc) for name, record in records.items()],
    )
    return write_report(root / "report.html", report)


def demo_records(folder: Path) -> dict[str, Record]:
    """The records of a demo that are there, by name."""
    return {name: Record.load(path) for name in NAMES if (path := folder / f"{name}.json").exists()}


def verdict(records: Mapping[str, Record]) -> tuple[str, str]:
    """The finding in one sentence, by the live runs if there are any, else by the twin; and what supports or limits it."""
    study = records.get("study")
    if study is None:
        return "No configuration was tuned yet", ""
    headline = f"{study.counters['headline']}."
    default, best = (_p95(records.get(f"paced_{name}")) for name in ("default", "best"))
    on_twin = f"On the digital twin: {headline}"
    if study.numbers["best_trial"] is None:
        return "No configuration kept every limit", headline
    if study.numbers["best_trial"] == study.numbers["default_trial"]:
        return "No configuration found was better than the default", on_twin
    if default is None or best is None:
        return "The best configuration was not confirmed by live runs", on_twin
    if (slower := _disturbed(records)) is not None:
        return "The live runs do not compare: the machine was busy with other work", f"{slower}. {on_twin}"
    gain = 1 - best / default
    found = f"p95 {best:.1f} ms against {default:.1f} ms, live"
    if abs(gain) < NOISE_SHARE:
        return f"The tuned configuration is as good as the default within noise: {found}", on_twin
    if gain < 0:
        return f"The tuned configuration is worse than the default: {found}. Keep the default", on_twin
    return f"{gain:.0%} less p95 latency than the default: {found}", on_twin


def _disturbed(records: Mapping[str, Record]) -> str | None:
    """If steps of about the same size took longer in one live run, something else used the machine: the latencies do not compare."""
    default, best = (records[f"paced_{name}"].counters for name in ("default", "best"))
    needed = ("batch_size_mean_items", "execution_p50_ms")
    if not all(counters.get(name) for counters in (default, best) for name in needed):
        return None
    alike = abs(best[needed[0]] / default[needed[0]] - 1) < NOISE_SHARE
    ratio = best[needed[1]] / default[needed[1]] - 1
    if not alike or abs(ratio) < 2 * NOISE_SHARE:
        return None
    name, share = ("best", ratio) if ratio > 0 else ("default", 1 / (1 + ratio) - 1)
    return f"Steps of the same size took {share:.0%} longer in the {name} run than in the other; run the demo again on an idle machine"


def _p95(record: Record | None) -> float | None:
    return None if record is None else record.numbers.get("latency_p95_ms")


def _title(records: Mapping[str, Record]) -> str:
    asr: dict[str, Any] = next((record.config["asr"] for record in records.values() if "asr" in record.config), {})
    return f"Streaming speech recognition workbench: {asr.get('model', 'model')}"


def _facts(records: Mapping[str, Record]) -> list[Fact]:
    facts = []
    study = records.get("study")
    for name in ("default", "best"):
        run = records.get(f"paced_{name}")
        if run is not None and (p95 := _p95(run)) is not None:
            params = study.counters[f"{name}_params"] if study is not None else {}
            facts.append(Fact(f"p95 chunk latency, {name}, live", f"{p95:.1f} ms", _short(params)))
    run = records.get("paced_default")
    if run is not None and run.numbers:
        late = f"{run.numbers['late_share']:.1%} of chunks late"
        facts.append(Fact("live load", f"{run.numbers['streams']} streams", f"{run.numbers['load_s']:g} s, {late}"))
    transcripts = records.get("transcripts")
    if transcripts is not None and "wer" in transcripts.numbers:
        numbers = transcripts.numbers
        facts.append(
            Fact(
                "word error rate",
                f"{numbers['wer']:.1%}",
                f"{numbers['wer_words']} words, {numbers['wer_clips']} clips",
            )
        )
    profile = records.get("profile")
    if profile is not None and "step_p50_ms" in profile.numbers:
        detail = f"of {profile.numbers['chunk_ms']} ms audio" if "chunk_ms" in profile.numbers else ""
        facts.append(Fact("one step, one stream, p50", f"{profile.numbers['step_p50_ms']:.2f} ms", detail))
    if study is not None:
        detail = f"{study.numbers['trials_failed']} failed, {study.numbers['trials_infeasible']} broke a limit"
        facts.append(Fact("configurations tried", str(study.numbers["trials"]), detail))
    return facts


def _latency(records: Mapping[str, Record]) -> Section | None:
    runs = {name: run for name in ("default", "best") if (run := records.get(f"paced_{name}")) and run.numbers}
    if not runs:
        return None
    first = next(iter(runs.values())).numbers
    text = [
        f"{first['streams']} live streams spoke for {first['load_s']:g} s in real time. Latency counts from when the last sample that a "
        f"chunk of {first['chunk_ms']:g} ms needs was spoken, so waiting in any queue is in it."
    ]
    charts = [
        Chart(plots.latency_curves(runs), "Share of chunks done within a latency; further left is better."),
        Chart(
            plots.latency_bars(runs), "Percentiles of a chunk's latency, and p95 of the final result of an utterance."
        ),
    ]
    if all(run.counters.get("batch_sizes") for run in runs.values()):
        charts.append(Chart(plots.batch_sizes(runs), "How many chunks shared a step: the reason behind the latencies."))
    pairs = {name: (twin, run) for name, run in runs.items() if (twin := _twin(records, name)) is not None}
    if pairs:
        text += [_slower(name, twin, run) for name, (twin, run) in pairs.items()]
        caption = "The digital twin's prediction beside the live run, with its error in per cent."
        if "twin_default" not in records:
            caption += " The twin's numbers are those of the study, on traffic of its own."
        charts.append(Chart(plots.twin_against_real(pairs), caption))
    columns, rows = _run_table(runs)
    return Section(
        "Live latency", tuple(filter(None, text)), tuple(charts), (Table(columns, rows, "The live runs in numbers"),)
    )


def _slower(name: str, twin: Record, run: Record) -> str:
    """What explains a twin that is off: the live steps did not take what the cost table says."""
    simulated, live = (record.counters.get("execution_p50_ms") for record in (twin, run))
    if not simulated or not live or abs(live / simulated - 1) < 2 * NOISE_SHARE:
        return ""
    return (
        f"In the live run of {name} a step took {live:.3g} ms (p50), on the twin {simulated:.3g} ms: steps on this machine did not "
        "cost what the cost table says while the load ran, so the twin is off by as much and more."
    )


def _run_table(runs: Mapping[str, Record]) -> tuple[list[str], list[list[Any]]]:
    wanted = (
        ("chunk latency p50, ms", "latency_p50_ms"),
        ("chunk latency p95, ms", "latency_p95_ms"),
        ("chunk latency p99, ms", "latency_p99_ms"),
        ("final latency p50, ms", "final_p50_ms"),
        ("final latency p95, ms", "final_p95_ms"),
        ("chunks", "latency_n"),
        ("chunks late by more than one chunk", "late_chunks"),
        ("load generator's own lateness p99, ms", "generator_late_p99_ms"),
        ("transcripts compared with the stream alone", "transcripts_compared"),
        ("transcripts that differ", "transcript_mismatches"),
    )
    counted = (
        ("steps", "batches"),
        ("mean chunks in a step", "batch_size_mean_items"),
        ("queue wait p95, ms", "queue_wait_p95_ms"),
        ("step p50, ms", "execution_p50_ms"),
        ("step p95, ms", "execution_p95_ms"),
    )
    rows = [[label, *(run.numbers.get(name) for run in runs.values())] for label, name in wanted]
    rows += [[label, *(run.counters.get(name) for run in runs.values())] for label, name in counted]
    reasons = [", ".join(f"{k} {v}" for k, v in run.counters.get("reasons", {}).items()) for run in runs.values()]
    rows.append(["why a step left", *reasons])
    return ["", *runs], [row for row in rows if any(value is not None for value in row[1:])]


def _twin(records: Mapping[str, Record], name: str) -> Record | None:
    """The twin's run of a configuration: its own record, else the numbers that the study kept of that trial."""
    study = records.get("study")
    if f"twin_{name}" in records or study is None:
        return records.get(f"twin_{name}")
    for row in study.rows:
        if row["trial"] == study.numbers[f"{name}_trial"] and "latency_p95_ms" in row["numbers"]:
            return Record(kind="twin", numbers=row["numbers"], counters=row["why"], environment=study.environment)
    return None


def _study(records: Mapping[str, Record], best_yaml: str) -> Section | None:
    study = records.get("study")
    if study is None:
        return None
    objectives = [f"{o['direction']} {o['number']}" for o in study.counters["objectives"]]
    limits = study.counters["constraints"]
    text = [
        f"Objective: {', '.join(objectives)}{'; kept: ' + ', '.join(limits) if limits else ''}. The study ran on the digital twin: the "
        "recogniser's own scheduler with the step costs measured below.",
        *(f"{sentence}." for sentence in (study.counters["headline"], *study.notes)),
    ]
    finished = [row for row in study.rows if row["values"]]
    charts: tuple[Chart, ...] = ()
    if finished:
        charts = (
            Chart(
                study_plots.history(study),
                "Every trial in order. Those far above the others are drawn at the upper edge.",
            ),
            Chart(study_plots.parameter_slices(study), "The objective against each tuned key."),
        )
        if len(objectives) == 2:
            charts += (
                Chart(study_plots.pareto(study), "The trials that no other beats in both objectives are joined."),
            )
    table = _trial_table(study)
    return Section("Tuning", tuple(text), charts, (table,) if table else (), best_yaml, folded=True)


def _trial_table(study: Record) -> Table | None:
    """The best trials and the default, each with why."""
    sign = 1 if study.counters["objectives"][0]["direction"] == "minimise" else -1
    name = study.counters["objectives"][0]["number"]
    finished = [row for row in study.rows if row["values"] and row["duplicate_of"] is None]
    ranked = sorted(finished, key=lambda row: (not row["feasible"], sign * row["values"][name]))
    shown = ranked[:TOP_TRIALS] + [row for row in ranked[TOP_TRIALS:] if row["is_default"]]
    if not shown:
        return None
    keys = list(study.counters["space"])
    rows = [
        [
            row["trial"],
            *(row["params"].get(key) for key in keys),
            *row["values"].values(),
            row["feasible"],
            row["why"].get("batch_size_mean_items"),
            row["why"].get("queue_wait_p95_ms"),
            ", ".join(f"{reason} {count}" for reason, count in row["why"].get("reasons", {}).items()),
            "default" if row["is_default"] else "",
        ]
        for row in shown
    ]
    columns = [
        "trial",
        *(key.rpartition(".")[2] for key in keys),
        *(plots.title(objective["number"]) for objective in study.counters["objectives"]),
        "keeps limits",
        "mean chunks in a step",
        "queue wait p95, ms",
        "why a step left",
        "",
    ]
    marked = frozenset(i for i, row in enumerate(shown) if row["trial"] == study.numbers["best_trial"])
    return Table(
        columns, rows, f"The {len(shown)} best of {len(finished)} measured configurations, and the default", marked
    )


def _costs(records: Mapping[str, Record]) -> Section | None:
    costs = records.get("costs")
    if costs is None:
        return None
    rows = [
        [row["shape"], row["batch"], row["ms_p50"], row["ms_p95"], row["ms_p50"] / row["batch"]] for row in costs.rows
    ]
    columns = ("kind of step", "chunks in it", "p50, ms", "p95, ms", "p50 / chunks, ms")
    chart = Chart(
        plots.cost_curves(costs), "Left: a whole step. Right: its share per chunk; where it falls, batching pays."
    )
    text = "Measured on this machine; the twin draws every step's duration from these measurements."
    return Section("What a step costs", (text,), (chart,), (Table(columns, rows, "The cost table"),), folded=True)


def _profile(records: Mapping[str, Record]) -> Section | None:
    labels = {"profile": "eager", "profile_graphed": "CUDA graph"}
    found = {label: records[name] for name, label in labels.items() if name in records}
    if not found:
        return None
    rows = []
    for key in dict.fromkeys(key for record in found.values() for key in record.numbers):
        values = [record.numbers.get(key) for record in found.values()]
        if any(isinstance(value, int | float) for value in values):
            rows.append([key.replace("_", " "), *values])
    tables = [Table(["per step, one stream", *found], rows, "The profile in numbers")]
    for label, record in found.items():
        top = [[r["name"], r["calls_per_step"], r["ms_per_step"], r["share"]] for r in record.rows[:14]]
        tables.append(
            Table(("what", "calls per step", "ms per step", "share of 1"), top, f"Where the time goes, {label}")
        )
    chart = Chart(idle_bar_figure(found), "How much of a profiled step the device worked, and why not for the rest.")
    text = "Times are taken without a profiler; counts and shares come from a profiled step."
    return Section("Where the time of a step goes", (text,), (chart,), tuple(tables), folded=True)


def _transcripts(records: Mapping[str, Record]) -> Section | None:
    record = records.get("transcripts")
    if record is None:
        return None
    rows = [
        [Path(row["path"]).stem, round(row["duration_s"], 1), row["reference"], row["error"] or _compared(row)]
        for row in record.rows
    ]
    numbers = record.numbers
    scored = f" Word error rate {numbers['wer']:.1%} over {numbers['wer_words']} words." if "wer" in numbers else ""
    text = f"{numbers['transcribed']} recordings of human speech, {numbers['audio_s']:.0f} s, pushed as live streams.{scored}"
    marks = "Marked words are wrong or added, struck words are missing; case and punctuation do not count."
    table = Table(("recording", "s", "reference", "recognised"), rows, marks)
    return Section("Transcripts", (text,), (), (table,))


def _compared(row: Mapping[str, Any]) -> Any:
    """The recognised text with the words that differ from the reference marked."""
    import jiwer

    from workbench.runtime.transcribe import plain

    reference, text = plain(row["reference"] or ""), plain(row["text"] or "")
    if not reference:
        return row["text"]
    aligned = jiwer.process_words(reference, text)
    wanted, got = aligned.references[0], aligned.hypotheses[0]
    spans: list[tuple[str, str]] = []
    for part in aligned.alignments[0]:
        words = " ".join(got[part.hyp_start_idx : part.hyp_end_idx])
        lost = " ".join(wanted[part.ref_start_idx : part.ref_end_idx])
        kind = {"equal": "same", "substitute": "wrong", "insert": "added", "delete": "missing"}[part.type]
        spans.append((kind, lost if kind == "missing" else words))
    return Words(tuple(spans))


def _short(params: Mapping[str, Any]) -> str:
    return " · ".join(f"{key.rpartition('.')[2]} {value}" for key, value in params.items())
