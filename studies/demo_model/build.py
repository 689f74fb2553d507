"""Builds the demo model from `config.yaml`, gives it starting values that train, and exports it in half precision.

The starting values matter at this size: log-mel features (mean -6, deviation 4) are normalised by the first
convolution; the output layers start at the unigram distribution of the texts; each residual branch starts small.
Without them the encoder collapses to a constant and the predictor becomes a language model, at a loss that looks
healthy."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch

if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack  # numpy 2.5 dropped the name that numba's CUDA code in the transducer loss still uses

import sentencepiece
from nemo.collections.asr.models import EncDecRNNTBPEModel
from omegaconf import DictConfig, OmegaConf, open_dict

MEL_MEAN, MEL_DEVIATION = -6.0, 4.0
BLANK_PRIOR = 0.6
BRANCH_ENDS = ("feed_forward1.linear2", "feed_forward2.linear2", "self_attn.linear_out", "conv.pointwise_conv2")


def train_tokenizer(texts: list[str], folder: Path, size: int) -> Path:
    """Trains byte-pair word pieces on the texts; writes the files that NeMo expects and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "tokenizer"), vocab_size=size, model_type="bpe",
        character_coverage=1.0, bos_id=-1, eos_id=-1, pad_id=-1, unk_id=0, minloglevel=2,
    )  # fmt: skip
    pieces = (folder / "tokenizer.vocab").read_text().splitlines()
    (folder / "vocab.txt").write_text("".join(line.split("\t")[0] + "\n" for line in pieces[1:]))
    return folder


def build(config: DictConfig, tokenizer: Path) -> EncDecRNNTBPEModel:
    """A new model on the CPU with NeMo's own starting values."""
    model_config = copy.deepcopy(config.model)
    with open_dict(model_config):
        model_config.tokenizer.dir = str(tokenizer)
    return EncDecRNNTBPEModel(cfg=model_config, trainer=None)


def prepare(model: EncDecRNNTBPEModel, ctc: torch.nn.Linear, unigram: np.ndarray) -> None:
    """Sets the starting values described above. unigram: relative frequency of each word piece [V]."""
    with torch.no_grad():
        first = next(
            module for module in model.encoder.pre_encode.conv.modules() if isinstance(module, torch.nn.Conv2d)
        )
        first.weight /= MEL_DEVIATION
        first.bias -= first.weight.sum(dim=(1, 2, 3)) * MEL_MEAN
        for name, module in model.encoder.layers.named_modules():
            if name.endswith(BRANCH_ENDS):
                module.weight *= 0.3
        log_prior = torch.log(torch.tensor(unigram + 1e-5, dtype=torch.float32) * (1 - BLANK_PRIOR))
        prior = torch.cat([log_prior, torch.log(torch.tensor([BLANK_PRIOR]))])
        for output in (model.joint.joint_net[-1], ctc):
            output.weight *= 0.1
            output.bias.copy_(prior)


def export(model: EncDecRNNTBPEModel, path: Path) -> None:
    """Writes a .nemo file with half-precision weights; `restore_from` copies them into an fp32 model."""
    model = model.cpu().eval()
    with open_dict(model.cfg):
        model.cfg.decoding.greedy.use_cuda_graph_decoder = True  # as in released models; training keeps it off
    whole = model.state_dict()
    halved = {name: value.half() if value.dtype == torch.float32 else value for name, value in whole.items()}
    original = model.state_dict
    model.state_dict = lambda *args, **kwargs: halved  # save_to asks the model for its weights
    try:
        model.save_to(str(path))
    finally:
        model.state_dict = original


def load_config(path: Path) -> DictConfig:
    """The study's YAML."""
    return OmegaConf.load(path)
