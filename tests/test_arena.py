"""Rows of state: no row is touched by another's batch, none is used before it was reset, none is owned twice."""

from __future__ import annotations

import pytest
import torch
from small_models import alone, recognizer_for, rnnt, tdt

from workbench.errors import ArenaFull
from workbench.runtime.decoding import WalkState


@pytest.fixture(scope="module")
def model():
    return rnnt()


@pytest.fixture(scope="module")
def tdt_model():
    return tdt()


def tensors(arena):
    d = arena.decoder
    found = [arena.channel, arena.time, *d.predictor]
    firsts = [arena.length, d.outputs, d.labels, d.decoded, *([] if d.time_jumps is None else [d.time_jumps])]
    if arena.staged is not None:
        found += arena.staged.banks[0]
        firsts.append(arena.staged.frames)
    return [(tensor, 1) for tensor in found] + [(tensor, 0) for tensor in firsts]


def rows_of(arena, rows):
    return [tensor.index_select(dim, torch.tensor(rows)).clone() for tensor, dim in tensors(arena)]


def poison(arena, rows):
    for tensor, dim in tensors(arena):
        if tensor.is_floating_point():
            tensor.index_fill_(dim, torch.tensor(rows), float("nan"))
        else:
            tensor.index_fill_(dim, torch.tensor(rows), 10**6)


def chunks_of(recognizer, samples):
    from workbench.runtime.frontend import AudioBuffer

    buffer = AudioBuffer(recognizer.loaded.geometry, recognizer.stage.frontend.preemphasis, 512)
    buffer.push(samples)
    while (chunk := buffer.next_chunk()) is not None:
        yield chunk, buffer.peek(chunk)
        buffer.consume(chunk)


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
@pytest.mark.parametrize("kind", ["model", "tdt_model"])
def test_a_batch_leaves_other_rows_bitwise_unchanged(request, noise, pipeline, kind):
    loaded = request.getfixturevalue(kind)
    recognizer = recognizer_for(loaded, f"asr.pipeline={pipeline}", "asr.batching.state_arena_slots=6")
    arena = recognizer.arena
    rows = [arena.acquire() for _ in range(6)]
    bystanders, members = [0, 2, 5], [4, 1, 3]
    poison(arena, [*bystanders, arena.scratch])
    before = rows_of(arena, [*bystanders, arena.scratch])
    for chunk, block in chunks_of(recognizer, noise(0.9, seed=4)):
        recognizer.stage.run([recognizer.stage.item(row, chunk, block) for row in members])
    after = rows_of(arena, [*bystanders, arena.scratch])
    assert all(torch.equal(a, b) or torch.equal(a.isnan(), b.isnan()) for a, b in zip(before, after, strict=True))
    for tensor, dim in tensors(arena):
        mine = tensor.index_select(dim, torch.tensor(members))
        assert not tensor.is_floating_point() or torch.isfinite(mine).all()
    assert rows == list(range(6))


def test_gather_and_scatter_are_inverse_on_any_rows(model):
    arena = recognizer_for(model, "asr.batching.state_arena_slots=5").arena
    for _ in range(5):
        arena.acquire()
    for tensor, _ in tensors(arena):
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape))
    whole = rows_of(arena, [0, 1, 2, 3, 4])
    index = arena.indices([3, 0, 4])
    arena.scatter_encoder(index, arena.gather_encoder(index))
    arena.scatter_decoder(index, arena.gather_decoder(index))
    assert all(torch.equal(a, b) for a, b in zip(whole, rows_of(arena, [0, 1, 2, 3, 4]), strict=True))


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
@pytest.mark.parametrize("kind", ["model", "tdt_model"])
def test_a_poisoned_reused_row_equals_a_fresh_one(request, noise, pipeline, kind):
    recognizer = recognizer_for(
        request.getfixturevalue(kind), f"asr.pipeline={pipeline}", "asr.batching.state_arena_slots=1"
    )
    first = alone(recognizer, noise(1.1, seed=5))
    alone(recognizer, noise(0.9, seed=6))
    poison(recognizer.arena, [0])
    if recognizer.arena.staged is not None:
        recognizer.arena.staged.walks[0] = WalkState(bank=1, pending=3, jump=2, decoded=99)
    assert alone(recognizer, noise(1.1, seed=5)) == first
    assert first[0], "a model that says nothing would show nothing"


def test_rows_are_reset_once_in_few_ranges(model, monkeypatch):
    arena = recognizer_for(model, "asr.batching.state_arena_slots=8").arena
    rows = [arena.acquire() for _ in range(8)]
    for row in (1, 2, 3, 7):
        arena.release(row)
    assert [arena.acquire() for _ in range(4)] == [1, 2, 3, 7]
    ranges, reset = [], arena._reset
    monkeypatch.setattr(arena, "_reset", lambda start, stop: (ranges.append((start, stop)), reset(start, stop)))
    arena.indices(rows)
    arena.indices(rows)
    assert ranges == [(1, 4), (7, 8)]


def test_padding_reads_the_scratch_row_only(model):
    arena = recognizer_for(model, "asr.batching.state_arena_slots=3").arena
    arena.acquire()
    assert arena.indices([0], pad_to=4).tolist() == [0, 3, 3, 3]
    assert arena.scratch == 3
    arena.acquire(), arena.acquire()
    with pytest.raises(ArenaFull, match="state_arena_slots"):
        arena.acquire()
    assert arena.snapshot()["arena_refusals"] == 1
