"""Geometry against NeMo's own streaming configuration, and the relations that make streaming equal to offline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import ConfigError
from workbench.geometry import StreamGeometry

CONTEXTS = [(56, 0), (56, 1), (56, 3), (56, 6), (56, 13), (70, 0), (70, 1), (70, 6), (70, 13)]
# look-ahead: steady mel frames, chunk ms, samples before the first and the second chunk can run
TABLE = {
    0: (17, 80, 200, 1480),
    1: (25, 160, 1480, 4040),
    3: (41, 320, 4040, 9160),
    6: (65, 560, 7880, 16840),
    13: (121, 1120, 16840, 34760),
}


@pytest.mark.parametrize(("left", "right"), CONTEXTS)
def test_against_the_table_of_released_models(left, right):
    g = StreamGeometry(left, right)
    assert (g.steady_mel_frames, g.chunk_ms, g.chunk_ready_samples(0), g.chunk_ready_samples(1)) == TABLE[right]
    assert g.chunk_samples == g.chunk_ms * 16
    assert g.chunk_s == g.chunk_ms / 1000


@pytest.mark.parametrize(("left", "right"), CONTEXTS)
def test_against_nemo_streaming_cfg(left, right, streaming_cfg_of):
    g, cfg = StreamGeometry(left, right), streaming_cfg_of(left, right)
    assert cfg.chunk_size == [g.first_mel_frames, g.next_mel_frames]
    assert cfg.shift_size == cfg.chunk_size
    assert cfg.valid_out_len == g.chunk_frames
    assert cfg.pre_encode_cache_size == [0, g.history_mel_frames]
    assert cfg.drop_extra_pre_encoded == g.drop_encoded_frames
    assert (cfg.last_channel_cache_size, cfg.cache_drop_size) == (left, 0)


@pytest.fixture(scope="module")
def streaming_cfg_of():
    from workbench.model.load import set_context
    from workbench.model.shapes import build_model

    models = {
        left: build_model("tiny", layers=1, contexts=tuple(c for c in CONTEXTS if c[0] == left)) for left in (56, 70)
    }

    def get(left, right):
        set_context(models[left], (left, right))
        return models[left].encoder.streaming_cfg

    return get


@given(st.sampled_from(CONTEXTS), st.integers(0, 60_000))
def test_chunks_tile_a_recording_and_give_as_many_frames_as_offline(context, samples):
    g = StreamGeometry(*context)
    chunks, total = g.chunks(samples), g.mel_frames(samples)
    assert [c.start_mel for c in chunks] == [0, *[c.stop_mel for c in chunks[:-1]]][: len(chunks)]
    assert (chunks[-1].stop_mel if chunks else 0) == total
    produced = [g.encoded_frames(c.input_mel_frames) - c.drop_encoded for c in chunks]
    assert sum(produced) == g.encoded_frames(total)
    assert all(n == g.chunk_frames for n in produced[:-1])
    assert all(0 < n <= g.chunk_frames for n in produced)


@given(st.sampled_from(CONTEXTS), st.integers(0, 60_000), st.integers(0, 20))
def test_a_chunk_is_ready_exactly_when_its_mel_frames_are(context, samples, index):
    g = StreamGeometry(*context)
    ready = samples >= g.chunk_ready_samples(index)
    assert ready == (g.ready_mel_frames(samples) >= g.chunk(index).stop_mel)


@pytest.mark.parametrize(("left", "right"), [(-1, 0), (56, -1), (56, 2), (70, 3)])
def test_impossible_contexts_are_refused(left, right):
    with pytest.raises(ConfigError, match="att_context_size"):
        StreamGeometry(left, right)


def test_nothing_left_is_an_error():
    with pytest.raises(ConfigError):
        StreamGeometry(56, 0).chunk(3, stop_mel=17)
