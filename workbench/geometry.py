"""Streaming geometry as integers: milliseconds, samples, mel frames and encoder frames of an `[left, right]` context.

Why: every off-by-one of a streaming recogniser lives in these few relations, so they stand once, here, and a table test
holds them against NeMo's own `streaming_cfg`. An encoder frame is `subsampling` mel frames (8 × 10 ms = 80 ms).

    g = StreamGeometry(left_frames=56, right_frames=3)
    g.chunk_ms            # 320: audio per step
    g.steady_mel_frames   # 41: 9 frames of pre-encoder history + 32 new ones
    g.chunk(0), g.chunk(1), g.chunk(2)

Chunk k of a stream produces encoder frames [k(r+1), (k+1)(r+1)). With causal ×8 striding, encoder frame j ends at mel frame 8j, so the
first chunk needs 1 + 8r mel frames and every later one 8(r+1). The pre-encoder sees up to 9 earlier mel frames again; the outputs
that belong to them are dropped. Where fewer than 9 earlier frames exist (second chunk of r = 0) only the existing ones are fed and
fewer outputs dropped: zero-filling them instead would put relu(bias) where an offline pass has the padding of the inner layers.
Sources: NeMo `ConformerEncoder.setup_streaming_params`, `ConvSubsampling` (kernel 3, stride 2, left padding 2, right padding 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from workbench.errors import ConfigError


@dataclass(frozen=True)
class Chunk:
    """What step `index` feeds to the encoder: mel frames [start_mel - history_mel, stop_mel), dropping `drop_encoded` outputs."""

    index: int
    start_mel: int
    stop_mel: int
    history_mel: int
    drop_encoded: int

    @property
    def input_mel_frames(self) -> int:
        """Mel frames handed to the encoder."""
        return self.history_mel + self.stop_mel - self.start_mel

    @property
    def new_mel_frames(self) -> int:
        """Mel frames that no earlier chunk carried."""
        return self.stop_mel - self.start_mel


@dataclass(frozen=True)
class StreamGeometry:
    """Integer relations of one look-ahead setting; `left_frames` and `right_frames` count encoder frames."""

    left_frames: int
    right_frames: int
    subsampling: int = 8
    hop_samples: int = 160
    window_samples: int = 400
    sample_rate_hz: int = 16000

    def __post_init__(self) -> None:
        if self.left_frames < 0 or self.right_frames < 0:
            raise ConfigError(f"att_context_size: got [{self.left_frames}, {self.right_frames}]; both must be >= 0")
        if self.left_frames % (self.right_frames + 1):
            raise ConfigError(
                f"att_context_size: got [{self.left_frames}, {self.right_frames}]; the left context must be a multiple of "
                f"right + 1 = {self.right_frames + 1} for chunked attention"
            )
        if self.subsampling < 2 or self.subsampling & (self.subsampling - 1):
            raise ConfigError(f"subsampling: got {self.subsampling}; allowed are powers of two from 2")

    @property
    def chunk_frames(self) -> int:
        """Encoder frames per step (NeMo `valid_out_len`)."""
        return self.right_frames + 1

    @property
    def frame_samples(self) -> int:
        """Samples per encoder frame."""
        return self.subsampling * self.hop_samples

    @property
    def frame_ms(self) -> int:
        """Milliseconds per encoder frame."""
        return self.frame_samples * 1000 // self.sample_rate_hz

    @property
    def chunk_samples(self) -> int:
        """Samples of new audio per steady step."""
        return self.chunk_frames * self.frame_samples

    @property
    def chunk_ms(self) -> int:
        """Milliseconds of new audio per steady step."""
        return self.chunk_frames * self.frame_ms

    @cached_property
    def chunk_s(self) -> float:
        """Seconds of new audio per steady step: the period of a live stream."""
        return self.chunk_samples / self.sample_rate_hz

    @cached_property
    def first_mel_frames(self) -> int:
        """New mel frames of the first chunk (NeMo `chunk_size[0]`)."""
        return 1 + self.subsampling * self.right_frames

    @cached_property
    def next_mel_frames(self) -> int:
        """New mel frames of every later chunk (NeMo `chunk_size[1]`)."""
        return self.subsampling * self.chunk_frames

    @cached_property
    def history_mel_frames(self) -> int:
        """Earlier mel frames that the pre-encoder sees again (NeMo `pre_encode_cache_size[1]`)."""
        return self.subsampling + 1

    @property
    def drop_encoded_frames(self) -> int:
        """Pre-encoder outputs dropped in a steady step (NeMo `drop_extra_pre_encoded`)."""
        return 1 + (self.history_mel_frames - 1) // self.subsampling

    @property
    def steady_mel_frames(self) -> int:
        """Mel frames handed to the encoder in a steady step."""
        return self.history_mel_frames + self.next_mel_frames

    @cached_property
    def right_samples(self) -> int:
        """Samples after the centre of a mel frame that its window needs."""
        return self.window_samples // 2

    def mel_frames(self, samples: int) -> int:
        """Mel frames of a whole recording of `samples` samples (NeMo `get_seq_len` with a centred window)."""
        return samples // self.hop_samples

    def samples_for_mel(self, mel_frames: int) -> int:
        """Samples that must have arrived before `mel_frames` frames can be computed without knowing the end."""
        return 0 if mel_frames <= 0 else (mel_frames - 1) * self.hop_samples + self.right_samples

    def ready_mel_frames(self, samples: int) -> int:
        """Mel frames computable from the first `samples` samples of a stream that goes on."""
        return 0 if samples < self.right_samples else (samples - self.right_samples) // self.hop_samples + 1

    def encoded_frames(self, mel_frames: int) -> int:
        """Encoder frames of `mel_frames` mel frames seen in one piece."""
        frames, factor = mel_frames, self.subsampling
        while factor > 1:
            frames, factor = frames // 2 + 1, factor // 2
        return frames if mel_frames > 0 else 0

    def mel_start(self, index: int) -> int:
        """First new mel frame of chunk `index`."""
        return 0 if index == 0 else self.first_mel_frames + (index - 1) * self.next_mel_frames

    def chunk(self, index: int, stop_mel: int | None = None) -> Chunk:
        """Chunk `index`, cut at `stop_mel` where the recording ends inside it. Raises ConfigError if that leaves nothing."""
        start, full_stop = self.mel_start(index), self.mel_start(index + 1)
        stop = full_stop if stop_mel is None else min(full_stop, stop_mel)
        if index < 0 or stop <= start:
            raise ConfigError(f"chunk {index} starts at mel frame {start}; nothing is left before {stop_mel}")
        history = min(self.history_mel_frames, start)
        # Outputs of the replayed history: encoder frames whose last mel frame lies before `start`, of those the window re-creates.
        drop = 0 if index == 0 else 1 + (history - 1) // self.subsampling
        return Chunk(index, start, stop, history, drop)

    def chunk_ready_samples(self, index: int) -> int:
        """Samples that must have arrived before chunk `index` can run; live, this over the rate is when the chunk is due."""
        return (self.mel_start(index + 1) - 1) * self.hop_samples + self.right_samples

    def chunks(self, samples: int) -> list[Chunk]:
        """Every chunk of a finished recording of `samples` samples, the last one cut at its end."""
        total, out = self.mel_frames(samples), list[Chunk]()
        while (out[-1].stop_mel if out else 0) < total:
            out.append(self.chunk(len(out), stop_mel=total))
        return out
