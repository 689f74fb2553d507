"""Counts what the training texts share with the held-out sentences: every text that was spoken, printed, composed or joined.

    python studies/demo_model/overlap.py data_folder --shards 450 --record overlap.json

data_folder: human.jsonl, texts.tsv, units.jsonl, lexicon.txt and human.opus of prepare.sh; --shards: how many training
shards the run spoke. The composed texts are drawn again with the seeds of synthesize.py, the joined ones as data.py
draws them. Three measures per held-out sentence, from strict to loose: it is contained word for word; a run of at least
three words and 60 % of it is shared; or the two are alike (`split.collides`)."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

from data import Planner, Pool
from split import collides, held_out_texts
from synthesize import PHRASE_SHARE, UNITS, tasks
from units import Units

JOINED = 20_000
EXAMPLES = 5


def runs(words: list[str], length: int) -> set[tuple[str, ...]]:
    """All runs of `length` neighbouring words."""
    return {tuple(words[first : first + length]) for first in range(len(words) - length + 1)}


def needed(words: list[str]) -> int:
    """How long a shared run must be to count: three words and 60 % of the sentence (all of it, if it is shorter)."""
    return min(len(words), max(3, math.ceil(0.6 * len(words))))


def overlap(training: Iterable[str], held_out: list[str]) -> dict:
    """How many training texts share what with which of the held-out sentences."""
    split_up = {sentence: sentence.split() for sentence in held_out}
    wanted: dict[tuple[str, ...], set[str]] = {}
    for sentence, words in split_up.items():
        for run in runs(words, needed(words)):
            wanted.setdefault(run, set()).add(sentence)
    lengths = sorted({len(run) for run in wanted})
    texts = set(training)
    hits: dict[str, set[str]] = {"contained": set(), "shared_run": set(), "alike": set()}
    counts, examples = dict.fromkeys(hits, 0), []
    for text in sorted(texts):
        words = text.split()
        shared = {sentence for n in lengths for run in runs(words, n) for sentence in wanted.get(run, ())}
        near = collides(text, held_out)
        found = {
            "contained": {sentence for sentence in shared if f" {sentence} " in f" {text} "},
            "shared_run": shared,
            "alike": {sentence for sentence in held_out if collides(text, [sentence])} if near else set(),
        }
        for name, sentences in found.items():
            counts[name] += bool(sentences)
            hits[name] |= sentences
        if (shared or near) and len(examples) < EXAMPLES:
            examples.append({"training": text, "held_out": min(shared | found["alike"])})
    return {
        "distinct_texts": len(texts),
        "training_texts": counts,
        "held_out_sentences": {name: sorted(sentences) for name, sentences in hits.items()},
        "examples": examples,
    }


def composed(rows: list[tuple[str, str]], voice: Units, shards: int, seed: int = 1) -> list[str]:
    """The texts that the composed human voice made up itself in the first `shards` training shards."""
    made = []
    for name, texts, shard_seed in [task for task in tasks(rows, seed) if task[0].startswith("train_")][:shards]:
        if UNITS not in name:
            continue
        rng = random.Random(shard_seed)
        for given in texts:
            own = rng.random() < PHRASE_SHARE
            text = voice.phrases(rng) if own else given
            if voice.phones(text, rng):  # as `speak` does, so that the same numbers are drawn
                rng.getrandbits(32)
            if own:
                made.append(text)
    return made


def joined(folder: Path, count: int) -> list[str]:
    """Texts of utterances of human prompts joined at random, the speaker of the held-out prompts."""
    tokens: dict[tuple[int, ...], str] = {}

    def remember(text: str) -> list[int]:
        tokens[(len(tokens),)] = text
        return [len(tokens) - 1]

    pool = Pool(remember, 1e6)
    pool.add_human(folder)
    spans = Planner(pool, {"human": 1.0}, seed=1).draw(count, 12 * 16000).spans
    return [" ".join(tokens[tuple(piece)] for _, _, piece in pieces) for pieces in spans]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [tuple(line.split("\t", 1)) for line in (arguments.data / "texts.tsv").read_text().splitlines()]
    prompts = [json.loads(line) for line in (arguments.data / "human.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (Path(__file__).parent / "human_train.jsonl").read_text().splitlines()]
    held_ids = {
        json.loads(line)["id"] for line in (Path(__file__).parent / "human_test.jsonl").read_text().splitlines()
    }
    training = {
        "human prompts": [row["text"] for row in [*prompts, *whole]],
        **{kind: [text for row, text in rows if row == kind] for kind in ("domain", "words", "print")},
        "composed": composed(rows, Units(arguments.data), arguments.shards),
        "joined prompts": joined(arguments.data, JOINED),
    }
    held_out = {"human": held_out_texts(), "synthetic": [text for kind, text in rows if kind == "test"]}
    record = {
        "command": f"overlap.py data --shards {arguments.shards} --record {arguments.record.name}",
        "recordings_in_both": len(held_ids & {row["id"] for row in prompts}),
        "sets": {},
    }
    for name, sentences in held_out.items():
        found = {kind: overlap(texts, sentences) for kind, texts in training.items()}
        touched = {text for kind in found.values() for hit in kind["held_out_sentences"].values() for text in hit}
        for kind, numbers in found.items():
            numbers["held_out_sentences"] = {k: len(hit) for k, hit in numbers["held_out_sentences"].items()}
            print(name, kind, numbers["distinct_texts"], numbers["training_texts"], numbers["held_out_sentences"])
        clear = [text for text in sentences if text not in touched]
        print(f"{name}: {len(clear)} of {len(sentences)} sentences share nothing with any training text", flush=True)
        record["sets"][name] = {"sentences": len(sentences), "training": found, "clear": clear}
    arguments.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
