"""Strict configuration: what is allowed loads and round-trips, anything else is an error that names path, value and choice."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from workbench.config import (
    BatchingConfig,
    Config,
    build,
    effective_batch_cap,
    field_path_type,
    load_config,
    replace,
    to_dict,
    to_yaml,
)
from workbench.errors import ConfigError


def test_batching_names_and_defaults_are_the_contract():
    assert to_dict(BatchingConfig()) == {
        "enabled": False,
        "max_batch_size": 1024,
        "max_queue_delay_us": 5000,
        "max_queue_depth": 2048,
        "ingress_cohort_delay_us": 20000,
        "state_arena_slots": 16,
        "offline_bucket_ms": 0,
    }


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"asr": {"batching": {"max_batch_sise": 8}}}, ["asr.batching.max_batch_sise", "did you mean max_batch_size"]),
        ({"asr": {"batching": {"max_batch_size": "8"}}}, ["asr.batching.max_batch_size", "'8'", "integer"]),
        ({"asr": {"batching": {"max_batch_size": 8.0}}}, ["asr.batching.max_batch_size", "8.0", "integer"]),
        ({"asr": {"batching": {"max_batch_size": True}}}, ["asr.batching.max_batch_size", "True", "integer"]),
        (
            {"asr": {"batching": {"max_batch_size": 0}}},
            ["asr.batching.max_batch_size", "got 0", "greater than or equal to 1"],
        ),
        ({"asr": {"batching": {"max_queue_delay_us": -1}}}, ["asr.batching.max_queue_delay_us", "-1"]),
        ({"asr": {"batching": {"enabled": "yes"}}}, ["asr.batching.enabled", "'yes'", "boolean"]),
        ({"asr": {"batching": 3}}, ["asr.batching", "got 3", "section"]),
        ({"asr": None}, ["asr", "section"]),
        ({"asr": {"device": "gpu"}}, ["asr.device", "'gpu'", "cuda"]),
        ({"asr": {"dtype": "int8"}}, ["asr.dtype", "'int8'", "bfloat16"]),
        ({"asr": {"weights": "int4"}}, ["asr.weights", "'int4'", "'native' or 'int8'"]),
        (
            {"asr": {"weights": "int8", "encoder": "auto"}},
            ["asr.weights: got int8", "auto; allowed is native, or int8"],
        ),
        ({"asr": {"att_context_size": [56]}}, ["asr.att_context_size"]),
        ({"asr": {"att_context_size": [56, -1]}}, ["asr.att_context_size.1", "-1"]),
        ({"asr": {"model": ""}}, ["asr.model"]),
        ({"batching": {}}, ["batching: unknown key", "asr, load"]),
        ({"load": {"seconds": float("nan")}}, ["load.seconds", "finite"]),
        ({"load": {"seconds": 0}}, ["load.seconds", "greater than 0"]),
        ({"load": {"starts": "random"}}, ["load.starts", "staggered"]),
    ],
)
def test_wrong_input_names_path_value_and_choice(data, words):
    with pytest.raises(ConfigError) as caught:
        load_config(data)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_mistake_of_a_file_is_reported_at_once(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("asr: {batching: {max_batch_size: 0, enabld: true}, dtype: int4}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("text", ["", "# nothing\n", "asr: {}\n"])
def test_empty_files_are_the_defaults(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert load_config(path) == Config()


def test_a_key_given_twice_is_refused(tmp_path):
    (tmp_path / "c.yaml").write_text("asr:\n  batching:\n    max_batch_size: 4\n    max_batch_size: 8\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: .*'max_batch_size' is given twice.*line 4"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    "text", ["? [a]\n: 1", "{}: 1", "asr: {device: 2001-99-99}", "asr: {device: !!int x}", "[" * 3000]
)
def test_yaml_that_python_cannot_hold_is_refused_by_name(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml: not valid YAML"):
        load_config(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match=r"asr\.device: got .*which is not a YAML value"):
        load_config(
            overrides=["asr.device=" + (text if ":" not in text[:5] else "{" + text.removeprefix("asr: ") + "}")]
        )


@pytest.mark.parametrize("text", ["[1, 2]", "asr: [", "\x00", "just text"])
def test_files_that_are_no_mapping_are_refused_by_name(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_overrides_go_over_the_file_and_are_as_strict():
    config = load_config(
        {"asr": {"batching": {"max_batch_size": 4}}}, ["asr.batching.max_batch_size=8", "load.seconds=3"]
    )
    assert config.asr.batching.max_batch_size == 8
    assert config.load.seconds == 3
    for bad in (
        "asr.batching.max_batch_size",
        "=3",
        "asr.batching.max_batch_sise=1",
        "asr.model.x=1",
        "asr.dtype=[",
        "load=3",
    ):
        with pytest.raises(ConfigError):
            load_config({}, [bad])


batching = st.builds(
    BatchingConfig,
    enabled=st.booleans(),
    max_batch_size=st.integers(1, 4096),
    max_queue_delay_us=st.integers(0, 100_000),
    max_queue_depth=st.integers(1, 100_000),
    state_arena_slots=st.integers(1, 4096),
    offline_bucket_ms=st.integers(0, 5000),
)


@given(batching)
def test_yaml_round_trip(value):
    config = Config(asr=replace(Config(), **{"asr.batching": to_dict(value)}).asr)
    assert load_config(yaml.safe_load(to_yaml(config))) == config
    assert build(BatchingConfig, to_dict(value)) == value


@given(batching)
def test_effective_cap_names_the_key_that_limits(value):
    cap, key = effective_batch_cap(value)
    if not value.enabled:
        assert (cap, key) == (1, "asr.batching.enabled")
    else:
        assert cap == min(value.max_batch_size, value.state_arena_slots, value.max_queue_depth)
        assert getattr(value, key.rpartition(".")[2]) == cap


def test_field_lookup_for_search_spaces():
    default, about = field_path_type("asr.batching.max_queue_delay_us")
    assert default == 5000 and about["ge"] == 0 and about["annotation"] is int
    with pytest.raises(ConfigError, match="did you mean max_queue_delay_us"):
        field_path_type("asr.batching.max_queue_delay")
