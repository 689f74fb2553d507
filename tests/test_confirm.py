"""Real runs of a study's finalists, small: the same code that confirms them on a GPU; and what a record tells of captured graphs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from test_study import HOST, SIZE, bowl

from workbench.config import Config
from workbench.encoder.graphed import attach, detach
from workbench.encoder.options import GraphOptions
from workbench.errors import LoadNotCarried
from workbench.measure.cost_table import Captures
from workbench.measure.costs import capture_rows
from workbench.measure.offline_run import offline_costs
from workbench.measure.offline_twin import OfflineCosts
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer
from workbench.show.study_results import confirm_studies
from workbench.tuning import confirm as confirm_module
from workbench.tuning.confirm import ConfirmOptions, LiveHost, confirm
from workbench.tuning.outcome import Outcome
from workbench.tuning.spec import parse_study
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
    assert [row["label"] for row in live.rows] == ["default", "document_example", "best", "best_again"]
    assert result.best is not None and result.best.params[SIZE] == 32
    for row in live.rows:
        assert row["kept"] is not None or row["why"].startswith("generator lagged")
        if row["kept"] is not None:
            assert row["latency_p95_ms"] > 0 and row["batch_size_mean_items"] >= 1 and row["streams"] == 2
    saved = json.loads((tmp_path / "live" / "results.json").read_text())
    assert saved["best"]["live"]["runs"] <= 1 and "untrained weights" in " ".join(saved["notes"])
    assert {"results.json", "report.html", "best.yaml", "trials.csv"} <= {p.name for p in (tmp_path / "live").iterdir()}


class Scripted(LiveHost):
    """A device whose p95 is a function of the configuration; no model is loaded."""

    def __init__(self, p95_ms: Any) -> None:
        super().__init__(say=lambda text: None)
        self.p95_ms, self.played = p95_ms, list[Config]()

    def model(self, asr: Any) -> Any:
        return SimpleNamespace(notes=())

    def run(self, config: Config, spec: Any) -> tuple[Record, dict[str, Any]]:
        self.played.append(config)
        numbers = {"latency_p95_ms": self.p95_ms(config), "late_share": 0.0, "streams": config.load.streams}
        return Record(kind="paced", numbers=numbers, environment=HOST), {}


def test_rounds_alternate_on_traffic_of_their_own_and_end_with_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = begun(tmp_path)
    host = Scripted(lambda config: 10.0)
    rows = confirm(result, host, ConfirmOptions(rounds=2, finalists=1)).rows
    labels = ["default", "document_example", "best", "best_again"]
    assert [row["label"] for row in rows] == [*labels, *reversed(labels)]
    assert {config.load.seed for config in host.played} == {3000, 3001} and host.played[0].load.seconds == 4.0
    clock = iter(range(0, 10_000, 50))
    monkeypatch.setattr(confirm_module.time, "perf_counter", lambda: float(next(clock)))
    short = confirm(result, Scripted(lambda config: 10.0), ConfirmOptions(rounds=5, finalists=1, budget_s=60.0))
    assert short.numbers["rounds"] == 1


def test_in_a_study_of_capacity_a_configuration_that_breaks_the_limit_goes_on_with_fewer(tmp_path: Path) -> None:
    def crowd(config: Config) -> Record:
        carried = 200 if config.asr.batching.max_batch_size == 32 else 100
        numbers = {"latency_p95_ms": 100.0 * config.load.streams / carried, "streams": config.load.streams}
        return Record(kind="twin", numbers=numbers, environment=HOST)

    result = begun(
        tmp_path,
        space={"load.streams": {"int": [2, 512]}, SIZE: {"choices": [32, 1024]}},
        objectives=[{"number": "streams", "direction": "maximise"}],
        constraints=[{"number": "latency_p95_ms", "at_most": 100}],
        evaluate=crowd,
    )
    host = Scripted(
        lambda config: 100.0 * config.load.streams / (150 if config.asr.batching.max_batch_size == 32 else 100)
    )
    live = confirm(result, host, ConfirmOptions(rounds=4, finalists=1))
    best = [row["streams"] for row in live.rows if row["label"] == "best"]
    assert best[0] > 190 and best[1] == int(best[0] * 150 / best[0]) == best[2] == best[3], "down by what it missed"
    outcome = Outcome.of(result, live).data
    assert outcome["best"]["live"]["streams"] == best[3] and outcome["best"]["live"]["runs"] == 3
    assert outcome["best"]["live"]["keeps_limits"] and outcome["default"]["live"]["streams"] == pytest.approx(99, abs=2)
    assert outcome["gain"]["live_over_default_share"] > 0.45
    lower = confirm(
        result, Scripted(lambda config: 100.0 * config.load.streams / 20), ConfirmOptions(rounds=1, finalists=1)
    )
    levels = [row["streams"] for row in lower.rows if row["label"] == "best"]
    assert len(levels) == 5 and lower.rows[-1]["kept"] and levels[-1] <= 20, "rounds more for whoever is still too high"


def test_a_live_run_that_was_refused_is_a_row_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Any
) -> None:
    def refusing(*_: Any, **__: Any) -> Record:
        raise LoadNotCarried("load: QueueFull at 1.00 s")

    monkeypatch.setattr(confirm_module, "run_paced", refusing)
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
        finally:
            recognizer.stage.encoder.ladder = None
            detach(tiny_model.model.encoder)
    assert [row["batch"] for row in rows] == [1, 2, 4] and all(row["capture_ms"] > 0 for row in rows)
    sizes = [row["bytes"] for row in rows]
    captures = Captures.from_rows(rows)
    assert sizes == sorted(sizes) and captures is not None and captures.pool_bytes == 1000
    assert captures.numbers((1, 4))["graph_memory_mib"] == pytest.approx((sizes[0] + sizes[2] + 1000) / 2**20)
