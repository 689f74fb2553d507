"""Finds where every phone of the human training prompts lies, and lists how the texts' words are pronounced.

pocketsphinx (`pip install pocketsphinx`; its wheel carries an acoustic model and a dictionary) aligns each part of
human.opus with its text. units.py then lets the human voice say new texts from these phones. Writes units.jsonl (per
part: id, offset in samples, phones as [name, frames of 10 ms, index of the word or -1 for silence]) and lexicon.txt
(word and phones, one pronunciation a line).

    python studies/demo_model/align.py data_folder      # with human.opus, human.jsonl and texts.tsv
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pocketsphinx
import soundfile as sf

FRAME, PADDING_FRAMES = 160, 15
# What the dictionary lacks of the prompts' words.
EXTRA = {
    "waldo's": "W AO L D OW Z", "unmute": "AH N M Y UW T", "unmuted": "AH N M Y UW T IH D", "digium": "D IH JH IY AH M",
    "touchtone": "T AH CH T OW N", "semicolon": "S EH M IY K OW L AH N", "caret": "K EH R AH T",
    "backtick": "B AE K T IH K", "lowercase": "L OW ER K EY S", "uppercase": "AH P ER K EY S", "xray": "EH K S R EY",
    "forevermore": "F ER EH V ER M AO R", "prepend": "P R IY P EH N D", "prepending": "P R IY P EH N D IH NG",
    "undelete": "AH N D IH L IY T", "undeleted": "AH N D IH L IY T IH D", "rerecord": "R IY R IH K AO R D",
}  # fmt: skip


def dictionary(wanted: set[str]) -> list[tuple[str, str]]:
    """(word, phones) of every pronunciation of the wanted words."""
    path = Path(pocketsphinx.get_model_path()) / "en-us" / "cmudict-en-us.dict"
    listed = [line.strip().split(" ", 1) for line in path.read_text().splitlines()]
    found = [(word.split("(")[0], phones) for word, phones in listed]
    return [pair for pair in [*found, *EXTRA.items()] if pair[0] in wanted]


def decoder(**options: float) -> pocketsphinx.Decoder:
    """An aligner that also knows the words of EXTRA."""
    made = pocketsphinx.Decoder(samprate=16000, loglevel="FATAL", cmn="batch", **options)
    for word, phones in EXTRA.items():
        made.add_word(word, phones, True)
    return made


def align(aligner: pocketsphinx.Decoder, samples: np.ndarray, text: str) -> list[tuple[str, int, int]]:
    """Phones of one clip as (name, frames of 10 ms, index of the word or -1).

    The clip is padded with faint noise, so that speech at its very beginning is not taken for silence.
    """
    padding = np.random.default_rng(0).normal(0, 8, (2, PADDING_FRAMES * FRAME))
    padded = np.concatenate([padding[0], samples, padding[1]]).astype(np.int16).tobytes()
    aligner.set_align_text(text)
    for turn in range(2):  # words first, then the phones within them
        if turn:
            aligner.set_alignment()
        aligner.start_utt()
        aligner.process_raw(padded, full_utt=True)
        aligner.end_utt()
    phones, number = [], -1
    for word in aligner.get_alignment():
        silent = word.name.startswith(("<", "["))
        number += not silent
        if silent:
            phones.append(("SIL", sum(phone.duration for phone in word), -1))
        else:
            phones += [(phone.name, phone.duration, number) for phone in word]
    return unpadded(phones)


def unpadded(phones: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The phones without the padding's frames at both ends."""
    for end in (0, -1):
        name, frames, word = phones[end]
        phones[end] = (name, max(frames - PADDING_FRAMES, 1), word)
    return phones


def main() -> None:
    """Command line: the data folder."""
    folder = Path(sys.argv[1])
    audio, _ = sf.read(folder / "human.opus", dtype="int16")
    rows = [json.loads(line) for line in (folder / "human.jsonl").read_text().splitlines()]
    spoken = [line.split("\t", 1)[1] for line in (folder / "texts.tsv").read_text().splitlines()]
    words = {word for text in [*spoken, *(row["text"] for row in rows)] for word in text.split()}
    lexicon = dictionary(words)
    (folder / "lexicon.txt").write_text("".join(f"{word} {phones}\n" for word, phones in lexicon))
    quick, thorough = decoder(), decoder(beam=0, wbeam=0, pbeam=0)
    kept = []
    for row in rows:
        part = audio[row["offset"] : row["offset"] + row["samples"]]
        try:
            phones = align(quick, part, row["text"])
        except RuntimeError:  # the beam lost the only path
            phones = align(thorough, part, row["text"])
        kept.append({"id": row["id"], "offset": row["offset"], "phones": phones})
    (folder / "units.jsonl").write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in kept))
    print(f"{len(kept)} of {len(rows)} parts, {sum(len(row['phones']) for row in kept)} phones, {len(lexicon)} words")


if __name__ == "__main__":
    main()
