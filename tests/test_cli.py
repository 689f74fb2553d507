"""The command line as a person meets it: exit codes, messages without a traceback, JSON on standard output."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from workbench import cli
from workbench.cli.output import parted
from workbench.errors import RecordError
from workbench.results import Record

TINY = ["--model", "tiny", "--context", "56,0", "--set", "asr.max_symbols=1", "--device", "cpu"]


@pytest.fixture
def run(monkeypatch, capsys):
    """`run("transcribe", …)` -> (exit code, stdout, stderr), in this process, where the model libraries are loaded already."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["workbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return call


@pytest.fixture
def mixed(tmp_path, noise):
    """A folder as users have them: good files of several kinds, and three bad ones."""
    soundfile.write(tmp_path / "good.wav", noise(0.6), 16000)
    soundfile.write(tmp_path / "telephone.wav", noise(0.6)[::2], 8000)
    soundfile.write(tmp_path / "stereo.flac", np.stack([noise(0.6)] * 2, axis=1), 16000)
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_text("a text file renamed")
    lines = [json.dumps({"audio_filepath": "good.wav", "duration": 0.6, "text": "ba"}), "{broken"]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_a_mixed_folder_is_done_in_part_and_every_bad_file_named(run, mixed):
    code, out, err = run("transcribe", mixed, *TINY, "--wer", "--compare-vs-offline", "--json")
    assert code == 3
    record = json.loads(out)
    done = [row["path"].rpartition("/")[2] for row in record["rows"] if row["error"] is None]
    assert sorted(done) == ["good.wav", "stereo.flac", "telephone.wav"]
    for word in ("empty.wav", "text.wav", "list.jsonl:2"):
        assert f"{word}" in err and any(word in reason for reason in record["counters"]["skipped"])
    assert record["numbers"]["offline_differences"] == 0 and record["numbers"]["offline_compared"] == 3
    assert record["numbers"]["wer"] >= 0 and record["numbers"]["wer_clips"] == 1
    assert "untrained weights" in err and record["notes"]


def test_batched_transcripts_equal_unbatched_ones(run, mixed):
    texts = []
    for concurrency in (1, 4):
        _, out, _ = run("transcribe", mixed, *TINY, "--concurrency", concurrency, "--json")
        texts.append([(row["path"], row["text"]) for row in json.loads(out)["rows"]])
    assert texts[0] == texts[1]


def test_a_line_break_in_a_file_name_stays_inside_its_line(run, tmp_path, noise):
    soundfile.write(tmp_path / "two\nlines.wav", noise(0.6), 16000)
    code, out, _ = run("transcribe", tmp_path, *TINY)
    assert code == 0 and len([line for line in out.splitlines() if "\t" in line]) == 1
    assert "two\\nlines.wav\t" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["transcribe", "x.wav", "-s", "asr.batching.max_batch_sise=8"],
            ["max_batch_sise", "did you mean max_batch_size"],
        ),
        (["transcribe", "absent.wav"], ["absent.wav", "no such file"]),
        (["transcribe", "x.wav", "--context", "a,b"], ["--context", "integers"]),
        (["transcribe", "x.wav", "--context", "56"], ["--context", "'56'", "left and right"]),
        (["transcribe", "SHIPPED", "--model", "no-such"], ["'no-such'", "allowed are"]),
        (["transcribe", "SHIPPED", "--model", "absent.nemo"], ["absent.nemo", "not a file"]),
        (["transcribe", "SHIPPED", *TINY[:2], "--context", "56,2"], ["[56, 2]", "trained for"]),
        (["transcribe", "SHIPPED", *TINY[:2], "--device", "cuda:99"], ["cuda:99", "allowed"]),
        (["bench", "asr", "SHIPPED", "--mode", "fast"], ["--mode", "stream and offline"]),
        (["bench", "paced", "-s", "load.seconds=-1"], ["load.seconds"]),
        (["tune", "absent-study"], ["absent-study", "no study there"]),
        (["show", "absent.json"], ["absent.json"]),
        (["bogus"], ["bogus"]),
        (["transcribe"], ["audio"]),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(run, arguments, words):
    from workbench.model.speech import SHIPPED_SPEECH

    code, _, err = run(*(str(SHIPPED_SPEECH) if a == "SHIPPED" else a for a in arguments))
    assert code == 2
    assert all(word.lower() in err.lower() for word in words), err
    assert "Traceback" not in err


def test_a_broken_checkpoint_is_named(run, tmp_path):
    (tmp_path / "broken.nemo").write_bytes(b"not a tar archive")
    code, _, err = run("transcribe", tmp_path / "broken.nemo", "--model", tmp_path / "broken.nemo")
    assert code == 2 and "broken.nemo" in err and "Traceback" not in err


def test_an_unreachable_hub_model_says_what_to_do(run, mixed, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, err = run("transcribe", mixed, "--model", "nobody/no-such-model")
    assert code == 2
    assert "could not be fetched" in err and "--model demo" in err and "Traceback" not in err


def test_bench_asr_reports_throughput_and_mismatches(run, mixed):
    code, out, _ = run(
        "bench", "asr", mixed / "good.wav", mixed / "stereo.flac", "--concurrency", "1,2", *TINY, "--json"
    )
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [row["concurrency"] for row in rows] == [1, 2]
    assert all(row["rtfx"] > 0 and row["mismatches"] == 0 and row["utterances_per_s"] > 0 for row in rows)


def test_costs_then_twin_then_show(run, tmp_path):
    code, out, _ = run("bench", "costs", "--batches", "1,2", *TINY, "--json", "-o", tmp_path / "costs.json")
    assert code == 0 and {row["shape"] for row in json.loads(out)["rows"]} == {"first", "second", "steady", "cut"}
    load = ["-s", "load.streams=2", "-s", "load.seconds=3", "-s", "asr.batching.enabled=true"]
    code, out, _ = run("twin", tmp_path / "costs.json", *load, "--json")
    assert code == 0 and json.loads(out)["numbers"]["latency_n"] > 10
    code, out, _ = run("show", tmp_path / "costs.json")
    assert code == 0 and "steady" in out


def test_the_twin_refuses_what_its_costs_do_not_stand_for(run, project, tmp_path):
    costs = project / "notebooks" / "records" / "costs_demo_cpu.json"
    load = ["-s", "load.streams=2", "-s", "load.seconds=2"]
    code, out, _ = run("twin", costs, *load, "--json")
    assert code == 0 and json.loads(out)["config"]["asr"]["att_context_size"] == [56, 1]
    for contradiction in ("asr.att_context_size=[56,13]", "asr.model=tiny", "asr.dtype=bfloat16"):
        code, _, err = run("twin", costs, *load, "-s", contradiction)
        assert code == 2 and "the costs were measured with" in err
    (tmp_path / "study.yaml").write_text("name: s\nspace:\n  asr.dtype: {choices: [float32, bfloat16]}\n")
    code, _, err = run("tune", tmp_path, "--costs", costs)
    assert code == 2 and "measured with" in err
    (tmp_path / "study.yaml").write_text("name: s\nspace:\n  asr.batching.max_batch_size: {float: [1, 8]}\n")
    code, _, err = run("tune", tmp_path, "--costs", costs)
    assert code == 2 and "whole numbers" in err


def test_every_committed_record_can_be_shown(run, project):
    found = [*project.glob("studies/h200/*.json"), *project.glob("notebooks/records/*.json")]
    assert len(found) > 3
    for path in found:
        code, out, err = run("show", path)
        assert code == 0 and out, (path, err)


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": ["costs"]},
        {"environment": {"gpu": [None]}},
        {"rows": [{"stage": "step", "batch": 1, "shape": "steady", "ms_p50": 1.0}]},
        {"rows": [{"stage": "step", "batch": 1, "shape": "steady", "ms_p50": "x", "ms_p95": 1.0}]},
    ],
)
def test_a_damaged_record_is_shown_or_named_but_never_a_traceback(run, tmp_path, damage):
    row = {"stage": "step", "batch": 1, "shape": "steady", "ms_p50": 1.0, "ms_p95": 1.0}
    data = {**vars(Record(kind="costs", environment={}, rows=[row])), **damage}
    (tmp_path / "r.json").write_text(json.dumps(data))
    code, _, err = run("show", tmp_path / "r.json", "--figure", tmp_path / "r.png")
    assert (code == 0) == ("environment" in damage) and (code == 0 or "damaged" in err)


def test_an_unwritable_output_is_one_line(run, mixed, tmp_path):
    code, _, err = run("transcribe", mixed / "good.wav", *TINY, "--output", tmp_path)
    assert code == 2 and "cannot be written" in err and "Traceback" not in err


@pytest.mark.parametrize("verb", ["transcribe nothing.wav", "bench core", "bench paced", "capacity", "profile"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_measured(run, tmp_path, monkeypatch, verb):
    monkeypatch.setattr("workbench.measure.core_bench.run_core_bench", lambda: pytest.fail("it was measured"))
    (tmp_path / "file").touch()
    for output in (tmp_path, tmp_path / "file" / "record.json"):
        code, _, err = (
            run(*verb.split(), "--model", "nothing.nemo", "--output", output)
            if "core" not in verb
            else run(*verb.split(), "--output", output)
        )
        assert code == 2 and "cannot be written" in err and "nothing" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ctrl_c_keeps_the_transcripts_so_far(run, mixed, tmp_path, monkeypatch):
    from workbench.runtime import transcribe

    whole = transcribe.transcribe

    def interrupted(*arguments):
        yield next(whole(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(transcribe, "transcribe", interrupted)
    code, out, err = run(
        "transcribe", mixed / "good.wav", mixed / "stereo.flac", *TINY, "--json", "-o", tmp_path / "kept.json"
    )
    assert code == 130 and "interrupted: 1 of 2 recordings" in err
    kept = Record.load(tmp_path / "kept.json")
    assert (
        [row["path"].rpartition("/")[2] for row in kept.rows]
        == ["good.wav"]
        == [row["path"].rpartition("/")[2] for row in json.loads(out)["rows"]]
    )
    assert "interrupted: 1 of 2 recordings" in " ".join(kept.notes)


def test_the_numbers_are_printed_even_where_the_record_can_no_longer_be_saved(run, tmp_path, monkeypatch):
    def full(record, path):
        raise RecordError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr(Record, "save", full)
    code, out, err = run("bench", "core", "--output", tmp_path / "core.json")
    assert code == 2 and "No space left" in err and "items_per_s" in out


def test_paced_run_has_no_mismatches(run):
    arguments = ["-s", "load.streams=2", "-s", "load.seconds=2", "-s", "asr.batching.enabled=true"]
    code, out, err = run("bench", "paced", *TINY, *arguments, "--json")
    if code == 1 and "generator lagged" in err:
        return  # a machine too busy to pace; refusing is the right answer and is tested in test_loadgen
    numbers = json.loads(out)["numbers"]
    assert numbers["latency_p95_ms"] > 0 and numbers["transcript_mismatches"] == 0


def test_profile_and_core(run, tmp_path):
    code, out, _ = run("profile", *TINY, "--batch", 2, "--trace", tmp_path / "t.json.gz", "--json")
    numbers = json.loads(out)["numbers"]
    assert code == 0 and numbers["batch"] == 2 and numbers["operators_per_step"] > 100
    assert (tmp_path / "t.json.gz").stat().st_size > 1000
    code, out, _ = run("bench", "core", "--json")
    assert code == 0 and json.loads(out)["items_per_second"] > 0


def test_help_and_version_load_nothing_heavy(run):
    for arguments in (["--help"], ["transcribe", "--help"], ["profile", "--help"], ["bench", "--help"], ["--version"]):
        code, out, _ = run(*arguments)
        assert code == 0 and out


def test_doctor_reports_every_part(run):
    code, out, _ = run("doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert code == 0
    assert {"torch", "nemo_toolkit", "gpu", "encoder graphs", "decoder graphs", "triton", "free memory"} <= set(
        findings
    )
    assert all(f["cost"] for f in findings.values() if f["state"] == "missing")


def test_capacity_of_the_twin_and_of_the_recogniser(run, project, tmp_path):
    costs = project / "notebooks" / "records" / "costs_demo_cpu.json"
    code, out, err = run("capacity", "--engine", "twin", "--costs", costs, "--seconds", "10", "--json")
    record = json.loads(out)
    assert code == 0 and record["numbers"]["capacity_streams"] > 0 and record["counters"]["ended"] == "complete"
    assert "short runs" in err and " streams: passed" in err
    levels = ["--seconds", "1", "--start", "1", "--late-share", "0.9", "--resolution", "0.9", "--repeats", "1"]
    saved = tmp_path / "capacity.json"
    code, out, _ = run("capacity", *TINY, *levels, "--same-process", "-s", "asr.batching.max_batch_size=2", "-o", saved)
    assert code == 0 and "capacity_streams" in out
    assert json.loads(saved.read_text())["config"]["fresh_processes"] is False
    code, out, _ = run("show", saved, "--figure", tmp_path / "capacity.svg")
    assert code == 0 and "capacity_streams" in out and (tmp_path / "capacity.svg").read_text().count("<path") > 5
    code, _, err = run("show", saved, "--figure", tmp_path / "capacity.doc")
    assert code == 2 and "allowed are names that end in" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "cpp"], "allowed are pipeline, nemo-loop, resident, twin"),
        (["--engine", "twin"], "--engine twin: needs a cost record: add --costs FILE"),
        (["--costs", "studies/h200/stage_costs.json"], "--engine pipeline: takes no --costs"),
        (["--seconds", "0"], "allowed are seconds above 0 to 86400"),
        (["--seconds", "1e9"], "allowed are seconds above 0 to 86400"),
        (["--resolution", "1"], "a resolution above 0 and below 1"),
        (["--model", "tiny", "--start", "0"], "1 <= start"),
    ],
)
def test_a_wrong_capacity_search_is_one_line(run, arguments, words):
    code, _, err = run("capacity", *arguments)
    assert code == 2 and words in err and "Traceback" not in err


def test_a_trained_model_has_the_label_rate_that_it_has(run):
    code, _, err = run("bench", "paced", "--label-rate", "3", "-s", "load.seconds=1")
    assert code == 2 and "allowed are models with random weights" in err


@pytest.mark.parametrize(("runs", "expected"), [(0, 1), (2, 0)])
def test_confirm_fails_where_no_real_run_could_be_measured(run, monkeypatch, runs, expected):
    from workbench.show import study_results

    outcome = {"headline": "told", "trials": 3, "default": {"live": {"runs": runs, "why": "the generator lagged"}}}
    monkeypatch.setattr(study_results, "confirm_studies", lambda studies, options: ({"small": outcome}, {}))
    code, out, err = run("confirm", "studies/small")
    assert code == expected and "small: told" in out
    assert ("failed: small: no real run could be measured" in err) == bool(expected)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(20, 200))
def test_a_table_too_wide_for_the_terminal_is_parted_and_loses_no_column(widths, available):
    named = {f"column{number}": width for number, width in enumerate(widths)}
    parts = parted(named, available)
    assert [name for part in parts for name in part[1:]] == list(named)[1:] and {part[0] for part in parts} == {
        "column0"
    }
    for part in parts:
        assert sum(named[name] + 3 for name in part) + 1 <= available or len(part) <= 2


def test_the_finding_of_a_study_is_shown_like_a_record(run):
    code, out, err = run("show", "studies/latency_80ms/results.json")
    assert code == 0 and "real runs" in out and "document example" in out and "less than default's" in err
    assert run("show", "studies/latency_80ms/study.yaml")[0] == 2
