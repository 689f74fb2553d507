"""Named model shapes with random weights: full cache-aware streaming transducers, true in every dimension to released ones.

Why: the time of a step depends on shapes and not on weights, so a 0.6 B model can be profiled and graphed without its
checkpoint. The decoder of random weights emits nonsense; every result that used one carries the note "untrained weights".

    model = build_model("tiny")                  # EncDecRNNTModel, ~4 M parameters, for the CPU
    model = build_model("nemotron-0.6b", seed=1)

Dimensions: nemotron-0.6b follows nvidia/nemotron-3.5-asr-streaming-0.6b, nemotron-en-0.6b the English
nemotron-speech-streaming, fastconformer-114m stt_en_fastconformer_hybrid_large_streaming_multi (their published configurations).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from workbench.errors import ModelError


@dataclass(frozen=True)
class Shape:
    """Dimensions of a streaming FastConformer transducer; `contexts` are the [left, right] pairs it was trained for."""

    layers: int
    d_model: int
    heads: int
    lstm_layers: int
    lstm_width: int
    joint_width: int
    vocabulary: int
    contexts: tuple[tuple[int, int], ...]
    mels: int = 128
    subsampling_channels: int = 256
    xscaling: bool = False
    prompts: int = 0
    feed_forward_factor: int = 4
    conv_kernel: int = 9


_MULTI = tuple((56, right) for right in (13, 6, 3, 1, 0))
_ENGLISH = tuple((70, right) for right in (13, 6, 1, 0))

SHAPES: dict[str, Shape] = {
    "tiny": Shape(
        layers=4, d_model=176, heads=4, lstm_layers=1, lstm_width=256, joint_width=256, vocabulary=256, contexts=_MULTI, mels=80,
        subsampling_channels=96,
    ),
    "nemotron-0.6b": Shape(
        layers=24, d_model=1024, heads=8, lstm_layers=2, lstm_width=640, joint_width=640, vocabulary=13087, contexts=_MULTI, prompts=128
    ),
    "nemotron-en-0.6b": Shape(
        layers=24, d_model=1024, heads=8, lstm_layers=2, lstm_width=640, joint_width=640, vocabulary=1024, contexts=_ENGLISH
    ),
    "fastconformer-114m": Shape(
        layers=17, d_model=512, heads=8, lstm_layers=1, lstm_width=640, joint_width=640, vocabulary=1024, contexts=_ENGLISH, mels=80,
        xscaling=True,
    ),
}  # fmt: skip


def build_model(name: str | Shape, seed: int = 0, **changes: Any) -> Any:
    """Build a shape in evaluation mode on the CPU with weights drawn from `seed`; `changes` replace fields (`layers=2`).

    Returns a NeMo `EncDecRNNTModel` (with the prompt mixin where the shape has prompts). Raises ModelError for an unknown name.
    """
    if isinstance(name, str) and name not in SHAPES:
        raise ModelError(f"model: got {name!r}; known shapes are {', '.join(SHAPES)}")
    shape = dataclasses.replace(SHAPES[name] if isinstance(name, str) else name, **changes)

    from workbench.model.quiet import quiet_nemo

    with quiet_nemo():
        import torch
        from nemo.collections.asr.models import EncDecRNNTModel
        from omegaconf import OmegaConf

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = (_prompted_class() if shape.prompts else EncDecRNNTModel)(
                cfg=OmegaConf.create(nemo_config(shape))
            )
            if shape.prompts:
                model.initialize_prompt_feature()
                model._inference_prompt_index = 0
    return model.eval()


def nemo_config(shape: Shape) -> dict[str, Any]:
    """The NeMo model configuration of a shape."""
    labels = _labels(shape.vocabulary)
    return {
        "sample_rate": 16000,
        "labels": labels,
        "num_prompts": shape.prompts,
        "model_defaults": {
            "enc_hidden": shape.d_model,
            "pred_hidden": shape.lstm_width,
            "joint_hidden": shape.joint_width,
            "prompt_dictionary": {"en-US": 0, "auto": 101} if shape.prompts else {},
        },
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "NA",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": shape.mels,
            "n_fft": 512,
            "dither": 0.0,
            "pad_to": 0,
        },
        "encoder": _encoder_config(shape),
        "decoder": {
            "_target_": "nemo.collections.asr.modules.RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "prednet": {
                "pred_hidden": shape.lstm_width,
                "pred_rnn_layers": shape.lstm_layers,
                "t_max": None,
                "dropout": 0.0,
            },
        },
        "joint": {
            "_target_": "nemo.collections.asr.modules.RNNTJoint",
            "log_softmax": None,
            "preserve_memory": False,
            "fuse_loss_wer": False,
            "jointnet": {"joint_hidden": shape.joint_width, "activation": "relu", "dropout": 0.0},
        },
        "decoding": {
            "strategy": "greedy_batch",
            "greedy": {"max_symbols": 10, "loop_labels": True, "use_cuda_graph_decoder": False},
        },
        "loss": {"loss_name": "default"},
    }


def _encoder_config(shape: Shape) -> dict[str, Any]:
    return {
        "_target_": "nemo.collections.asr.modules.ConformerEncoder",
        "feat_in": shape.mels,
        "feat_out": -1,
        "n_layers": shape.layers,
        "d_model": shape.d_model,
        "subsampling": "dw_striding",
        "subsampling_factor": 8,
        "subsampling_conv_channels": shape.subsampling_channels,
        "causal_downsampling": True,
        "ff_expansion_factor": shape.feed_forward_factor,
        "self_attention_model": "rel_pos",
        "n_heads": shape.heads,
        "att_context_size": [list(context) for context in shape.contexts],
        "att_context_style": "chunked_limited",
        "xscaling": shape.xscaling,
        "untie_biases": True,
        "pos_emb_max_len": 5000,
        "conv_kernel_size": shape.conv_kernel,
        "conv_norm_type": "layer_norm",
        "conv_context_size": "causal",
        "dropout": 0.0,
        "dropout_pre_encoder": 0.0,
        "dropout_emb": 0.0,
        "dropout_att": 0.0,
    }


def _labels(count: int) -> list[str]:
    """`count` pronounceable word pieces, every third one starting a word, so that nonsense reads like text."""
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    syllables = [c + v for c in consonants for v in vowels]
    pieces = [a + b for a in ["", *syllables] for b in syllables]
    pieces += [a + b + c for a in syllables for b in syllables for c in syllables[:3]]
    return [(" " if i % 3 == 0 else "") + piece for i, piece in enumerate(pieces[:count])]


def _prompted_class() -> Any:
    from nemo.collections.asr.models import EncDecRNNTModel
    from nemo.collections.asr.parts.mixins.mixins import PromptStreamingMixin

    return type("PromptedRNNTModel", (PromptStreamingMixin, EncDecRNNTModel), {})
