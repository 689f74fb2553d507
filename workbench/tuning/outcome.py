"""What a study leaves in its folder: the finding as `results.json`, every trial as `trials.csv`, and the configuration to deploy as `best.yaml`.

    outcome = Outcome.of(result, live)            # live: the record of the real runs (`workbench confirm`), or None
    outcome.data["default"], outcome.data["document_example"], outcome.data["best"], outcome.data["gain"]
    write_outcome(outcome, "studies/latency_80ms")

Every configuration carries what the twin said of it on fresh traffic and, where there were real runs, what they said. Of the finalists, the real
runs decide which one is the best; without them, the twin does. Units are in the names, as in every record.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.config import Config, to_dict
from workbench.errors import StudyError
from workbench.results import Record, command_line, environment
from workbench.tuning.confirm import AGAIN, HELD
from workbench.tuning.level_search import RESOLUTION
from workbench.tuning.live_summary import live_summary, shown
from workbench.tuning.result import StudyResult, TrialRow, best_yaml
from workbench.tuning.spec import STREAMS, at_streams, load_study
from workbench.tuning.study import load_result

RESULTS_FILE, TRIALS_FILE, BEST_FILE, LIVE_FILE = "results.json", "trials.csv", "best.yaml", "live.json"
# In a study of capacity, as a share: two levels no further apart are not told apart.
_LEVELS_APART = RESOLUTION - 1


@dataclass(frozen=True)
class Outcome:
    """The finding: `result` with the best that the real runs chose, and everything as plain data."""

    result: StudyResult
    live: Record | None
    data: dict[str, Any]

    @classmethod
    def of(cls, result: StudyResult, live: Record | None = None) -> Outcome:
        """Put the two together. Real runs of another study, or of configurations that are no longer its finalists, are left out."""
        if live is not None and live.counters.get("study") != result.spec.name:
            live = None
        runs = live_summary(result, live)
        result = _decided(result, runs)
        sections = {
            "default": _section(result, result.default_config, runs.get("default"), _fresh(result, result.default)),
            **{
                name: _section(result, config, runs.get(name), result.compared.get(name))
                for name, config in result.spec.compared(result.default_config).items()
            },
        }
        best = _label(result, runs)
        if result.best is not None and result.best_config is not None:
            sections["best"] = {
                "trial": result.best.number,
                **_section(result, result.best_config, runs.get(best), _fresh(result, result.best)),
            }
        data = {
            "study": result.spec.name,
            "title": result.spec.title,
            "headline": headline(result, sections, _noise(result, runs)["live_again_difference_share"]),
            "objectives": [f"{o.direction} {o.number}" for o in result.spec.objectives],
            "limits": [f"95 % confidence bound of {c.describe()}" for c in result.spec.constraints],
            "load": _load(result),
            "trials": len(result.trials),
            **{name: sections.get(name) for name in ("default", *result.spec.compare, "best")},
            "gain": gains(result, sections),
            "noise": _noise(result, runs),
            "front": _front(result),
            "notes": [*result.notes, *(live.notes if live is not None else ())],
            "environment": {"search": environment(), **({"live": live.environment} if live is not None else {})},
            "command": command_line(),
        }
        return cls(result, live, data)

    def best_yaml(self) -> str:
        """The best configuration as a file; of a study of capacity with an arena for the streams that it was found to carry: more rows may not
        even fit the device. Raises StudyError if no trial kept every limit."""
        best, config = self.data.get("best") or {}, self.result.best_config
        if config is not None and self.result.spec.finds_capacity:
            live, twin = best.get("live") or {}, best.get("twin") or {}
            told = live if live.get("keeps_limits") else twin
            config = at_streams(config, int(told["streams"])) if "streams" in told else config
        return best_yaml(self.result, self.data["headline"], config)


def write_outcome(outcome: Outcome, folder: str | Path) -> list[Path]:
    """Write results.json, trials.csv and, if a configuration kept every limit, best.yaml; returns their paths."""
    root, result = Path(folder), outcome.result
    texts = {
        RESULTS_FILE: json.dumps(outcome.data, indent=1, allow_nan=False, default=str) + "\n",
        TRIALS_FILE: trials_csv(result),
    }
    if result.best is not None:
        texts[BEST_FILE] = outcome.best_yaml()
    else:
        (root / BEST_FILE).unlink(missing_ok=True)
    for name, text in texts.items():
        part = root / f".{name}.{os.getpid()}"
        part.write_text(text, encoding="utf-8")
        part.replace(root / name)
    return [root / name for name in texts]


def outcome_of_study(study: str | Path) -> Outcome:
    """What a study's database says, with the real runs in its folder if there are any. Raises StudyError if it was never begun."""
    folder = Path(study) if Path(study).is_dir() else Path(study).parent
    return with_live(load_result(Config(), load_study(study), folder), folder)


def with_live(result: StudyResult, folder: Path) -> Outcome:
    """The outcome with the real runs that lie in the folder."""
    path = folder / LIVE_FILE
    return Outcome.of(result, Record.load(path) if path.exists() else None)


def best_of(study: str | Path) -> str:
    """The best configuration as YAML: of the study's database, or without one the file that was committed with it. Raises StudyError."""
    folder = Path(study) if Path(study).is_dir() else Path(study).parent
    committed = folder / BEST_FILE
    try:
        outcome = outcome_of_study(study)
    except StudyError:
        if not committed.exists():
            raise
        return committed.read_text(encoding="utf-8")
    return outcome.best_yaml()


def trials_csv(result: StudyResult) -> str:
    """One line per trial: parameters, objectives, excess over each limit, and why."""
    keys, objectives = list(result.spec.space), [objective.number for objective in result.spec.objectives]
    limits = [constraint.describe() for constraint in result.spec.constraints]
    why = ("batch_size_mean_items", "queue_wait_p95_ms", "padding_rows_share")
    lines = [
        [
            "trial",
            "state",
            "default",
            "feasible",
            "duplicate_of",
            *keys,
            *objectives,
            *limits,
            *why,
            "reasons",
            "failure",
        ]
    ]
    for trial in result.trials:
        values = trial.values or [None] * len(objectives)
        reasons = " ".join(f"{reason}={count}" for reason, count in trial.why.get("reasons", {}).items())
        cells = [trial.number, trial.state, trial.is_default, trial.feasible, trial.duplicate_of]
        cells += [trial.params.get(key) for key in keys] + [*values]
        cells += [trial.excess.get(limit) for limit in limits] + [trial.why.get(key) for key in why]
        lines.append([_cell(cell) for cell in [*cells, reasons, trial.failure]])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def headline(result: StudyResult, sections: Mapping[str, Any], noise: float | None) -> str:
    """The finding in one sentence, by the real runs if there are any. noise: how far two equal real runs lie apart; no more is no difference, nor
    is what lies within the resolution of levels."""
    number, best = result.spec.objectives[0].number, sections.get("best", {})
    apart, within = noise, "the noise"
    if result.spec.finds_capacity and (noise or 0.0) < _LEVELS_APART:
        apart, within = _LEVELS_APART, "the tenth to which levels are found"
    if best.get("live") is None or number not in best["live"]:
        why = (best.get("live") or {}).get("why")
        return f"On the digital twin: {result.headline}" + (f"; its real runs were not measured: {why}" if why else "")
    against, held = [], best["live"].get(HELD)
    for name in ("default", *result.spec.compare):
        other = (sections[name] or {}).get("live") or {}
        share = _known_gain(result, other, best["live"])
        if result.best is result.default and name == "default":
            continue
        if share is None:
            if other.get(HELD) is not None or (held is not None and number in other):
                against.append(f"not to be compared with {name.replace('_', ' ')}'s {other[number]:.4g}")
            continue
        less = (share > 0) == (result.spec.objectives[0].direction == "minimise")
        broken = "" if other.get("keeps_limits") else " (which breaks a limit)"
        if apart is not None and abs(share) <= apart:
            against.append(f"no different from {name.replace('_', ' ')}'s {other[number]:.4g} within {within}{broken}")
            continue
        against.append(
            f"{'at least ' if held is not None else ''}{abs(share) * 100:.1f} % {'less' if less else 'more'} than {name.replace('_', ' ')}'s {other[number]:.4g}{broken}"
        )
    reached = "" if held is None else f" at least (the load generator lagged at {held})"
    if not best["live"].get("keeps_limits"):
        broke = (
            "it broke a limit there"
            if result.spec.finds_capacity
            else "the confidence bound of its runs breaks a limit"
        )
        reached += f", though {broke}"
    others = [(sections[name] or {}).get("live") or {} for name in ("default", *result.spec.compare)]
    if held is not None and all(other.get(number) == best["live"][number] and other.get(HELD) for other in others):
        lagged = f"the load generator lagged at {held}, so none could be taken to its own limit"
        return f"In real runs nothing tells the configurations apart: each ran with {best['live'][number]:.4g} streams, and {lagged}. On the digital twin: {result.headline}"
    said = "no configuration was better than the default" if result.best is result.default else ""
    found = ", ".join(filter(None, [said, *against]))
    return f"In real runs: {number} {best['live'][number]:.4g}{reached}" + (f": {found}" if found else "")


def gains(result: StudyResult, sections: Mapping[str, Any]) -> dict[str, Any]:
    """Improvement of the best over every other section in the first objective, as shares of the other's value, on the twin and in real runs."""
    number, best = result.spec.objectives[0].number, sections.get("best")
    out: dict[str, Any] = {"number": number, "direction": result.spec.objectives[0].direction}
    for where in ("twin", "live"):
        for name in ("default", *result.spec.compare):
            ours, other = ((section or {}).get(where) or {} for section in (best, sections.get(name)))
            out[f"{where}_over_{name}_share"] = _known_gain(result, other, ours)
            if other.get("keeps_limits") is False:
                out[f"{where}_{name}_keeps_limits"] = False
    return out


def _decided(result: StudyResult, runs: Mapping[str, Mapping[str, Any]]) -> StudyResult:
    """With real runs of one objective, the finalist that did best in them and kept the limits is the best."""
    number, sign = result.spec.objectives[0].number, 1 if result.spec.objectives[0].direction == "minimise" else -1
    if len(result.spec.objectives) > 1 or result.best is None:
        return result
    if number not in runs.get("default" if result.best.is_default else "best", {}):
        return result  # without its own runs, nothing is known to be better than it
    trials = {"default": result.default, "best": result.best}
    trials |= {f"trial_{trial.number}": trial for trial in result.trials}
    able = [label for label, run in runs.items() if label in trials and run.get("keeps_limits") and number in run]
    if not able:
        return result
    winner = min(able, key=lambda label: (sign * runs[label][number], label != "default"))
    if any(HELD in runs[label] for label in able if label != winner):
        return result  # one that the load generator held back may carry more than the winner
    return replace(result, best=trials[winner])


def _label(result: StudyResult, runs: Mapping[str, Any]) -> str:
    """Under which name the best ran for real."""
    if result.best is None or result.best.is_default:
        return "default"
    named = f"trial_{result.best.number}"
    return named if named in runs else "best"


def _section(
    result: StudyResult, config: Config, run: Mapping[str, Any] | None, fresh: Mapping[str, Any] | None
) -> dict[str, Any]:
    plain = to_dict(config)
    keys = [*result.spec.space, *(() if STREAMS in result.spec.space else (STREAMS,))]
    twin = None
    if fresh:
        numbers = {
            **fresh["numbers"],
            **dict(zip([o.number for o in result.spec.objectives], fresh["values"], strict=True)),
        }
        twin = {"keeps_limits": all(excess <= 0 for excess in fresh["excess"].values()), **shown(result, numbers)}
    if result.spec.finds_capacity and twin is not None:  # the level that it was judged to carry, not that of its trial
        plain["load"]["streams"] = int(twin["streams"])
    return {
        "configuration": {key: _at(plain, key) for key in keys if result.spec.offline is None or key != STREAMS},
        "twin": twin,
        "live": dict(run) if run is not None else None,
    }


def _fresh(result: StudyResult, trial: TrialRow | None) -> dict[str, Any] | None:
    """The trial's judgement on fresh traffic, else the trial itself."""
    if trial is None or trial.values is None:
        return None
    own = {"values": list(trial.values), "excess": trial.excess, "numbers": trial.numbers}
    judged: dict[str, Any] = result.confirmation.get(str(trial.number), own)
    return judged


def _gain(result: StudyResult, other: float | None, best: float | None) -> float | None:
    if not other or best is None:
        return None
    return round(1 - best / other if result.spec.objectives[0].direction == "minimise" else best / other - 1, 6)


def _known_gain(result: StudyResult, other: Mapping[str, Any], best: Mapping[str, Any]) -> float | None:
    """The gain of the best, at least; None where the other, or a best that looks no better than levels are found, may carry more than the load
    generator spoke."""
    number = result.spec.objectives[0].number
    share = _gain(result, other.get(number), best.get(number))
    unknown = HELD in other or (HELD in best and share is not None and share <= _LEVELS_APART)
    return None if unknown else share


def _noise(result: StudyResult, runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A/A: how far two judgements of one configuration lie apart."""
    number = result.spec.objectives[0].number
    pair = [runs.get(label, {}) for label in ("best" if "best" in runs else "default", AGAIN)]
    # Two that the load generator held below one level are equal for that alone.
    first, again = (None if HELD in run else run.get(number) for run in pair)
    live = abs(again / first - 1) if first and again is not None else None
    return {"twin_again_difference_share": result.again_share, "live_again_difference_share": live}


def _front(result: StudyResult) -> list[dict[str, Any]]:
    if len(result.spec.objectives) < 2:
        return []
    names = [objective.number for objective in result.spec.objectives]
    rows = [
        {**dict(zip(names, t.values or (), strict=False)), "configuration": t.params, "trial": t.number}
        for t in result.pareto
    ]
    return sorted(rows, key=lambda row: row[names[0]])


def _load(result: StudyResult) -> dict[str, Any]:
    work, load = result.spec.offline, result.default_config.load
    if work is not None:
        return {"recordings_per_set": work.recordings, "sets": list(work.lengths), "concurrency": work.concurrency}
    streams = "searched" if STREAMS in result.spec.space else load.streams
    return {"streams": streams, "seconds": load.seconds, "starts": load.starts, "coordinated": load.coordinated}


def _at(plain: Mapping[str, Any], dotted: str) -> Any:
    for part in dotted.split("."):
        plain = plain[part]
    return plain


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value
