"""Several cost records as one: each stands for its model, look-ahead, precision, graphs and pipeline, and a configuration gets its own.

    book = CostBook.load(["costs_56_0.json", "costs_56_13.json"])      # or a folder of records
    config = book.fit(config)                       # what the configuration leaves open is taken from what was measured
    evaluate = book.runner(clip_samples)            # Config -> Record, on the digital twin
    evaluate(replace(config, **{"asr.att_context_size": [56, 13]}))

A configuration that nothing was measured for is refused: a simulation stands for its costs and for nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.config import AsrConfig, Config, replace
from workbench.errors import ConfigError, RecordError
from workbench.geometry import StreamGeometry
from workbench.measure.cost_table import CostTable
from workbench.measure.twin import twin_runner
from workbench.results import Record

# What changes the costs themselves. A record says with which values it was measured.
MATCHED = (
    *("model", "att_context_size", "dtype", "cuda_graphs", "encoder", "weights", "pipeline", "max_symbols"),
    "label_rate_hz",
)


@dataclass(frozen=True)
class Measured:
    """One cost record and the values of the keys that it stands for; of a key that is younger than the record, the default."""

    record: Record
    asr: dict[str, Any]
    geometry: StreamGeometry

    @classmethod
    def of(cls, record: Record) -> Measured:
        """Raises RecordError for another kind of record, or one that does not say at what geometry it was measured."""
        if record.kind != "costs":
            raise RecordError(f"got a record of kind {record.kind!r}; a cost table is one of kind 'costs'")
        geometry = geometry_of(record)
        if not isinstance(record.config.get("asr", {}), dict):
            raise RecordError("costs: the record is damaged; its config has no section asr")
        asr, default = record.config.get("asr", {}), AsrConfig()
        stands_for = {key: asr.get(key, _plain(getattr(default, key))) for key in MATCHED}
        return cls(record, {**stands_for, "att_context_size": [geometry.left_frames, geometry.right_frames]}, geometry)

    def contradicts(self, config: Config, strict: Collection[str]) -> list[str]:
        """Keys that the configuration asks otherwise; one left at its default asks for nothing, unless it is named in `strict`."""
        default = AsrConfig()
        return [
            key
            for key, value in self.asr.items()
            if asked(config, key) != value and (key in strict or asked(config, key) != _plain(getattr(default, key)))
        ]

    def agreements(self, config: Config) -> int:
        """How many keys the configuration asks for exactly as measured."""
        return sum(asked(config, key) == value for key, value in self.asr.items())

    def describe(self) -> str:
        """The values in words."""
        return ", ".join(f"{key} {value}" for key, value in self.asr.items())


class CostBook:
    """Cost records by what they stand for."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.measured = tuple(map(Measured.of, records))
        if not self.measured:
            raise RecordError("costs: got no record; needed is at least one of kind 'costs' (workbench bench costs)")
        for position, one in enumerate(self.measured):
            if any(one.asr == other.asr and _stages(one) & _stages(other) for other in self.measured[:position]):
                raise RecordError(f"costs: two records for {one.describe()}; allowed is one")

    @classmethod
    def load(cls, paths: Sequence[str | Path]) -> CostBook:
        """Read records, and every record of kind `costs` in a folder. Raises RecordError naming the file."""
        records = []
        for path in map(Path, paths):
            if path.is_dir():
                found = [Record.load(file) for file in sorted(path.glob("*.json"))]
                records += [record for record in found if record.kind == "costs"]
            else:
                records.append(Record.load(path))
        return cls(records)

    def fit(self, config: Config, searched: Collection[str] = (), stage: str = "step") -> Config:
        """The configuration with the measured value of every key that it leaves at its default.

        searched: dotted keys that a study varies; they are taken as they are; stage: of the rows that are needed. Raises ConfigError where the configuration asks for
        something that was not measured, or where several records would do.
        """
        strict = {key.removeprefix("asr.") for key in searched}
        fits = [one for one in self.measured if stage in _stages(one) and not one.contradicts(config, strict)]
        if not fits:
            raise self._unmeasured(config, strict, stage)
        most = max(one.agreements(config) for one in fits)
        best = [one for one in fits if one.agreements(config) == most]
        first = best[0].asr
        for other in best[1:]:
            for key in first:
                if first[key] != other.asr.get(key, first[key]):
                    raise ConfigError(
                        f"asr.{key}: got {asked(config, key)!r}; the costs were measured with {first[key]!r} and {other.asr[key]!r}: say which"
                    )
        return replace(config, **{f"asr.{key}": value for key, value in first.items()})

    def pick(self, config: Config, stage: str = "step") -> Measured:
        """The record of a configuration, with rows of `stage`. Raises ConfigError if there is none."""
        for one in self.measured:
            if stage in _stages(one) and not one.contradicts(config, MATCHED):
                return one
        raise self._unmeasured(config, set(MATCHED), stage)

    def runner(self, clip_samples: Sequence[int], cohort: int = 0) -> Callable[[Config], Record]:
        """`config -> Record`: the twin with the costs that belong to the configuration."""
        runners: dict[int, Callable[[Config], Record]] = {}

        def run(config: Config) -> Record:
            one = self.pick(config)
            if id(one) not in runners:
                table = CostTable.from_record(one.record)
                runners[id(one)] = twin_runner(table, one.geometry, clip_samples, cohort)
            return runners[id(one)](config)

        return run

    def digest(self) -> str:
        """A short fingerprint of all measurements."""
        parts = [
            CostTable.from_record(one.record, stage).digest()
            for one in self.measured
            for stage in sorted(_stages(one) & {"step", "offline"})
        ]
        return parts[0] if len(parts) == 1 else hashlib.sha256("".join(parts).encode()).hexdigest()[:12]

    def _unmeasured(self, config: Config, strict: Collection[str], stage: str = "step") -> ConfigError:
        if len(self.measured) == 1 and (wrong := self.measured[0].contradicts(config, strict)):
            key = wrong[0]
            return ConfigError(
                f"asr.{key}: got {asked(config, key)!r}; the costs were measured with {self.measured[0].asr[key]!r}; measure costs for it first"
            )
        wanted = ", ".join(f"{key} {asked(config, key)}" for key in MATCHED)
        have = "; ".join(one.describe() for one in self.measured)
        return ConfigError(f"costs: nothing was measured ({stage}) for {wanted}; measured are: {have}")


def geometry_of(costs: Record) -> StreamGeometry:
    """The geometry that a cost record was measured at. Raises RecordError if it does not say."""
    try:
        geometry = StreamGeometry(**costs.counters["geometry"])
    except (KeyError, TypeError):
        raise RecordError("the record does not say at what streaming geometry its costs were measured") from None
    sizes = dataclasses.asdict(geometry)
    if (
        not all(type(value) is int for value in sizes.values())
        or min(geometry.hop_samples, geometry.window_samples, geometry.sample_rate_hz) < 1
    ):
        raise RecordError(
            f"the record's streaming geometry is damaged: got {sizes}; allowed are whole numbers, sizes from 1"
        )
    return geometry


def asked(config: Config, key: str) -> Any:
    """The value of a key of `asr` as plain data."""
    return _plain(getattr(config.asr, key))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _stages(one: Measured) -> set[str]:
    return {str(row.get("stage")) for row in one.record.rows} & {"step", "offline"}
