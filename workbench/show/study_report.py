"""The page of one study: the finding first, then what supports it: the search, which key matters, the real runs, and every trial behind the charts.

    write_study_report(Outcome.of(result, live), "studies/latency_80ms")     # writes report.html

Reads what the study found and what the real runs said, computes nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml
from matplotlib.figure import Figure

from workbench.errors import RecordError
from workbench.results import Record
from workbench.show import plots, study_plots
from workbench.show.record_figure import confirm_figure
from workbench.tuning.confirm import HELD
from workbench.tuning.outcome import Outcome
from workbench.tuning.report import Chart, Fact, Report, Section, Table, write_report

REPORT_FILE = "report.html"
TOP_TRIALS = 15
# Characters of why a run was not kept; the whole text is in live.json.
LONGEST_REASON = 90


def write_study_report(outcome: Outcome, folder: str | Path) -> Path:
    """Write `report.html` into the folder and return its path."""
    study, data = outcome.result.record(), outcome.data
    sections = (
        _comparison(outcome),
        _search(outcome, study),
        _front(outcome),
        _runs(outcome),
        _trials(outcome),
        _best(outcome),
    )
    live = outcome.live
    report = Report(
        title=f"Study {data['study']}: {data['title']}" if data["title"] else f"Study {data['study']}",
        verdict=f"{data['headline']}.",
        lead=_lead(outcome),
        facts=tuple(_facts(outcome)),
        warnings=tuple(dict.fromkeys(data["notes"])),
        sections=tuple(section for section in sections if section is not None),
        environment=study.environment if live is None else live.environment,
        sources=[("the search", study.command, study.created_utc)]
        + ([("the real runs", live.command, live.created_utc)] if live is not None else []),
    )
    return write_report(Path(folder) / REPORT_FILE, report)


def _lead(outcome: Outcome) -> str:
    data = outcome.data
    load = ", ".join(f"{name.replace('_', ' ')}: {_text(value)}" for name, value in data["load"].items())
    limits = f" Limits: {'; '.join(data['limits'])}." if data["limits"] else ""
    return f"Objective: {'; '.join(data['objectives'])}.{limits} Load: {load}. {data['trials']} trials on the digital twin."


def _facts(outcome: Outcome) -> list[Fact]:
    data, number = outcome.data, outcome.result.spec.objectives[0].number
    facts = []
    for name in ("default", *outcome.result.spec.compare, "best"):
        section = data.get(name)
        where = "live" if section and (section.get("live") or {}).get(number) is not None else "twin"
        found = ((section or {}).get(where) or {}).get(number)
        if found is not None:
            kept = "" if section[where].get("keeps_limits", True) else ", breaks a limit"
            held = section[where].get(HELD)
            least = "" if held is None else f", at least: the load generator lagged at {held}"
            facts.append(
                Fact(f"{plots.title(number)}, {_named(name)}", f"{found:.4g}", f"{_where(where)}{kept}{least}")
            )
    noise = {where: data["noise"][f"{where}_again_difference_share"] for where in ("live", "twin")}
    where = "live" if noise["live"] is not None else "twin"
    if noise[where] is not None:
        note = f"{_where(where)}: differences below this are noise"
        facts.append(Fact("the same configuration twice (A/A)", f"{noise[where]:.1%}", note))
    return facts


def _comparison(outcome: Outcome) -> Section | None:
    """The configurations side by side, each as simulated and as run."""
    data = outcome.data
    names = [name for name in ("default", *outcome.result.spec.compare, "best") if data.get(name)]
    columns, cells = ["", *map(_named, names)], list[list[Any]]()
    for key in data[names[0]]["configuration"]:
        cells.append([key.removeprefix("asr."), *(_text(data[name]["configuration"].get(key)) for name in names)])
    settings = Table(columns, cells, "What differs between the configurations")
    tables = [settings]
    for where in ("live", "twin"):
        found = {name: data[name].get(where) or {} for name in names}
        keys = dict.fromkeys(key for section in found.values() for key in section if key not in ("single_runs", "why"))
        rows = [[plots.title(key), *(_text(section.get(key)) for section in found.values())] for key in keys]
        if rows:
            tables.append(Table(columns, rows, f"{_where(where)[0].upper()}{_where(where)[1:]}"))
    text = (
        "All were judged by one rule and met equal traffic, which no trial of the search had seen. "
        + "Gains: "
        + "; ".join(
            f"{key.removesuffix('_share').replace('_', ' ')} {value:+.1%}"
            for key, value in data["gain"].items()
            if key.endswith("_share") and value is not None
        )
        + "."
    )
    return Section("The configurations compared", (text,), (), tuple(tables))


def _search(outcome: Outcome, study: Record) -> Section | None:
    """The trials in order, against each key, which key matters, and the two that matter most together."""
    drawn: tuple[tuple[Callable[[Record], Figure], str], ...] = (
        (study_plots.history, "Every trial in order. Those far above the others are drawn at the upper edge."),
        (study_plots.parameter_slices, "The first objective against each searched key."),
        (study_plots.importance, "How much of the variation each key explains alone."),
        (
            study_plots.contour,
            "The two keys that matter most together; dots are trials, colours between them are interpolated.",
        ),
    )
    charts = []
    for draw, caption in drawn:
        try:
            charts.append(Chart(draw(study), caption))
        except RecordError:  # nothing to draw: too few trials, or one key only
            continue
    found = f"On the digital twin: {outcome.result.headline}."
    return Section("The search", (found,), tuple(charts)) if charts else None


def _front(outcome: Outcome) -> Section | None:
    spec = outcome.result.spec
    if len(spec.objectives) != 2 or not outcome.data["front"]:
        return None
    study = outcome.result.record()
    names, rows = [objective.number for objective in spec.objectives], []
    for row in outcome.data["front"]:
        rows.append(
            [
                row["trial"],
                *(row[name] for name in names),
                *(_text(row["configuration"].get(key)) for key in spec.space),
            ]
        )
    columns = ["trial", *map(plots.title, names), *(key.rpartition(".")[2] for key in spec.space)]
    chart = Chart(study_plots.pareto(study), "The trials that no other beats in both objectives are joined.")
    return Section(
        "The front", (), (chart,), (Table(columns, rows, "The front in numbers"),), folded=len(rows) > TOP_TRIALS
    )


def _runs(outcome: Outcome) -> Section | None:
    live = outcome.live
    if live is None:
        return None
    spec = outcome.result.spec
    numbers = [o.number for o in spec.objectives] + [c.number for c in spec.constraints]
    wanted = list(dict.fromkeys(["streams", *numbers, "latency_p50_ms", "batch_size_mean_items"]))
    rows = [
        [
            row["round"],
            _named(row["label"]),
            *(row.get(name) for name in wanted),
            row["kept"],
            shorten(row["why"], LONGEST_REASON, placeholder=" …"),
        ]
        for row in live.rows
    ]
    columns = ["round", "configuration", *map(plots.title, wanted), "keeps limits", "why not"]
    text = (
        "Each configuration ran on a fresh recogniser in real time, in turns and with the order reversed from round to round; the best ran "
        "twice a round under two names, which shows how far equal runs lie apart."
    )
    charts = []
    if any(row["kept"] is not None for row in live.rows):
        charts = [Chart(confirm_figure(live), "Every real run that was begun.")]
    return Section("The real runs", (text,), tuple(charts), (Table(columns, rows, "Every real run"),))


def _trials(outcome: Outcome) -> Section | None:
    result = outcome.result
    spec, ranked = result.spec, list(result.ranked)[:TOP_TRIALS]
    shown = ranked or list(result.closest)[:TOP_TRIALS]
    if result.default is not None and result.default.values and result.default not in shown:
        shown.append(result.default)
    if not shown:
        return None
    rows = [
        [
            trial.number,
            *(_text(trial.params.get(key)) for key in spec.space),
            *(trial.values or ()),
            trial.feasible,
            trial.why.get("batch_size_mean_items"),
            trial.why.get("queue_wait_p95_ms"),
            ", ".join(f"{reason} {count}" for reason, count in trial.why.get("reasons", {}).items()),
        ]
        for trial in shown
    ]
    columns = [
        "trial", *(key.rpartition(".")[2] for key in spec.space), *(plots.title(o.number) for o in spec.objectives),
        "keeps limits", "mean items in a batch", "queue wait p95, ms", "why a batch left",
    ]  # fmt: skip
    marked = frozenset(
        i for i, trial in enumerate(shown) if result.best is not None and trial.number == result.best.number
    )
    caption = f"The best {len(shown)} of {len(result.trials)} trials and the default; all are in trials.csv"
    return Section("Trials", (), (), (Table(columns, rows, caption, marked),), folded=True)


def _best(outcome: Outcome) -> Section | None:
    if outcome.result.best is None:
        return None
    return Section("The configuration to deploy", code=outcome.best_yaml())


def _named(name: str) -> str:
    return name.replace("_", " ")


def _where(where: str) -> str:
    return "in real runs, median" if where == "live" else "on the digital twin, fresh traffic"


def _text(value: Any) -> Any:
    """Plain data as a cell."""
    if isinstance(value, Mapping):
        return yaml.safe_dump(dict(value), default_flow_style=True).strip()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(str, value)) + "]"
    return "yes" if value is True else "no" if value is False else value
