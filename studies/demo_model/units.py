"""Lets the human speaker of the training prompts say new texts, by unit selection over half phones.

The prompts hold 2,400 words, which a model soon knows by heart. Here their phones (align.py) are put together anew: a
text is a row of half phones, and dynamic programming picks for each one a place in the recordings, so that few joins
are needed and those lie where they are least heard. Random costs make every rendering different. `phrases` makes texts
from runs of one to four words of different prompts, so that whole words and their transitions are kept too."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import soundfile as sf
from split import held_out_pattern

HELD_OUT = held_out_pattern()
FRAME = 160  # samples of a frame of the alignment
FADE, SEARCH = 96, 64  # samples of a cross-fade, and how far its place may be moved for the waves to agree
LONGEST_SILENCE = 12  # frames of half a pause
CLASSES = (
    "SIL", "P T K", "B D G", "CH JH", "F TH S SH HH", "V DH Z ZH", "M N NG", "L R W Y", "IY IH EY", "EH AE AY",
    "AH ER UH", "AA AO AW OY", "UW OW",
)  # fmt: skip
CLASS = {phone: number for number, phones in enumerate(CLASSES) for phone in phones.split()}
SONORANT = {phone for phones in CLASSES[6:] for phone in phones.split()}


class Units:
    """The recordings as half phones, and the pronunciations of words."""

    def __init__(self, folder: Path) -> None:
        """folder: data folder with human.opus, human.jsonl, units.jsonl and lexicon.txt."""
        self.audio = np.pad(sf.read(folder / "human.opus", dtype="float32")[0], (0, FRAME * 20))
        self.lexicon: dict[str, list[list[str]]] = {}
        for line in (folder / "lexicon.txt").read_text().splitlines():
            word, *phones = line.split()
            self.lexicon.setdefault(word, []).append(phones)
        self.texts = [json.loads(line)["text"].split() for line in (folder / "human.jsonl").read_text().splitlines()]
        names, starts, ends, before, after = [], [], [], [], []
        for line in (folder / "units.jsonl").read_text().splitlines():
            row = json.loads(line)
            position, phones = row["offset"], row["phones"]
            around = ["SIL", *(name for name, _, _ in phones), "SIL"]
            for number, (name, frames, _) in enumerate(phones):
                middle, end = position + frames * FRAME // 2, position + frames * FRAME
                names += [name + "<", name + ">"]  # first and second half
                starts += [position, middle]
                ends += [middle, end]
                before += [around[number]] * 2
                after += [around[number + 2]] * 2
                position = end
            names.append("|")  # no run goes on into the next clip
            starts.append(position), ends.append(position), before.append("SIL"), after.append("SIL")
        self.starts, self.ends = np.array(starts), np.array(ends)
        self.before, self.after = np.array(before), np.array(after)
        kinds = np.array(names)
        self.places = {name: np.flatnonzero(kinds == name) for name in set(names) - {"|"}}
        self.classes = {name: np.array([CLASS[phone] for phone in list_]) for name, list_ in
                        (("before", before), ("after", after))}  # fmt: skip

    def phones(self, text: str, rng: random.Random) -> list[str] | None:
        """Phones of a text with some pauses, or None if a word's pronunciation is not known."""
        result = ["SIL"]
        for word in text.split():
            if word not in self.lexicon:
                return None
            result += rng.choice(self.lexicon[word])
            if rng.random() < 0.12:
                result.append("SIL")
        return result if result[-1] == "SIL" else [*result, "SIL"]

    def select(self, phones: list[str], noise: np.random.Generator) -> list[int] | None:
        """Half phones of the cheapest path, or None if a phone was never recorded."""
        goal = [(number, half) for number in range(len(phones)) for half in "<>"][1:-1]
        total = np.full(len(self.starts) + 1, np.inf)
        came: list[tuple[np.ndarray, np.ndarray]] = []
        costs, places = np.zeros(0), np.zeros(0, int)
        for step, (number, half) in enumerate(goal):
            phone = phones[number]
            fresh = self.places.get(phone + half)
            if fresh is None:
                return None
            # What a unit costs by itself: how different its neighbour was from the one that is wanted.
            side, other = ("before", number - 1) if half == "<" else ("after", number + 1)
            wanted, had = phones[other], getattr(self, side)[fresh]
            own = 0.5 * (had != wanted) + 0.5 * (self.classes[side][fresh] != CLASS[wanted])
            own = own + noise.exponential(0.35, len(fresh))
            if step == 0:
                costs, origin = own, np.full(len(fresh), -1)
            else:
                total[places] = costs
                going_on = total[fresh - 1]
                total[places] = np.inf
                best = int(np.argmin(costs))
                sonorant = phone in SONORANT
                join = 0.2 if phone == "SIL" else (1.6 if sonorant else 0.9) if half == ">" else 1.9
                joined = costs[best] + join
                origin = np.where(going_on <= joined, -2, best)
                costs = np.minimum(going_on, joined) + np.where(going_on <= joined, 0.3, 1.0) * own
            came.append((fresh, origin))
            places = fresh
        return self.trace(came, int(np.argmin(costs)))

    def trace(self, came: list[tuple[np.ndarray, np.ndarray]], last: int) -> list[int]:
        """The chosen half phones, from the back pointers (-2: the place before; else an index into the step before)."""
        path = []
        for step in range(len(came) - 1, -1, -1):
            fresh, origin = came[step]
            path.append(int(fresh[last]))
            if step:
                earlier = came[step - 1][0]
                last = int(np.searchsorted(earlier, fresh[last] - 1)) if origin[last] == -2 else int(origin[last])
        return path[::-1]

    def render(self, path: list[int]) -> np.ndarray:
        """The samples of a path: runs of neighbouring half phones, cross-faded where the waves agree best."""
        ends = np.minimum(self.ends, self.starts + LONGEST_SILENCE * FRAME * 2)
        breaks = [0, *(i for i in range(1, len(path)) if path[i] != path[i - 1] + 1), len(path)]
        out = np.zeros(0, np.float32)
        for first, end in itertools.pairwise(breaks):
            begin, finish = int(self.starts[path[first]]), int(ends[path[end - 1]]) + FADE
            if not len(out):
                out = self.audio[begin:finish].copy()
                continue
            low = max(begin - FADE - SEARCH, 0)
            tail = out[-FADE:]
            window = self.audio[low : low + FADE + 2 * SEARCH]
            energy = np.sqrt(np.convolve(window**2, np.ones(FADE), "valid")) + 1e-3
            shift = int(np.argmax(np.correlate(window, tail, "valid") / energy))
            piece = self.audio[low + shift : finish]
            ramp = np.linspace(0, 1, FADE, dtype=np.float32)
            out = np.concatenate([out[:-FADE], tail * (1 - ramp) + piece[:FADE] * ramp, piece[FADE:]])
        return out

    def speak(self, text: str, rng: random.Random) -> np.ndarray | None:
        """The text in the human voice at 16 kHz, or None if it cannot be said."""
        phones = self.phones(text, rng)
        path = self.select(phones, np.random.default_rng(rng.getrandbits(32))) if phones else None
        return self.render(path) if path else None

    def phrases(self, rng: random.Random) -> str:
        """A text of runs of one to four words of different prompts that spells no held-out sentence."""
        while True:
            words: list[str] = []
            for _ in range(rng.randint(1, 6)):
                source = rng.choice(self.texts)
                first = rng.randrange(len(source))
                words += source[first : first + rng.choice((1, 1, 2, 2, 3, 4))]
            text = " ".join(words)
            if not HELD_OUT.search(f" {text} "):
                return text
