"""Whole recordings through the resident engine, any subset of the live streams at a time; shared by the CPU and the GPU tests."""

from __future__ import annotations

import numpy as np

from workbench.runtime.encoding import step_item
from workbench.runtime.frontend import AudioBuffer


class CrowdStream:
    """One recording on its way."""

    def __init__(self, engine, samples, prompt=0):
        self.buffer = AudioBuffer(engine.geometry, engine.frontend.preemphasis, engine.frontend.n_fft)
        self.buffer.push(samples)
        self.buffer.end()
        self.prompt, self.row, self.labels, self.frames = prompt, None, [], []

    def item(self, geometry):
        """The next chunk as a full-size item, or None."""
        chunk = self.buffer.next_chunk()
        return None if chunk is None else step_item(geometry, self.row, chunk, self.buffer.peek(chunk), extend=True)


def step(engine, streams, items):
    """One engine step of several streams with equal kinds."""
    kind = (items[0].key.input_mel_frames, items[0].key.drop_encoded)
    out = engine.step(
        np.array([item.row for item in items]),
        np.stack([item.block for item in items]),
        np.array([item.chunk.input_mel_frames for item in items]),
        kind,
        np.array([stream.prompt for stream in streams]),
    )
    for n, (stream, item) in enumerate(zip(streams, items, strict=True)):
        stream.labels += out.labels[n, : out.counts[n]].tolist()
        stream.frames += out.frames[n, : out.counts[n]].tolist()
        stream.buffer.consume(item.chunk)


def crowd(engine, clips, rng, prompts=None):
    """Labels and frames of every clip; streams join as rows become free, in random company. Also returns the engine steps taken."""
    streams = [CrowdStream(engine, clip, 0 if prompts is None else prompts[n]) for n, clip in enumerate(clips)]
    waiting, live, free, steps = list(streams), [], list(range(engine.rows)), 0
    while waiting or live:
        while waiting and free and (not live or rng.random() < 0.5):
            stream = waiting.pop(0)
            stream.row = free.pop(int(rng.integers(len(free))))
            engine.reset([stream.row])
            live.append(stream)
        chosen = [s for s in live if rng.random() < 0.7] or live[:1]
        pairs = [(s, s.item(engine.geometry)) for s in chosen]
        for stream, item in pairs:
            if item is None:
                live.remove(stream)
                free.append(stream.row)
        pairs = [(s, i) for s, i in pairs if i is not None]
        if pairs:
            key = pairs[0][1].key
            pairs = [(s, i) for s, i in pairs if i.key == key][: engine.ladder[-1]]
            step(engine, [s for s, _ in pairs], [i for _, i in pairs])
            steps += 1
    return [(tuple(s.labels), tuple(s.frames)) for s in streams], steps
