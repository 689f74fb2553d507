"""Texts to be spoken by synthetic voices: a grammar of telephone sentences, word lists at random, and printed English.

The grammar (`grammar.yaml`) gives the domain; random words give every word a chance in every position, so that the
model cannot lean on sentences alone; short printed sentences (Debian's `fortunes`) give running English. Whatever
resembles a held-out human sentence (`split.collides`) is dropped here, before it can be spoken.

    python studies/demo_model/texts.py fortunes_folder word_list out.tsv --count 60000

Each line of the result: kind <tab> text. Kinds: domain, words, print, `test` (held-out domain sentences), `dev`.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path

import yaml
from split import collides, held_out_texts

from workbench.model.fetch_speech import ONES, normalise_text, number_words

HERE = Path(__file__).parent
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PHONETIC = [
    "alpha",
    "bravo",
    "charlie",
    "delta",
    "echo",
    "foxtrot",
    "golf",
    "hotel",
    "india",
    "juliet",
    "kilo",
    "lima",
    "mike",
    "november",
    "oscar",
    "papa",
    "quebec",
    "romeo",
    "sierra",
    "tango",
    "uniform",
    "victor",
    "whiskey",
    "xray",
    "yankee",
    "zulu",
]
MONTHS = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
]
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
ORDINALS |= {"twelve": "twelfth"}
SHARES = {"domain": 0.5, "words": 0.2, "print": 0.3}
TEST_SENTENCES = 200
DEV_SENTENCES = 150


def ordinal(number: int) -> str:
    """21 → "twenty first", for numbers from 1 to 99."""
    head, _, last = number_words(number).rpartition(" ")
    regular = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return f"{head} {ORDINALS.get(last, regular)}".strip()


def digits(rng: random.Random, low: int = 2, high: int = 8) -> str:
    """Digits read one by one, sometimes with "oh" and "double"."""
    zero = rng.choice(["zero", "zero", "oh"])
    return " ".join(rng.choice([zero, *ONES[1:10]]) for _ in range(rng.randint(low, high)))


def spoken_time(rng: random.Random) -> str:
    """A time of day in one of the usual forms."""
    hour, minute = rng.randint(1, 12), rng.randint(0, 59)
    half = rng.choice(["", " a m", " p m"])
    minutes = "" if minute == 0 else f" oh {number_words(minute)}" if minute < 10 else f" {number_words(minute)}"
    forms = [f"{number_words(hour)}{minutes}{half}"] * 3 + [f"{number_words(hour)} o'clock", "noon", "midnight"]
    return rng.choice([*forms, f"half past {number_words(hour)}", f"quarter to {number_words(hour)}"])


def spoken_date(rng: random.Random) -> str:
    """A date, a weekday, or a relative day."""
    day = f"{rng.choice(MONTHS)} {ordinal(rng.randint(1, 31))}"
    year = f"{rng.choice(['nineteen', 'twenty'])} {number_words(rng.randint(10, 99))}"
    forms = [day, day, f"{day} {year}", rng.choice(DAYS), f"{rng.choice(DAYS)} {day}", f"next {rng.choice(DAYS)}"]
    return rng.choice([*forms, "today", "tomorrow", "yesterday", f"the {ordinal(rng.randint(1, 31))}"])


def money(rng: random.Random) -> str:
    """An amount in dollars, sometimes with cents."""
    dollars = f"{large(rng)} dollars"
    return rng.choice([dollars, dollars, f"{dollars} and {number_words(rng.randint(1, 99))} cents"])


def large(rng: random.Random) -> str:
    """A whole number in words; small ones are more likely."""
    small = number_words(rng.randint(0, 99))
    hundreds = f"{number_words(rng.randint(1, 9))} hundred"
    thousands = f"{number_words(rng.randint(1, 999))} {rng.choice(['thousand', 'thousand', 'million', 'billion'])}"
    return rng.choice([small, small, small, hundreds, f"{hundreds} {small}", thousands, f"{thousands} {hundreds}"])


@cache
def grammar() -> tuple[list[int], list[str], dict[str, list[str]]]:
    """Weights, sentence patterns and slots of `grammar.yaml`."""
    # BaseLoader keeps every scalar a string: in YAML 1.1 a plain `on` or `no` would become a truth value.
    loaded = yaml.load((HERE / "grammar.yaml").read_text(), Loader=yaml.BaseLoader)
    weights, patterns = zip(*loaded["sentences"], strict=True)
    return [int(weight) for weight in weights], list(patterns), loaded["slots"]


def fill(name: str, rng: random.Random) -> str:
    """One random value of a slot."""
    made = {
        "digits": lambda: digits(rng),
        "phone": lambda: digits(rng, 7, 10),
        "spelled": lambda: " ".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 7))),
        "phonetic": lambda: " ".join(rng.choice(PHONETIC) for _ in range(rng.randint(1, 5))),
        "cardinal": lambda: large(rng),
        "ordinal": lambda: ordinal(rng.randint(1, 60)),
        "time": lambda: spoken_time(rng),
        "date": lambda: spoken_date(rng),
        "money": lambda: money(rng),
    }
    return made[name]() if name in made else rng.choice(grammar()[2][name])


def domain_sentence(rng: random.Random) -> str:
    """One sentence of the grammar."""
    weights, patterns, _ = grammar()
    text = rng.choices(patterns, weights)[0]
    while "{" in text:
        text = re.sub(r"\{(\w+)\}", lambda match: fill(match[1], rng), text)
    return " ".join(text.split())


def printed_sentences(folder: Path) -> list[str]:
    """Sentences of 3 to 14 plain words from the collections of short texts, without names of authors and symbols."""
    found = set()
    for path in sorted(folder.iterdir()):
        if path.suffix or path.name in ("ascii-art", "translate-me", "art", "zippy", "drugs", "ethnic", "sports"):
            continue
        for entry in path.read_text(errors="ignore").split("\n%\n"):
            body = re.sub(r"\s+", " ", re.sub(r"\n\s*--.*", "", entry, flags=re.S))
            for sentence in re.split(r"(?<=[.!?;:])\s", body):
                plain = re.fullmatch(r"[A-Za-z][A-Za-z', \-]+[.!?;:]?", sentence)
                if plain and not re.search(r"\b[A-Z]{2,}", sentence):
                    words = normalise_text(sentence).split()
                    if 3 <= len(words) <= 14:
                        found.add(" ".join(words))
    return sorted(found)


def common_words(printed: list[str], word_list: Path, count: int = 6000) -> list[str]:
    """Words for random sequences: the grammar's, those seen at least three times in print, and a dictionary sample."""
    known = {word.strip() for word in word_list.read_text().splitlines() if re.fullmatch(r"[a-z]+", word.strip())}
    seen = Counter(word for sentence in printed for word in sentence.split())
    frequent = [word for word, times in seen.most_common() if times >= 3 and word in known][:count]
    slots = {word for words in grammar()[2].values() for text in words for word in text.split() if "{" not in word}
    return sorted(slots) * 2 + frequent


def make(count: int, printed: list[str], words: list[str], seed: int) -> list[tuple[str, str]]:
    """`count` training sentences and the held-out domain sentences, all clear of the held-out human ones."""
    rng, held_out = random.Random(seed), held_out_texts()
    test: set[str] = set()
    while len(test) < TEST_SENTENCES:
        text = domain_sentence(rng)
        if 3 <= len(text.split()) <= 20 and not collides(text, held_out):
            test.add(text)
    rows = {text: "test" for text in sorted(test)}
    kinds, shares = list(SHARES), list(SHARES.values())
    printed_left = printed.copy()
    rng.shuffle(printed_left)
    while len(rows) < count + TEST_SENTENCES:
        kind = rng.choices(kinds, shares)[0]
        if kind == "print" and not printed_left:
            continue
        if kind == "domain":
            text = domain_sentence(rng)
        elif kind == "words":
            text = " ".join(rng.choice(words) for _ in range(rng.randint(1, 9)))
        else:
            text = printed_left.pop()
        if text not in rows and len(text.split()) <= 26 and not collides(text, held_out):
            rows[text] = kind
    add_dev(rows, seed)
    return [(kind, text) for text, kind in rows.items()]


def add_dev(rows: dict[str, str], seed: int) -> None:
    """Adds the sentences for choosing the blank's bias; they are in no other set."""
    rng, held_out, wanted = random.Random(seed + 1), held_out_texts(), len(rows) + DEV_SENTENCES
    while len(rows) < wanted:
        text = domain_sentence(rng)
        if text not in rows and 3 <= len(text.split()) <= 16 and not collides(text, held_out):
            rows[text] = "dev"


def main() -> None:
    """Command line: where the printed English and the word list lie, and where to write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fortunes", type=Path)
    parser.add_argument("word_list", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    printed = printed_sentences(arguments.fortunes)
    rows = make(arguments.count, printed, common_words(printed, arguments.word_list), arguments.seed)
    arguments.out.write_text("".join(f"{kind}\t{text}\n" for kind, text in rows))
    print(Counter(kind for kind, _ in rows), f"{len(printed)} printed sentences")


if __name__ == "__main__":
    main()
