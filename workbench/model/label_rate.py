"""A realistic label rate for random weights: the decoder of an untrained model emits as many labels as it may, or none at all.

    emitted_hz = set_label_rate(model, geometry, rate_hz=3.0)     # labels per second of audio; people speak about 3 word pieces a second

Why: each label costs a round of predictor and joint, so a load on random weights measures the wrong decoder unless the rate is set. The
joint's bias of blank is moved until the shipped speech, recognised in one pass at the present context, gives the wanted rate. Labels of random
weights come in runs: with `asr.max_symbols` of 2 a frame that emits costs about what it costs a trained model.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import ModelError
from workbench.model.speech import SHIPPED_SPEECH, find_audio, read_audio

CLIPS, CLIP_S = 12, 4.0
TRIES = 14


def set_label_rate(model: Any, rate_hz: float, sample_rate_hz: int = 16000) -> float:
    """Move the bias of blank so that about `rate_hz` labels per second of audio are emitted; returns the rate reached.

    Call again after a change of the context. Raises ModelError where more labels are wanted than `max_symbols` allows.
    """
    import torch

    with torch.inference_mode():
        encoded_BDT, lengths_B, audio_s = _encoded(model, sample_rate_hz)
        bias = model.joint.joint_net[-1].bias.data
        blank = model.decoding.decoding.decoding_computer._blank_index
        start, tried = float(bias[blank]), list[tuple[float, float, float]]()

        def emitted_hz(more: float) -> float:
            bias[blank] = start + more
            best = model.decoding.rnnt_decoder_predictions_tensor(encoded_BDT, lengths_B, return_hypotheses=True)
            found_hz = sum(len(hypothesis.y_sequence) for hypothesis in best) / audio_s
            tried.append((abs(found_hz - rate_hz), more, found_hz))
            return found_hz

        reach = 1.0
        while emitted_hz(-reach) < rate_hz or emitted_hz(reach) > rate_hz:
            reach *= 4
            if reach > 1e5:
                bias[blank] = start
                raise ModelError(f"label rate: got {rate_hz:g} labels a second; this model reaches {tried[-2][2]:.3g}")
        low, high = -reach, reach
        for _ in range(TRIES):
            middle = (low + high) / 2
            low, high = (middle, high) if emitted_hz(middle) > rate_hz else (low, middle)
        _, more, found_hz = min(tried)
        bias[blank] = start + more
    return found_hz


def _encoded(model: Any, sample_rate_hz: int) -> tuple[Any, Any, float]:
    """Encoder output [B, D, T] of shipped speech with the prompt applied, its lengths [B], and the seconds of audio."""
    import torch

    limit = int(CLIP_S * sample_rate_hz)
    clips = [read_audio(item, sample_rate_hz)[:limit] for item in find_audio([str(SHIPPED_SPEECH)]).items[:CLIPS]]
    weight = next(model.encoder.parameters())
    signal_BS = torch.zeros(len(clips), max(clip.size for clip in clips))
    for row, clip in enumerate(clips):
        signal_BS[row, : clip.size] = torch.from_numpy(clip)
    sizes_B = torch.tensor([clip.size for clip in clips], device=weight.device)
    mel_BFT, frames_B = model.preprocessor(input_signal=signal_BS.to(weight.device), length=sizes_B)
    encoded_BDT, lengths_B = model.encoder(audio_signal=mel_BFT.to(weight.dtype), length=frames_B)
    return (
        model._apply_prompt_to_encoded(encoded_BDT),
        lengths_B,
        sum(clip.size for clip in clips) / sample_rate_hz,
    )
