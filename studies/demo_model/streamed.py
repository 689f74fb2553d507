"""Streams the held-out speech with `workbench transcribe` at every context and gathers the word error rates in one record.

    python studies/demo_model/streamed.py out --manifest workbench/data/speech/manifest.jsonl --manifest held_out/manifest.jsonl \\
        --shards shards --overlap overlap.json --record cpu_streaming.json

Sets: human prompts, other human speakers, synthetic sentences (the shards `test_*` of synthesize.py). Each with 32
streams and compared with offline recognition label by label; the human ones also alone, and the shipped clips alone at
80 ms several times for the speed. `clear` counts only sentences that share nothing with a training text (overlap.py).
Runs whose record lies in `out` are not repeated."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path

import soundfile as sf
from evaluate import RATE_HZ, read_shards, word_errors

CONTEXTS = (13, 6, 1, 0)
STREAMS = 32
SPEED_RUNS = 5
SHIPPED = "workbench/data/speech/manifest.jsonl"


def write_manifests(out: Path, manifests: list[Path], shards: Path) -> None:
    """human.jsonl, other.jsonl and synthetic.jsonl in `out`, the last with its audio as FLAC beside it."""
    rows = []
    for manifest in manifests:
        for line in manifest.read_text().splitlines():
            row = json.loads(line)
            rows.append(row | {"audio_filepath": str((manifest.parent / row["audio_filepath"]).resolve())})
    sets = {
        "human": [row for row in rows if row["source"].startswith("asterisk")],
        "other": [row for row in rows if not row["source"].startswith("asterisk")],
        "synthetic": [],
    }
    for number, clip in enumerate(read_shards(shards)):
        name = f"synthetic_{number:03d}.flac"
        sf.write(out / name, clip["samples"], RATE_HZ, subtype="PCM_16")
        seconds = len(clip["samples"]) / RATE_HZ
        sets["synthetic"].append({"audio_filepath": name, "duration": seconds, "text": clip["text"]})
    for name, listed in sets.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))


def transcribe(out: Path, manifest: str, record: str, context: int, *options: str) -> dict:
    """The record of one `workbench transcribe`, made unless it is there; with the command that makes it."""
    command = ["workbench", "transcribe", manifest, "--wer", "--context", f"56,{context}", "--device", "cpu", *options]
    if not (out / record).exists():
        subprocess.run([*command, "-o", record], cwd=out, check=True, capture_output=True)
    return json.loads((out / record).read_text()) | {"command": " ".join([*command, "-o", record])}


def kinds_of_error(reference: list[str], hypothesis: list[str]) -> tuple[int, int, int]:
    """(substitutions, deletions, insertions) of a cheapest way from reference to hypothesis."""
    table = [[(j, 0, 0, j) for j in range(len(hypothesis) + 1)]]  # (errors, substitutions, deletions, insertions)
    for i, word in enumerate(reference, 1):
        row = [(i, 0, i, 0)]
        for j, other in enumerate(hypothesis, 1):
            (a, s, d, n), (b, t, e, m), (c, u, f, o) = table[-1][j - 1], table[-1][j], row[-1]
            wrong = word != other
            row.append(min((a + wrong, s + wrong, d, n), (b + 1, t, e + 1, m), (c + 1, u, f, o + 1)))
        table.append(row)
    return table[-1][-1][1:]


def percent_wrong(rows: list[dict]) -> float:
    """Word error rate of transcribed rows in percent."""
    errors = sum(word_errors(row["reference"].split(), row["text"].split()) for row in rows)
    return round(100 * errors / sum(len(row["reference"].split()) for row in rows), 2)


def summary(record: dict, clear: set[str]) -> dict:
    """What is kept of one transcribe record."""
    rows, numbers = record["rows"], record["numbers"]
    kinds = [kinds_of_error(row["reference"].split(), row["text"].split()) for row in rows]
    kept = {
        "wer_percent": percent_wrong(rows),
        "clips": numbers["wer_clips"],
        "words": numbers["wer_words"],
        **dict(zip(("substitutions", "deletions", "insertions"), map(sum, zip(*kinds, strict=True)), strict=True)),
        "offline_compared": numbers["offline_compared"],
        "offline_differences": numbers["offline_differences"],
    }
    untouched = [row for row in rows if row["reference"] in clear]
    if untouched:
        words = sum(len(row["reference"].split()) for row in untouched)
        kept["clear"] = {"wer_percent": percent_wrong(untouched), "clips": len(untouched), "words": words}
    return kept | {"command": record["command"]}


def speed(out: Path) -> dict:
    """Speed of one stream at 80 ms: how many times faster than the audio, over several runs of the shipped clips."""
    loads, rates, record = [], [], {}
    for turn in range(SPEED_RUNS):
        loads.append(round(os.getloadavg()[0], 2))
        record = transcribe(out, str(Path(SHIPPED).resolve()), f"speed_{turn}.json", 0)
        rates.append(record["numbers"]["rtfx"])
    return {
        "clips": record["numbers"]["transcribed"],
        "audio_s": record["numbers"]["audio_s"],
        "rtfx_median": round(statistics.median(rates), 2),
        "rtfx": rates,
        "load_average_before": loads,
        "command": f"workbench transcribe {SHIPPED} --wer --context 56,0 --device cpu",
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--manifest", type=Path, action="append", required=True)
    for name in ("shards", "overlap", "record"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    write_manifests(out, arguments.manifest, arguments.shards)
    clear = {name: set(found["clear"]) for name, found in json.loads(arguments.overlap.read_text())["sets"].items()}
    result: dict = {"model": "workbench/data/demo.nemo", "sets": {}, "texts_alone_that_differ": {}}
    for name in ("human", "other", "synthetic"):
        for context in CONTEXTS:
            many = ("--concurrency", str(STREAMS), "--compare-vs-offline")
            record = transcribe(out, f"{name}.jsonl", f"{name}_{context}.json", context, *many)
            result["environment"] = record["environment"]
            result["sets"].setdefault(name, {})[f"[56, {context}]"] = summary(record, clear.get(name, set()))
            if name != "synthetic":
                alone = transcribe(out, f"{name}.jsonl", f"{name}_{context}_b1.json", context)
                differ = [a["text"] != b["text"] for a, b in zip(record["rows"], alone["rows"], strict=True)]
                result["texts_alone_that_differ"][f"{name} [56, {context}]"] = {
                    "compared": len(differ),
                    "differ": sum(differ),
                }
    result["one_stream_80_ms"] = speed(out)
    arguments.record.write_text(json.dumps(result, indent=1) + "\n")
    for name, contexts in result["sets"].items():
        print(name, {context: numbers["wer_percent"] for context, numbers in contexts.items()})


if __name__ == "__main__":
    main()
