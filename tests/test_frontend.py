"""Incremental mel equals whole-file mel, and does not depend on how the audio was cut into pushes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import StreamClosed
from workbench.geometry import StreamGeometry
from workbench.runtime.frontend import AudioBuffer, MelFrontend

CONTEXTS = [(56, 0), (56, 1), (56, 3), (56, 6), (56, 13)]


def incremental(loaded, geometry, samples, cuts):
    """Mel [F, T] put together from chunks, with `samples` pushed in pieces that end at `cuts`; the chunks taken as they became ready."""
    frontend = MelFrontend(loaded.model.preprocessor.featurizer, "cpu")
    buffer = AudioBuffer(geometry, frontend.preemphasis, frontend.n_fft)
    out, blocks = [], []

    def drain():
        while (chunk := buffer.next_chunk()) is not None:
            block = buffer.peek(chunk)
            buffer.consume(chunk)
            blocks.append(block)
            out.append(frontend(torch.from_numpy(block)[None])[0][:, chunk.history_mel :])

    for start, stop in zip([0, *cuts], [*cuts, samples.size], strict=True):
        buffer.push(samples[start:stop])
        drain()
    buffer.end()
    drain()
    mel = torch.cat(out, dim=1) if out else torch.zeros(frontend._filters_FK.size(0), 0)
    return mel, blocks


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("seconds", [0.005, 0.0099, 0.01, 0.08, 0.31, 1.0, 2.3456])
def test_incremental_mel_equals_whole_file_mel(tiny_model, noise, context, seconds):
    samples = noise(seconds)
    whole, length = tiny_model.model.preprocessor(
        input_signal=torch.from_numpy(samples)[None], length=torch.tensor([samples.size])
    )
    mel, _ = incremental(tiny_model, StreamGeometry(*context), samples, [])
    assert mel.shape[1] == int(length[0])
    torch.testing.assert_close(mel, whole[0, :, : int(length[0])], rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), context=st.sampled_from(CONTEXTS), samples=st.integers(0, 40_000))
def test_any_chunking_of_push_gives_bit_equal_blocks(tiny_model, noise, data, context, samples):
    audio = noise(samples / 16000)
    cuts = sorted(data.draw(st.lists(st.integers(0, audio.size), max_size=12)))
    geometry = StreamGeometry(*context)
    one, one_blocks = incremental(tiny_model, geometry, audio, [])
    many, many_blocks = incremental(tiny_model, geometry, audio, cuts)
    assert torch.equal(one, many)
    assert [b.tobytes() for b in one_blocks] == [b.tobytes() for b in many_blocks]


def test_memory_of_a_long_stream_is_bounded(tiny_model, noise):
    geometry = StreamGeometry(56, 0)
    frontend = MelFrontend(tiny_model.model.preprocessor.featurizer, "cpu")
    buffer = AudioBuffer(geometry, frontend.preemphasis, frontend.n_fft)
    kept = []
    for _ in range(300):
        buffer.push(noise(0.1))
        while (chunk := buffer.next_chunk()) is not None:
            buffer.peek(chunk)
            buffer.consume(chunk)
        kept.append(buffer._kept.size)
    assert max(kept[150:]) == max(kept[50:150]) < 6000


def test_audio_after_the_end_is_refused():
    buffer = AudioBuffer(StreamGeometry(56, 0), 0.97, 512)
    buffer.end()
    with pytest.raises(StreamClosed):
        buffer.push(np.zeros(10, np.float32))
