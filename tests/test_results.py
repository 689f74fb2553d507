"""Records: they come back as they were written, and anything else is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import RecordError
from workbench.results import Record, environment, percentiles_ms


def test_round_trip_and_what_a_record_knows_of_itself(tmp_path):
    record = Record(
        kind="bench",
        config={"asr": {"model": "tiny"}},
        numbers={"p95_ms": np.float32(2.5), "n": np.int64(3)},
        rows=[{"a": 1}],
    )
    path = record.save(tmp_path / "deep" / "r.json")
    again = Record.load(path)
    assert again.numbers == {"p95_ms": 2.5, "n": 3}
    assert again.environment["packages"]["numpy"] == np.__version__
    assert again.command and again.created_utc.endswith("+00:00")
    assert not list(path.parent.glob(".*")), "no part file stays behind"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64("nan"), {"x": float("inf")}])
def test_numbers_that_are_not_finite_are_refused(tmp_path, value):
    with pytest.raises(RecordError, match=r"r\.json"):
        Record(kind="x", numbers={"a": value}).save(tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"kind": "x", "surprise": 1}', json.dumps({"kind": "x", "schema": 99})]
)
def test_files_that_are_no_records_are_refused_by_name(tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(RecordError, match=r"bad\.json"):
        Record.load(tmp_path / "bad.json")


@pytest.mark.parametrize("damage", [{"rows": "x"}, {"rows": [1]}, {"numbers": [1]}, {"notes": 5}, {"counters": None}])
def test_damaged_records_are_refused_by_name(tmp_path, damage):
    (tmp_path / "bad.json").write_text(json.dumps({"kind": "x", "schema": 1, **damage}))
    with pytest.raises(RecordError, match=r"bad\.json: damaged"):
        Record.load(tmp_path / "bad.json")


def test_a_place_that_cannot_be_written_is_named_and_left_clean(tmp_path):
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", tmp_path / "folder" / ".." / "file" / "x.json"):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(RecordError, match="cannot be written"):
            Record(kind="x").save(target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_percentiles_are_numpys(seconds):
    got = percentiles_ms(seconds, "step")
    assert got["step_n"] == len(seconds)
    assert got["step_p95_ms"] == pytest.approx(np.percentile(np.array(seconds) * 1e3, 95))


@pytest.mark.parametrize("values", [[], [float("nan")], [1.0, float("inf")]])
def test_no_percentile_of_nothing(values):
    with pytest.raises(RecordError, match="percentiles"):
        percentiles_ms(values, "x")


def test_environment_does_not_load_torch():
    assert {"python", "system", "packages"} <= set(environment())


@pytest.mark.parametrize(
    "argv, command",
    [
        (["/somewhere/bin/workbench", "tune", "my study"], "workbench tune 'my study'"),
        (["/somewhere/workbench/cli/__main__.py", "bench", "twin"], "python -m workbench bench twin"),
        (["/some where/a script.py"], "'a script.py'"),
        ([""], "python"),
    ],
)
def test_the_command_of_a_record_can_be_pasted_into_a_shell_and_names_no_path(monkeypatch, argv, command):
    monkeypatch.setattr("sys.argv", argv)
    assert Record(kind="bench").command == command
