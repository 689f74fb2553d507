"""Streams taken through the resident step and through NeMo's own step, shared by the CPU and the GPU tests."""

from __future__ import annotations

import torch
from small_models import loaded

from workbench.model.shapes import build_model


def small_encoder(context, device="cpu", layers=2, name="tiny", **changes):
    model = loaded(build_model(name, layers=layers, **changes), context, device=device)
    # Random positional biases and norms: zeros and ones would hide a mistake.
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.model.encoder.named_parameters():
        if "pos_bias" in name or "norm" in name:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.data.add_(noise * (0.3 if "pos_bias" in name else 0.1))
    return model.model.encoder, model.geometry


def relative_error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def chunks_of(geometry, frames):
    """Chunks of a recording of `frames` mel frames, the last one cut at its end."""
    out = []
    while not out or out[-1].stop_mel < frames:
        out.append(geometry.chunk(len(out), stop_mel=frames))
    return out


def lone_frames(encoder, geometry, mel_BFM):
    """Encoded frames [D, T] of one recording by NeMo's step, alone."""
    state = encoder.get_initial_cache_state(batch_size=1, dtype=mel_BFM.dtype, device=mel_BFM.device)
    parts = []
    for chunk in chunks_of(geometry, mel_BFM.size(2)):
        piece = mel_BFM[:, :, chunk.start_mel - chunk.history_mel : chunk.stop_mel]
        encoded, length, *state = type(encoder).cache_aware_stream_step(
            encoder,
            processed_signal=piece,
            processed_signal_length=torch.tensor([piece.size(2)], device=mel_BFM.device),
            cache_last_channel=state[0],
            cache_last_time=state[1],
            cache_last_channel_len=state[2],
            keep_all_outputs=chunk != geometry.chunk(chunk.index),
            drop_extra_pre_encoded=chunk.drop_encoded,
        )
        parts.append(encoded[0, :, : int(length[0])])
    return torch.cat(parts, dim=1)


class ResidentWalk:
    """Drives a resident encoder over whole recordings; `step(mel, lengths, rows, drop)` may be a graphed one."""

    def __init__(self, resident, geometry, step=None):
        self.resident, self.geometry, self.step = resident, geometry, step or resident.step
        self.reused = self.padded = 0

    def whole(self, rows, mel_BFM):
        """One recording per row, all in step -> encoded frames [D, T] of each."""
        self.resident.reset(torch.tensor(rows, device=mel_BFM.device))
        found = [[] for _ in rows]
        for chunk in chunks_of(self.geometry, mel_BFM.size(2)):
            for parts, piece in zip(
                found, self.together(rows, [mel_BFM[n : n + 1] for n in range(len(rows))], chunk), strict=True
            ):
                parts.append(piece)
        return [torch.cat(parts, dim=1) for parts in found]

    def together(self, rows, mels, *chunks, pad_to=0):
        """One step of several rows whose chunks have one shape, filled up at a cut end -> frames [D, T'] of each."""
        chunks = list(chunks) * (len(rows) if len(chunks) == 1 else 1)
        full = self.geometry.chunk(chunks[0].index)
        size = max(len(rows), pad_to)
        batch = mels[0].new_zeros(size, mels[0].size(1), full.input_mel_frames)
        lengths = [full.input_mel_frames] * size
        for n, (mel, chunk) in enumerate(zip(mels, chunks, strict=True)):
            piece = mel[0, :, chunk.start_mel - chunk.history_mel : chunk.stop_mel]
            batch[n, :, : piece.size(1)] = piece
            lengths[n] = piece.size(1)
        index = torch.tensor([*rows, *[self.resident.scratch] * (size - len(rows))], device=batch.device)
        encoded, valid = self.step(batch, torch.tensor(lengths, device=batch.device), index, full.drop_encoded)
        self.padded += size - len(rows)
        return [encoded[n, : int(valid[n])].t() for n in range(len(rows))]

    def crowd(self, mels, rng, buckets, steps_limit=100_000):
        """All recordings through the rows there are: streams join when a row is free, and any subset of them steps together."""
        waiting, live, free, used = list(range(len(mels))), {}, list(range(self.resident.rows)), set()
        plans = [chunks_of(self.geometry, mel.size(2)) for mel in mels]
        found, at = [[] for _ in mels], [0] * len(mels)
        for _ in range(steps_limit):
            while waiting and free and (not live or rng.random() < 0.6):
                row = free.pop(int(rng.integers(len(free))))
                self.reused += row in used
                used.add(row)
                self.resident.reset(torch.tensor([row], device=mels[0].device))
                live[waiting.pop(0)] = row
            if not live:
                break
            chosen = [n for n in live if rng.random() < 0.7] or [next(iter(live))]
            kind = self.kind(plans[chosen[0]][at[chosen[0]]])
            chosen = [n for n in chosen if self.kind(plans[n][at[n]]) == kind][: buckets[-1]]
            size = next(b for b in buckets if b >= len(chosen))
            pieces = self.together(
                [live[n] for n in chosen], [mels[n] for n in chosen], *[plans[n][at[n]] for n in chosen], pad_to=size
            )
            for n, piece in zip(chosen, pieces, strict=True):
                found[n].append(piece)
                at[n] += 1
                if at[n] == len(plans[n]):
                    free.append(live.pop(n))
        return [torch.cat(parts, dim=1) for parts in found]

    def kind(self, chunk):
        return min(chunk.index, 2)
