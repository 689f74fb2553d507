"""The graphed encoder step and NeMo's graph-captured decoder in one process, and what endangers the decoder without our shield."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from decoder_fault import EVENTS
from mixed_steps import run_mixed

SCRIPT = Path(__file__).with_name("decoder_fault.py")


@pytest.fixture(scope="module")
def outcomes(project):
    """All experiments, each in its own process, started together."""
    started = {
        (event, shield): subprocess.Popen(
            [sys.executable, str(SCRIPT), event, "--shield", shield],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for event in EVENTS
        for shield in ("yes", "no")
    }
    found = {
        key: (process.communicate(timeout=240)[0].strip().splitlines() or [""])[-1] for key, process in started.items()
    }
    codes = {key: process.returncode for key, process in started.items()}
    print(*found.values(), sep="\n")
    return {key: (codes[key], found[key]) for key in started}


@pytest.mark.parametrize("event", EVENTS)
def test_a_shielded_decoder_survives_whatever_happens_to_the_cache(outcomes, event):
    code, line = outcomes[event, "yes"]
    assert code == 0, line
    assert '"graph": true' in line, "the decoder did not capture a graph, so this shows nothing"


def test_our_capture_does_not_endanger_an_unshielded_decoder(outcomes):
    assert outcomes["none", "no"][0] == 0 and outcomes["graphed_step", "no"][0] == 0, outcomes


def test_mixed_steps():
    numbers, counters = run_mixed(400, check_every=20, decode_every=4)
    assert numbers["encoder_mismatches"] == numbers["transcript_mismatches"] == 0, numbers
    assert numbers["encoder_checks"] == 20 and numbers["sessions_decoded_again"] >= 2 and numbers["tokens"] > 0
    assert numbers["decoder_graph_held"] and counters["replayed"] > 300 and counters["captured"] == 7, (
        numbers,
        counters,
    )
