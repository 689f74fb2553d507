"""Whole-file recognition with the attention masks of a streaming context: the reference that streaming must equal.

    offline_labels(loaded, samples)      # label ids of one pass over the whole recording

Also `nemo_stream_labels`: NeMo's own `conformer_stream_step` in a plain loop, the yardstick for the cost of everything around it.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.geometry import StreamGeometry
from workbench.model.load import LoadedModel
from workbench.model.speech import Samples
from workbench.runtime.frontend import AudioBuffer, MelFrontend


@torch.inference_mode()
def offline_labels(loaded: LoadedModel, samples: Samples) -> tuple[int, ...]:
    """Label ids of a recording [S] recognised in one piece at the model's current context."""
    model = loaded.model
    if loaded.geometry.mel_frames(samples.size) == 0:
        return ()
    signal = torch.from_numpy(samples).unsqueeze(0).to(loaded.device)
    length = torch.tensor([samples.size], device=loaded.device)
    mel, mel_length = model.preprocessor(input_signal=signal, length=length)
    encoded, encoded_length = model.encoder(audio_signal=mel.to(getattr(torch, loaded.dtype)), length=mel_length)
    if hasattr(model, "_apply_prompt_to_encoded"):
        encoded = model._apply_prompt_to_encoded(encoded)
    best = model.decoding.rnnt_decoder_predictions_tensor(encoded, encoded_length, return_hypotheses=True)
    return tuple(int(label) for label in best[0].y_sequence)


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
