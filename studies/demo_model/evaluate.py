"""Word error rate of the demo model per context, with the whole clip given at once under the streaming attention mask.

    python studies/demo_model/evaluate.py demo.nemo --manifest workbench/data/speech/manifest.jsonl --record wer.json

A set of clips is named by the manifest's `source`, so human prompts, other speakers and synthetic voices are told
apart. Errors are substitutions + insertions + deletions over all words of a set (the usual micro average)."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import numpy as np
import soundfile as sf
import torch

RATE_HZ = 16000
SETS = {"test": "synthetic", "dev": "composed human voice"}


def word_errors(reference: list[str], hypothesis: list[str]) -> int:
    """Edit distance between two word sequences."""
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(hypothesis, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1]


def read_clips(manifests: list[Path]) -> list[dict]:
    """Manifest rows with their samples (float32)."""
    rows = []
    for manifest in manifests:
        for line in manifest.read_text().splitlines():
            row = json.loads(line)
            row["samples"], _ = sf.read(manifest.parent / row["audio_filepath"], dtype="float32")
            rows.append(row)
    return rows


def read_shards(folder: Path, kind: str = "test") -> list[dict]:
    """The held-out domain sentences that `synthesize.py` spoke first; kind: test, or dev (the composed human voice)."""
    rows = []
    for path in sorted(folder.glob(f"{kind}_*.json")):
        audio, position = np.load(path.with_suffix(".npy")), 0
        for row in json.loads(path.read_text()):
            samples = audio[position : position + row["samples"]].astype(np.float32) / 32768
            rows.append({"text": row["text"], "source": SETS[kind], "samples": samples, "voice": row["voice"]})
            position += row["samples"]
    return rows


@torch.no_grad()
def transcribe(model, clips: list[dict], context: list[int], batch: int = 128) -> list[str]:
    """Greedy transcripts of the clips at one attention context."""
    device = next(model.parameters()).device
    model.eval()
    model.encoder.set_default_att_context_size(context)
    order = sorted(range(len(clips)), key=lambda index: len(clips[index]["samples"]))
    texts = [""] * len(clips)
    for first in range(0, len(order), batch):
        part = order[first : first + batch]
        lengths = torch.tensor([len(clips[index]["samples"]) for index in part])
        waves = torch.zeros(len(part), int(lengths.max()))
        for row, index in enumerate(part):
            waves[row, : lengths[row]] = torch.from_numpy(clips[index]["samples"])
        encoded, encoded_length = model(input_signal=waves.to(device), input_signal_length=lengths.to(device))
        found = model.decoding.rnnt_decoder_predictions_tensor(encoded, encoded_length, return_hypotheses=False)
        for index, hypothesis in zip(part, found, strict=True):
            texts[index] = hypothesis.text if hasattr(hypothesis, "text") else hypothesis
    return texts


def wer_by_set(clips: list[dict], texts: list[str]) -> dict[str, dict[str, float]]:
    """Per set: clips, words, word error rate in percent, and the rate over clips of three words or more."""
    result: dict[str, dict[str, float]] = {}
    for source in sorted({clip["source"] for clip in clips}):
        pairs = [(c["text"].split(), t.split()) for c, t in zip(clips, texts, strict=True) if c["source"] == source]
        words, errors = sum(len(ref) for ref, _ in pairs), sum(word_errors(ref, hyp) for ref, hyp in pairs)
        result[source] = {"clips": len(pairs), "words": words, "wer_percent": round(100 * errors / words, 2)}
    return result


def environment(model) -> dict:
    """What a record says about where and how it was made."""
    device = next(model.parameters()).device
    return {
        "device": "CPU" if device.type == "cpu" else "one H200",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def evaluate(model, clips: list[dict]) -> dict:
    """A record: the word error rates of every context of the model, and the transcripts at the first."""
    record: dict = {"mode": "offline, streaming attention mask", **environment(model), "contexts": {}}
    contexts = [list(context) for context in model.encoder.att_context_size_all]
    for context in contexts:
        texts = transcribe(model, clips, context)
        record["contexts"][str(context)] = wer_by_set(clips, texts)
        if context == contexts[0]:
            kept = zip(clips, texts, strict=True)
            record["transcripts"] = [{"set": c["source"], "reference": c["text"], "hypothesis": t} for c, t in kept]
    model.encoder.set_default_att_context_size(contexts[0])
    return record


def main() -> None:
    """Command line."""
    from build import EncDecRNNTBPEModel

    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--manifest", type=Path, action="append", default=[])
    parser.add_argument("--shards", type=Path, help="folder of synthesize.py with the held-out domain sentences")
    parser.add_argument("--record", type=Path, required=True)
    arguments = parser.parse_args()
    model = EncDecRNNTBPEModel.restore_from(str(arguments.model), map_location="cpu").eval()
    clips = read_clips(arguments.manifest) + (read_shards(arguments.shards) if arguments.shards else [])
    record = evaluate(model, clips)
    arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    for context, sets in record["contexts"].items():
        print(context, {name: numbers["wer_percent"] for name, numbers in sets.items()})


if __name__ == "__main__":
    main()
