"""Trains the demo model on one GPU in about ten minutes; resumable, with checkpoints small enough to carry.

    python studies/demo_model/train.py data_folder --shards shards --out run --seconds 540 [--resume run]

data_folder: human.opus + human.jsonl (human.py), texts.tsv (texts.py), tokenizer/ (made here if it is missing).
shards: the folder that synthesize.py fills; new shards are picked up while training goes on. out: weights.pt,
average.pt, adam_m.pt, adam_v.pt (two bytes a number), state.json, and at the end demo.nemo and wer.json. What each
phase is for is told in README.md; its numbers are in config.yaml."""

from __future__ import annotations

import argparse
import gc
import json
import math
import queue
import random
import time
from pathlib import Path

import numpy as np
import torch
from augment import augment, mask
from blank_bias import choose_blank_bias
from build import build, export, load_config, prepare, train_tokenizer
from data import AudioBlock, Loader, Plan, Planner, Pool, frame_targets, render, to_device
from evaluate import evaluate, read_clips, read_shards, transcribe, wer_by_set
from nemo.core.classes.common import typecheck
from transducer import transducer_loss


class Trainer:
    """The model, its CTC head, the optimiser and the running average of the weights."""

    def __init__(self, config, data: Path, device: torch.device) -> None:
        self.config, self.device = config, device
        self.model = build(config, tokenizer(config, data))
        self.blank = self.model.joint.num_classes_with_blank - 1
        self.ctc = torch.nn.Linear(config.model.encoder.d_model, self.blank + 1)
        prepare(self.model, self.ctc, unigram(self.model, data))
        self.model.to(device)
        self.ctc.to(device)
        self.named = {**dict(self.model.named_parameters()), **{f"ctc.{n}": p for n, p in self.ctc.named_parameters()}}
        rate, decay = config.training.learning_rate, config.training.weight_decay
        matrices = [p for p in self.named.values() if p.dim() > 1]
        others = [p for p in self.named.values() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=device.type == "cuda")
        self.average = {name: p.detach().clone() for name, p in self.named.items()}
        self.step, self.elapsed_s = 0, 0.0
        self.warm_from = 0  # the step at which the optimiser began with empty moments

    def learning_rate(self) -> float:
        """Linear warm-up by steps, constant, then a half cosine down to the end of the training time."""
        settings = self.config.training
        steps = settings.restart_warmup_steps if self.warm_from else settings.warmup_steps
        warm = min(1.0, (self.step - self.warm_from + 1) / steps)
        progress = min(1.0, self.elapsed_s / settings.total_s)
        fall = max(0.0, (progress - settings.constant_share) / (1 - settings.constant_share))
        top, last = settings.learning_rate, settings.last_learning_rate
        return warm * (last + (top - last) * 0.5 * (1 + math.cos(math.pi * fall)))

    def half_precision(self) -> torch.autocast:
        """bfloat16 on a GPU; on a CPU it would be many times slower than fp32."""
        return torch.autocast("cuda", dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def strength(self) -> float:
        """Augmentation strength: rises from 0.1 to 1 between two steps, and eases off towards the end."""
        settings = self.config.training
        first, full = settings.augment_from_step, settings.augment_full_step
        rising = min(1.0, 0.1 + 0.9 * max(0, self.step - first) / (full - first))
        late = (self.elapsed_s - settings.augment_ease_from_s) / (settings.total_s - settings.augment_ease_from_s)
        return rising * (1 - (1 - settings.augment_last) * min(1.0, max(0.0, late)))

    def encode(self, plan: Plan, audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoder output [B, T, D] in fp32 and lengths of an augmented batch."""
        with torch.no_grad():
            waves, samples = render(audio, plan)
            waves = augment(waves, self.strength())
            features, lengths = self.model.preprocessor(input_signal=waves, length=samples)
            features = mask(features, lengths, self.strength())
        with self.half_precision():
            encoded, encoded_length = self.model.encoder(audio_signal=features, length=lengths)
        return encoded.transpose(1, 2).float(), encoded_length

    def losses(self, plan: Plan, audio: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss to descend and what to log: losses per token and the spread of the encoder's output."""
        encoded, lengths = self.encode(plan, audio)
        spread = encoded.detach()[:, ::4].reshape(-1, encoded.shape[2]).std(dim=0).mean()
        log_probs = self.ctc(encoded).log_softmax(-1)
        if self.step < self.config.training.flat_start_steps:
            targets = frame_targets(plan, encoded.shape[1], self.blank).to(self.device)
            loss = torch.nn.functional.nll_loss(log_probs.flatten(0, 1), targets.flatten())
            return loss, {"frame": loss.detach(), "spread": spread}
        padded, count = to_device(plan.targets, self.device), to_device(plan.counts, self.device)
        ctc = (
            torch.nn.functional.ctc_loss(
                log_probs.transpose(0, 1), padded, lengths, count, self.blank, reduction="sum", zero_infinity=True
            )
            / count.sum()
        )
        # The predictor does not see some of the labels (the blank's embedding is zero), so that it learns no texts by heart.
        unseen = torch.rand(padded.shape, device=self.device) < self.config.training.label_dropout
        with self.half_precision():
            predicted, _, _ = self.model.decoder(targets=padded.masked_fill(unseen, self.blank), target_length=count)
            joint = self.model.joint(encoder_outputs=encoded.transpose(1, 2), decoder_outputs=predicted)
        if self.device.type == "cpu":
            transducer = transducer_loss(joint, padded, lengths, count, self.blank)
        else:
            lattice = {"input_lengths": lengths, "target_lengths": count}
            transducer = self.model.loss(log_probs=joint.float(), targets=padded, **lattice)
        settings = self.config.training
        weight = settings.early_ctc_weight if self.step < settings.early_ctc_steps else settings.ctc_weight
        loss = transducer + weight * ctc
        return loss, {"transducer": transducer.detach(), "ctc": ctc.detach(), "spread": spread}

    def update(self, plan: Plan, audio: torch.Tensor) -> dict[str, torch.Tensor]:
        """One optimiser step and one step of the running average."""
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, logged = self.losses(plan, audio)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        parameters = list(self.named.values())
        logged["norm"] = torch.nn.utils.clip_grad_norm_(parameters, self.config.training.clip_norm)
        self.optimizer.step()
        keep = min(self.config.training.ema, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.values()), parameters, 1 - keep)
        self.step += 1
        return logged

    def set_contexts(self) -> None:
        """Which look-aheads the next steps draw: first the two longest, later all alike."""
        early = self.step < self.config.training.wide_context_steps
        count = len(self.model.encoder.att_context_size_all)
        self.model.encoder.att_context_probs = [0.8, 0.2] + [0.0] * (count - 2) if early else [1 / count] * count

    def save(self, folder: Path) -> None:
        """Writes the checkpoint, two bytes a number."""
        moments = {name: self.optimizer.state.get(p, {}) for name, p in self.named.items()}
        parts = {
            "weights": {name: p.detach().half() for name, p in self.named.items()},
            "average": {name: p.half() for name, p in self.average.items()},
            "adam_m": {name: state["exp_avg"].bfloat16() for name, state in moments.items() if state},
            "adam_v": {name: state["exp_avg_sq"].bfloat16() for name, state in moments.items() if state},
        }
        for name, tensors in parts.items():
            torch.save({key: value.cpu() for key, value in tensors.items()}, folder / f"{name}.pt")
        (folder / "state.json").write_text(json.dumps({"step": self.step, "elapsed_s": self.elapsed_s}))

    def resume(self, folder: Path) -> None:
        """Continues from a checkpoint, or from its average.pt alone; then the moments start empty and the rate warms up."""
        state = json.loads((folder / "state.json").read_text())
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        parts = {path.stem: torch.load(path) for path in folder.glob("*.pt")}
        whole = {"weights", "adam_m", "adam_v"} <= set(parts)
        self.warm_from = 0 if whole else self.step
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(parts["weights" if whole else "average"][name])
                self.average[name].copy_(parts["average"][name])
                if whole and name in parts["adam_m"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(float(self.step), device=self.device),
                        "exp_avg": parts["adam_m"][name].to(self.device, torch.float32),
                        "exp_avg_sq": parts["adam_v"][name].to(self.device, torch.float32),
                    }

    def swap_average(self) -> None:
        """Exchanges the weights with their running average (call again to undo)."""
        with torch.no_grad():
            for name, parameter in self.named.items():
                kept = parameter.clone()
                parameter.copy_(self.average[name])
                self.average[name].copy_(kept)


def tokenizer(config, data: Path) -> Path:
    """The word pieces' folder; trained on the human and synthetic texts if it is missing."""
    folder = data / "tokenizer"
    return folder if folder.exists() else train_tokenizer(training_texts(data), folder, config.vocabulary)


def training_texts(data: Path) -> list[str]:
    """All texts that may be spoken in training; the human ones counted ten times."""
    rows = [line.split("\t", 1) for line in (data / "texts.tsv").read_text().splitlines()]
    human = [json.loads(line)["text"] for line in (data / "human.jsonl").read_text().splitlines()]
    return [text for kind, text in rows if kind not in ("test", "dev")] + human * 10


def unigram(model, data: Path) -> np.ndarray:
    """Relative frequency of the word pieces over the training texts [V]."""
    counts = np.zeros(model.tokenizer.vocab_size)
    for text in training_texts(data)[::5]:
        np.add.at(counts, model.tokenizer.text_to_ids(text), 1)
    return counts / counts.sum()


def longest_s(trainer: Trainer) -> float:
    """The longest utterance of the next batches in seconds: short ones until the curriculum ends."""
    settings = trainer.config.training
    return 5.0 if trainer.step < settings.curriculum_steps else settings.longest_s


def train(trainer: Trainer, loader: Loader, block: AudioBlock, out: Path, seconds: float, checks: list[dict]) -> None:
    """Runs for `seconds`, logging and writing checkpoints; ends early if no more batches come."""
    settings = trainer.config.training
    gc.collect()
    gc.freeze()  # what exists by now stays; the collector need not look at it again
    start, base_s, last_save = time.perf_counter(), trainer.elapsed_s, time.perf_counter()
    window, waited_s = time.perf_counter(), 0.0
    while time.perf_counter() - start < seconds:
        loader.longest_s.value = longest_s(trainer)
        trainer.model.train()
        trainer.set_contexts()
        asked = time.perf_counter()
        try:
            plan, hours = loader.next(block)
        except queue.Empty:
            print("no more batches: the planning process has stopped", flush=True)
            break
        waited_s += time.perf_counter() - asked
        logged = trainer.update(plan, block.samples)
        trainer.elapsed_s = base_s + time.perf_counter() - start
        if trainer.step % 50 == 0 or time.perf_counter() - start < 3:
            shown = " ".join(f"{name} {float(value):.3f}" for name, value in logged.items())
            now = time.perf_counter()
            print(f"step {trainer.step} {trainer.elapsed_s:.0f} s lr {trainer.learning_rate():.2e} {shown} pool {hours:.1f} h "
                  f"{20 * (now - window):.0f} ms/step, {20 * waited_s:.0f} waiting", flush=True)  # fmt: skip
            window, waited_s = now, 0.0
            if trainer.step == settings.collapse_step and float(logged["spread"]) < settings.collapse_spread:
                raise SystemExit("the encoder has collapsed: its output hardly depends on the audio")
        if time.perf_counter() - last_save > settings.checkpoint_every_s:
            last_save = time.perf_counter()
            trainer.save(out)
            trainer.swap_average()
            context = list(trainer.model.encoder.att_context_size_all[0])
            texts = transcribe(trainer.model, checks, context)
            trainer.swap_average()
            print("check", {k: v["wer_percent"] for k, v in wer_by_set(checks, texts).items()}, flush=True)
            window = time.perf_counter()
    trainer.save(out)


def wait_for_shards(shards: Path, wanted: int, limit_s: float = 120.0) -> None:
    """Returns once so many training shards are there; a synthesis that makes none must not hold a GPU."""
    deadline = time.perf_counter() + limit_s
    while len(list(shards.glob("train_*.json"))) < wanted:
        if time.perf_counter() > deadline:
            raise SystemExit(f"fewer than {wanted} shards in {shards} after {limit_s:.0f} s; see synthesis.log")
        time.sleep(0.5)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="training time of this run")
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "config.yaml")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run")
    parser.add_argument("--manifest", type=Path, action="append", default=[], help="held-out clips, more than once")
    parser.add_argument("--wait-shards", type=int, default=40, help="start once so many shards are there")
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, arguments.data, device)
    if arguments.resume and (arguments.resume / "state.json").exists():
        trainer.resume(arguments.resume)
        random.seed(config.seed + trainer.step)
        torch.manual_seed(config.seed + trainer.step)
    config.training.seed_now = config.seed + trainer.step
    print(
        f"{sum(p.numel() for p in trainer.model.parameters()) / 1e6:.2f} M parameters, step {trainer.step}", flush=True
    )
    typecheck.set_typecheck_enabled(False)  # NeMo's checks of every call cost the host time
    hours = 60 if device.type == "cuda" else 2
    pool = Pool(trainer.model.tokenizer.text_to_ids, hours * 3600.0)
    pool.add_human(arguments.data)
    wait_for_shards(arguments.shards, arguments.wait_shards)
    settings = config.training
    planner = Planner(pool, dict(settings.shares), settings.seed_now)
    loader = Loader(planner, arguments.shards, settings.audio_per_step_s, longest_s(trainer))
    human = read_clips(arguments.manifest)
    block = AudioBlock(device, hours * 3600.0)
    train(trainer, loader, block, arguments.out, arguments.seconds, human)
    trainer.swap_average()
    clips, dev = human + read_shards(arguments.shards), read_shards(arguments.shards, "dev")
    before = evaluate(trainer.model, clips)["contexts"] if dev else {}
    lowered_by, rates = choose_blank_bias(trainer.model, dev, list(settings.blank_offsets)) if dev else (0.0, {})
    record = evaluate(trainer.model, clips)
    record["blank_bias"] = {"lowered_by": lowered_by, "dev_wer_percent": rates}
    record["contexts_before_blank_bias"] = before
    record["training"] = {
        "steps": trainer.step,
        "seconds": round(trainer.elapsed_s, 1),
        "shards": len(list(arguments.shards.glob("train_*.json"))),
    }
    (arguments.out / "wer.json").write_text(json.dumps(record, indent=1) + "\n")
    for context, sets in record["contexts"].items():
        print(context, {name: numbers["wer_percent"] for name, numbers in sets.items()}, flush=True)
    export(trainer.model, arguments.out / "demo.nemo")


if __name__ == "__main__":
    main()
