"""The greedy walk equals decoding one frame and one label at a time, and its banks always hold what the predictor must read."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.runtime.decoding import ChunkWalk, WalkState

BLANK = 5


class FakeModel:
    """Scores as a pure function of frame and label history; `durations` None is RNNT."""

    def __init__(self, seed, tdt, blank_share):
        self.seed, self.tdt, self.blank_share = seed, tdt, blank_share

    def best(self, history, frame):
        rng = random.Random(hash((self.seed, history, frame)))
        label = BLANK if rng.random() < self.blank_share else rng.randrange(BLANK)
        return label, rng.randrange(4) if self.tdt else 0


def one_at_a_time(model, chunks, max_symbols):
    """Labels with their frames, by the definition: at most `max_symbols` at a frame of one chunk, blanks move on."""
    history, out, frame, start = (), [], 0, 0
    for size in chunks:
        at_frame, last = 0, None
        while frame < start + size:
            label, duration = model.best(history, frame)
            if label == BLANK:
                frame += max(1, duration) if model.tdt else 1
                continue
            at_frame, last = (at_frame + 1 if frame == last else 1), frame
            history += (label,)
            out.append((label, frame))
            if duration:
                frame += duration
            elif at_frame >= max_symbols:
                frame += 1
        start += size
    return out


def walked(model, chunks, max_symbols):
    """The same by walks over two banks of label histories, where a wrong bank would give another history."""
    state, banks, output, out, start = WalkState(), [None, ()], (), [], 0
    for size in chunks:
        walk = ChunkWalk(state, size, max_symbols, BLANK)
        while (op := walk.op()) is not None:
            if op[0] == "predictor":
                banks[1 - op[1]] = output = (*banks[op[1]], state.pending)
                walk.predicted()
            else:
                assert op[1] == size - walk.time
                best = [model.best(output, start + walk.time + i) for i in range(op[1])]
                walk.joined([b[0] for b in best], [b[1] for b in best] if model.tdt else None)
        out += zip(walk.labels, walk.at_frames, strict=True)
        start += size
    return out


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_the_walk_equals_one_frame_and_label_at_a_time(seed, tdt, blank_share, chunks, max_symbols):
    model = FakeModel(seed, tdt, blank_share)
    assert walked(model, chunks, max_symbols) == one_at_a_time(model, chunks, max_symbols)


def test_operations_of_a_short_chunk():
    state = WalkState()
    walk = ChunkWalk(state, 3, 10, BLANK)
    assert walk.op() == ("joint", 3)
    walk.joined([BLANK, 2, 4], None)  # what lies behind the first label is thrown away
    assert (walk.labels, walk.at_frames, state.bank) == ([2], [1], 1)
    assert walk.op() == ("predictor", 1)
    walk.predicted()
    assert walk.op() == ("joint", 2)
    walk.joined([BLANK, BLANK], None)
    assert walk.op() is None and walk.finished
    assert (state.bank, state.pending, state.decoded) == (1, None, 3), "blanks leave the predictor as it is"


@pytest.mark.parametrize(("duration", "jump"), [(1, 0), (3, 2)])
def test_a_jump_past_the_end_is_carried_over(duration, jump):
    state = WalkState()
    ChunkWalk(state, 1, 10, BLANK).joined([2], [duration])
    assert (state.jump, state.pending) == (jump, 2)
    following = ChunkWalk(state, 1, 10, BLANK)
    assert following.finished is (jump >= 1)
    assert state.jump == max(0, jump - 1)
    assert following.op() == (None if jump else ("predictor", 1)), "a label at the end waits for the next chunk"
