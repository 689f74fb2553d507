"""Label ids to text, incrementally: a stream's text grows by its new words and is never rebuilt from its beginning.

    detokenizer = Detokenizer(model)
    growing = GrowingText(detokenizer)
    growing.add([17, 203]); growing.text

Word pieces join into text at word starts (`▁` of SentencePiece, a leading space in a plain vocabulary), so everything before a word start is
final once that word has begun. That keeps the cost of a step independent of the age of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_FREEZE_AFTER = 48


@dataclass(frozen=True)
class Word:
    """One word and the span, in seconds, of the encoder frames that emitted it."""

    text: str
    start_s: float
    end_s: float


class Detokenizer:
    """Text and word starts of a model's vocabulary."""

    def __init__(self, model: Any) -> None:
        self._tokenizer = getattr(model, "tokenizer", None)
        vocabulary = [str(piece) for piece in model.joint.vocabulary]
        if self._tokenizer is not None:
            vocabulary = [str(p) for p in self._tokenizer.ids_to_tokens(list(range(len(vocabulary))))]
        self._vocabulary = vocabulary
        self._starts = [piece.startswith(("▁", " ")) for piece in vocabulary]

    def text(self, labels: Sequence[int]) -> str:
        """Text of label ids, without outer spaces."""
        if self._tokenizer is not None:
            return str(self._tokenizer.ids_to_text(list(labels))).strip()
        return "".join(self._vocabulary[label] for label in labels).strip()

    def words(
        self, labels: Sequence[int], frames: Sequence[int], frame_s: float, duration_s: float
    ) -> tuple[Word, ...]:
        """Words with their times, cut at `duration_s`: frame k covers [k, k + 1) * `frame_s`."""
        if not labels:
            return ()
        starts = [i for i, label in enumerate(labels) if i == 0 or self._starts[label]]
        spans = zip(starts, [*starts[1:], len(labels)], strict=True)
        words = [
            Word(
                self.text(labels[i:j]),
                min(frames[i] * frame_s, duration_s),
                min((frames[j - 1] + 1) * frame_s, duration_s),
            )
            for i, j in spans
        ]
        return tuple(word for word in words if word.text)

    def starts_word(self, label: int) -> bool:
        """Whether the label begins a word."""
        return self._starts[label]


class GrowingText:
    """The text of one stream."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._frozen = ""
        self._open: list[int] = []
        self._text = ""

    @property
    def text(self) -> str:
        """Everything recognised so far."""
        return self._text

    def add(self, labels: Sequence[int]) -> None:
        """Append label ids."""
        if not labels:
            return
        self._open += labels
        if len(self._open) > _FREEZE_AFTER:
            cut = next(
                (i for i in range(len(self._open) - 1, 0, -1) if self._detokenizer.starts_word(self._open[i])), 0
            )
            if cut:
                self._frozen = _joined(self._frozen, self._detokenizer.text(self._open[:cut]))
                self._open = self._open[cut:]
        self._text = _joined(self._frozen, self._detokenizer.text(self._open))


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
