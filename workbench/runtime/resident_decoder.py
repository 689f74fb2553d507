"""Greedy RNNT and TDT decoding that lives on the device: state in rows, a fixed piece of work per call, no object per stream.

Why: NeMo's label looping asks the host (or a conditional graph node) after every label whether to go on, and carries hypothesis objects
per stream. Here one *round* is a plain sequence of kernels for the whole batch: joint, best label, then, for rows that emitted, one predictor
step. A chunk of T frames is T + 2 rounds captured behind the encoder in the same graph; rows that emit more ask for further rounds.

    decoder = ResidentDecoder(model, rows=256, max_symbols=10)
    work = decoder.begin(projected_BTJ, lengths_B, start_B, rows_B)
    decoder.rounds(work, 3)
    packed = decoder.end(work)              # [B, 2 + 2 * cap] int32: labels emitted, frames left, labels, frames they belong to

Rules as in NeMo's greedy label looping: at most `max_symbols` labels at one frame; a TDT blank moves at least one frame; a TDT jump past the end
of a chunk is carried into the next. Shapes: B batch, T frames, J joint width, H LSTM width, N LSTM layers, R rows + 1, V labels + blank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from workbench.errors import ModelError


@dataclass(frozen=True)
class DecoderRings:
    """State of all rows: LSTM h and c [N, R, H], predictor output after projection [R, J], frames that a TDT jump still skips [R]."""

    h: torch.Tensor
    c: torch.Tensor
    output: torch.Tensor
    jump: torch.Tensor


@dataclass
class Work:
    """One batch being decoded; replaced tensors, fixed shapes. cap = T * max_symbols."""

    projected: torch.Tensor  # [B, T, J]
    lengths: torch.Tensor  # [B]
    start: torch.Tensor  # [B]
    rows: torch.Tensor  # [B]
    h: torch.Tensor  # [N, B, H]
    c: torch.Tensor  # [N, B, H]
    output: torch.Tensor  # [B, J]
    time: torch.Tensor  # [B]
    at_frame: torch.Tensor  # [B] labels emitted at the present frame
    count: torch.Tensor  # [B]
    labels: torch.Tensor  # [B, cap + 1]; the last column takes what no row emitted
    frames: torch.Tensor  # [B, cap + 1]


class ResidentDecoder:
    """Decoder rows and rounds of one model. Raises ModelError where the predictor is not a plain LSTM."""

    def __init__(self, model: Any, rows: int, max_symbols: int, dtype: torch.dtype) -> None:
        computer = model.decoding.decoding.decoding_computer
        self.durations = _durations(computer)
        self.joint, self.max_symbols, self.blank = model.joint, max_symbols, int(computer._blank_index)
        self.scratch = rows
        device = next(model.joint.parameters()).device
        lstm = _plain_lstm(model.decoder)
        self._score = _weights(model.joint.joint_net[-1], dtype)
        self._project = _weights(model.joint.pred, dtype)
        embedding = model.decoder.prediction["embed"].weight
        self.layers = [_lstm_weights(lstm, layer, dtype) for layer in range(lstm.num_layers)]
        # The first layer's share of the label never changes: a table instead of a product.
        w_in, _, bias = self.layers[0]
        self.table = functional.linear(embedding.to(dtype), w_in, bias)
        start = computer._get_decoding_state_item_after_sos(device=device)
        self._start = ([part.to(dtype) for part in start.predictor_state], start.predictor_output.to(dtype).view(-1))
        size = (lstm.num_layers, rows + 1, lstm.hidden_size)
        self.rings = DecoderRings(
            h=torch.zeros(size, dtype=dtype, device=device),
            c=torch.zeros(size, dtype=dtype, device=device),
            output=torch.zeros(rows + 1, self._start[1].numel(), dtype=dtype, device=device),
            jump=torch.zeros(rows + 1, dtype=torch.int64, device=device),
        )
        self.reset(torch.arange(rows + 1, device=device))

    def reset(self, rows_B: torch.Tensor) -> None:
        """Put rows into the state after the start symbol."""
        (h, c), output = self._start
        batch = rows_B.numel()
        self.rings.h.index_copy_(1, rows_B, h[:, None].expand(-1, batch, -1))
        self.rings.c.index_copy_(1, rows_B, c[:, None].expand(-1, batch, -1))
        self.rings.output.index_copy_(0, rows_B, output[None].expand(batch, -1))
        self.rings.jump.index_fill_(0, rows_B, 0)

    def begin(
        self, projected_BTJ: torch.Tensor, lengths_B: torch.Tensor, start_B: torch.Tensor, rows_B: torch.Tensor
    ) -> Work:
        """Take up the rows' state for a chunk of encoder frames that went through the joint's encoder projection."""
        rings, batch = self.rings, rows_B.numel()
        cap = projected_BTJ.size(1) * self.max_symbols
        zeros = torch.zeros_like(lengths_B)
        return Work(
            projected_BTJ,
            torch.where(rows_B == self.scratch, zeros, lengths_B),
            start_B.to(torch.int64),
            rows_B,
            *(ring.index_select(1, rows_B) for ring in (rings.h, rings.c)),
            rings.output.index_select(0, rows_B),
            rings.jump.index_select(0, rows_B),
            zeros,
            zeros,
            *(torch.zeros(batch, cap + 1, dtype=torch.int64, device=rows_B.device) for _ in range(2)),
        )

    def rounds(self, work: Work, count: int) -> None:
        """So many rounds for every row that has frames left."""
        for _ in range(count):
            self._round(work)

    def end(self, work: Work) -> torch.Tensor:
        """Put the state back and pack the result so far; may be called again after further rounds."""
        rings, rows = self.rings, work.rows
        rings.h.index_copy_(1, rows, work.h)
        rings.c.index_copy_(1, rows, work.c)
        rings.output.index_copy_(0, rows, work.output)
        rings.jump.index_copy_(0, rows, (work.time - work.lengths).clamp(min=0))
        left = (work.lengths - work.time).clamp(min=0)
        parts = (work.count[:, None], left[:, None], work.labels[:, :-1], work.frames[:, :-1])
        return torch.cat(parts, dim=1).to(torch.int32)

    def _round(self, w: Work) -> None:
        active = w.time < w.lengths
        at = w.time.minimum((w.lengths - 1).clamp(min=0))
        seen = w.projected.gather(1, at[:, None, None].expand(-1, 1, w.projected.size(2)))[:, 0]
        scores = self._scores(seen + w.output)
        label, duration = self._best(scores)
        blank = label == self.blank
        emit = active & ~blank
        slot = torch.where(emit, w.count, w.labels.size(1) - 1)[:, None]
        w.labels.scatter_(1, slot, label[:, None])
        w.frames.scatter_(1, slot, (w.start + w.time)[:, None])
        w.count = w.count + emit
        repeats = torch.where(duration == 0, w.at_frame + emit, 0)
        full = repeats >= self.max_symbols
        w.time = w.time + torch.where(active, duration + full, 0)
        w.at_frame = torch.where(full, 0, repeats)
        self._predict(w, label, emit)

    def _scores(self, joined_BJ: torch.Tensor) -> torch.Tensor:
        for part in self.joint.joint_net[:-1]:
            joined_BJ = part(joined_BJ)
        return functional.linear(joined_BJ, *self._score)

    def _best(self, scores_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Best label [B] and frames to move [B]: for RNNT one after a blank, none after a label."""
        if self.durations is None:
            label = scores_BV.argmax(dim=1)
            return label, (label == self.blank).to(torch.int64)
        kinds = self.durations.numel()
        label = scores_BV[:, :-kinds].argmax(dim=1)
        duration = self.durations[scores_BV[:, -kinds:].argmax(dim=1)]
        return label, torch.where((label == self.blank) & (duration == 0), 1, duration)

    def _predict(self, w: Work, label: torch.Tensor, emit: torch.Tensor) -> None:
        """One LSTM step and projection, kept only where a label was emitted."""
        keep = emit[:, None]
        states, below = [], None
        for number, (w_in, w_state, bias) in enumerate(self.layers):
            h, c = w.h[number], w.c[number]
            given = self.table[label] if below is None else functional.linear(below, w_in, bias)
            gate_in, gate_forget, cell, gate_out = (given + functional.linear(h, w_state)).chunk(4, dim=1)
            new_c = gate_forget.sigmoid() * c + gate_in.sigmoid() * cell.tanh()
            below = gate_out.sigmoid() * new_c.tanh()
            states.append((torch.where(keep, below, h), torch.where(keep, new_c, c)))
        w.h = torch.stack([h for h, _ in states])
        w.c = torch.stack([c for _, c in states])
        w.output = torch.where(keep, functional.linear(below, *self._project), w.output)  # type: ignore[arg-type]


def _durations(computer: Any) -> torch.Tensor | None:
    durations = getattr(computer, "durations", None)
    if durations is None:
        return None
    device = next(computer.joint.parameters()).device
    return torch.as_tensor(durations, dtype=torch.int64, device=device)


def _plain_lstm(decoder: Any) -> Any:
    layers = getattr(decoder, "prediction", None)
    lstm = getattr(layers["dec_rnn"], "lstm", None) if layers is not None and "dec_rnn" in layers else None
    if not isinstance(lstm, torch.nn.LSTM) or lstm.proj_size or lstm.bidirectional:
        raise ModelError("the predictor of this model is not a plain LSTM; it has no resident decoder")
    return lstm


def _weights(module: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return module.weight.detach().to(dtype), module.bias.detach().to(dtype)


def _lstm_weights(lstm: Any, layer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input weights [4H, in], state weights [4H, H], sum of both biases [4H]) of one layer, gates in PyTorch's order i, f, g, o."""
    w_in, w_state = (getattr(lstm, f"weight_{kind}_l{layer}").detach().to(dtype) for kind in ("ih", "hh"))
    bias = getattr(lstm, f"bias_ih_l{layer}").detach() + getattr(lstm, f"bias_hh_l{layer}").detach()
    return w_in, w_state, bias.to(dtype)
