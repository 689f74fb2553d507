"""The slot-resident encoder step: NeMo's cache-aware step without its caches being copied, projected or masked again.

Why: NeMo keeps the attention *input* of the last frames per stream and projects keys and values of all of them in every step: 84 % of the
arithmetic at 80 ms chunks. Here each stream owns a row that holds keys and values after projection, in a ring; a step writes the new
frames into the ring and reads it in place. Positional projections depend on nothing but the window, so they are computed once.

    resident = ResidentEncoder(model.encoder, rows=256)
    encoded_BTD, lengths_B = resident.step(mel_BFM, mel_lengths_B, rows_B, drop=2)

Every stream's position counts its frames; what a ring holds of frames before the stream's first is never read, so a row is made fresh by
setting its position to zero and the rest may hold anything. Row `rows` is scratch: padding of a batch points at it and it never advances.

Shapes: B batch, F mel bins, M mel frames, T new encoder frames, D model width, H heads, K = D / H, L layers, R rows + 1,
C = left context + T (ring of keys and values), W = kernel - 1 + T (ring of the convolution's input).
Source of the formulas: Transformer-XL relative attention as in NeMo's `RelPositionMultiHeadAttention`, Conformer layer of `ConformerLayer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from workbench.encoder.int8 import WEIGHTS, Int8Matrix, dequantise, quantise
from workbench.errors import ModelError


@dataclass(frozen=True)
class Norm:
    """A layer normalisation's parameters [D]."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Linear:
    """A projection's parameters: weight [out, in], bias [out] or None; int8: what a lone frame reads in place of `weight`, the same values."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    int8: Int8Matrix | None = None


@dataclass(frozen=True)
class Relative:
    """Relative attention's constants: projected positions [H, 2C - 1, K] in the step's dtype; biases u, v [H, K] and v's scores with every
    position [H, 2C - 1] in fp32."""

    positions: torch.Tensor
    bias_u: torch.Tensor
    bias_v: torch.Tensor
    bias_scores: torch.Tensor


@dataclass(frozen=True)
class FoldedLinear:
    """A projection of a normalised input with the normalisation folded in: weight * norm weight [out, in], its row sums [out] in fp32,
    and bias + weight @ norm bias [out] in fp32. With int8 weights the norm weight [in] stays apart, in fp32, as `factors` of the input."""

    weight: torch.Tensor | Int8Matrix
    sums: torch.Tensor
    bias: torch.Tensor
    eps: float
    factors: torch.Tensor | None = None


@dataclass(frozen=True)
class FoldedWeights:
    """The four projections of a layer that follow a normalisation, folded; used where a step is a single frame."""

    ff1_in: FoldedLinear
    qkv: FoldedLinear
    conv_in: FoldedLinear
    ff2_in: FoldedLinear


@dataclass(frozen=True)
class LayerWeights:
    """One Conformer layer. relative: see `Relative`; taps [kernel, D]."""

    norm_ff1: Norm
    ff1_in: Linear
    ff1_out: Linear
    norm_att: Norm
    qkv: Linear
    relative: Relative
    att_out: Linear
    norm_conv: Norm
    conv_in: Linear
    taps: torch.Tensor
    taps_bias: torch.Tensor | None
    norm_taps: Norm
    conv_out: Linear
    norm_ff2: Norm
    ff2_in: Linear
    ff2_out: Linear
    norm_out: Norm


@dataclass(frozen=True)
class Rings:
    """Stream state of all rows: keys and values [L, R, 2, C, D], convolution inputs [L, R, W, D], frames so far [R] (int32)."""

    kv: torch.Tensor
    conv: torch.Tensor
    position: torch.Tensor

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return (self.kv[:, 0].numel() + self.conv[:, 0].numel()) * self.kv.element_size() + 4


@dataclass(frozen=True)
class StepFrame:
    """What all layers of one step share: row indices [B] (int64), first position [B] and valid new frames [B] (int32)."""

    rows: torch.Tensor
    start: torch.Tensor
    valid: torch.Tensor


def why_not_resident(encoder: Any) -> str | None:
    """The first reason why this encoder has no resident step, or None."""
    cfg = encoder.streaming_cfg
    layer = encoder.layers[0]
    checks = (
        (encoder.self_attention_model == "rel_pos", f"attention is {encoder.self_attention_model!r}, not 'rel_pos'"),
        (encoder.att_context_style == "chunked_limited", f"context style is {encoder.att_context_style!r}"),
        (layer.conv.norm_type == "layer_norm", f"the convolution's norm is {layer.conv.norm_type!r}, not 'layer_norm'"),
        (layer.conv.depthwise_conv._right_padding == 0, "the convolution is not causal"),
        (layer.conv.pointwise_activation == "glu_", "the convolution's gate is not a GLU"),
        (encoder.reduction_position is None, "the encoder reduces its frame rate inside"),
        (cfg is not None and cfg.cache_drop_size == 0, "the streaming configuration drops frames of its caches"),
        (not isinstance(encoder.pre_encode, torch.nn.Linear), "the encoder has no convolutional subsampling"),
        (not getattr(encoder, "is_adapter_available", lambda: False)(), "the encoder has adapters"),
    )
    return next((reason for good, reason in checks if not good), None)


class ResidentEncoder:
    """The step on `rows` rows. Weights are taken as they are now (cast to `dtype`), some packed anew and some shared with the model: after a change of the
    model build the step again.

    ops: the module with `residual_norm`, `attention`, `convolution` …; chosen for the device where None. fold: whether a step of a
    single frame runs with the normalisations folded into the projections, which takes a second copy of half the weights; None as the
    operations advise. weights: `native`, or `int8`: the layers' projections are rounded to int8 (`int8.py`), a folded step reads them so,
    and every other step reads the same values in `dtype`. Raises ModelError for an encoder that has no resident step.
    """

    def __init__(
        self,
        encoder: Any,
        rows: int,
        dtype: torch.dtype | None = None,
        ops: ModuleType | None = None,
        fold: bool | None = None,
        weights: str = "native",
    ) -> None:
        if weights not in WEIGHTS:
            raise ModelError(f"weights: got {weights!r}; allowed are {', '.join(WEIGHTS)}")
        if (reason := why_not_resident(encoder)) is not None:
            raise ModelError(f"no resident step for this encoder: {reason}")
        first = next(encoder.parameters())
        self.device, self.dtype = first.device, dtype or first.dtype
        self.encoder, self.rows, self.ops = encoder, rows, ops or ops_for(self.device)
        left, right = encoder.att_context_size
        self.left, self.chunk_frames = int(left), int(right) + 1
        self.ring_frames = self.left + self.chunk_frames
        conv = encoder.layers[0].conv
        self.conv_frames = conv.kernel_size - 1 + self.chunk_frames
        self.width, self.heads = int(encoder.d_model), int(encoder.layers[0].self_attn.h)
        fold = (self.ops.FOLDS_LONE_FRAMES if fold is None else fold) and self.chunk_frames == 1
        self.weights, self._keep_int8 = weights, weights == "int8" and fold
        with torch.no_grad():
            self.layers = [self._pack(layer) for layer in encoder.layers]
            self.folded = [self._fold(w) for w in self.layers] if fold else []
            self._subsample = self.ops.subsampling(encoder, self.dtype)
        self.rings = self._rings()

    @property
    def scratch(self) -> int:
        """The row that padding points at."""
        return self.rows

    def reset(self, rows_B: torch.Tensor) -> None:
        """Make rows fresh: nothing of what their rings hold will be read."""
        self.rings.position.index_fill_(0, rows_B, 0)

    def step(
        self, mel_BFM: torch.Tensor, mel_lengths_B: torch.Tensor, rows_B: torch.Tensor, drop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One chunk of each row -> encoded [B, T, D] in the step's dtype, valid frames [B] (int64). Rows other than scratch are distinct.

        mel_BFM holds the chunk with the history that the subsampling needs, `drop` encoder frames of which are dropped; a chunk that
        the end cut short is filled up and its true mel frames are in `mel_lengths_B`.
        """
        x_BTD, lengths_B = self._subsampled(mel_BFM, mel_lengths_B, drop)
        position = self.rings.position
        frame = StepFrame(rows_B, position.index_select(0, rows_B), lengths_B.to(torch.int32))
        lone = bool(self.folded) and x_BTD.size(0) == 1
        encoded_BTD = (self._folded_layers if lone else self._layers)(x_BTD, frame)
        moved_B = (rows_B != self.scratch).to(torch.int32) * x_BTD.size(1)
        position.index_add_(0, rows_B, moved_B)
        return encoded_BTD, lengths_B

    def _subsampled(
        self, mel_BFM: torch.Tensor, mel_lengths_B: torch.Tensor, drop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New frames after subsampling, scaled where the model scales: [B, T, D], valid ones [B]."""
        x_BTD, lengths_B = self._subsample(mel_BFM, mel_lengths_B, drop, self.chunk_frames)
        scale = self.encoder.pos_enc.xscale
        return x_BTD * scale if scale else x_BTD, lengths_B

    def _layers(self, x_BTD: torch.Tensor, frame: StepFrame) -> torch.Tensor:
        ops, dtype = self.ops, self.dtype
        # The residual stream stays in fp32; what enters a projection is in the step's dtype.
        residual = x_BTD.float().contiguous()
        hidden = ops.norm(residual, self.layers[0].norm_ff1, dtype)
        for number, w in enumerate(self.layers):
            branch = _linear(functional.silu(_linear(hidden, w.ff1_in)), w.ff1_out)
            residual, hidden = ops.residual_norm(residual, branch, 0.5, w.norm_att)
            attended = ops.attention(_linear(hidden, w.qkv), self.rings.kv[number], frame, w.relative, self.left)
            residual, hidden = ops.residual_norm(residual, _linear(attended, w.att_out), 1.0, w.norm_conv)
            mixed = ops.convolution(
                _linear(hidden, w.conv_in), self.rings.conv[number], frame, (w.taps, w.taps_bias), w.norm_taps
            )
            residual, hidden = ops.residual_norm(residual, _linear(mixed, w.conv_out), 1.0, w.norm_ff2)
            branch = _linear(functional.silu(_linear(hidden, w.ff2_in)), w.ff2_out)
            last = number + 1 == len(self.layers)
            following = None if last else self.layers[number + 1].norm_ff1
            residual, hidden = ops.residual_two_norms(residual, branch, 0.5, w.norm_out, following, dtype)
        return self._out(hidden)

    def _folded_layers(self, x_BTD: torch.Tensor, frame: StepFrame) -> torch.Tensor:
        """The same layers for a lone frame: every projection is one kernel with its normalisation, activation and residual sum."""
        ops, dtype = self.ops, self.dtype
        residual = x_BTD.float().contiguous()
        for number, (w, f) in enumerate(zip(self.layers, self.folded, strict=True)):
            hidden = ops.norm_linear(residual, f.ff1_in, True, dtype)
            residual = ops.linear_residual(hidden, w.ff1_out, residual, 0.5)
            attended = ops.attention(
                ops.norm_linear(residual, f.qkv, False, dtype),
                self.rings.kv[number], frame, w.relative, self.left,
            )  # fmt: skip
            residual = ops.linear_residual(attended, w.att_out, residual, 1.0)
            mixed = ops.convolution(
                ops.norm_linear(residual, f.conv_in, False, dtype),
                self.rings.conv[number], frame, (w.taps, w.taps_bias), w.norm_taps,
            )  # fmt: skip
            residual = ops.linear_residual(mixed, w.conv_out, residual, 1.0)
            hidden = ops.norm_linear(residual, f.ff2_in, True, dtype)
            residual = ops.norm(ops.linear_residual(hidden, w.ff2_out, residual, 0.5), w.norm_out, torch.float32)
        return self._out(residual.to(dtype))

    def _out(self, hidden: torch.Tensor) -> torch.Tensor:
        projection = self.encoder.out_proj
        if projection is None:
            return hidden
        return functional.linear(hidden, projection.weight.to(self.dtype), projection.bias.to(self.dtype))

    def _rings(self) -> Rings:
        layers, rows = len(self.layers), self.rows + 1
        where: dict[str, Any] = {"device": self.device}
        return Rings(
            kv=torch.zeros(layers, rows, 2, self.ring_frames, self.width, dtype=self.dtype, **where),
            conv=torch.zeros(layers, rows, self.conv_frames, self.width, dtype=self.dtype, **where),
            position=torch.zeros(rows, dtype=torch.int32, **where),
        )

    def _pack(self, layer: Any) -> LayerWeights:
        attention, conv = layer.self_attn, layer.conv
        parts = (attention.linear_q, attention.linear_k, attention.linear_v)
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        taps = conv.depthwise_conv
        return LayerWeights(
            norm_ff1=self._norm(layer.norm_feed_forward1),
            ff1_in=self._linear(layer.feed_forward1.linear1),
            ff1_out=self._linear(layer.feed_forward1.linear2),
            norm_att=self._norm(layer.norm_self_att),
            qkv=self._cast(torch.cat([part.weight for part in parts]), bias),
            relative=self._relative(attention),
            att_out=self._linear(attention.linear_out),
            norm_conv=self._norm(layer.norm_conv),
            conv_in=self._linear(conv.pointwise_conv1),
            taps=taps.weight.detach()[:, 0].float().t().contiguous(),
            taps_bias=None if taps.bias is None else taps.bias.detach().float(),
            norm_taps=self._norm(conv.batch_norm),
            conv_out=self._linear(conv.pointwise_conv2),
            norm_ff2=self._norm(layer.norm_feed_forward2),
            ff2_in=self._linear(layer.feed_forward2.linear1),
            ff2_out=self._linear(layer.feed_forward2.linear2),
            norm_out=self._norm(layer.norm_out),
        )

    def _fold(self, w: LayerWeights) -> FoldedWeights:
        pairs = ((w.norm_ff1, w.ff1_in), (w.norm_att, w.qkv), (w.norm_conv, w.conv_in), (w.norm_ff2, w.ff2_in))
        return FoldedWeights(*(self._folded(norm, linear) for norm, linear in pairs))

    def _folded(self, norm: Norm, linear: Linear) -> FoldedLinear:
        source = linear.weight.float() if linear.int8 is None else dequantise(linear.int8)
        bias = source @ norm.bias
        bias = bias if linear.bias is None else bias + linear.bias.float()
        # Sums of the weights as they are after rounding: the mean must cancel exactly what the products contain.
        if linear.int8 is not None:
            return FoldedLinear(linear.int8, (source * norm.weight).sum(dim=1), bias, norm.eps, norm.weight)
        weight = (source * norm.weight).to(self.dtype)
        return FoldedLinear(weight, weight.float().sum(dim=1), bias, norm.eps)

    def _relative(self, attention: Any) -> Relative:
        """Positional projections of distances C - 1 … -(C - 1), as NeMo slices its table for C keys, and the biases."""
        table, keys = self.encoder.pos_enc.pe, self.ring_frames
        start = table.size(1) // 2 + 1 - keys
        projected = attention.linear_pos(table[0, start : start + 2 * keys - 1].to(attention.linear_pos.weight.dtype))
        by_head = projected.view(2 * keys - 1, self.heads, -1).transpose(0, 1)
        positions = by_head.detach().to(self.dtype).contiguous()
        u, v = (bias.detach().float().contiguous() for bias in (attention.pos_bias_u, attention.pos_bias_v))
        return Relative(positions, u, v, torch.einsum("hk,hpk->hp", v, positions.float()).contiguous())

    def _linear(self, module: Any) -> Linear:
        weight = module.weight.detach()
        return self._cast(weight[:, :, 0] if weight.dim() == 3 else weight, module.bias)

    def _cast(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        bias = None if bias is None else bias.detach().to(self.dtype)
        if self.weights == "native":
            return Linear(weight.detach().to(self.dtype).contiguous(), bias)
        int8 = quantise(weight.detach().contiguous())
        return Linear(dequantise(int8, self.dtype), bias, int8 if self._keep_int8 else None)

    def _norm(self, module: Any) -> Norm:
        return Norm(module.weight.detach().float(), module.bias.detach().float(), float(module.eps))


def ops_for(device: torch.device) -> ModuleType:
    """Triton kernels on CUDA where Triton is installed, plain PyTorch elsewhere."""
    from workbench.encoder import resident_ops

    if device.type != "cuda" or find_spec("triton") is None:
        return resident_ops
    from workbench.encoder import kernels

    return kernels


def _linear(x: torch.Tensor, w: Linear) -> torch.Tensor:
    return functional.linear(x, w.weight, w.bias)
