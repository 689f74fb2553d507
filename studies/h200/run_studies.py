"""The parts of `studies/h200/run_studies.sh` that need the GPU, in one process: offline costs if they are missing, and the real runs.

python studies/h200/run_studies.py OUT COSTS "offline confirm"

Studies that were not searched are skipped with the reason; what was measured is written after every study.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

from workbench.config import load_config
from workbench.measure.cost_book import CostBook
from workbench.measure.offline_run import offline_costs
from workbench.runtime.recognizer import Recognizer
from workbench.show.study_results import confirm_study
from workbench.tuning.confirm import ConfirmOptions, LiveHost

# Finalists of each study, and its share of the time for real runs.
STUDIES = {
    "latency_80ms": (2, 0.28),
    "capacity_slo": (1, 0.24),
    "offline_bucket": (1, 0.08),
    "graph_buckets": (1, 0.2),
    "pareto": (2, 0.2),
}
BATCHES, LENGTHS_S = (1, 4, 16, 64), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# Longest time that the search of the offline study may take while the device waits.
SEARCH_S = 60


def measure_offline(host: LiveHost, costs: Path) -> None:
    """Costs of whole recordings for the model that the step costs were measured with."""
    low = load_config({"asr": {"att_context_size": [56, 0], "cuda_graphs": True, "batching": {"enabled": True}}})
    config = load_config(
        {"asr": {**_plain(CostBook.load([costs]).fit(low)), "cuda_graphs": False}},
        overrides=[f"asr.batching.state_arena_slots={max(BATCHES)}"],
    )
    batches = _numbers("OFFLINE_BATCHES", BATCHES)
    with Recognizer(host.model(config.asr), config) as recognizer:
        record = offline_costs(
            recognizer, host.clips, [int(b) for b in batches], _numbers("OFFLINE_LENGTHS", LENGTHS_S), 2
        )
    record.save(costs / "offline_costs.json")


def _plain(config: object) -> dict[str, object]:
    from workbench.config import to_dict

    return to_dict(config)["asr"]


def _numbers(name: str, default: tuple[float, ...]) -> list[float]:
    return [float(part) for part in os.environ[name].split(",")] if name in os.environ else list(default)


if __name__ == "__main__":
    out, costs, parts = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split()
    host = LiveHost(lambda text: print(text, flush=True))
    begun = time.perf_counter()
    if "offline" in parts and not (costs / "offline_costs.json").exists():
        try:
            measure_offline(host, costs)
            print(f"== offline costs: {time.perf_counter() - begun:.1f} s", flush=True)
            subprocess.run(
                ["bash", "studies/h200/run_studies.sh", str(out), str(costs), "search_offline"],
                timeout=SEARCH_S,
                check=False,
            )
        except Exception:
            traceback.print_exc()
    real_s = float(os.environ.get("REAL_S", "150"))
    for name, (finalists, share) in STUDIES.items() if "confirm" in parts else ():
        begun = time.perf_counter()
        options = ConfirmOptions(
            seconds=float(os.environ.get("SECONDS_RUN", "4")),
            rounds=int(os.environ.get("ROUNDS", "2")),
            finalists=finalists,
            budget_s=share * real_s,
            most_streams=int(os.environ.get("MOST_STREAMS", "100000")),
        )
        try:
            print(f"== {name}", flush=True)
            print(confirm_study(out / name, host, options).data["headline"], flush=True)
        except Exception:
            traceback.print_exc()
        print(f"== {name}: {time.perf_counter() - begun:.1f} s", flush=True)
