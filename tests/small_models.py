"""Models for tests of the runtime: one or two layers, quick, and silent enough that blanks, labels and repeats all occur."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from omegaconf import OmegaConf, open_dict

from workbench.config import load_config
from workbench.model.load import LoadedModel, set_context, set_decoding
from workbench.model.quiet import quiet_nemo
from workbench.model.shapes import SHAPES, build_model, nemo_config
from workbench.runtime.encoding import apply_prompts
from workbench.runtime.recognizer import Recognizer

DURATIONS = [0, 1, 2, 3, 4]


def loaded(model, context, blank=-1, device="cpu", name="small", memory=3):
    """A LoadedModel around `model`, whose blank wins about half of the frames of speech; `memory` scales what earlier labels weigh."""
    model.preprocessor.featurizer.pad_to = 0
    model.preprocessor.featurizer.dither = 0.0
    model = model.to(device).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    set_decoding(model, max_symbols=3)
    geometry = set_context(model, context)
    contexts = tuple((int(left), int(right)) for left, right in model.encoder.att_context_size_all)
    _spread_scores(model, blank, device, memory)
    return LoadedModel(model, name, geometry, contexts, device, "float32", False)


@torch.inference_mode()
def _spread_scores(model, blank, device, memory):
    """Random joints give nearly equal scores: spread them, let the predictor matter, and set the blank between the others."""
    output = model.joint.joint_net[-1]
    output.weight.data *= 6
    model.joint.pred.weight.data *= memory
    gaps = leads(model, shipped_clips(1)[0], blank, device).sort().values
    # Half way between two frames: on a frame's own lead the two would tie, and rounding would choose.
    output.bias.data[blank] += gaps[gaps.numel() // 2 - 1 : gaps.numel() // 2 + 1].mean()


@torch.inference_mode()
def leads(model, samples, blank=-1, device="cpu"):
    """For each encoder frame of a recording how far the best label leads the blank at the start of an utterance."""
    signal = torch.from_numpy(samples).unsqueeze(0).to(device)
    mel, length = model.preprocessor(input_signal=signal, length=torch.tensor([signal.size(1)], device=device))
    encoded, _ = model.encoder(audio_signal=mel, length=length)
    encoded = apply_prompts(model, encoded, [0])
    start = model.decoding.decoding.decoding_computer._get_decoding_state_item_after_sos(device=device)
    scores = model.joint.joint_after_projection(
        model.joint.project_encoder(encoded.transpose(1, 2)), start.predictor_output.unsqueeze(0)
    ).flatten(0, 2)
    labels = scores[:, : model.joint.joint_net[-1].out_features + blank]
    return labels.max(-1).values - scores[:, blank]


def rnnt(layers=1, context=(56, 0), device="cpu", memory=3, seed=0):
    return loaded(build_model("tiny", layers=layers, seed=seed), context, device=device, memory=memory)


def tdt(context=(56, 1), device="cpu"):
    """A TDT transducer of the same size: durations 0 to 4 behind the labels and the blank."""
    cfg = OmegaConf.create(nemo_config(dataclasses.replace(SHAPES["tiny"], layers=1)))
    with open_dict(cfg), quiet_nemo():
        from nemo.collections.asr.models import EncDecRNNTModel

        cfg.model_defaults.tdt_durations = DURATIONS
        cfg.joint.num_extra_outputs = len(DURATIONS)
        cfg.decoding.update({"model_type": "tdt", "durations": DURATIONS})
        cfg.loss = {"loss_name": "tdt", "tdt_kwargs": {"durations": DURATIONS}}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = EncDecRNNTModel(cfg=cfg).eval()
    return loaded(model, context, blank=-1 - len(DURATIONS), device=device, name="small-tdt")


def prompted(device="cpu"):
    """A model with a language prompt and two languages."""
    model = build_model("tiny", layers=1, prompts=16)
    with open_dict(model.cfg):
        model.cfg.model_defaults.prompt_dictionary = {"en-US": 0, "de-DE": 5}
    return loaded(model, (56, 0), device=device, name="small-prompted")


def recognizer_for(model, *overrides, slots=3):
    return Recognizer(model, load_config({}, ["asr.model=tiny", *overrides]), slots)


def alone(recognizer, samples, **options):
    """Labels and frames of one stream that is stepped by itself."""
    with recognizer.stream(**options) as stream:
        stream.push(samples)
        stream.step()
        stream.finish()
        return stream.labels, stream.frames


def shipped_clips(count, most_s=4.0):
    """Real speech, the shortest shipped clips first."""
    from workbench.measure.steps import speech_clips

    clips = sorted(speech_clips(16000), key=len)
    return [np.ascontiguousarray(clip[: int(most_s * 16000)]) for clip in clips[:count]]
