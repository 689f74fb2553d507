"""The texts of the shipped speech by every way the demo model's step can run, against those of NeMo's eager step in fp32.

python studies/h200/transcribe_speech.py OUT_FOLDER [--device cuda] [--clips N]

TF32 is off, so that what differs is the step's own doing. With `--clips` only the first ones; on a CPU the graphed runs are left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from workbench.config import load_config
from workbench.model.speech import SHIPPED_SPEECH, find_audio
from workbench.results import Record, check_writable
from workbench.runtime.recognizer import Recognizer
from workbench.runtime.transcribe import transcribe, word_errors

CONTEXTS, CONCURRENCY = ((56, 0), (56, 13)), 32
RUNS: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager_again": {},
    "graphed": {"cuda_graphs": True},
    "graphed_again": {"cuda_graphs": True},
    "resident": {"encoder": "resident"},
    "eager_bf16": {"dtype": "bfloat16"},
    "resident_bf16": {"encoder": "resident", "dtype": "bfloat16"},
    "resident_int8": {"encoder": "resident", "dtype": "bfloat16", "weights": "int8"},
}


def texts_of(items: list[Any], asr: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """(text by clip, numbers of the run)."""
    batching = {"enabled": True, "state_arena_slots": CONCURRENCY}
    with Recognizer.open(load_config({"asr": {"batching": batching, **asr}})) as recognizer:
        rows = list(transcribe(recognizer, items, CONCURRENCY, compare_offline="encoder" not in asr))
    compared = [row.differs_offline for row in rows if row.differs_offline is not None]
    numbers = {"wer": word_errors(rows)["wer"], "offline_compared": len(compared), "offline_differences": sum(compared)}
    return {Path(row.path).name: row.text or "" for row in rows}, numbers


def main() -> None:
    """Every run in every context; the record is written after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clips", type=int)
    options = parser.parse_args()
    if options.clips is not None and options.clips < 1:
        parser.error(f"argument --clips: got {options.clips}; allowed is 1 or more")
    check_writable(options.out / "transcribed_speech.json")
    items, rows, texts = find_audio([str(SHIPPED_SPEECH)]).items[: options.clips], [], {}
    others: dict[str, list[dict[str, str]]] = {}
    for context in CONTEXTS:
        for run, asr in RUNS.items():
            if asr.get("cuda_graphs") and options.device == "cpu":
                continue
            chosen = {"att_context_size": list(context), "device": options.device, **asr}
            found, numbers = texts_of(items, chosen)
            eager = texts.setdefault(str(list(context)), found)
            unlike = [{"clip": c, "eager_fp32": eager[c], "here": found[c]} for c in eager if found[c] != eager[c]]
            row = {"context": list(context), "run": run, "clips": len(found), **numbers}
            rows.append({**row, "texts_unlike_eager_fp32": len(unlike)})
            others |= {f"{list(context)} {run}": unlike} if unlike else {}
            print(rows[-1], flush=True)
            config = {"model": "demo", "device": options.device, "concurrency": CONCURRENCY, "runs": RUNS}
            record = Record("transcribed_speech", config, rows=rows, counters={"texts": texts, "unlike": others})
            record.save(options.out / "transcribed_speech.json")


if __name__ == "__main__":
    main()
