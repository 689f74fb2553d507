"""From pushed audio to mel frames, a chunk at a time, equal to the mel of the whole recording.

`AudioBuffer` (host, numpy) keeps the samples that future chunks still need and cuts the block of one chunk; `MelFrontend` (device, torch)
turns a batch of blocks into log-mel. A block is a pure function of the sample position, so pushing the same audio in other pieces gives
bit-equal features, and blocks of one chunk kind have one shape: they batch.

Shapes: samples [S], blocks [B, S], mel [B, F, T]. Formula: NeMo `FilterbankFeatures` (pre-emphasis, centred Hann window of 25 ms in a
512-point FFT, power, filterbank, log(x + 2^-24)), where the centre padding is zeros; so a block carries n_fft/2 samples on both sides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from workbench.errors import StreamClosed
from workbench.geometry import Chunk, StreamGeometry
from workbench.model.speech import Samples


class AudioBuffer:
    """Samples of one stream. Pre-emphasis is applied on arrival, since it needs the sample before."""

    def __init__(self, geometry: StreamGeometry, preemphasis: float | None, n_fft: int) -> None:
        self.geometry, self._half = geometry, n_fft // 2
        self._preemphasis = np.float32(preemphasis or 0.0)
        self._kept: Samples = np.zeros(0, np.float32)
        self._kept_from = 0
        self._last = np.float32(0)
        self._next_chunk = 0
        self.received_samples = 0
        self.ended = False

    def push(self, samples: Samples) -> None:
        """Append audio [S] at the model's rate. Raises StreamClosed after `end`."""
        if self.ended:
            raise StreamClosed("audio was pushed after the end of the stream")
        if samples.size == 0:
            return
        kept = np.empty(self._kept.size + samples.size, np.float32)
        kept[: self._kept.size] = self._kept
        added = kept[self._kept.size :]
        if self._preemphasis:
            np.multiply(samples[:-1], self._preemphasis, out=added[1:])
            added[0] = self._preemphasis * self._last
            np.subtract(samples, added, out=added)
            self._last = samples[-1]
        else:
            added[:] = samples
        self._kept = kept
        self.received_samples += samples.size

    def end(self) -> None:
        """No audio follows: the remaining chunks may be cut short."""
        self.ended = True

    def forget(self) -> None:
        """No chunk will be cut any more: let the audio go, even while somebody still holds the stream."""
        self._kept = np.zeros(0, np.float32)

    @property
    def waiting_samples(self) -> int:
        """Samples received that no chunk has taken."""
        return max(0, self.received_samples - self.geometry.mel_start(self._next_chunk) * self.geometry.hop_samples)

    def next_chunk(self, ahead: int = 0) -> Chunk | None:
        """The next chunk, or the one `ahead` places behind it, if its audio is there, else None."""
        index = self._next_chunk + ahead
        if self.received_samples >= self.geometry.chunk_ready_samples(index):
            return self.geometry.chunk(index)
        total = self.geometry.mel_frames(self.received_samples)
        if not self.ended or total <= self.geometry.mel_start(index):
            return None
        return self.geometry.chunk(index, stop_mel=total)

    def peek(self, chunk: Chunk) -> Samples:
        """The block [S] of `chunk`, S = (input mel frames - 1) * hop + n_fft.

        What lies beyond the window of the last frame stays zero, even if it has arrived: a block depends on the chunk alone.
        """
        hop = self.geometry.hop_samples
        start = (chunk.start_mel - chunk.history_mel) * hop - self._half
        stop = (chunk.stop_mel - 1) * hop + self._half
        block = np.zeros(stop - start, np.float32)
        seen_to = self.geometry.samples_for_mel(chunk.stop_mel)
        have_from, have_to = max(start, self._kept_from), min(seen_to, self.received_samples)
        block[have_from - start : have_to - start] = self._kept[have_from - self._kept_from : have_to - self._kept_from]
        return block

    def consume(self, chunk: Chunk) -> None:
        """`chunk` was taken: move on, and forget the samples that no later chunk needs."""
        keep_from = (chunk.stop_mel - self.geometry.history_mel_frames) * self.geometry.hop_samples - self._half
        keep_from = max(self._kept_from, keep_from)
        self._kept = self._kept[keep_from - self._kept_from :]
        self._kept_from = keep_from
        self._next_chunk = chunk.index + 1


class MelFrontend:
    """Log-mel of blocks on the model's device, in fp32, with the window and filterbank of NeMo's featurizer."""

    def __init__(self, featurizer: Any, device: str) -> None:
        self.device, self._featurizer = device, featurizer
        self.n_fft, self.hop = int(featurizer.n_fft), int(featurizer.hop_length)
        self.preemphasis: float | None = featurizer.preemph
        self._window = featurizer.window.to(device, torch.float32)
        self._filters_FK = featurizer.fb[0].to(device, torch.float32)

    def __call__(self, blocks_BS: torch.Tensor) -> torch.Tensor:
        """Blocks [B, S] -> log-mel [B, F, T] with T = (S - n_fft) / hop + 1."""
        f = self._featurizer
        spectrum = torch.stft(
            blocks_BS.to(self.device, non_blocking=True),
            n_fft=self.n_fft,
            hop_length=self.hop,
            win_length=f.win_length,
            window=self._window,
            center=False,
            return_complex=True,
        )
        power = torch.view_as_real(spectrum).pow(2).sum(-1).sqrt()
        if f.mag_power != 1.0:
            power = power.pow(f.mag_power)
        mel_BFT = torch.matmul(self._filters_FK, power)
        guard = f.log_zero_guard_value_fn(mel_BFT)
        return torch.log(mel_BFT + guard if f.log_zero_guard_type == "add" else mel_BFT.clamp(min=guard))
