"""Divides the human prompts into training and test by text, so that no test sentence or near-duplicate is trained on.

Prompts whose texts are alike are linked (`alike`), linked prompts form clusters, and whole clusters go to one side.
Only clusters of at most six prompts can be drawn, since the menus that repeat each other form one large cluster.
`collides` is the same test for synthetic text: whatever resembles a test sentence is dropped before it is spoken.

    python studies/demo_model/split.py human/speech/manifest.jsonl     # writes human_{test,train}.jsonl here
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path

HERE = Path(__file__).parent
TEST_CLIPS = 100
LONG_TEST_CLIPS = 10
LARGEST_CLUSTER = 6
LONGEST_TEST_S = 12.5
# Names of protocols: what is spoken ("m g c p" or a word) cannot be told from the transcript file.
UNCERTAIN = ("spy-", "demo-instruct")


def alike(first: list[str], second: list[str]) -> bool:
    """Whether two texts (lists of words) are near-duplicates, or one repeats most of the other."""
    short, long = sorted((first, second), key=len)
    if short == long:
        return True
    if len(short) < 2:
        return False
    if 2 * len(short) / (len(short) + len(long)) < 0.6 and len(short) < 3:
        return False
    matcher = SequenceMatcher(None, short, long, autojunk=False)
    run = matcher.find_longest_match(0, len(short), 0, len(long)).size
    return run >= max(3, 0.6 * len(short)) or matcher.ratio() >= 0.6


def collides(text: str, held_out: Iterable[str]) -> bool:
    """Whether a training text resembles any held-out sentence: contains it, or shares 60 % of its words in order."""
    words = text.split()
    for sentence in held_out:
        other = sentence.split()
        if f" {sentence} " in f" {text} ":
            return True
        if len(other) >= 3 and set(other) & set(words):
            common = sum(word in words for word in other)
            if common >= 0.6 * len(other) and SequenceMatcher(None, words, other, autojunk=False).ratio() >= 0.6:
                return True
    return False


def held_out_texts() -> list[str]:
    """The sentences of the held-out human set."""
    return [json.loads(line)["text"] for line in (HERE / "human_test.jsonl").read_text().splitlines()]


def held_out_pattern() -> re.Pattern[str]:
    """Matches a text, padded by a space on both sides, that contains a held-out sentence."""
    return re.compile(f" (?:{'|'.join(held_out_texts())}) ")


def clusters(texts: list[list[str]]) -> list[list[int]]:
    """Groups of indices whose texts are linked, directly or through others (single linkage)."""
    parent = list(range(len(texts)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    for i in range(len(texts)):
        for j in range(i):
            if root(i) != root(j) and alike(texts[i], texts[j]):
                parent[root(i)] = root(j)
    groups: dict[int, list[int]] = {}
    for index in range(len(texts)):
        groups.setdefault(root(index), []).append(index)
    return list(groups.values())


def eligible(members: list[dict], outside: list[str]) -> bool:
    """Whether a cluster may be held out: sentences of three words or more that no text outside of it contains."""
    if len(members) > LARGEST_CLUSTER or any(m["id"].startswith(UNCERTAIN) for m in members):
        return False
    if any(len(m["text"].split()) < 3 or m["duration"] > LONGEST_TEST_S for m in members):
        return False
    return not any(f" {m['text']} " in text for m in members for text in outside)


def divide(rows: list[dict], seed: int = 1) -> tuple[list[dict], list[dict]]:
    """(train, test) rows of the manifest; read sentences of other speakers are always test.

    Clusters are drawn in a seeded random order, those with a clip of 5 s or more first until there are ten such clips.
    """
    prompts = [row for row in rows if row["source"].startswith("asterisk")]
    others = [row for row in rows if not row["source"].startswith("asterisk")]
    groups = clusters([row["text"].split() for row in prompts])
    random.Random(seed).shuffle(groups)
    candidates = []
    for group in groups:
        outside = [f" {row['text']} " for index, row in enumerate(prompts) if index not in group]
        if eligible([prompts[index] for index in group], outside):
            candidates.append(group)
    long = [group for group in candidates if any(prompts[index]["duration"] >= 5 for index in group)]
    chosen: set[int] = set()
    for group in long[:LONG_TEST_CLIPS] + [group for group in candidates if group not in long]:
        if len(chosen) < TEST_CLIPS:
            chosen.update(group)
    test = [prompts[index] for index in sorted(chosen)]
    train = [prompts[index] for index in range(len(prompts)) if index not in chosen]
    return [row for row in train if not row["id"].startswith(UNCERTAIN)], test + others


def main() -> None:
    """Command line: the manifest that `workbench.model.fetch_speech` wrote."""
    parser = argparse.ArgumentParser()
    parser.add_argument("manifest", type=Path)
    rows = [json.loads(line) for line in parser.parse_args().manifest.read_text().splitlines()]
    for name, part in zip(("human_train", "human_test"), divide(rows), strict=True):
        kept = [{key: row[key] for key in ("id", "text", "duration", "source")} for row in part]
        (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        words = sum(len(row["text"].split()) for row in kept)
        print(f"{name}: {len(kept)} clips, {words} words, {sum(row['duration'] for row in kept):.0f} s")


if __name__ == "__main__":
    main()
