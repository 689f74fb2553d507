"""Augmentation on the device: gain, equalisation, telephone band, reverberation, noise, and masks on the mel features.

Everything acts on a whole batch at once. `strength` (0…1) scales how often and how much, so that training starts on
clean speech. Reverberation is a decaying noise tail; filters and tails are applied in one Fourier transform."""

from __future__ import annotations

import torch

RATE_HZ = 16000
MASK_VALUE = -6.0  # about the mean of log-mel features


def chance(count: int, probability: float, device: torch.device) -> torch.Tensor:
    """[B, 1] float mask of ones with the given probability."""
    return (torch.rand(count, 1, device=device) < probability).float()


def random_filters(count: int, bins: int, strength: float, device: torch.device) -> torch.Tensor:
    """Magnitude responses [B, bins]: a smooth ±8 dB curve, and a low pass near 3.4 to 4 kHz for a part of the batch."""
    decibel = torch.randn(count, 1, 10, device=device) * 4.0 * strength
    curve = torch.nn.functional.interpolate(decibel, size=bins, mode="linear", align_corners=True)[:, 0]
    curve = curve * chance(count, 0.6, device)
    frequency = torch.linspace(0, RATE_HZ / 2, bins, device=device)[None]
    edge = 3400 + 600 * torch.rand(count, 1, device=device)
    narrow = torch.sigmoid((edge - frequency) / 60) * torch.sigmoid((frequency - 200) / 40)
    band = chance(count, 0.2 * strength, device)
    return 10 ** (curve / 20) * (1 - band + band * narrow)


def reverberation(count: int, size: int, strength: float, device: torch.device) -> torch.Tensor:
    """Fourier transform [B, size/2+1] of impulse responses: a direct pulse and, for a part, a decaying tail."""
    time = torch.arange(4800, device=device)[None] / RATE_HZ
    decay = torch.exp(-time * 6.9 / (0.1 + 0.4 * torch.rand(count, 1, device=device)))
    tail = torch.randn(count, 4800, device=device) * decay
    tail = tail / tail.norm(dim=1, keepdim=True) * (0.15 + 0.45 * torch.rand(count, 1, device=device))
    tail = tail * chance(count, 0.3 * strength, device)
    tail[:, 0] = 1.0
    return torch.fft.rfft(tail, n=size)


def noise(waves: torch.Tensor, strength: float) -> torch.Tensor:
    """Coloured noise, and other utterances of the batch as babble, at random signal-to-noise ratios."""
    count, device = len(waves), waves.device
    size = waves.shape[1]
    level = waves.square().mean(dim=1, keepdim=True).sqrt() + 1e-5
    white = torch.fft.rfft(torch.randn_like(waves))
    frequency = torch.arange(white.shape[1], device=device)[None] / white.shape[1] + 0.01
    coloured = torch.fft.irfft(white * frequency ** (-torch.rand(count, 1, device=device)), n=size)
    coloured = coloured / coloured.square().mean(dim=1, keepdim=True).sqrt()
    ratio = 10 ** (-(8 + 32 * torch.rand(count, 1, device=device)) / 20)
    mixed = waves + coloured * level * ratio * chance(count, 0.6 * strength, device)
    babble = waves.roll(1, 0)
    ratio = 10 ** (-(12 + 18 * torch.rand(count, 1, device=device)) / 20)
    scale = level / (babble.square().mean(dim=1, keepdim=True).sqrt() + 1e-5)
    return mixed + babble * scale * ratio * chance(count, 0.1 * strength, device)


def augment(waves: torch.Tensor, strength: float) -> torch.Tensor:
    """Augmented waveforms [B, T]; the peak stays at or below 1."""
    if strength <= 0:
        return waves
    count, length, device = *waves.shape, waves.device
    size = 1 << (length + 4800 - 1).bit_length()
    response = random_filters(count, size // 2 + 1, strength, device) * reverberation(count, size, strength, device)
    filtered = torch.fft.irfft(torch.fft.rfft(waves, n=size) * response, n=size)[:, :length]
    noisy = noise(filtered, strength)
    gain = 10 ** (-20 * strength * torch.rand(count, 1, device=device) / 20)
    peak = noisy.abs().amax(dim=1, keepdim=True).clamp(min=1e-4)
    return noisy / peak * torch.minimum(peak, torch.ones_like(peak)) * gain


def mask(features: torch.Tensor, lengths: torch.Tensor, strength: float) -> torch.Tensor:
    """Masks two bands and several stretches of log-mel features [B, F, T] at the features' mean."""
    if strength <= 0:
        return features
    count, bands, frames = features.shape
    device = features.device
    hidden = torch.zeros(count, bands, frames, dtype=torch.bool, device=device)
    band, frame = torch.arange(bands, device=device), torch.arange(frames, device=device)
    for _ in range(2):
        width = torch.rand(count, 1, device=device) * 22 * strength
        first = torch.rand(count, 1, device=device) * (bands - width)
        hidden |= ((band >= first) & (band < first + width))[:, :, None]
    for _ in range(6):
        width = torch.rand(count, 1, device=device) * torch.clamp(lengths[:, None] * 0.05, max=30.0) * strength
        first = torch.rand(count, 1, device=device) * (lengths[:, None] - width)
        hidden |= ((frame >= first) & (frame < first + width))[:, None, :]
    return features.masked_fill(hidden, MASK_VALUE)
