"""Everything that is measured on one GPU host in one sitting, part by part, on one loaded model.

    campaign = Campaign(Sizes(), Path("OUT"))
    campaign.run("costs")            # writes OUT/stage_costs.json

A part writes its records and nothing else depends on it, except that later parts start from what earlier ones found, if they ran. Parts that
replay graphs come before those that run eagerly, the profiler comes last: a process stays slower after it. The model has random weights with
a set label rate, fp32 with TF32 allowed. `Sizes` shrinks it all to a test.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.config import Config, load_config, replace, to_dict
from workbench.encoder.graphed import set_streaming_cuda_graphs
from workbench.errors import ConfigError, GeneratorLagged, LoadNotCarried
from workbench.measure.capacity import CapacityRule, LevelRun, SearchPlan, find_capacity
from workbench.measure.capacity_engines import EngineSpec, level_config, model_levels, still_collector
from workbench.measure.cost_table import CostTable
from workbench.measure.costs import measure_costs
from workbench.measure.loadgen import build_schedule
from workbench.measure.offline_run import offline_costs
from workbench.measure.paced import PacedOptions, run_paced
from workbench.measure.resident_parts import ResidentSearch, freed, in_dtype, step_rows
from workbench.measure.step_table import DEFAULT_CELLS, StepCell, profile_table
from workbench.measure.steps import speech_clips
from workbench.measure.traffic_costs import traffic_costs
from workbench.measure.twin import simulate
from workbench.measure.twin_check import TwinCheck, check_twin
from workbench.model.load import LoadedModel, load_model, set_context, with_label_rate
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer

BATCHED_KINDS = ("first", "second", "steady")
STARTS_AT = 0.6  # of what the twin predicts from costs of a lone loop, which are lower than those in traffic


@dataclass(frozen=True)
class Sizes:
    """What is measured; the defaults are those of one H200.

    low, high: contexts of shortest and longest look-ahead; batches: of the cost tables; traffic_*: streams of the runs that correct them; dense_*: the
    same up to near what is carried, for studies of capacity;
    offline_*: batches and recordings; *_s: seconds of one run, twin_s of all real runs of a pair; capacity_search_s: after
    which a search starts no further level; nemo_decoder_graphs: NeMo's own loop with its decoder's CUDA graphs, as is its default; resident_*: of the
    resident engine's parts, streams at low and high look-ahead (first and most).
    """

    model: str = "nemotron-0.6b"
    device: str = "auto"
    low: tuple[int, int] = (56, 0)
    high: tuple[int, int] = (56, 13)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    eager_batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    repeats: int = 6
    traffic_streams_low: tuple[int, ...] = (8, 24, 40)
    traffic_streams_high: tuple[int, ...] = (64, 192, 320)
    dense_streams_low: tuple[int, ...] = (8, 40, 100)
    dense_streams_high: tuple[int, ...] = (64, 256, 768)
    dense_streams_resident_low: tuple[int, ...] = (32, 128, 320)
    dense_streams_resident_high: tuple[int, ...] = (128, 512, 1536)
    traffic_s: float = 4.0
    offline_batches: tuple[int, ...] = (1, 4, 16, 64)
    offline_lengths_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    paced_streams: tuple[int, ...] = (8, 32, 64, 128)
    paced_s: float = 10.0
    twin_streams: tuple[int, ...] = (4, 12, 20)
    twin_s: float = 8.0
    capacity_s: float = 8.0
    capacity_search_s: float = 20.0
    cells: tuple[StepCell, ...] = DEFAULT_CELLS
    label_rate_hz: float = 3.0
    max_symbols: int = 2
    nemo_decoder_graphs: bool = True
    resident_batches: tuple[int, ...] = (1, 32, 128, 256)
    resident_steps: int = 200
    resident_ladder: tuple[int, ...] = (1, 8, 32, 64, 128, 192, 256)
    resident_streams_low: tuple[int, int] = (1500, 6000)
    resident_streams_high: tuple[int, int] = (8000, 16000)
    resident_s: float = 10.0
    resident_search_s: float = 48.0


class Campaign:
    """The parts, on one model that is loaded once."""

    def __init__(self, sizes: Sizes, out: Path, report: Callable[[str], None] = print) -> None:
        self.sizes, self.out, self._report = sizes, out, report
        self._loaded: LoadedModel | None = None
        low, high = sizes.low, sizes.high
        self.parts: dict[str, Callable[[], None]] = {
            "costs": lambda: self._costs("stage_costs", low, True),
            "twin": self._twin,
            "paced": lambda: self._paced("nemo", "paced"),
            "paced_resident": lambda: self._paced("resident", "paced_resident"),
            "capacity_fused_low": lambda: self._capacity("fused", low),
            "capacity_staged_low": lambda: self._capacity("staged", low),
            "costs_high": lambda: self._costs(f"stage_costs_{self._chunk_ms(high)}ms", high, True),
            "capacity_fused_high": lambda: self._capacity("fused", high),
            "capacity_staged_high": lambda: self._capacity("staged", high),
            "traffic": lambda: self._traffic("stage_costs", low, sizes.traffic_streams_low),
            "traffic_high": lambda: self._traffic(
                f"stage_costs_{self._chunk_ms(high)}ms", high, sizes.traffic_streams_high
            ),
            "dense": lambda: self._dense("nemo", low, sizes.dense_streams_low),
            "dense_high": lambda: self._dense("nemo", high, sizes.dense_streams_high),
            "dense_resident": lambda: self._dense("resident", low, sizes.dense_streams_resident_low),
            "dense_resident_high": lambda: self._dense("resident", high, sizes.dense_streams_resident_high),
            "offline_costs": self._offline_costs,
            "costs_eager_high": lambda: self._costs(f"stage_costs_eager_{self._chunk_ms(high)}ms", high, False),
            "capacity_nemo_high": lambda: self._capacity("nemo-loop", high),
            "costs_eager": lambda: self._costs("stage_costs_eager", low, False),
            "capacity_nemo_low": lambda: self._capacity("nemo-loop", low),
            "resident_step": self._resident_step,
            "capacity_resident_low": lambda: self._capacity_resident(low, "float32"),
            "capacity_resident_low_bf16": lambda: self._capacity_resident(low, "bfloat16"),
            "capacity_resident_high": lambda: self._capacity_resident(high, "float32"),
            "capacity_resident_high_bf16": lambda: self._capacity_resident(high, "bfloat16"),
            "profile": self._profile,
        }

    def load(self) -> None:
        """Load the model now, so that no part pays for it."""
        self._model(self.sizes.low)

    def run(self, part: str) -> None:
        """Run one part. Whatever it raises is the caller's to handle; records that were written stay."""
        start_s = time.perf_counter()
        self.parts[part]()
        self._report(f"{part}: {time.perf_counter() - start_s:.1f} s")

    def usable(self) -> bool:
        """Whether the device still answers: after an illegal access nothing more can be measured in this process."""
        import torch

        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True

    @cached_property
    def _clips(self) -> Any:
        return speech_clips(16000)

    def _chunk_ms(self, context: tuple[int, int]) -> int:
        return 80 * (context[1] + 1)

    def _model(self, context: tuple[int, int]) -> LoadedModel:
        sizes, loaded = self.sizes, self._loaded
        if loaded is None:
            start_s = time.perf_counter()
            loaded = load_model(sizes.model, context, sizes.device, max_symbols=sizes.max_symbols)
            if loaded.device != "cpu":
                _allow_tf32()
            self._loaded = loaded = with_label_rate(loaded, sizes.label_rate_hz)
            self._report(f"model: {time.perf_counter() - start_s:.1f} s")
        elif (loaded.geometry.left_frames, loaded.geometry.right_frames) != context:
            loaded = dataclasses.replace(loaded, geometry=set_context(loaded.model, context))
            self._loaded = loaded = with_label_rate(loaded, sizes.label_rate_hz)
        return loaded

    def _config(
        self, context: tuple[int, int], graphed: bool, pipeline: str = "fused", encoder: str = "nemo"
    ) -> Config:
        sizes, top = self.sizes, max(self.sizes.batches)
        config = load_config(
            {
                "asr": {
                    "model": sizes.model,
                    "device": self._model(context).device,
                    "att_context_size": list(context),
                    "max_symbols": sizes.max_symbols,
                    "label_rate_hz": sizes.label_rate_hz,
                    "cuda_graphs": graphed,
                    "encoder": encoder,
                    "pipeline": pipeline,
                    "batching": {
                        "enabled": True,
                        "max_batch_size": top,
                        "max_queue_delay_us": 0,
                        "max_queue_depth": 65536,
                        "state_arena_slots": top,
                    },
                }
            }
        )
        if not graphed:
            set_streaming_cuda_graphs(self._model(context).model, False)
        return config

    def _save(self, record: Record, name: str) -> None:
        record.save(self.out / f"{name}.json")

    def _costs(self, name: str, context: tuple[int, int], graphed: bool, encoder: str = "nemo") -> None:
        batches = self.sizes.batches if graphed else self.sizes.eager_batches
        config = self._config(context, graphed, encoder=encoder)
        with Recognizer(self._model(context), config) as recognizer:
            recognizer.warm_up()
            record = measure_costs(recognizer, self._clips, batches, self.sizes.repeats, kinds=BATCHED_KINDS)
            record.counters["graphs"] = recognizer.graph_counters()
        self._save(record, name)

    def _dense(self, encoder: str, context: tuple[int, int], streams: tuple[int, ...]) -> None:
        """Costs in a lone loop and then in traffic up to near what is carried."""
        name = f"dense_costs_{encoder}_{self._chunk_ms(context)}ms"
        self._costs(name, context, True, encoder)
        self._traffic(name, context, streams, encoder)

    def _traffic(self, name: str, context: tuple[int, int], streams: tuple[int, ...], encoder: str = "nemo") -> None:
        """The costs of `name` as live traffic pays them, in its place; those of the lone loop stay as `NAME_lone`."""
        lone = Record.load(self.out / f"{name}.json")
        rows = max(2 * max(streams), max(self.sizes.batches))
        config = replace(
            self._config(context, True, encoder=encoder),
            **{"asr.batching.state_arena_slots": rows, "load.seconds": self.sizes.traffic_s},
        )
        loads = [replace(config, **{"load.streams": number}).load for number in streams]
        with still_collector(), Recognizer(self._model(context), config) as recognizer:
            recognizer.warm_up()
            record = traffic_costs(recognizer, self._clips, lone, loads)
        self._save(lone, f"{name}_lone")
        self._save(record, name)

    def _offline_costs(self) -> None:
        """Whole recordings, eager, as they are recognised offline."""
        sizes = self.sizes
        with Recognizer(self._model(sizes.low), self._config(sizes.low, False)) as recognizer:
            record = offline_costs(recognizer, self._clips, sizes.offline_batches, sizes.offline_lengths_s, 2)
        self._save(record, "offline_costs")

    def _twin(self) -> None:
        context = self.sizes.low
        lone = self.out / "stage_costs_lone.json"
        costs = Record.load(lone if lone.exists() else self.out / "stage_costs.json")
        check = TwinCheck(self.sizes.twin_streams, seconds=self.sizes.twin_s)
        record = check_twin(
            self._model(context), self._config(context, True), costs, self._clips, check, report=self._report
        )
        self._save(record, "twin_agreement")

    def _paced(self, encoder: str, name: str) -> None:
        """A row per number of streams; a level that could not be measured is a note. encoder: as in `asr.encoder`."""
        context, sizes = self.sizes.low, self.sizes
        config = replace(
            self._config(context, True, encoder=encoder),
            **{
                "asr.batching.state_arena_slots": 2 * max(sizes.paced_streams),
                "load.seconds": sizes.paced_s,
            },
        )
        rows, notes = [], list(self._model(context).notes)
        with still_collector(), Recognizer(self._model(context), config) as recognizer:
            recognizer.warm_up()
            for streams in sizes.paced_streams:
                load = replace(config, **{"load.streams": streams}).load
                try:
                    found = run_paced(recognizer, self._clips, load, options=PacedOptions(compare=False))
                except (GeneratorLagged, LoadNotCarried) as reason:
                    notes.append(f"{streams} streams: {reason}")
                    continue
                rows.append({**found.numbers, "distribution": found.rows})
                self._report(str(found.numbers))
                self._save(Record("paced_levels", to_dict(config), rows=rows, notes=notes), name)

    def _capacity(self, engine: str, context: tuple[int, int]) -> None:
        """One search; `capacity.json` gathers all that are there."""
        graphed, sizes = engine != "nemo-loop", self.sizes
        name = f"{engine.replace('-', '_')}_{self._chunk_ms(context)}ms"
        config = self._config(context, graphed, engine if graphed else "fused")
        rule = CapacityRule(seconds=sizes.capacity_s)
        spec = EngineSpec("pipeline" if graphed else "nemo-loop", config, decoder_graphs=sizes.nemo_decoder_graphs)
        start_s, passed = time.perf_counter(), list[int]()

        def on_level(so_far: Record, run: LevelRun) -> None:
            passed.extend([run.streams] if run.passed else [])
            self._report(f"{name}: {run.streams} {run.passed} {run.why}")

        def go_on() -> bool:
            """A search that has found no level yet gets longer, since without one it says nothing."""
            return time.perf_counter() - start_s < sizes.capacity_search_s * (1 if passed else 3)

        record = find_capacity(
            model_levels(spec, rule, self._model(context), self._clips),
            rule,
            SearchPlan(start=self._predicted(context, graphed), resolution=0.1, repeats=1),
            on_level=on_level,
            go_on=go_on,
        )
        record.notes.append("all levels in one process, one run a level")
        self._save(record, f"capacity_{name}")
        self._gather()

    def _resident_step(self) -> None:
        """Low and high look-ahead in both precisions; written after each."""
        sizes, rows, notes = self.sizes, list[dict[str, Any]](), list[str]()
        for context in (sizes.low, sizes.high):
            config = self._config(context, True)
            for dtype in ("float32", "bfloat16"):
                with in_dtype(self._model(context), dtype) as loaded:
                    loaded = with_label_rate(loaded, sizes.label_rate_hz)
                    rows += step_rows(
                        loaded, self._clips, sizes.resident_batches, sizes.resident_steps, sizes.max_symbols
                    )
                freed()
                notes += [f"{context} {dtype}: {note}" for note in loaded.notes]
                self._report("\n".join(str(row) for row in rows[-len(sizes.resident_batches) :]))
                self._save(Record("resident_step", to_dict(config), rows=rows, notes=notes), "resident_step")

    def _capacity_resident(self, context: tuple[int, int], dtype: str) -> None:
        """One search, written after every level."""
        sizes, name = self.sizes, f"resident_{self._chunk_ms(context)}ms_{dtype}"
        start, most = sizes.resident_streams_low if context == sizes.low else sizes.resident_streams_high
        config = replace(
            self._config(context, True), **{"asr.dtype": dtype, "asr.batch_buckets": list(sizes.resident_ladder)}
        )
        plan = SearchPlan(start=start, most_streams=most, resolution=0.1, repeats=1)
        search = ResidentSearch(config, CapacityRule(seconds=sizes.resident_s), plan, sizes.resident_search_s)
        with in_dtype(self._model(context), dtype) as loaded:
            loaded = with_label_rate(loaded, sizes.label_rate_hz)
            search.run(loaded, self._clips, lambda record: self._save(record, f"capacity_{name}"), self._report)
        freed()
        self._gather()

    def _predicted(self, context: tuple[int, int], graphed: bool) -> int:
        """Streams to start a search at: what the twin carries with the cost table of this context, less a margin."""
        part = "" if graphed else "_eager"
        suffix = "" if context == self.sizes.low else f"_{self._chunk_ms(context)}ms"
        path = self.out / f"stage_costs{part}{suffix}.json"
        if not path.exists():
            return max(self.sizes.paced_streams)
        costs = Record.load(path)
        table, geometry = CostTable.from_record(costs), self._model(context).geometry
        # A queue that fills ends an overloaded level of the simulation early.
        config = replace(self._config(context, graphed), **{"asr.batching.max_queue_depth": 2048})
        rule, samples = CapacityRule(seconds=self.sizes.capacity_s), [clip.size for clip in self._clips]

        def simulated(streams: int) -> Record:
            level = level_config(config, rule, streams)
            return simulate(level, table, build_schedule(level.load, geometry, samples))

        found = find_capacity(simulated, rule, SearchPlan(start=16, most_streams=4096, resolution=0.1, repeats=1))
        return max(1, int(STARTS_AT * (found.numbers["capacity_streams"] or 1)))

    def _gather(self) -> None:
        records = {path.stem.removeprefix("capacity_"): Record.load(path) for path in self.out.glob("capacity_*.json")}
        if records:
            self._save(gathered(records), "capacity")

    def _profile(self) -> None:
        config = self._config(self.sizes.cells[0].context, False)
        record = profile_table(self._model, config, self.sizes.cells, self.out, self._report)
        self._save(record, "profile_steps")


def sizes_from(changes: dict[str, Any]) -> Sizes:
    """`Sizes` with fields replaced by plain JSON values. Raises ConfigError for an unknown field."""
    known = [field.name for field in dataclasses.fields(Sizes)]
    if unknown := sorted(set(changes) - set(known)):
        raise ConfigError(f"sizes: got {', '.join(unknown)}; allowed are {', '.join(known)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()}
    if "cells" in changes:
        values["cells"] = tuple(StepCell((left, right), batch) for (left, right), batch in changes["cells"])
    return Sizes(**values)


def gathered(records: dict[str, Record]) -> Record:
    """Several capacity records as one: their rows with the name of the search, their capacities as numbers."""
    ordered = dict(sorted(records.items()))
    first = next(iter(ordered.values()))
    return Record(
        kind="capacity",
        config={name: record.config for name, record in ordered.items()},
        numbers={f"{name}_streams": record.numbers["capacity_streams"] for name, record in ordered.items()},
        rows=[{"search": name, **row} for name, record in ordered.items() for row in record.rows],
        counters={
            name: {"ended": record.counters["ended"], "numbers": record.numbers} for name, record in ordered.items()
        },
        notes=[f"{name}: {note}" for name, record in ordered.items() for note in record.notes],
        environment=first.environment,
    )


def _allow_tf32() -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
