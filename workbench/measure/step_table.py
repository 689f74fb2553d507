"""Launches, kernels and idle time of whole steps, eager and graphed, over look-aheads and batch sizes: one table.

    record = profile_table(model_at, config, [StepCell((56, 0), 1), StepCell((56, 0), 32)], folder)
    record.rows[0]     # {"context": [56, 0], "batch": 1, "graphed": False, "step_p50_ms": …, "launches_per_step": …, "gpu_idle_share": …}

A step is what live traffic runs: front end, encoder and decoder of `batch` streams with full caches. `graphed_table` is its narrower sister: the
encoder alone. Everything is timed before anything is profiled, since a process stays slower after profiling. Of the first cell a small
trace is kept for each way of running, which opens in Perfetto and is read again without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from workbench.config import Config, replace, to_dict
from workbench.encoder.graphed import set_streaming_cuda_graphs
from workbench.measure.chrome_trace import load_trace, save_trace
from workbench.measure.profile import profile_steps, time_steps
from workbench.measure.steps import PreparedSteps, speech_clips
from workbench.model.load import LoadedModel
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer

STEPS = 3
STAGES = ("workbench.frontend", "workbench.encoder", "workbench.decoder")


@dataclass(frozen=True)
class StepCell:
    """One step to profile: its context in encoder frames and its streams."""

    context: tuple[int, int]
    batch: int


DEFAULT_CELLS = tuple(StepCell((56, right), batch) for right, batch in ((0, 1), (0, 32), (3, 8), (3, 32), (13, 32)))


def profile_table(
    model_at: Callable[[tuple[int, int]], LoadedModel],
    config: Config,
    cells: Sequence[StepCell] = DEFAULT_CELLS,
    trace_folder: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Record:
    """Rows for every cell, eager and, where the model is on CUDA, graphed. `model_at(context)` gives the loaded model.

    trace_folder: gets `trace_eager.json.gz` and `trace_graphed.json.gz` of the first cell. Raises RecordError for a trace that cannot be
    trusted.
    """
    on_gpu = model_at(cells[0].context).device != "cpu"
    ways = [(cell, graphed) for cell in cells for graphed in ((False, True) if on_gpu else (False,))]
    times_s = {}
    for cell, graphed in ways:
        with _prepared(model_at(cell.context), config, cell, graphed) as step:
            times_s[cell, graphed] = time_steps(step, device=model_at(cell.context).device, bound_s=2.0)
    rows, notes = [], dict[str, None]()
    with TemporaryDirectory() as temporary:
        for cell, graphed in ways:
            loaded, trace = model_at(cell.context), Path(temporary) / "step.json.gz"
            with _prepared(loaded, config, cell, graphed) as step:
                profiled = profile_steps(
                    step, device=loaded.device, trace_path=trace, steps=STEPS, seconds=times_s[cell, graphed]
                )
            rows.append(_row(cell, graphed, profiled))
            notes |= dict.fromkeys([*loaded.notes, *profiled.notes])
            report(str(rows[-1]))
            if trace_folder is not None and cell == cells[0]:
                save_trace(load_trace(trace), Path(trace_folder) / f"trace_{'graphed' if graphed else 'eager'}.json.gz")
    return Record(kind="profile_table", config=to_dict(config), rows=rows, notes=list(notes))


@contextmanager
def _prepared(loaded: LoadedModel, config: Config, cell: StepCell, graphed: bool) -> Iterator[Callable[[], None]]:
    """A function that does one steady step of the cell."""
    changes = {
        "asr.cuda_graphs": graphed,
        "asr.batching.enabled": True,
        "asr.batching.max_batch_size": cell.batch,
        "asr.batching.state_arena_slots": cell.batch,
    }
    if not graphed:
        set_streaming_cuda_graphs(loaded.model, False)
    clips = speech_clips(loaded.geometry.sample_rate_hz)
    with (
        Recognizer(loaded, replace(config, **changes)) as recognizer,
        PreparedSteps(recognizer, clips, cell.batch) as steps,
    ):
        steps.fill()
        items = steps.items("steady")
        yield lambda: _ignore(recognizer.stage.run(items))


def _ignore(results: Any) -> None:
    """A step to be timed returns nothing."""


def _row(cell: StepCell, graphed: bool, profiled: Record) -> dict[str, Any]:
    stages = {row["name"]: row for row in profiled.rows if row.get("kind") == "stage"}
    of_stages = {
        f"{stage.removeprefix('workbench.')}_{name}": stages[stage].get(name)
        for stage in STAGES
        if stage in stages
        for name in ("ms_per_step", "host_ms_per_step", "launches_per_step")
        if name in stages[stage]
    }
    return {"context": list(cell.context), "batch": cell.batch, "graphed": graphed, **profiled.numbers, **of_stages}
