"""From a study folder to a result: load or measure the costs, let the twin evaluate, run the search.

    result = run_study(Config(), "studies/demo", costs="runs/costs.json")

The measured part are the costs; every trial then simulates the study's load with the recogniser's own scheduler. What a configuration leaves
open, the model above all, is taken from the costs; what contradicts them is refused.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workbench.config import Config, replace
from workbench.errors import ConfigError
from workbench.measure.cost_book import MATCHED, CostBook, geometry_of
from workbench.measure.offline_twin import OFFLINE, OfflineCosts, long_tailed_lengths, simulate_offline
from workbench.results import Record
from workbench.tuning.result import StudyResult
from workbench.tuning.space import Space
from workbench.tuning.spec import OfflineWork, StudySpec, load_study
from workbench.tuning.study import tune

__all__ = ["Prepared", "geometry_of", "prepare", "run_study", "shipped_lengths", "simulate_configured", "work_lengths"]

COSTS_FILE = "costs.json"
BATCHES = (1, 2, 4, 8, 16)
LENGTHS_S = (1.0, 4.0, 16.0)
Costs = str | Path | Sequence[str | Path] | None


@dataclass(frozen=True)
class Prepared:
    """A study that can run. base: the user's configuration with what the costs stand for; evaluate: the twin; digest: of its costs."""

    spec: StudySpec
    folder: Path
    base: Config
    evaluate: Callable[[Config], Record]
    digest: str

    @property
    def default(self) -> Config:
        """The study's default configuration."""
        return self.spec.configure(self.base)


def run_study(
    base: Config,
    study: str | Path,
    costs: Costs = None,
    trials: int | None = None,
    storage: str | None = None,
    overrides: Sequence[str] = (),
) -> StudyResult:
    """Run or resume the study in folder `study` on the twin; costs that were measured for it are kept beside it."""
    ready = prepare(base, study, costs, overrides)
    spec = ready.spec
    if trials is not None:
        spec = dataclasses.replace(spec, budget=dataclasses.replace(spec.budget, trials=trials))
    if storage is not None:
        spec = dataclasses.replace(spec, storage=storage)
    shown = sys.stderr.isatty()
    return tune(ready.base, spec, ready.evaluate, folder=ready.folder, measured_with=ready.digest, progress=shown)


def prepare(base: Config, study: str | Path, costs: Costs = None, overrides: Sequence[str] = ()) -> Prepared:
    """Read a study and its costs: those given, those that it names, those in its folder, or measured now. `overrides` win over its `base:`.

    Raises ConfigError where the study varies or asks for something that was not measured.
    """
    spec = load_study(study).overridden(overrides)
    folder = Path(study) if Path(study).is_dir() else Path(study).parent
    book = CostBook.load(_costs(spec, folder, base, costs))
    _check_space(spec)
    fitted = book.fit(spec.configure(base), spec.space, "step" if spec.offline is None else OFFLINE)
    base = replace(
        base, **{f"asr.{key}": getattr(fitted.asr, key) for key in MATCHED if f"asr.{key}" not in spec.space}
    )
    _check_measured(spec, book, spec.configure(base))
    evaluate = book.runner(shipped_lengths()) if spec.offline is None else _offline_runner(book, spec.offline)
    return Prepared(spec, folder, base, evaluate, book.digest())


def simulate_configured(config: Config, costs: Costs) -> Record:
    """One simulated run of `config.load` with the costs of a record, or of the one of several that belongs to it."""
    book = CostBook.load(_listed(costs))
    return book.runner(shipped_lengths())(book.fit(config))


def shipped_lengths(sample_rate_hz: int = 16000) -> list[int]:
    """Lengths in samples of the shipped recordings, from their headers."""
    import soundfile

    from workbench.model.speech import SHIPPED_SPEECH, read_manifest

    infos = [soundfile.info(item.path) for item in read_manifest(SHIPPED_SPEECH).items]
    return [info.frames * sample_rate_hz // info.samplerate for info in infos]


def work_lengths(work: OfflineWork) -> dict[str, list[int]]:
    """Lengths in samples of the recordings of an offline study, per distribution. `shipped`: drawn between the shipped recordings' lengths,
    since recordings of exactly one length are rarer in the world than in sixty clips repeated."""
    shipped = np.asarray(shipped_lengths())
    shares = (np.arange(work.recordings) + 0.5) / work.recordings
    known = {
        "shipped": np.quantile(shipped, shares).astype(int).tolist(),
        "long_tailed": long_tailed_lengths(work.recordings),
    }
    return {name: known[name] for name in work.lengths}


def _offline_runner(book: CostBook, work: OfflineWork) -> Callable[[Config], Record]:
    lengths = work_lengths(work)
    tables: dict[int, OfflineCosts] = {}

    def run(config: Config) -> Record:
        one = book.pick(config, OFFLINE)
        if id(one) not in tables:
            tables[id(one)] = OfflineCosts.from_record(one.record)
        return simulate_offline(config, tables[id(one)], one.geometry, lengths, work.concurrency)

    return run


def _costs(spec: StudySpec, folder: Path, base: Config, costs: Costs) -> list[Path]:
    if given := _listed(costs) or [Path(path) for path in spec.costs]:
        return given
    path = folder / COSTS_FILE
    if not path.exists():
        from workbench.measure.bench import costs_configured

        lengths_s = LENGTHS_S if spec.offline is not None else ()
        costs_configured(spec.configure(base), BATCHES, lengths_s=lengths_s).save(path)
    return [path]


def _listed(costs: Costs) -> list[Path]:
    if costs is None:
        return []
    return [Path(costs)] if isinstance(costs, str | Path) else [Path(path) for path in costs]


def _check_space(spec: StudySpec) -> None:
    measured = tuple(f"asr.{key}" for key in MATCHED)
    for key in spec.space:
        live = key.startswith("load.") or key == "asr.batch_buckets" or key in measured
        if not key.startswith("asr.batching.") and (spec.offline is not None or not live):
            allowed = (
                "asr.batching.*"
                if spec.offline is not None
                else f"asr.batching.*, load.*, asr.batch_buckets, {', '.join(measured)}"
            )
            raise ConfigError(f"space.{key}: the twin does not model this key; allowed are {allowed}")


def _check_measured(spec: StudySpec, book: CostBook, default: Config) -> None:
    """Every value that the study may choose must have been measured."""
    stage = OFFLINE if spec.offline is not None else "step"
    book.pick(default, stage)
    for parameter in Space.parse(spec.space).parameters:
        if parameter.path.removeprefix("asr.") in MATCHED:
            if parameter.kind != "choices":
                raise ConfigError(f"space.{parameter.path}: got a range; allowed are choices, each with its own costs")
            for choice in parameter.choices:
                book.pick(replace(default, **{parameter.path: choice}), stage)
