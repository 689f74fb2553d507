"""Lowers the blank's output bias of a trained model, so that it drops fewer words; the offset is chosen on dev sentences.

    python studies/demo_model/blank_bias.py trained.nemo demo.nemo --shards shards --record blank_bias.json

A transducer that has heard few texts ends a new sentence too early: its errors are deletions. The dev sentences are new
ones in the composed human voice (`dev_*` shards of synthesize.py). `train.py` uses the same rule at its end."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from build import EncDecRNNTBPEModel, export, load_config
from evaluate import environment, read_shards, transcribe, wer_by_set


def best_offset(rates: dict[float, float]) -> float:
    """The offset with the least word error rate in percent; of equal ones the smallest."""
    return min(rates, key=lambda offset: (rates[offset], offset))


def set_offset(model, start: float, offset: float) -> None:
    """Sets the blank's output bias to `offset` below `start`."""
    model.joint.joint_net[-1].bias.detach()[-1] = start - offset  # shares the model's memory


def mean_rate(model, clips: list[dict]) -> float:
    """Word error rate of the clips in percent, the mean over the longest and the shortest context."""
    contexts = [list(context) for context in model.encoder.att_context_size_all]
    found = [wer_by_set(clips, transcribe(model, clips, context)) for context in (contexts[0], contexts[-1])]
    return float(np.mean([numbers["wer_percent"] for sets in found for numbers in sets.values()]))


def choose_blank_bias(model, clips: list[dict], offsets: list[float]) -> tuple[float, dict]:
    """Lowers the blank's output bias by the best offset; returns it and the rate in percent of each offset tried.

    Trying stops when two offsets in turn were worse than the best, so offsets must rise. The clips must not be those that are reported on.
    """
    start = float(model.joint.joint_net[-1].bias.detach()[-1])
    rates: dict[float, float] = {}
    for offset in offsets:
        set_offset(model, start, offset)
        rates[offset] = mean_rate(model, clips)
        print(f"blank bias -{offset}: dev WER {rates[offset]:.2f} %", flush=True)
        if len(rates) > 2 and min(list(rates.values())[-2:]) > min(rates.values()):
            break
    chosen = best_offset(rates)
    set_offset(model, start, chosen)
    return chosen, {str(offset): round(rate, 2) for offset, rate in rates.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shards", type=Path, required=True, help="folder of synthesize.py with dev_* shards")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent / "config.yaml")
    arguments = parser.parse_args()
    settings = load_config(arguments.config).training
    model = EncDecRNNTBPEModel.restore_from(str(arguments.model), map_location="cpu").eval()
    dev = read_shards(arguments.shards, "dev")
    if not dev:
        raise SystemExit(f"no dev_* shards in {arguments.shards}; synthesize.py makes them before the training shards")
    chosen, rates = choose_blank_bias(model, dev, list(settings.blank_offsets))
    record = environment(model) | {
        "rule": "least dev WER",
        "contexts": "mean of the longest and the shortest, offline under the streaming attention mask",
        "lowered_by": chosen,
        "dev": {"clips": len(dev), "words": sum(len(clip["text"].split()) for clip in dev), "wer_percent": rates},
    }
    arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    export(model, arguments.out)
    print(f"{arguments.out}: blank bias lowered by {chosen}, {arguments.out.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
