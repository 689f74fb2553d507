"""The device of the real runs: one model at a time, the precision that the twin's costs were measured with, and one run on a fresh recogniser.

    host = LiveHost()
    host.tf32 = measured_tf32(costs)             # None leaves PyTorch's own setting
    record, graphs = host.run(config, LiveRun())

One host serves many studies: a model is loaded once and moved to another look-ahead where that is all that changes; its graphs go on to serve the
next recogniser while the device has room. Python's garbage collector rests during a run, or its pauses would be the generator's.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from workbench.config import AsrConfig, Config
from workbench.encoder.graphed import set_streaming_cuda_graphs
from workbench.errors import DeviceMemoryError, LoadNotCarried, StepTimeout
from workbench.measure.capacity_engines import still_collector
from workbench.measure.cost_table import Captures
from workbench.measure.costs import capture_rows
from workbench.measure.offline_run import run_offline
from workbench.measure.paced import PacedOptions, run_paced
from workbench.measure.steps import speech_clips
from workbench.model.load import LoadedModel, load_configured, set_context, with_label_rate
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer
from workbench.tuning.rule import not_carried

# A backlog that takes as long to work off as the load took to speak is twice what is carried; short loads get a little more.
DRAIN_LEAST_S, DRAIN_MOST_S = 2.0, 10.0


@dataclass(frozen=True)
class LiveRun:
    """What runs: `config.load` as live streams or, with `work` (lengths in samples by set), whole recordings, `concurrency` in the works at once
    and for `most_s` seconds at most."""

    work: Mapping[str, Sequence[int]] | None = None
    concurrency: int = 1
    most_s: float = 600.0


class LiveHost:
    """The model at hand and the recordings that are spoken. tf32: whether fp32 products on CUDA use TF32; None: as PyTorch was found."""

    def __init__(self, say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)) -> None:
        self.say = say
        self.tf32: bool | None = None
        self._found_tf32: bool | None = None
        self._loaded: LoadedModel | None = None
        self._key: Any = None
        self._own_context = (0, 0)  # of the model at hand, where a configuration sets none

    @cached_property
    def clips(self) -> list[Any]:
        """Recordings at 16 kHz."""
        return speech_clips(16000)

    def model(self, asr: AsrConfig) -> LoadedModel:
        """The model of a configuration, loaded only if the one at hand is another, and the recordings: no run pays for either."""
        key = (asr.model, asr.device, asr.dtype, asr.max_symbols, asr.label_rate_hz)
        loaded = self._loaded if self._key == key else None
        self._loaded, fresh = None, loaded is None  # a model that fails on the way to its configuration is loaded anew
        if loaded is None:
            begun = time.perf_counter()
            loaded, self._key = (
                load_configured(dataclasses.replace(asr, att_context_size=None, label_rate_hz=None)),
                key,
            )
            self._own_context = _context(loaded)
            said = f"{asr.model} on {loaded.device} and {len(self.clips)} recordings"
            self.say(f"  loaded {said} in {time.perf_counter() - begun:.1f} s")
        wanted = self._own_context if asr.att_context_size is None else tuple(asr.att_context_size)
        moved = _context(loaded) != wanted
        if moved:
            loaded = dataclasses.replace(loaded, geometry=set_context(loaded.model, wanted))
        if (fresh or moved) and asr.label_rate_hz is not None:
            loaded = with_label_rate(loaded, asr.label_rate_hz)
        self._follow_costs(loaded)
        self._loaded = loaded
        return loaded

    def notes(self, asr: AsrConfig) -> list[str]:
        """What must be read with the numbers of this model here."""
        loaded = self.model(asr)
        precision = "fp32 products with TF32" if self.tf32 else "fp32 products without TF32"
        told = self.tf32 is not None and _has_tf32(loaded)
        return [*loaded.notes, *([f"{precision}, as the twin's costs were measured"] if told else [])]

    def run(self, config: Config, what: LiveRun) -> tuple[Record, dict[str, Any]]:
        """One real run on a fresh recogniser, warmed up; with it what its graphs are. A load that was refused is a record that says so.

        Raises GeneratorLagged as soon as it is certain, StepTimeout if recordings are not done in time, and DeviceMemoryError where the device
        has no room for the configuration.
        """
        try:
            return self._run(config, what)
        except torch.OutOfMemoryError as error:
            # PyTorch's text goes on about its allocator; what did not fit comes first.
            raise DeviceMemoryError(f"the device is out of memory ({str(error).split(' GPU ')[0].strip()})") from error

    def _run(self, config: Config, what: LiveRun) -> tuple[Record, dict[str, Any]]:
        loaded = self.model(config.asr)
        gc.collect()  # an engine's rows and graphs lie in cycles: those of the last run make room for this one's
        if not config.asr.cuda_graphs or _crowded(loaded):
            set_streaming_cuda_graphs(loaded.model, False)  # frees what earlier recognisers captured
        with still_collector(), Recognizer(loaded, config) as recognizer:
            recognizer.warm_up()
            graphs = _graphs(recognizer)
            if what.work is not None:
                return run_offline(
                    recognizer, what.work, self.clips, what.concurrency, config.load, what.most_s
                ), graphs
            drain_s = min(DRAIN_MOST_S, max(DRAIN_LEAST_S, config.load.seconds))
            options = PacedOptions(compare=False, stop_lagging=True, drain_timeout_s=drain_s)
            try:
                return run_paced(recognizer, self.clips, config.load, options=options), graphs
            except (LoadNotCarried, StepTimeout) as refused:
                return not_carried(config, str(refused)), graphs

    def _follow_costs(self, loaded: LoadedModel) -> None:
        """Set TF32 as the costs were measured. The one place that does; a CPU has no such switch."""
        if not _has_tf32(loaded):
            return
        if self._found_tf32 is None:
            self._found_tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self._found_tf32 if self.tf32 is None else self.tf32


def measured_tf32(costs: Iterable[Record]) -> bool | None:
    """Whether cost records were measured with TF32 products; None if none is of a GPU, or they differ."""
    found = {bool(gpu["matmul_tf32"]) for cost in costs if "matmul_tf32" in (gpu := cost.environment.get("gpu") or {})}
    return found.pop() if len(found) == 1 else None


def _context(loaded: LoadedModel) -> tuple[int, int]:
    return loaded.geometry.left_frames, loaded.geometry.right_frames


def _has_tf32(loaded: LoadedModel) -> bool:
    return loaded.device != "cpu" and loaded.dtype == "float32"


def _crowded(loaded: LoadedModel) -> bool:
    """Whether less than half of the device's memory is free: the graphs of earlier configurations stay until then."""
    if loaded.device == "cpu":
        return False
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(torch.device(loaded.device))
    return free < total / 2


def _graphs(recognizer: Recognizer) -> dict[str, float]:
    """What the graphs of this recogniser's ladder took to capture and hold, by the same rule as the twin's."""
    ladder, captures = recognizer.stage.encoder.ladder, Captures.from_rows(capture_rows(recognizer))
    if ladder is None:
        return {}
    return {"graphs": len(ladder), **(captures.numbers(ladder) if captures else {})}
