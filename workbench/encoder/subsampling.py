"""NeMo's causal ×8 depthwise-striding subsampling as five kernels, computing only the encoder frames that a step keeps.

Why: as a stack of layers it is some thirty kernels, which at one stream cost as much as three Conformer layers, and at hundreds of streams it
writes and reads activations of 256 channels at mel resolution several times. Here the first convolution is recomputed inside the second,
outputs of the replayed history are never formed, masks are predicates, and channels lie last so that pointwise convolutions are products.

    subsample = subsampling(encoder)
    x_BTD, lengths_B = subsample(mel_BFM, mel_lengths_B, drop=2, frames=1)

Stages: convolution 3×3 stride 2 (one to C channels), ReLU; twice: depthwise 3×3 stride 2, pointwise, ReLU; linear. Each pads two zeros before and one
after, in time and frequency, and what lies beyond a row's length is zero at the input of every stage, as in NeMo's `MaskedConvSequential`.
Shapes: B batch, F mel bins, M mel frames, T frames kept, J = 2T + 1 second-stage frames needed, F2 and F3 bins after two and three stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn import functional

from workbench.encoder.resident_ops import subsampling as layered

Subsample = Callable[[torch.Tensor, torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]]
STAGES = 3


@triton.jit
def _first_two_kernel(
    mel_ptr, lengths_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, out_ptr, bins, mel_frames, bins1, bins2, channels, needed, first,
    BINS_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr,
):  # fmt: skip
    # Program (row and second-stage frame, block of second-stage bins): depthwise stage over the first convolution, recomputed.
    b, j = tl.program_id(0) // needed, tl.program_id(0) % needed
    f2 = tl.program_id(1) * BINS_BLOCK + tl.arange(0, BINS_BLOCK)
    c = tl.arange(0, CHANNELS_BLOCK)
    in_c = c < channels
    length = tl.load(lengths_ptr + b).to(tl.int32)
    length1 = length // 2 + 1
    t2 = first + j
    mel = mel_ptr + b.to(tl.int64) * bins * mel_frames
    bias1 = tl.load(b1_ptr + c, mask=in_c, other=0.0)
    total = tl.zeros((BINS_BLOCK, CHANNELS_BLOCK), tl.float32) + tl.load(b2_ptr + c, mask=in_c, other=0.0)[None, :]
    for dt in tl.static_range(3):
        for df in tl.static_range(3):
            t1 = 2 * t2 - 2 + dt
            f1 = 2 * f2 - 2 + df
            value = tl.zeros((BINS_BLOCK, CHANNELS_BLOCK), tl.float32) + bias1[None, :]
            for et in tl.static_range(3):
                for ef in tl.static_range(3):
                    t0 = 2 * t1 - 2 + et
                    f0 = 2 * f1 - 2 + ef
                    seen = (f0 >= 0) & (f0 < bins) & (t0 >= 0) & (t0 < length)
                    m = tl.load(mel + f0 * mel_frames + t0, mask=seen, other=0.0).to(tl.float32)
                    w1 = tl.load(w1_ptr + (et * 3 + ef) * channels + c, mask=in_c, other=0.0)
                    value += m[:, None] * w1[None, :]
            exists = (t1 >= 0) & (t1 < length1) & (f1 >= 0) & (f1 < bins1)
            w2 = tl.load(w2_ptr + (dt * 3 + df) * channels + c, mask=in_c, other=0.0)
            total += tl.where(exists[:, None], tl.maximum(value, 0.0), 0.0) * w2[None, :]
    at = (tl.program_id(0).to(tl.int64) * bins2 + f2[:, None]) * channels + c[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(f2 < bins2)[:, None] & in_c[None, :])


@triton.jit
def _depthwise_kernel(
    x_ptr, lengths_ptr, w_ptr, b_ptr, out_ptr, bins2, bins3, channels, needed, frames, first,
    BINS_BLOCK: tl.constexpr, CHANNELS_BLOCK: tl.constexpr,
):  # fmt: skip
    # Program (row and kept frame, block of third-stage bins).
    b, i = tl.program_id(0) // frames, tl.program_id(0) % frames
    f3 = tl.program_id(1) * BINS_BLOCK + tl.arange(0, BINS_BLOCK)
    c = tl.arange(0, CHANNELS_BLOCK)
    in_c = c < channels
    length2 = (tl.load(lengths_ptr + b).to(tl.int32) // 2 + 1) // 2 + 1
    total = tl.zeros((BINS_BLOCK, CHANNELS_BLOCK), tl.float32) + tl.load(b_ptr + c, mask=in_c, other=0.0)[None, :]
    for dt in tl.static_range(3):
        t2 = first + 2 * i + dt
        frame = (b * needed + 2 * i + dt).to(tl.int64) * bins2
        for df in tl.static_range(3):
            f2 = 2 * f3 - 2 + df
            exists = (t2 >= 0) & (t2 < length2) & (f2 >= 0) & (f2 < bins2)
            x = tl.load(
                x_ptr + (frame + f2[:, None]) * channels + c[None, :], mask=exists[:, None] & in_c[None, :], other=0.0
            )
            w = tl.load(w_ptr + (dt * 3 + df) * channels + c, mask=in_c, other=0.0)
            total += x.to(tl.float32) * w[None, :]
    at = (tl.program_id(0).to(tl.int64) * bins3 + f3[:, None]) * channels + c[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(f3 < bins3)[:, None] & in_c[None, :])


class FusedSubsampling:
    """The five kernels with an encoder's weights, laid out for them."""

    def __init__(self, pre_encode: Any, dtype: torch.dtype) -> None:
        layers = [layer for layer in pre_encode.conv if isinstance(layer, torch.nn.Conv2d)]
        first, depth2, point2, depth3, point3 = layers
        self.dtype, self.channels = dtype, first.out_channels
        self.first, self.depth2, self.depth3 = (_taps(layer) for layer in (first, depth2, depth3))
        self.point2, self.point3 = (_product(layer, dtype) for layer in (point2, point3))
        out = pre_encode.out
        weight = out.weight.detach().view(out.out_features, self.channels, -1).transpose(1, 2)  # [D, F3, C]
        self.out = (weight.reshape(out.out_features, -1).to(dtype).contiguous(), out.bias.detach().to(dtype))

    def __call__(
        self, mel_BFM: torch.Tensor, lengths_B: torch.Tensor, drop: int, frames: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoder frames drop … drop + frames - 1 of each row [B, T, D], and how many of them are valid [B] (int64)."""
        batch, bins, mel_frames = mel_BFM.shape
        bins1 = bins // 2 + 1
        bins2 = bins1 // 2 + 1
        bins3 = bins2 // 2 + 1
        needed, first = 2 * frames + 1, 2 * drop - 2
        mel_BFM = mel_BFM.contiguous()
        block = {"CHANNELS_BLOCK": triton.next_power_of_2(self.channels), "num_warps": 4}
        x = torch.empty(batch, needed, bins2, self.channels, dtype=self.dtype, device=mel_BFM.device)
        _first_two_kernel[(batch * needed, triton.cdiv(bins2, 4))](
            mel_BFM, lengths_B, *self.first, *self.depth2, x, bins, mel_frames, bins1, bins2, self.channels, needed, first, BINS_BLOCK=4, **block
        )  # fmt: skip
        x = _relu_product(x, self.point2)
        y = torch.empty(batch, frames, bins3, self.channels, dtype=self.dtype, device=mel_BFM.device)
        _depthwise_kernel[(batch * frames, triton.cdiv(bins3, 4))](
            x, lengths_B, *self.depth3, y, bins2, bins3, self.channels, needed, frames, first, BINS_BLOCK=4, **block
        )  # fmt: skip
        y = _relu_product(y, self.point3)
        encoded = functional.linear(y.view(batch, frames, -1), *self.out)
        lengths = lengths_B.to(torch.int64)
        for _ in range(STAGES):
            lengths = lengths // 2 + 1
        return encoded, (lengths - drop).clamp(min=0, max=frames)


def subsampling(encoder: Any, dtype: torch.dtype) -> Subsample:
    """The fused form where the encoder's subsampling is of the kind, else its own layers."""
    pre, bins = encoder.pre_encode, encoder._feat_in
    fits = (
        getattr(pre, "_subsampling", "") == "dw_striding"
        and pre.is_causal
        and pre._sampling_num == STAGES
        and all(isinstance(layer, torch.nn.Conv2d | torch.nn.ReLU) for layer in pre.conv)
        and pre.out.in_features == pre._conv_channels * (((bins // 2 + 1) // 2 + 1) // 2 + 1)
    )
    return FusedSubsampling(pre, dtype) if fits else layered(encoder, dtype)


def _taps(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Taps [9, C] in order of time then frequency, and bias [C], in fp32."""
    weight = layer.weight.detach().float()[:, 0].reshape(layer.out_channels, 9)
    return weight.t().contiguous(), layer.bias.detach().float()


def _product(layer: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.weight.detach()[:, :, 0, 0].to(dtype).t().contiguous(), layer.bias.detach().to(dtype)


def _relu_product(x: torch.Tensor, product: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    weight_CC, bias_C = product
    flat = torch._addmm_activation(bias_C, x.view(-1, x.size(-1)), weight_CC)
    return flat.view(*x.shape[:-1], weight_CC.size(1))
