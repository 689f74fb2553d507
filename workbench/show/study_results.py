"""From a study that was run to the files that it leaves, and from its finalists to real runs.

write_study(result, "studies/latency_80ms")                      # results.json, trials.csv, best.yaml, report.html
confirm_studies(["studies/latency_80ms", "studies/pareto"])      # real runs, one after the other on one loaded model
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.config import Config
from workbench.errors import InputError
from workbench.results import Record
from workbench.show.study_report import write_study_report
from workbench.tuning.confirm import ConfirmOptions, confirm
from workbench.tuning.live_host import LiveHost, measured_tf32
from workbench.tuning.outcome import LIVE_FILE, Outcome, with_live, write_outcome
from workbench.tuning.result import StudyResult
from workbench.tuning.run import COSTS_FILE
from workbench.tuning.spec import load_study
from workbench.tuning.study import load_result


def write_study(result: StudyResult, study: str | Path) -> list[Path]:
    """Write everything that a study leaves into its folder, with its real runs if they are there; returns the paths."""
    folder = _folder(study)
    return _write(with_live(result, folder), folder)


def confirm_studies(
    studies: Sequence[str | Path], options: ConfirmOptions | None = None, costs: Sequence[str | Path] = ()
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run the finalists of every study for real and write its files anew. Returns the outcomes as plain data by study, and by folder why one
    could not be run; the others go on."""
    host, found, failed = LiveHost(), dict[str, dict[str, Any]](), dict[str, str]()
    for study in studies:
        try:
            outcome = confirm_study(study, host, options, costs)
        except (InputError, RuntimeError) as error:  # told by the caller; the next study has its own configurations
            failed[str(study)] = f"{type(error).__name__}: {error}"
        else:
            found[outcome.result.spec.name] = outcome.data
    return found, failed


def confirm_study(
    study: str | Path, host: LiveHost, options: ConfirmOptions | None = None, costs: Sequence[str | Path] = ()
) -> Outcome:
    """Run the finalists of one study for real and write its files anew. Raises StudyError if it was never begun."""
    result, live = run_finalists(study, host, options, costs)
    outcome = Outcome.of(result, live)
    _write(outcome, _folder(study))
    return outcome


def run_finalists(
    study: str | Path, host: LiveHost, options: ConfirmOptions | None = None, costs: Sequence[str | Path] = ()
) -> tuple[StudyResult, Record]:
    """The real runs alone; `live.json` is written after every one of them, so that a kill loses none that was measured.

    costs: records or folders of them that the twin used, if not those that the study names or has in its folder: products are computed with the
    precision that they were measured with. Raises StudyError if the study was never begun.
    """
    folder, spec = _folder(study), load_study(study)
    result = load_result(Config(), spec, folder)
    host.tf32 = measured_tf32(_cost_records(costs or [*spec.costs, folder / COSTS_FILE]))
    return result, confirm(result, host, options, keep=lambda live: live.save(folder / LIVE_FILE))


def _cost_records(costs: Sequence[str | Path]) -> list[Record]:
    """Those that are there: a study may have been searched on another machine."""
    files = [file for path in map(Path, costs) for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    return [record for file in files if file.exists() and (record := Record.load(file)).kind == "costs"]


def _write(outcome: Outcome, folder: Path) -> list[Path]:
    return [*write_outcome(outcome, folder), write_study_report(outcome, folder)]


def _folder(study: str | Path) -> Path:
    path = Path(study)
    return path if path.is_dir() else path.parent
