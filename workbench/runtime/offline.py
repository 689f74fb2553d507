"""Whole-file recognition with the attention masks of a streaming context: the reference that streaming must equal.

    offline_labels(loaded, samples)      # label ids of one pass over the whole recording

Also `nemo_stream_labels`: NeMo's own `conformer_stream_step` in a plain loop, the yardstick for the cost of everything around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.geometry import StreamGeometry
from workbench.model.load import LoadedModel
from workbench.model.speech import Samples
from workbench.runtime.encoding import apply_prompts, prompt_index
from workbench.runtime.frontend import AudioBuffer, MelFrontend


def offline_labels(loaded: LoadedModel, samples: Samples, prompt: int | None = None) -> tuple[int, ...]:
    """Label ids of a recording [S] recognised in one piece at the model's current context."""
    return offline_batch(loaded, torch.from_numpy(samples).unsqueeze(0), [samples.size], prompt)[0][0]


@torch.inference_mode()
def offline_batch(
    loaded: LoadedModel, signal_BS: torch.Tensor, samples: Sequence[int], prompt: int | None = None
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Label ids, and the encoder frame of each, of recordings [B, S] whose true lengths are `samples`; what lies behind is masked."""
    model = loaded.model
    if min(map(loaded.geometry.mel_frames, samples)) == 0:
        # NeMo cannot take an empty recording; the others of such a batch run without it.
        heard = [row for row, length in enumerate(samples) if loaded.geometry.mel_frames(length) > 0]
        found = iter(offline_batch(loaded, signal_BS[heard], [samples[row] for row in heard], prompt) if heard else [])
        return [next(found) if row in heard else ((), ()) for row in range(len(samples))]
    length = torch.tensor(list(samples), device=loaded.device)
    mel, mel_length = model.preprocessor(input_signal=signal_BS.to(loaded.device), length=length)
    encoded, encoded_length = model.encoder(audio_signal=mel.to(getattr(torch, loaded.dtype)), length=mel_length)
    index = prompt_index(model, None) if prompt is None else prompt
    encoded = apply_prompts(model, encoded, [index] * len(samples))
    best = model.decoding.rnnt_decoder_predictions_tensor(encoded, encoded_length, return_hypotheses=True)
    return [(_integers(hypothesis.y_sequence), _integers(hypothesis.timestamp)) for hypothesis in best]


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


@torch.inference_mode()
def nemo_stream_labels(loaded: LoadedModel, samples: Samples) -> tuple[int, ...]:
    """Label ids of a recording [S] streamed by NeMo's `conformer_stream_step`, one chunk after another, state carried by the caller."""
    model, state, hypotheses = loaded.model, loaded.model.encoder.get_initial_cache_state(batch_size=1), None
    for mel, chunk, last in mel_chunks(loaded.geometry, loaded.model.preprocessor.featurizer, loaded.device, samples):
        _, _, *caches, hypotheses = model.conformer_stream_step(
            processed_signal=mel,
            processed_signal_length=torch.tensor([mel.size(2)], device=mel.device),
            cache_last_channel=state[0],
            cache_last_time=state[1],
            cache_last_channel_len=state[2],
            keep_all_outputs=last,
            previous_hypotheses=hypotheses,
            drop_extra_pre_encoded=chunk.drop_encoded,
            return_transcription=True,
        )
        state = tuple(caches[:3])
    return tuple(int(label) for label in hypotheses[0].y_sequence) if hypotheses else ()


def mel_chunks(geometry: StreamGeometry, featurizer: Any, device: str, samples: Samples) -> Any:
    """Yield (mel [1, F, T], chunk, is_last) over a whole recording."""
    frontend = MelFrontend(featurizer, device)
    buffer = AudioBuffer(geometry, frontend.preemphasis, frontend.n_fft)
    buffer.push(samples)
    buffer.end()
    chunks = geometry.chunks(samples.size)
    for chunk in chunks:
        block = buffer.peek(chunk)
        buffer.consume(chunk)
        yield frontend(torch.from_numpy(block).unsqueeze(0)), chunk, chunk == chunks[-1]
