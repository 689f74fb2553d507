"""A study of five trials with two objectives on the twin, made in a second or two."""

from __future__ import annotations

from pathlib import Path

from workbench.config import load_config
from workbench.measure.twin import CostTable, twin_runner
from workbench.results import Record
from workbench.tuning.run import geometry_of, shipped_lengths
from workbench.tuning.spec import parse_study
from workbench.tuning.study import tune

COSTS = Path(__file__).parents[1] / "notebooks" / "records" / "costs_demo_cpu.json"


def small_study(folder):
    """The study's record; its database goes to `folder`."""
    spec = parse_study(
        {
            "name": "panel",
            "base": {"asr": {"batching": {"enabled": True}}, "load": {"streams": 2, "seconds": 4}},
            "space": {"asr.batching.max_queue_delay_us": {"int": [0, 50000], "step": 5000}},
            "objectives": [{"number": "latency_p95_ms"}, {"number": "busy_share"}],
            "budget": {"trials": 5},
        }
    )
    costs = Record.load(COSTS)
    evaluate = twin_runner(CostTable.from_record(costs), geometry_of(costs), shipped_lengths())
    return tune(load_config(), spec, evaluate, folder=folder, progress=False).record()
