"""From a study folder to a result: load or measure the cost table, let the twin evaluate, run the search.

    result = run_study(Config(), "studies/demo", costs_path="runs/costs.json")

The measured part is the cost table; every trial then simulates the study's load with the recogniser's own scheduler.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from workbench.config import AsrConfig, Config, replace
from workbench.errors import ConfigError, RecordError
from workbench.geometry import StreamGeometry
from workbench.measure.twin import CostTable, twin_runner
from workbench.results import Record
from workbench.tuning.result import StudyResult
from workbench.tuning.spec import load_study
from workbench.tuning.study import tune

# What a simulation can change; anything else changes the costs themselves.
MODELLED = ("asr.batching.", "load.")
COSTS_FILE = "costs.json"
BATCHES = (1, 2, 4, 8, 16)


def run_study(
    base: Config, study: Path, costs_path: Path | None, trials: int | None = None, storage: str | None = None
) -> StudyResult:
    """Run or resume the study in folder `study` on the twin; its cost record is kept beside it."""
    spec = load_study(study)
    folder = study if study.is_dir() else study.parent
    if trials is not None:
        spec = dataclasses.replace(spec, budget=dataclasses.replace(spec.budget, trials=trials))
    if storage is not None:
        spec = dataclasses.replace(spec, storage=storage)
    path = costs_path or folder / COSTS_FILE
    if costs_path is None and not path.exists():
        from workbench.measure.bench import costs_configured

        costs_configured(spec.configure(base), BATCHES).save(path)
    costs = Record.load(path)
    table = CostTable.from_record(costs)
    base = as_measured(base, costs)
    as_measured(spec.configure(base), costs)
    foreign = [key for key in spec.space if not key.startswith(MODELLED)]
    if foreign:
        raise ConfigError(
            f"space.{foreign[0]}: the twin does not model this key; allowed are {', '.join(f'{m}*' for m in MODELLED)}"
        )
    evaluate = twin_runner(table, geometry_of(costs), shipped_lengths())
    return tune(base, spec, evaluate, folder=folder, measured_with=table.digest(), progress=sys.stderr.isatty())


def simulate_configured(config: Config, costs_path: Path) -> Record:
    """One simulated run of `config.load` with the costs of a record."""
    costs = Record.load(costs_path)
    config = as_measured(config, costs)
    return twin_runner(CostTable.from_record(costs), geometry_of(costs), shipped_lengths())(config)


def as_measured(config: Config, costs: Record) -> Config:
    """`config` with the model, context and precision of the cost record: those are what a simulation stands for.

    Raises ConfigError where the configuration asks for something else than was measured.
    """
    geometry, default, changes = geometry_of(costs), AsrConfig(), {}
    measured = {**costs.config.get("asr", {}), "att_context_size": [geometry.left_frames, geometry.right_frames]}
    for key in ("model", "att_context_size", "dtype", "cuda_graphs", "max_symbols", "label_rate_hz"):
        if key not in measured:
            continue
        asked = getattr(config.asr, key)
        asked = list(asked) if isinstance(asked, tuple) else asked
        if asked not in (getattr(default, key), measured[key]):
            raise ConfigError(
                f"asr.{key}: got {asked!r}; the costs were measured with {measured[key]!r}; measure costs for it first"
            )
        changes[f"asr.{key}"] = measured[key]
    return replace(config, **changes)


def geometry_of(costs: Record) -> StreamGeometry:
    """The geometry that a cost record was measured at. Raises RecordError if it does not say."""
    try:
        return StreamGeometry(**costs.counters["geometry"])
    except (KeyError, TypeError):
        raise RecordError("the record does not say at what streaming geometry its costs were measured") from None


def shipped_lengths(sample_rate_hz: int = 16000) -> list[int]:
    """Lengths in samples of the shipped recordings, from their headers."""
    import soundfile

    from workbench.model.speech import SHIPPED_SPEECH, read_manifest

    infos = [soundfile.info(item.path) for item in read_manifest(SHIPPED_SPEECH).items]
    return [info.frames * sample_rate_hz // info.samplerate for info in infos]
