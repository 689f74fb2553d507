"""Options that several verbs share, and the configuration that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.config import Config, load_config, replace
from workbench.errors import InputError

PARTIAL = 3


ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="YAML with the sections asr: and load:.")]


Overrides = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Override one key: asr.batching.max_batch_size=8. Repeatable.")
]


Model = Annotated[
    str | None, typer.Option(help="demo, a named shape (tiny, nemotron-0.6b, …), a .nemo path, or a hub name.")
]


Context = Annotated[str | None, typer.Option(help="Left and right context in 80 ms frames, e.g. 56,0.")]


Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")]


AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


Audio = Annotated[list[str], typer.Argument(help="Audio files, folders, globs or NeMo manifests.", show_default=False)]


LabelRate = Annotated[
    float | None,
    typer.Option(help="Random weights: labels per second of audio that the decoder is made to emit, e.g. 3."),
]


def writable(path: Path | None) -> Path | None:
    """Refuse an output that could not be written before anything is measured, not after."""
    from workbench.results import check_writable

    return None if path is None else check_writable(path)


Save = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Also write the record to this file.", callback=writable),
]


def configured(
    config: Path | None,
    overrides: list[str] | None,
    model: str | None,
    context: str | None,
    device: str | None,
    label_rate: float | None = None,
) -> Config:
    """The configuration of a verb: the file, what `--set` changes, and the options that have a name of their own.

    Raises ConfigError for a key or value that is not allowed.
    """
    chosen = load_config(config, overrides or ())
    changes: dict[str, Any] = {}
    if model is not None:
        changes["asr.model"] = model
    if context is not None:
        sides = integers(context, "--context")
        if len(sides) != 2:
            from workbench.errors import ConfigError

            raise ConfigError(f"--context: got {context!r}; allowed are two numbers, left and right, e.g. 56,0")
        changes["asr.att_context_size"] = sides
    if device is not None:
        changes["asr.device"] = device
    if label_rate is not None:
        changes["asr.label_rate_hz"] = label_rate
    return replace(chosen, **changes)


def integers(text: str, option: str) -> list[int]:
    """Integers of a comma-separated option. Raises InputError naming the option."""
    try:
        return [int(part) for part in text.strip("[] ").split(",")]
    except ValueError:
        raise InputError(f"{option}: got {text!r}; allowed are integers separated by commas") from None
