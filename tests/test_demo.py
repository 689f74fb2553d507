"""The main job end to end on real speech: what it leaves behind, resuming after Ctrl-C, and a second run."""

from __future__ import annotations

import html
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from workbench import demo
from workbench.config import load_config
from workbench.errors import InputError
from workbench.results import Record

OVERRIDES = ["asr.model=tiny", "asr.att_context_size=[56,1]", "asr.max_symbols=1", "asr.device=cpu"]


def finished_trials(folder):
    """Finished trials in the study database: number -> value."""
    database = next((folder / "study").glob("*.db"))
    query = "select t.number, v.value from trials t join trial_values v on v.trial_id = t.trial_id where t.state = 'COMPLETE' and v.objective = 0"
    with sqlite3.connect(database) as connection:
        return dict(connection.execute(query).fetchall())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_interrupted_then_resumed_then_complete(tmp_path, monkeypatch, capsys):
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "workbench.cli", "demo", "--out", str(out)]
    for override in OVERRIDES:
        command += ["--set", override]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        stop = time.monotonic() + 240
        while not (any((out / "study").glob("*.db")) and finished_trials_or_none(out)):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < stop, "the tuning stage was not reached"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"workbench demo --out {out}" in said and "Traceback" not in said
    before, records = finished_trials(out), {p.name: p.stat().st_mtime_ns for p in out.glob("*.json")}
    assert {"transcripts.json", "profile.json", "costs.json"} <= set(records)

    monkeypatch.setattr(demo, "CONFIRM_S", 2.0)
    demo.run_demo(load_config({}, OVERRIDES), out, fresh=False)
    said = capsys.readouterr()
    after = finished_trials(out)
    assert before.items() <= after.items() and len(after) > len(before), "a finished trial was lost"
    assert all((out / name).stat().st_mtime_ns == stamp for name, stamp in records.items()), (
        "a finished stage ran again"
    )
    for name in ("report.html", "best.yaml"):
        assert (out / name).stat().st_size > 100 and str(out / name) in said.out
    assert load_config(out / "best.yaml").asr.batching.enabled
    assert Record.load(out / "paced_best.json").kind == "paced"
    assert len(list((out / "live").glob("*.json"))) == 4
    page = (out / "report.html").read_text()
    finding = said.out.split(".\nreport: ")[0].splitlines()[-1]
    assert finding and finding in html.unescape(page), "the terminal says what the page says"
    assert "untrained weights" in page and "<svg" not in page.split("<body")[0]

    demo.run_demo(load_config({}, OVERRIDES), out, fresh=False)
    assert "--fresh" in capsys.readouterr().err
    with pytest.raises(InputError, match="another configuration"):
        demo.run_demo(load_config({}, [*OVERRIDES, "asr.max_symbols=2"]), out, fresh=False)


def finished_trials_or_none(folder):
    """Like `finished_trials`, None while the database is being made."""
    try:
        return finished_trials(folder)
    except sqlite3.OperationalError:
        return None


def test_two_demos_never_share_a_folder(tmp_path):
    with demo._alone(tmp_path / "d"), pytest.raises(InputError, match="another demo is running"):
        demo.run_demo(load_config({}, OVERRIDES), tmp_path / "d", fresh=False)
    with demo._alone(tmp_path / "d"):
        pass


def test_fresh_never_deletes_a_folder_that_is_not_a_demos(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not a demo's folder"):
        demo.run_demo(load_config({}, OVERRIDES), tmp_path, fresh=True)
    assert (tmp_path / "thesis.txt").exists()
