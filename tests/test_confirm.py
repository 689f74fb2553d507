"""Real runs of a study's finalists, small: the same code that confirms them on a GPU; and what a record tells of captured graphs."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from test_study import HOST, SIZE, bowl

from workbench.config import Config, replace
from workbench.encoder.graphed import attach, detach
from workbench.encoder.options import GraphOptions
from workbench.errors import ConfigError, DeviceMemoryError, GeneratorLagged, LoadNotCarried, ModelError, StepTimeout
from workbench.measure.cost_table import Captures
from workbench.measure.costs import capture_rows
from workbench.measure.offline_run import offline_costs, run_offline, thinned
from workbench.measure.offline_twin import OfflineCosts
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer
from workbench.show.record_figure import confirm_figure
from workbench.show.study_results import confirm_studies
from workbench.tuning import live_host
from workbench.tuning.confirm import ConfirmOptions, confirm
from workbench.tuning.live_host import LiveHost, LiveRun, measured_tf32
from workbench.tuning.outcome import Outcome
from workbench.tuning.spec import at_streams, parse_study
from workbench.tuning.study import tune

ASR = {"model": "tiny", "device": "cpu", "att_context_size": [56, 13], "max_symbols": 2}
EXAMPLE = {"asr": {"batching": {"max_batch_size": 32}}}


def begun(folder: Path, **changes: Any) -> Any:
    """A study that was searched with a made-up twin, its YAML and database in `folder`."""
    data: dict[str, Any] = {
        "name": "live",
        "base": {"asr": {**ASR, "batching": {"enabled": True}}, "load": {"streams": 2, "seconds": 2}},
        "space": {SIZE: {"choices": [2, 32, 1024]}},
        "budget": {"trials": 6, "repeats": 2, "finalists": 2},
        "compare": {"document_example": EXAMPLE},
        **changes,
    }
    evaluate = data.pop("evaluate", bowl)
    folder.mkdir(exist_ok=True)
    (folder / "study.yaml").write_text(yaml.safe_dump(data))
    return tune(Config(), parse_study(data), evaluate, folder=folder, progress=False)


def test_the_finalists_of_studies_run_live_one_after_the_other_and_a_study_without_trials_is_told(
    tmp_path: Path,
) -> None:
    result = begun(tmp_path / "live")
    (tmp_path / "never").mkdir()
    (tmp_path / "never" / "study.yaml").write_text(yaml.safe_dump({"name": "n", "space": {SIZE: {"int": [1, 1024]}}}))
    options = ConfirmOptions(seconds=2.0, rounds=1, finalists=1)
    found, failed = confirm_studies([tmp_path / "never", tmp_path / "live"], options)
    assert "run it first" in failed[str(tmp_path / "never")] and list(found) == ["live"]
    live = Record.load(tmp_path / "live" / "live.json")
    assert [row["label"] for row in live.rows] == ["default", "best", "document_example", "best_again"]
    assert result.best is not None and result.best.params[SIZE] == 32
    for row in live.rows:
        assert row["kept"] is not None or row["why"].startswith("generator lagged")
        if row["kept"] is not None:
            assert row["latency_p95_ms"] > 0 and row["batch_size_mean_items"] >= 1 and row["streams"] == 2
    saved = json.loads((tmp_path / "live" / "results.json").read_text())
    assert saved["best"]["live"]["runs"] <= 1 and "untrained weights" in " ".join(saved["notes"])
    assert {"results.json", "report.html", "best.yaml", "trials.csv"} <= {p.name for p in (tmp_path / "live").iterdir()}


class Scripted(LiveHost):
    """A device whose p95 is a function of the configuration, and whose runs take `run_s` on a clock of its own; no model is loaded."""

    def __init__(self, p95_ms: Any, run_s: float = 5.0) -> None:
        super().__init__(say=lambda text: None)
        self.p95_ms, self.run_s, self.played, self.now_s = p95_ms, run_s, list[Config](), 0.0

    def clock(self) -> float:
        return self.now_s

    def model(self, asr: Any) -> Any:
        return SimpleNamespace(notes=())

    def run(self, config: Config, what: Any) -> tuple[Record, dict[str, Any]]:
        self.played.append(config)
        self.now_s += self.run_s
        numbers = {"latency_p95_ms": self.p95_ms(config), "late_share": 0.0, "streams": config.load.streams}
        return Record(kind="paced", numbers=numbers, environment=HOST), {}


def test_rounds_alternate_on_traffic_of_their_own(tmp_path: Path) -> None:
    result = begun(tmp_path)
    host = Scripted(lambda config: 10.0)
    rows = confirm(result, host, ConfirmOptions(rounds=2, finalists=1)).rows
    labels = ["default", "best", "document_example", "best_again"]
    assert [row["label"] for row in rows] == [*labels, *reversed(labels)]
    assert {config.load.seed for config in host.played} == {3000, 3001} and host.played[0].load.seconds == 4.0


def test_no_run_is_begun_that_would_pass_the_budget_and_what_did_not_run_says_so(tmp_path: Path) -> None:
    result = begun(tmp_path)
    for budget_s, ran in ((1.0, 1), (12.0, 2), (29.0, 5), (40.0, 8)):
        host, kept = Scripted(lambda config: 10.0), list[Record]()
        live = confirm(result, host, ConfirmOptions(rounds=2, finalists=1, budget_s=budget_s), kept.append, host.clock)
        assert len(host.played) == ran and live.numbers["took_s"] == 5.0 * ran
        left_out = [row["label"] for row in live.rows if row["why"].startswith("not run: ")]
        assert left_out == ["default", "best", "document_example", "best_again"][ran:]
        assert [len(record.rows) for record in kept[:-1]] == list(range(1, ran + 1)), "kept after every run"
        assert any("round 2 without" in note for note in live.notes) == (4 < ran < 8)
        outcome = Outcome.of(result, live).data
        assert outcome["default"]["live"]["runs"] >= 1
        assert ("its real runs were not measured: not run" in outcome["headline"]) == (ran == 1)


class Mute(Scripted):
    """A device whose load generator speaks no more than `most` streams."""

    def __init__(self, most: int, p95_ms: Any = lambda config: 10.0) -> None:
        super().__init__(p95_ms)
        self.most = most

    def run(self, config: Config, what: Any) -> tuple[Record, dict[str, Any]]:
        found = super().run(config, what)
        if config.load.streams > self.most:
            raise GeneratorLagged("generator lagged: late")
        return found


def crowded(tmp_path: Path, **changes: Any) -> Any:
    """A study of capacity: on the twin, batches of 32 carry 200 streams and the default 100."""

    def crowd(config: Config) -> Record:
        carried = 200 if config.asr.batching.max_batch_size == 32 else 100
        numbers = {"latency_p95_ms": 100.0 * config.load.streams / carried, "streams": config.load.streams}
        return Record(kind="twin", numbers=numbers, environment=HOST)

    return begun(
        tmp_path,
        space={"load.streams": {"int": [2, 512]}, SIZE: {"choices": [32, 1024]}},
        objectives=[{"number": "streams", "direction": "maximise"}],
        constraints=[{"number": "latency_p95_ms", "at_most": 100}],
        evaluate=crowd,
        **changes,
    )


def levels_of(live: Record, label: str) -> list[tuple[int, bool | None]]:
    """What a configuration ran with, in turn, and whether it kept every limit."""
    return [(row["streams"], row["kept"]) for row in live.rows if row["label"] == label]


def test_a_level_that_cannot_be_spoken_steps_down_at_once_and_then_up_to_what_can(tmp_path: Path) -> None:
    result = crowded(tmp_path)
    live = confirm(result, Mute(60), ConfirmOptions(rounds=1, finalists=1))
    default, best = levels_of(live, "default"), levels_of(live, "best")
    first = default[0][0]
    assert first in (99, 100) and default[1:3] == [(int(first * 0.7), None), (int(int(first * 0.7) * 0.7), True)]
    assert [row["round"] for row in live.rows if row["label"] == "default"] == [1, 1, 1, 2, 3]
    assert best[:4] == [(200, None), (140, None), (98, None), (68, None)], "its generator's own pace is to be found"
    data = Outcome.of(result, live).data
    for name, levels in (
        ("default", default),
        ("document_example", levels_of(live, "document_example")),
        ("best", best),
    ):
        lagged, kept = min(n for n, k in levels if k is None), max(n for n, k in levels if k)
        assert 60 / 1.1 < kept <= 60 < lagged <= 1.1 * kept
        assert data[name]["live"]["held_below_streams"] == lagged and data[name]["live"]["streams"] == kept
    assert data["best"]["live"]["why"].startswith("the load generator lagged at")
    assert data["gain"]["live_over_default_share"] is None and data["noise"]["live_again_difference_share"] is None
    assert "at least (the load generator lagged at" in data["headline"] and "not to be compared" in data["headline"]
    figure = confirm_figure(live)
    assert figure.axes[0].get_xlabel().startswith("streams, a dot a run")
    assert Outcome.of(result, live).result.best is result.best, "levels of the generator choose nobody"
    assert not any("narrowed" in note for note in live.notes)


def test_a_level_that_was_kept_in_every_run_is_carried_however_the_runs_differ(tmp_path: Path) -> None:
    """Two runs at 90 and 95 ms of 100: their bound would break the limit, where a level that ran once has none."""
    result = crowded(tmp_path)

    def p95_ms(config: Config) -> float:
        if config.asr.batching.max_batch_size == 32:
            return 90.0 if config.load.seed % 2 else 95.0
        return 100 * config.load.streams / 60

    live = confirm(result, Scripted(p95_ms), ConfirmOptions(rounds=2, finalists=1, most_streams=200))
    assert levels_of(live, "best") == [(200, True), (200, True)] and levels_of(live, "default")[-1][0] < 70
    outcome = Outcome.of(result, live)
    assert outcome.result.best is result.best and outcome.data["best"]["live"]["keeps_limits"] is True
    assert outcome.data["headline"].startswith("In real runs: streams 200: ")
    assert yaml.safe_load(outcome.best_yaml())["asr"]["batching"]["state_arena_slots"] == 400


def test_what_is_deployed_has_rows_for_what_the_real_runs_carried_or_without_them_for_what_the_twin_did(
    tmp_path: Path,
) -> None:
    result = crowded(tmp_path)
    twin = Outcome.of(result)
    live = Outcome.of(result, confirm(result, Mute(60), ConfirmOptions(rounds=1, finalists=1)))
    assert live.data["best"]["live"]["streams"] <= 60 < twin.data["best"]["twin"]["streams"]
    for outcome, carried in ((twin, twin.data["best"]["twin"]), (live, live.data["best"]["live"])):
        text = outcome.best_yaml()
        assert yaml.safe_load(text)["asr"]["batching"]["state_arena_slots"] == 2 * carried["streams"]
        assert f"rows for {carried['streams']:.0f} live streams" in " ".join(text.replace("#", " ").split())


def test_where_every_configuration_ends_at_one_level_of_the_generator_nothing_tells_them_apart(tmp_path: Path) -> None:
    result = crowded(tmp_path)
    rows = [
        {"label": label, "round": 1, "why": "", **run}
        for label in ("default", "best", "document_example", "best_again")
        for run in (
            {"streams": 120, "kept": None, "held_below_streams": 120},
            {"streams": 84, "kept": True, "latency_p95_ms": 50.0},
        )
    ]
    live = Record(kind="confirm", rows=rows, counters={"study": "live"}, environment=HOST)
    headline = Outcome.of(result, live).data["headline"]
    assert "nothing tells the configurations apart: each ran with 84 streams" in headline
    assert "the load generator lagged at 120, so none" in headline


def test_a_held_configuration_is_not_said_to_carry_more_than_one_that_it_leads_by_less_than_a_tenth(
    tmp_path: Path,
) -> None:
    def told(default: int) -> dict[str, Any]:
        runs = {
            "default": [(2 * default, False, {}), (default, True, {})],
            "best": [(120, None, {"held_below_streams": 120}), (100, True, {})],
        }
        rows = [
            {"label": label, "round": 1, "why": "", "streams": streams, "kept": kept, **more}
            for label, levels in runs.items()
            for streams, kept, more in levels
        ]
        live = Record(kind="confirm", rows=rows, counters={"study": "live"}, environment=HOST)
        return dict(Outcome.of(result, live).data)

    result = crowded(tmp_path)
    near, far = told(95), told(50)
    assert (
        near["gain"]["live_over_default_share"] is None and "not to be compared with default's 95" in near["headline"]
    )
    assert (
        far["gain"]["live_over_default_share"] == 1.0 and "at least 100.0 % more than default's 50" in far["headline"]
    )


def test_a_lag_above_a_level_that_broke_a_limit_holds_nobody_and_a_level_that_broke_one_once_is_not_kept(
    tmp_path: Path,
) -> None:
    def told(*runs: tuple[int, bool | None, float]) -> dict[str, Any]:
        rows = [
            {
                "label": "default",
                "round": 1,
                "why": f"at {p95_ms} ms",
                "streams": n,
                "kept": kept,
                "latency_p95_ms": p95_ms,
            }
            | ({"held_below_streams": n} if kept is None else {})
            for n, kept, p95_ms in runs
        ]
        live = Record(kind="confirm", rows=rows, counters={"study": "live"}, environment=HOST)
        return dict(Outcome.of(result, live).data["default"]["live"])

    result = crowded(tmp_path)
    found = told((256, None, 0.0), (179, False, 120.0), (89, True, 40.0))
    assert (
        "held_below_streams" not in found and found["streams"] == 89 and found["why"] == "at 179 streams: at 120.0 ms"
    )
    once = told(*[(89, True, 90.0)] * 8, (89, False, 101.0), (256, None, 0.0))
    assert once["streams"] == 89 and once["runs"] == 9 and once["keeps_limits"] is False, (
        "though the bound of all keeps it"
    )
    assert "held_below_streams" not in once and once["why"] == "at 89 streams: at 101.0 ms"
    never = told((200, False, 500.0), (100, None, 0.0))
    assert (
        "held_below_streams" not in never and never["streams"] == 200 and never["why"] == "at 200 streams: at 500.0 ms"
    )


def test_the_generators_pace_with_one_configuration_holds_no_other(tmp_path: Path) -> None:
    class Uneven(Mute):
        def run(self, config: Config, what: Any) -> tuple[Record, dict[str, Any]]:
            self.most = 130 if config.asr.batching.max_batch_size == 32 else 60
            return super().run(config, what)

    result = crowded(tmp_path)
    live = confirm(result, Uneven(0), ConfirmOptions(rounds=2, finalists=1))
    data = Outcome.of(result, live).data
    assert 54 < data["default"]["live"]["streams"] <= 60 < data["default"]["live"]["held_below_streams"] < 70
    assert 118 < data["best"]["live"]["streams"] <= 130 < data["best"]["live"]["held_below_streams"] < 145
    assert levels_of(live, "best")[0][0] > 190, "it began at the twin's level, though the default had lagged far below"


def test_a_lag_where_the_level_was_kept_before_takes_nothing_from_it(tmp_path: Path) -> None:
    class Hiccup(Scripted):
        def run(self, config: Config, what: Any) -> tuple[Record, dict[str, Any]]:
            found = super().run(config, what)
            if config.load.seed >= 3001:
                raise GeneratorLagged("generator lagged: late")
            return found

    result = crowded(tmp_path)
    live = confirm(result, Hiccup(lambda config: 10.0), ConfirmOptions(rounds=3, finalists=1, most_streams=90))
    assert levels_of(live, "default") == [(90, True), (90, None), (90, None)]
    told = Outcome.of(result, live).data["default"]["live"]
    assert told["streams"] == 90 and "held_below_streams" not in told and told["why"] == "more were not tried"


def test_a_configuration_that_keeps_its_limits_goes_up_until_it_breaks_one(tmp_path: Path) -> None:
    result = crowded(tmp_path)
    host = Scripted(lambda config: 100.0 * config.load.streams / 333)
    live = confirm(result, host, ConfirmOptions(rounds=2, finalists=1))
    levels = levels_of(live, "default")
    assert [kept for _, kept in levels[:4]] == [True, True, True, False] and levels[1][0] == round(1.5 * levels[0][0])
    data = Outcome.of(result, live).data
    for name in ("default", "best", "document_example"):
        told = data[name]["live"]
        assert 333 / 1.1 < told["streams"] <= 333 and told["runs"] == 1 and told["keeps_limits"]
        assert "held_below_streams" not in told and "latency_p95_ms <= 100" in told["why"]
    assert "within the tenth to which levels are found" in data["headline"], "both carry 333"
    bounded = confirm(result, Scripted(lambda config: 1.0), ConfirmOptions(rounds=1, finalists=1, most_streams=250))
    assert levels_of(bounded, "best")[-1] == (250, True) and max(row["streams"] for row in bounded.rows) == 250


def just_missed(config: Config) -> float:
    """p95 in milliseconds where batches of 32 carry 137 streams and others 60, and far more than those misses by far."""
    return 50.0 if config.load.streams <= (137 if config.asr.batching.max_batch_size == 32 else 60) else 500.0


def test_a_level_that_was_halved_is_searched_again_upwards_and_then_repeated(tmp_path: Path) -> None:
    result = crowded(tmp_path)
    live = confirm(result, Scripted(just_missed), ConfirmOptions(rounds=7, finalists=1))
    assert levels_of(live, "best") == [
        (200, False),
        (100, True),
        (141, False),
        (119, True),
        (130, True),
        (130, True),
        (130, True),
    ]
    told = Outcome.of(result, live).data["best"]["live"]
    assert (
        told["streams"] == 130 and told["runs"] == 3 and told["why"] == "at 141 streams: breaks latency_p95_ms <= 100"
    )
    again = [(row["round"], row["label"]) for row in live.rows if row["label"] in ("best", "best_again")]
    assert again[0] == (1, "best") and again[2] == (2, "best_again"), "the order is reversed from round to round"


def test_a_repeat_that_breaks_a_limit_takes_the_level_down_to_one_that_was_always_kept(tmp_path: Path) -> None:
    result = crowded(tmp_path)

    class Lucky(Scripted):
        def run(self, config: Config, what: Any) -> tuple[Record, dict[str, Any]]:
            self.p95_ms = lambda c: 100.0 * c.load.streams / (130 if config.load.seed < 3004 else 110)
            return super().run(config, what)

    live = confirm(result, Lucky(None), ConfirmOptions(rounds=9, finalists=1))
    levels = levels_of(live, "default")
    lucky = max(n for n, kept in levels if kept)
    assert (lucky, False) in levels and lucky > 115
    told = Outcome.of(result, live).data["default"]["live"]
    assert told["streams"] < lucky and all(kept for n, kept in levels if n == told["streams"]) and told["keeps_limits"]
    assert told["streams"] > 110 / 1.1 - 1 and told["streams"] <= 110


def test_a_budget_that_ends_in_the_middle_leaves_the_level_that_was_kept_so_far(tmp_path: Path) -> None:
    result = crowded(tmp_path)
    host = Scripted(just_missed)
    live = confirm(result, host, ConfirmOptions(rounds=2, finalists=1, budget_s=40.0), clock=host.clock)
    assert levels_of(live, "best") == [(200, False), (100, True)]
    assert len(host.played) == 8 and live.numbers["took_s"] == 40.0
    told = Outcome.of(result, live)
    assert told.data["best"]["live"]["streams"] == 100 and told.data["best"]["live"]["keeps_limits"]
    assert told.data["best"]["live"]["why"].startswith("at 200 streams: breaks")
    assert "best: 100 streams were kept, 200 were not; its level was not narrowed down further" in told.data["notes"]
    first = confirm(result, host, ConfirmOptions(rounds=2, finalists=1, budget_s=20.0), clock=host.clock)
    best = Outcome.of(result, first).data["best"]["live"]
    assert best["streams"] == 200 and best["keeps_limits"] is False and best["why"].startswith("at 200 streams: breaks")


def test_an_arena_that_was_sized_for_the_load_follows_it_down(tmp_path: Path) -> None:
    host = Mute(60)
    confirm(crowded(tmp_path), host, ConfirmOptions(rounds=1, finalists=1))
    assert min(config.load.streams for config in host.played) < 60 < host.played[-1].load.streams < 70
    assert all(config.asr.batching.state_arena_slots == 2 * config.load.streams for config in host.played)
    last = host.played[-1]
    wide = replace(last, **{"asr.batching.state_arena_slots": 500})
    assert at_streams(wide, 10).asr.batching.state_arena_slots == 500


class Small(Scripted):
    """A device that has memory for no more than `room` streams of a configuration with batches of 32."""

    def __init__(self, room: int, p95_ms: Any = lambda config: 10.0) -> None:
        super().__init__(p95_ms)
        self.room = room

    def run(self, config: Config, what: Any) -> tuple[Record, dict[str, Any]]:
        found = super().run(config, what)
        if config.asr.batching.max_batch_size == 32 and config.load.streams > self.room:
            raise DeviceMemoryError(f"{2 * config.load.streams} rows need 14.5 GiB")
        return found


def test_a_level_that_the_device_has_no_memory_for_is_a_ceiling_and_the_next_is_tried_at_once(tmp_path: Path) -> None:
    result = crowded(tmp_path)
    host = Small(80, lambda config: 50.0 if config.load.streams <= 90 else 500.0)
    live = confirm(result, host, ConfirmOptions(rounds=1, finalists=1))
    assert levels_of(live, "best") == [(200, None), (100, None), (50, True), (71, True), (84, None), (77, True)]
    assert [row["round"] for row in live.rows if row["label"] == "best"] == [1, 1, 1, 2, 3, 4]
    told = Outcome.of(result, live).data["document_example"]["live"]
    assert told["streams"] == 77 and told["keeps_limits"] and told["why"] == "at 84 streams: 168 rows need 14.5 GiB"
    assert "held_below_streams" not in told, "its own memory bounds it, not the generator"


def test_a_configuration_that_has_no_memory_for_one_stream_is_asked_no_more_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    result = crowded(tmp_path)
    live = confirm(result, Small(0), ConfirmOptions(rounds=4, finalists=1, most_streams=100))
    assert levels_of(live, "default") == [(100, True)] * 4 or levels_of(live, "default") == [
        (99, True),
        *[(100, True)] * 3,
    ]
    assert levels_of(live, "best") == [(n, None) for n in (100, 50, 25, 12, 6, 3, 1)]
    assert [row["round"] for row in live.rows if row["label"] == "best"] == [1] * 6 + [2]
    assert "14.5 GiB" in Outcome.of(result, live).data["headline"]


def test_a_configuration_that_is_refused_for_what_no_smaller_level_mends_is_asked_once(tmp_path: Path) -> None:
    class Refusing(Scripted):
        def run(self, config: Config, what: Any) -> tuple[Record, dict[str, Any]]:
            found = super().run(config, what)
            if config.asr.batching.max_batch_size == 32:
                raise ConfigError("asr.batch_buckets: got 3; allowed are others")
            return found

    live = confirm(
        crowded(tmp_path), Refusing(lambda config: 10.0), ConfirmOptions(rounds=2, finalists=1, most_streams=100)
    )
    for label in ("best", "document_example", "best_again"):
        assert [kept for _, kept in levels_of(live, label)] == [None]


def test_at_one_load_a_device_without_memory_refuses_the_configuration(tmp_path: Path) -> None:
    live = confirm(begun(tmp_path), Small(0), ConfirmOptions(rounds=3, finalists=1))
    assert levels_of(live, "best") == [(2, None)] and len(levels_of(live, "default")) == 3


def test_runs_too_short_for_a_chunk_keep_no_limit_and_say_so(tmp_path: Path) -> None:
    class Short(Scripted):
        def run(self, config: Config, what: Any) -> tuple[Record, dict[str, Any]]:
            super().run(config, what)
            numbers = {"latency_n": 0, "load_s": 1.0, "chunk_ms": 1120.0, "late_share": 0.0}
            return Record(kind="paced", numbers=numbers, environment=HOST), {}

    result = crowded(tmp_path)
    live = confirm(result, Short(lambda config: 10.0), ConfirmOptions(seconds=1.0, rounds=2, finalists=1))
    assert [row["kept"] for row in live.rows] == [None] * 4
    reason = "seconds: got runs of 1 s, in which no chunk of 1.12 s but the last was spoken; allowed are longer ones"
    assert all(reason in row["why"] for row in live.rows) and reason in Outcome.of(result, live).data["headline"]


def test_where_one_stream_alone_lags_it_is_tried_once_more_and_not_held_below_nothing(tmp_path: Path) -> None:
    short = {"document_example": {"asr": {**EXAMPLE["asr"], "att_context_size": [56, 0]}}}
    live = confirm(crowded(tmp_path, compare=short), Mute(0), ConfirmOptions(rounds=1, finalists=1))
    assert all(row["streams"] >= 1 and row.get("held_below_streams", 1) >= 1 for row in live.rows)
    lone = [(row["label"], row["round"]) for row in live.rows if row["streams"] == 1]
    assert max(lone.count(turn) for turn in lone) == 2


def test_a_model_that_was_not_trained_for_a_context_is_asked_once(tmp_path: Path) -> None:
    class Untrained(Scripted):
        def run(self, config: Config, what: Any) -> tuple[Record, dict[str, Any]]:
            found = super().run(config, what)
            if config.asr.batching.max_batch_size == 32:
                raise ModelError("att_context_size: got [56, 13]; this model was trained for [56, 0]")
            return found

    live = confirm(begun(tmp_path), Untrained(lambda config: 10.0), ConfirmOptions(rounds=3, finalists=1))
    assert [row["label"] for row in live.rows].count("best") == 1 and live.rows[1]["why"].endswith("[56, 0]")


def test_the_engine_of_a_run_is_gone_before_the_device_is_asked_for_room_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows and graphs can fill a GPU, and Python's collector rests during a run."""
    engines: list[weakref.ref[Any]] = []
    alive_at_start: list[int] = []
    build = live_host.Recognizer

    def crowded(loaded: Any) -> bool:
        alive_at_start.append(sum(engine() is not None for engine in engines))
        return False

    def counted(*given: Any) -> Recognizer:
        recognizer = build(*given)
        engines.append(weakref.ref(recognizer.stage))
        return recognizer

    monkeypatch.setattr(live_host, "_crowded", crowded)
    monkeypatch.setattr(live_host, "Recognizer", counted)
    host = LiveHost(say=lambda text: None)
    config = parse_study({"name": "x", "space": {SIZE: {"int": [1, 1024]}}}).configure(Config())
    asr = {"model": "tiny", "device": "cpu", "cuda_graphs": True, "encoder": "resident", "att_context_size": (56, 0)}
    config = replace(config, **{f"asr.{key}": value for key, value in asr.items()}, **{"load.seconds": 0.5})
    config = at_streams(replace(config, **{"asr.batching.enabled": True, "asr.batching.max_batch_size": 2}), 1)
    gc.disable()  # it may come of itself in time, or not
    try:
        for _ in range(3):
            with contextlib.suppress(GeneratorLagged):  # on a busy machine, where it is no less a run
                host.run(config, LiveRun())
    finally:
        gc.enable()
    assert alive_at_start == [0, 0, 0]


def test_a_configuration_without_a_context_runs_in_the_models_own_whatever_ran_before() -> None:
    host, own = LiveHost(say=lambda text: None), dataclasses.replace(Config().asr, model="tiny", device="cpu")
    moved = dataclasses.replace(own, att_context_size=(56, 0))
    contexts = []
    for asr in (moved, own, moved, own):
        geometry = host.model(asr).geometry
        contexts.append((geometry.left_frames, geometry.right_frames))
        assert tuple(host.model(asr).model.encoder.att_context_size) == contexts[-1]
    assert contexts == [(56, 0), contexts[1], (56, 0), contexts[1]] and contexts[1] in host.model(own).contexts
    first = host.model(own)
    with pytest.raises(ModelError, match="was trained for"):
        host.model(dataclasses.replace(own, att_context_size=(57, 0)))
    assert host.model(own).geometry == first.geometry


def test_label_rates_of_one_configuration_do_not_stay_for_the_next() -> None:
    host, plain = LiveHost(say=lambda text: None), dataclasses.replace(Config().asr, model="tiny", device="cpu")
    rated = dataclasses.replace(plain, label_rate_hz=3.0)
    told = ["label rate" in " ".join(host.model(asr).notes) for asr in (plain, rated, plain)]
    assert told == [False, True, False]


def test_a_device_that_runs_out_of_memory_refuses_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Any
) -> None:
    def full(*_: Any, **__: Any) -> Record:
        raise live_host.torch.OutOfMemoryError("tried to allocate 14.50 GiB")

    monkeypatch.setattr(live_host, "run_paced", full)
    monkeypatch.setattr(LiveHost, "model", lambda self, asr: tiny_model)
    config = parse_study({"name": "x", "space": {SIZE: {"int": [1, 1024]}}}).configure(Config())
    with pytest.raises(DeviceMemoryError, match=r"14\.50 GiB"):
        LiveHost(say=lambda text: None).run(config, live_host.LiveRun())


def test_a_gain_over_a_configuration_that_its_own_limit_bounds_is_stated_as_the_least(tmp_path: Path) -> None:
    result = crowded(tmp_path)
    slow = Mute(
        150, lambda config: 100.0 * config.load.streams / (200 if config.asr.batching.max_batch_size == 32 else 50)
    )
    data = Outcome.of(result, confirm(result, slow, ConfirmOptions(rounds=2, finalists=1))).data
    assert data["default"]["live"]["streams"] in (49, 50) and data["best"]["live"]["held_below_streams"] > 150
    assert "latency_p95_ms <= 100" in data["default"]["live"]["why"] and "at least 180" in data["headline"]


def test_where_no_level_can_be_spoken_the_search_ends_and_the_finding_says_why(tmp_path: Path) -> None:
    result = crowded(tmp_path)
    host = Mute(0)
    live = confirm(result, host, ConfirmOptions(rounds=1, finalists=1, budget_s=40.0), clock=host.clock)
    assert host.now_s <= 40.0 + host.run_s and all(row["kept"] is None for row in live.rows)
    headline = Outcome.of(result, live).data["headline"]
    assert headline.startswith("On the digital twin: ") and "real runs were not measured" in headline


def test_at_one_load_a_run_whose_generator_lagged_is_tried_once_more(tmp_path: Path) -> None:
    live = confirm(begun(tmp_path), Mute(0), ConfirmOptions(rounds=1, finalists=1))
    assert [row["label"] for row in live.rows].count("default") == 2 and {row["streams"] for row in live.rows} == {2}


class Offline(Scripted):
    """A device that recognises `rtfx` seconds of audio a second, where a run does not take too long."""

    def __init__(self, rtfx: float) -> None:
        super().__init__(lambda config: 10.0)
        self.rtfx, self.works = rtfx, list[dict[str, list[int]]]()

    def run(self, config: Config, what: Any) -> tuple[Record, dict[str, Any]]:
        self.played.append(config)
        self.works.append(what.work)
        took_s = sum(map(sum, what.work.values())) / 16000 / self.rtfx
        self.now_s += min(took_s, what.most_s)
        if took_s > what.most_s:
            raise StepTimeout("offline: time was up")
        return Record(kind="offline_run", numbers={"rtfx": self.rtfx}, environment=HOST), {}


def recordings(tmp_path: Path, rtfx: float = 50.0, count: int = 256) -> Any:
    """An offline study whose twin recognises `rtfx` seconds of audio a second."""
    return begun(
        tmp_path,
        base={"asr": {**ASR, "batching": {"enabled": True}}},
        objectives=[{"number": "rtfx", "direction": "maximise"}],
        offline={"lengths": ["shipped", "long_tailed"], "recordings": count, "concurrency": count // 16},
        evaluate=lambda config: Record(
            kind="offline_twin", numbers={"rtfx": rtfx + (config.asr.batching.max_batch_size == 32)}, environment=HOST
        ),
    )


def test_an_offline_run_takes_as_many_recordings_as_fit_the_same_for_all(tmp_path: Path) -> None:
    result = recordings(tmp_path)
    for budget_s, all_of_them in ((100.0, False), (6000.0, True)):
        host = Offline(50.0)
        live = confirm(result, host, ConfirmOptions(rounds=2, finalists=1, budget_s=budget_s), clock=host.clock)
        assert len(host.works) == 8 and all(work == host.works[0] for work in host.works)
        assert host.now_s <= budget_s and (len(host.works[0]["shipped"]) == 256) == all_of_them
        assert live.numbers["recordings_per_set"] == len(host.works[0]["long_tailed"])
        assert any("of 256 recordings of each set" in note for note in live.notes) != all_of_them


def test_where_the_twin_was_far_too_fast_fewer_recordings_are_tried_and_all_get_those(tmp_path: Path) -> None:
    result, host = recordings(tmp_path), Offline(10.0)
    live = confirm(result, host, ConfirmOptions(rounds=1, finalists=1, budget_s=120.0), clock=host.clock)
    measured = [row for row in live.rows if row["kept"] is not None]
    counts = [len(work["shipped"]) for work in host.works]
    assert live.rows[0]["why"] == "offline: time was up" and counts[1] == counts[0] // 4
    assert set(counts[1:]) == {counts[1]} and [row["label"] for row in measured][:2] == ["default", "best"]
    assert live.numbers["recordings_per_set"] == counts[1] and host.now_s <= 120.0 + 30.0


def test_in_a_study_of_capacity_a_configuration_that_breaks_the_limit_goes_on_with_fewer(tmp_path: Path) -> None:
    result = crowded(tmp_path)
    host = Scripted(
        lambda config: 100.0 * config.load.streams / (150 if config.asr.batching.max_batch_size == 32 else 100)
    )
    live = confirm(result, host, ConfirmOptions(rounds=6, finalists=1))
    best = levels_of(live, "best")
    assert best[0][0] > 190 and best[1] == (int(best[0][0] * 150 / best[0][0]), True), "down by what it missed"
    assert [kept for _, kept in best[2:4]] == [False, False] and best[4:] == [best[1]] * 2, "no more between; repeated"
    outcome = Outcome.of(result, live).data
    assert outcome["best"]["live"]["streams"] == best[1][0] and outcome["best"]["live"]["runs"] == 3
    assert outcome["best"]["live"]["keeps_limits"] and outcome["default"]["live"]["streams"] == pytest.approx(99, abs=2)
    assert outcome["gain"]["live_over_default_share"] > 0.45
    lower = confirm(
        result, Scripted(lambda config: 100.0 * config.load.streams / 20), ConfirmOptions(rounds=1, finalists=1)
    )
    levels = levels_of(lower, "best")
    assert (
        [kept for _, kept in levels] == [False] * 4 + [True, False] and levels[4] == (20, True) and levels[5][0] == 22
    )
    assert [row["round"] for row in lower.rows if row["label"] == "best"] == [1, 2, 3, 4, 5, 6], (
        "rounds more until it is found"
    )


def test_a_live_run_that_was_refused_is_a_row_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Any
) -> None:
    def refusing(*_: Any, **__: Any) -> Record:
        raise LoadNotCarried("load: QueueFull at 1.00 s")

    monkeypatch.setattr(live_host, "run_paced", refusing)
    monkeypatch.setattr(LiveHost, "model", lambda self, asr: tiny_model)
    result = begun(tmp_path, constraints=[{"number": "late_share", "at_most": 0.01}])
    row = confirm(result, LiveHost(say=lambda text: None), ConfirmOptions(rounds=1, finalists=1)).rows[0]
    assert row["kept"] is False and row["why"] == "load: QueueFull at 1.00 s" and row["late_share"] == 1.0


def test_offline_costs_are_measured_by_size_and_length_and_feed_the_twin(tiny_model: Any, noise: Any) -> None:
    config = parse_study({"name": "x", "space": {SIZE: {"int": [1, 1024]}}}).configure(Config())
    with Recognizer(tiny_model, config) as recognizer:
        record = offline_costs(recognizer, [noise(1.0)], batches=(1, 2), lengths_s=(0.5, 1.0), repeats=1)
    assert {(row["audio_s"], row["batch"]) for row in record.rows} == {(0.5, 1), (0.5, 2), (1.0, 1), (1.0, 2)}
    assert OfflineCosts.from_record(record).quantiles_ms(2, 0.75)[128] > 0


def test_a_cost_record_tells_what_the_graphs_of_every_batch_size_took(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_graphed_cpu import FakeBackend

    monkeypatch.setattr("workbench.encoder.key._on_cuda", lambda inputs: True)
    config = parse_study({"name": "x", "space": {SIZE: {"int": [1, 1024]}}}).configure(Config())
    with Recognizer(tiny_model, config) as recognizer:
        assert capture_rows(recognizer) == []
        attach(tiny_model.model.encoder, GraphOptions(max_graphs=16, warmup_steps=0), FakeBackend())
        try:
            recognizer.stage.encoder.ladder = (1, 2, 4)
            recognizer.warm_up()
            rows = capture_rows(recognizer)
            # The engine of another recogniser of the model has graphs of its own, which these are not.
            with Recognizer(tiny_model, replace(config, **{"asr.encoder": "resident"})) as resident:
                assert capture_rows(resident) == []
        finally:
            recognizer.stage.encoder.ladder = None
            detach(tiny_model.model.encoder)
    assert [row["batch"] for row in rows] == [1, 2, 4] and all(row["capture_ms"] > 0 for row in rows)
    sizes = [row["bytes"] for row in rows]
    captures = Captures.from_rows(rows)
    assert sizes == sorted(sizes) and captures is not None and captures.pool_bytes == 1000
    assert captures.numbers((1, 4))["graph_memory_mib"] == pytest.approx((sizes[0] + sizes[2] + 1000) / 2**20)


def test_products_are_computed_as_the_costs_were_measured(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def costs(**gpu: Any) -> Record:
        return Record(kind="costs", environment={"gpu": gpu} if gpu else {})

    assert (
        measured_tf32([costs(matmul_tf32=True), costs()]) is True and measured_tf32([costs(matmul_tf32=False)]) is False
    )
    assert (
        measured_tf32([costs()]) is None and measured_tf32([costs(matmul_tf32=True), costs(matmul_tf32=False)]) is None
    )
    matmul, asr = live_host.torch.backends.cuda.matmul, Config().asr
    found, loaded = matmul.allow_tf32, [tiny_model]
    monkeypatch.setattr(live_host, "load_configured", lambda asr: loaded[0])
    host = LiveHost(say=lambda text: None)
    host.tf32 = not found
    assert host.notes(asr) == list(tiny_model.notes) and matmul.allow_tf32 is found, "a CPU has no such switch"
    loaded[0] = dataclasses.replace(tiny_model, device="cuda:0")
    host = LiveHost(say=lambda text: None)
    try:
        host.tf32 = not found
        assert host.notes(asr)[-1].endswith("as the twin's costs were measured") and matmul.allow_tf32 is not found
        host.tf32 = None
        assert host.notes(asr) == list(tiny_model.notes) and matmul.allow_tf32 is found, "the next study has no costs"
    finally:
        matmul.allow_tf32 = found


def test_a_part_of_the_recordings_has_lengths_like_all_of_them_and_ends_in_time(tiny_model: Any, noise: Any) -> None:
    lengths = [int(value) for value in np.random.default_rng(0).permutation(1000)]
    part = thinned(lengths, 100)
    assert part == list(range(5, 1000, 10)) and thinned(lengths, 5000) == sorted(lengths) and thinned([7], 1) == [7]
    config = parse_study({"name": "x", "space": {SIZE: {"int": [1, 1024]}}}).configure(Config())
    with Recognizer(tiny_model, config) as recognizer:
        record = run_offline(recognizer, {"shipped": [8000, 16000, 8000]}, [noise(1.0)], concurrency=2)
        assert record.numbers["recordings"] == 3 and record.numbers["rtfx_shipped"] > 0
        with pytest.raises(StepTimeout, match="0 of 3 recordings had been begun"):
            run_offline(recognizer, {"shipped": [8000] * 3}, [noise(1.0)], concurrency=2, most_s=-1.0)


def test_an_offline_study_runs_live_and_a_kill_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "live"
    recordings(folder, rtfx=5.0, count=32)
    ran, run = [], LiveHost.run

    def killed(host: LiveHost, config: Config, what: Any) -> Any:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(what.work)
        return run(host, config, what)

    monkeypatch.setattr(LiveHost, "run", killed)
    with pytest.raises(KeyboardInterrupt):
        confirm_studies([folder], ConfirmOptions(rounds=1, finalists=1, budget_s=120.0))
    live = Record.load(folder / "live.json")
    assert [row["label"] for row in live.rows] == ["default", "best"] and len(ran[0]["shipped"]) < 32
    assert all(row["recordings"] == 2 * len(ran[0]["shipped"]) for row in live.rows if row["kept"])
    assert any("recordings of each set" in note for note in live.notes)
