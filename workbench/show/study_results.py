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
from workbench.show.study_report import write_study_report
from workbench.tuning.confirm import ConfirmOptions, LiveHost, confirm
from workbench.tuning.outcome import LIVE_FILE, Outcome, with_live, write_outcome
from workbench.tuning.result import StudyResult
from workbench.tuning.spec import load_study
from workbench.tuning.study import load_result


def write_study(result: StudyResult, study: str | Path) -> list[Path]:
    """Write everything that a study leaves into its folder, with its real runs if they are there; returns the paths."""
    folder = _folder(study)
    return _write(with_live(result, folder), folder)


def confirm_studies(
    studies: Sequence[str | Path], options: ConfirmOptions | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run the finalists of every study for real and write its files anew. Returns the outcomes as plain data by study, and by folder why one
    could not be run; the others go on."""
    host, found, failed = LiveHost(), dict[str, dict[str, Any]](), dict[str, str]()
    for study in studies:
        try:
            outcome = confirm_study(study, host, options)
        except (InputError, RuntimeError) as error:  # told by the caller; the next study has its own configurations
            failed[str(study)] = f"{type(error).__name__}: {error}"
        else:
            found[outcome.result.spec.name] = outcome.data
    return found, failed


def confirm_study(study: str | Path, host: LiveHost, options: ConfirmOptions | None = None) -> Outcome:
    """Run the finalists of one study for real and write its files anew. Raises StudyError if it was never begun."""
    folder = _folder(study)
    result = load_result(Config(), load_study(study), folder)
    live = confirm(result, host, options)
    live.save(folder / LIVE_FILE)
    outcome = Outcome.of(result, live)
    _write(outcome, folder)
    return outcome


def _write(outcome: Outcome, folder: Path) -> list[Path]:
    return [*write_outcome(outcome, folder), write_study_report(outcome, folder)]


def _folder(study: str | Path) -> Path:
    path = Path(study)
    return path if path.is_dir() else path.parent
