"""Models for tests of the runtime: one or two layers, quick, and silent enough that blanks, labels and repeats all occur."""

from __future__ import annotations

import numpy as np
import torch
from omegaconf import OmegaConf, open_dict

from workbench.config import load_config
from workbench.model.load import LoadedModel, set_context, set_decoding
from workbench.model.shapes import SHAPES, _prompted_class, build_model, nemo_config
from workbench.runtime.recognizer import Recognizer

DURATIONS = [0, 1, 2, 3, 4]


def loaded(model, context=(56, 0), max_symbols=3, device="cpu", name="small"):
    """A LoadedModel around `model`, whose blank wins about half of the frames."""
    model.preprocessor.featurizer.pad_to = 0
    model = model.to(device).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    set_decoding(model, max_symbols)
    geometry = set_context(model, context)
    contexts = tuple((int(left), int(right)) for left, right in model.encoder.att_context_size_all)
    return LoadedModel(model, name, geometry, contexts, device, "float32", False)


def rnnt(layers=1, context=(56, 0), blank_bias=1.3, device="cpu", **changes):
    model = build_model("tiny", layers=layers, **changes)
    model.joint.joint_net[-1].bias.data[-1] += blank_bias
    return loaded(model, context, device=device)


def tdt(context=(56, 1), blank_bias=0.8, device="cpu"):
    """A TDT transducer of the same size: durations 0 to 4 behind the labels and the blank."""
    import dataclasses

    from nemo.collections.asr.models import EncDecRNNTModel

    from workbench.model.quiet import quiet_nemo

    cfg = OmegaConf.create(nemo_config(dataclasses.replace(SHAPES["tiny"], layers=1)))
    with open_dict(cfg), quiet_nemo():
        cfg.model_defaults.tdt_durations = DURATIONS
        cfg.joint.num_extra_outputs = len(DURATIONS)
        cfg.decoding.update({"model_type": "tdt", "durations": DURATIONS})
        cfg.loss = {"loss_name": "tdt", "tdt_kwargs": {"durations": DURATIONS}}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = EncDecRNNTModel(cfg=cfg).eval()
    model.joint.joint_net[-1].bias.data[-1 - len(DURATIONS)] += blank_bias
    return loaded(model, context, device=device, name="small-tdt")


def prompted(device="cpu"):
    """A model with a language prompt and two languages."""
    assert _prompted_class()
    model = build_model("tiny", layers=1, prompts=16)
    with open_dict(model.cfg):
        model.cfg.model_defaults.prompt_dictionary = {"en-US": 0, "de-DE": 5}
    model.joint.joint_net[-1].bias.data[-1] += 1.0
    return loaded(model, device=device, name="small-prompted")


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
