"""Stands in for the live panel's engine: reports at once, repeats the knobs it was given, and can refuse to end or fail.

Started as `python -m tests.fake_live_engine`; the seed of the load chooses what it does.
"""

from __future__ import annotations

import json
import sys
import time

FAILS, HANGS = 1, 2


def report(**values):
    print(json.dumps(values), flush=True)


def main():
    config = json.loads(sys.stdin.readline())["config"]
    batching, load = config["asr"]["batching"], config["load"]
    knobs = {
        "load.streams": load["streams"],
        "asr.batching.max_batch_size": batching["max_batch_size"],
        "asr.batching.max_queue_delay_us": batching["max_queue_delay_us"],
    }
    if load["seed"] == FAILS:
        report(kind="error", message="ModelError: <no model>")
        return
    report(kind="ready")
    number = 0
    while True:
        for part in range(3):
            number += 1
            report(
                kind="tick", time_s=0.25 * number, latency_ms=[10.0 * knobs["load.streams"], 20.0 + part], generator_late_ms=1.0,
                batch_sizes={"2": 1}, open=part, idle_share=0.5, refused=0, streams=knobs["load.streams"],
                max_batch_size=knobs["asr.batching.max_batch_size"], max_queue_delay_us=knobs["asr.batching.max_queue_delay_us"],
            )  # fmt: skip
        line = sys.stdin.readline()
        if not line:
            if load["seed"] == HANGS:
                time.sleep(60)
            return
        knobs.update(json.loads(line))


if __name__ == "__main__":
    main()
