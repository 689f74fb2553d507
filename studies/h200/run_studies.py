"""The real runs of `studies/h200/run_studies.sh`, in one process on one loaded model; then the files of every study.

python studies/h200/run_studies.py OUT study...

REAL_S seconds of real runs are shared out by what each study needs; what one leaves goes to the others. Studies that were not searched are skipped
with the reason; what was measured is written after every run (live.json), results and reports come last, since they need no GPU.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

from workbench.errors import InputError
from workbench.show.study_results import run_finalists, write_study
from workbench.tuning.confirm import ConfirmOptions, LiveHost
from workbench.tuning.outcome import outcome_of_study
from workbench.tuning.result import StudyResult

# Finalists of each study, and the seconds that one round of it takes on an H200: about 7 s a run with its warm-up, more where graphs are captured
# anew or levels are searched.
STUDIES = {
    "latency_80ms": (2, 35.0),
    "capacity_slo": (1, 120.0),
    "offline_bucket": (1, 25.0),
    "graph_buckets": (1, 35.0),
    "pareto": (1, 120.0),
}


def real_runs(out: Path, names: list[str], host: LiveHost, real_s: float) -> dict[str, StudyResult]:
    """By name, the studies whose finalists ran."""
    chosen = {name: STUDIES[name] for name in STUDIES if name in names}
    found, needed_s = dict[str, StudyResult](), sum(need_s for _, need_s in chosen.values())
    for name, (finalists, need_s) in chosen.items():
        options = ConfirmOptions(
            seconds=float(os.environ.get("SECONDS_RUN", "4")),
            rounds=int(os.environ.get("ROUNDS", "2")),
            finalists=finalists,
            budget_s=max(0.0, real_s) * need_s / needed_s,
            most_streams=int(os.environ.get("MOST_STREAMS", "100000")),
        )
        needed_s -= need_s
        print(f"== {name}: {options.budget_s:.1f} s", flush=True)
        if options.budget_s <= 0:
            print("not run: the others took all the time", flush=True)
            continue
        try:
            found[name], live = run_finalists(out / name, host, options)
            real_s -= live.numbers["took_s"]
            print(f"== {name}: took {live.numbers['took_s']:.1f} s", flush=True)
        except InputError as reason:
            print(f"left out: {reason}", flush=True)
        except Exception:
            traceback.print_exc()
    return found


if __name__ == "__main__":
    out = Path(sys.argv[1])
    host = LiveHost(lambda text: print(text, flush=True))
    results = real_runs(out, sys.argv[2:], host, float(os.environ.get("REAL_S", "200")))
    begun = time.perf_counter()
    for name, result in results.items():
        try:
            write_study(result, out / name)
            print(f"{name}: {outcome_of_study(out / name).data['headline']}", flush=True)
        except Exception:
            traceback.print_exc()
    print(f"== files: {time.perf_counter() - begun:.1f} s", flush=True)
