"""Everything of the graphed encoder step that needs no GPU: keys, guards, reasons, counters, eviction, lifecycle, NeMo's own switches.

The device side is a hand-written backend: it "captures" by remembering the addresses of the weights and recomputes on replay from its
own static inputs, so a stale address or a missing copy shows as it would on a GPU.
"""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.encoder.graphed import (
    GraphedEncoderStep,
    GraphError,
    GraphOptions,
    attach,
    attached_step,
    detach,
    find_encoder,
    set_streaming_cuda_graphs,
)
from workbench.encoder.guard import PointerGuard
from workbench.encoder.key import StepCall, StepInputs, autocast_on, precision_flags, step_key, why_eager
from workbench.encoder.options import REASONS
from workbench.encoder.steady import StepShape, steady_call
from workbench.errors import ConfigError, ModelError


class FakeGraph:
    """A captured step on the CPU: its own static inputs, and the memory of the weights as it was at capture."""

    def __init__(self, run, inputs):
        self.static = StepInputs(*(t.clone() for t in inputs))
        self.run, self.closed = run, False
        self.stable = tuple(t.clone() for t in run(self.static))
        self.nbytes = sum(t.numel() * t.element_size() for t in (*self.static, *self.stable))

    def close(self):
        self.closed = True


class FakeBackend:
    """Counts what the step asks of a device. `fail` makes the next captures raise."""

    def __init__(self):
        self.pool_bytes = 0
        self.synchronized = self.released = 0
        self.capturing = False
        self.fail = 0
        self.graphs = []

    def is_capturing(self):
        return self.capturing

    def capture(self, run, inputs):
        if self.fail:
            self.fail -= 1
            raise RuntimeError("out of memory while capturing")
        self.graphs.append(FakeGraph(run, inputs))
        self.pool_bytes = 1000
        return self.graphs[-1]

    def replay(self, graph, inputs):
        assert not graph.closed, "a dropped graph was replayed"
        for static, given_tensor in zip(graph.static, inputs, strict=True):
            static.copy_(given_tensor)
        for stable, fresh in zip(graph.stable, graph.run(graph.static), strict=True):
            stable.copy_(fresh)
        return tuple(t.clone() for t in graph.stable)

    def synchronize(self):
        self.synchronized += 1

    def release_pools(self):
        self.released += 1
        self.pool_bytes = 0


@pytest.fixture(scope="module")
def model():
    from workbench.model.shapes import build_model

    return build_model("tiny", layers=2, d_model=64, subsampling_channels=32, vocabulary=64)


@pytest.fixture
def encoder(model, monkeypatch):
    """The model's encoder with "on CUDA" answered yes: the fake backend stands for the device."""
    monkeypatch.setattr("workbench.encoder.key._on_cuda", lambda inputs: True)
    model.eval().requires_grad_(False)
    model.encoder.set_default_att_context_size([56, 3])
    yield model.encoder
    detach(model.encoder)
    model.eval().requires_grad_(False)


def attach_fake(encoder, **options):
    backend = FakeBackend()
    return attach(encoder, GraphOptions(**options), backend), backend


def call_of(encoder, batch=2, **shape):
    return steady_call(encoder, StepShape(batch=batch, **shape))


def run(step, call, **changes):
    call = call._replace(**changes)
    return step.step(
        *call.inputs,
        keep_all_outputs=call.keep_all_outputs,
        drop_extra_pre_encoded=call.drop,
        bypass_pre_encode=call.bypass_pre_encode,
    )


def eager(encoder, call):
    return type(encoder).cache_aware_stream_step(
        encoder, *call.inputs, call.keep_all_outputs, call.drop, call.bypass_pre_encode
    )


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# --- capture, replay, equality -------------------------------------------------------------------------------------------------


def test_a_shape_is_eager_for_its_warmup_then_captured_then_replayed(encoder):
    step, backend = attach_fake(encoder, warmup_steps=2)
    call = call_of(encoder)
    for _ in range(5):
        assert same(run(step, call), eager(encoder, call))
    report = step.report()
    assert (report["captured"], report["replayed"], report["held"]) == (1, 3, 1)
    assert report["eager"] == {"warmup": 2}
    assert report["held_bytes"] == backend.graphs[0].nbytes + 1000
    assert report["last_capture_ms"] > 0


def test_a_stream_through_fill_steady_state_and_final_step_equals_eager(encoder):
    step, _ = attach_fake(encoder)
    state = expected = encoder.get_initial_cache_state(batch_size=3)
    for index in range(24):
        call = call_of(encoder, batch=3)._replace(keep_all_outputs=index == 23)
        got = run(step, call._replace(inputs=StepInputs(*call.inputs[:2], *state)))
        want = eager(encoder, call._replace(inputs=StepInputs(*call.inputs[:2], *expected)))
        assert same(got, want)
        state, expected = got[2:], want[2:]
    assert int(state[2][0]) == 56, "the cache must be full for the last steps"
    assert step.report()["captured"] == 1, "cache_last_channel_len is data and must not make a second graph"


def test_what_the_caller_received_is_never_overwritten(encoder):
    step, _ = attach_fake(encoder, warmup_steps=0)
    first = run(step, call_of(encoder))
    kept = [t.clone() for t in first]
    run(step, call_of(encoder))
    assert same(first, kept)


def test_weights_changed_in_place_are_seen_without_a_new_capture(encoder):
    step, _ = attach_fake(encoder, warmup_steps=0)
    call = call_of(encoder)
    before = run(step, call)
    weights = {k: v.clone() for k, v in encoder.state_dict().items()}
    encoder.load_state_dict({k: v * 1.5 if v.is_floating_point() else v for k, v in weights.items()})
    after = run(step, call)
    assert same(after, eager(encoder, call)) and not torch.equal(before[0], after[0])
    assert step.report()["captured"] == 1
    encoder.load_state_dict(weights)


# --- the key ---------------------------------------------------------------------------------------------------------------------


def test_the_key_ignores_values_and_separates_everything_baked_in(encoder):
    call = call_of(encoder)
    base = step_key(encoder, call.inputs, 2)
    other_values = StepInputs(*(t.clone() * 0 for t in call.inputs))
    assert step_key(encoder, other_values, 2) == base

    def changed(**parts):
        return step_key(encoder, call.inputs._replace(**parts), 2)

    variants = [
        step_key(encoder, call.inputs, 1),
        changed(signal=call.inputs.signal[:, :, :-8]),
        changed(signal=call.inputs.signal.double()),
        changed(signal_len=call.inputs.signal_len.int()),
        changed(cache_channel=call.inputs.cache_channel.half()),
        changed(cache_time=call.inputs.cache_time[:, :1]),
        changed(cache_channel_len=call.inputs.cache_channel_len.int()),
        changed(signal=call.inputs.signal.to("meta")),
        step_key(encoder, call_of(encoder, batch=3).inputs, 2),
    ]
    for name in ("last_channel_cache_size", "cache_drop_size", "valid_out_len"):
        value = getattr(encoder.streaming_cfg, name)
        setattr(encoder.streaming_cfg, name, value + 1)
        variants.append(step_key(encoder, call.inputs, 2))
        setattr(encoder.streaming_cfg, name, value)
    encoder.att_context_size = [56, 1]
    variants.append(step_key(encoder, call.inputs, 2))
    encoder.att_context_size = [56, 3]
    assert step_key(encoder, call.inputs, 2) == base
    assert len({base, *variants}) == len(variants) + 1


def test_the_key_follows_the_precision_switches():
    matmul = torch.backends.cuda.matmul
    old, seen = matmul.allow_tf32, []
    for value in (True, False, True):
        matmul.allow_tf32 = value
        seen.append(precision_flags())
    matmul.allow_tf32 = old
    assert seen[0] == seen[2] != seen[1]


def test_the_effective_drop_is_in_the_key_not_the_argument(encoder):
    step, _ = attach_fake(encoder, warmup_steps=0)
    call = call_of(encoder)
    run(step, call)
    run(step, call, drop=encoder.streaming_cfg.drop_extra_pre_encoded)
    assert step.report()["captured"] == 1, "None and the configured value are the same step"
    encoder.streaming_cfg.drop_extra_pre_encoded = 1
    assert same(run(step, call), eager(encoder, call))
    assert step.report()["captured"] == 2, "a changed configuration must not replay the old graph"


def test_switching_the_context_captures_anew_and_back_finds_the_old_graph(encoder):
    step, _ = attach_fake(encoder, warmup_steps=0)
    for context, captured in (([56, 3], 1), ([56, 0], 2), ([56, 3], 2)):
        encoder.set_default_att_context_size(context)
        call = call_of(encoder)
        assert same(run(step, call), eager(encoder, call))
        assert step.report()["captured"] == captured


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=14))
@settings(max_examples=10, deadline=None)
def test_every_step_is_counted_once_and_the_limit_holds(model, steps):
    encoder = model.encoder
    encoder.set_default_att_context_size([56, 0])
    step, backend = attach_fake(encoder, max_graphs=2, warmup_steps=1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("workbench.encoder.key._on_cuda", lambda inputs: True)
            model.requires_grad_(False)
            for batch, keep_all in steps:
                run(step, call_of(encoder, batch=batch), keep_all_outputs=keep_all)
                assert step.report()["held"] <= 2
        report = step.report()
        assert report["replayed"] + sum(report["eager"].values()) == len(steps)
        assert report["captured"] - report["evicted"] == report["held"]
        assert set(report["eager"]) <= REASONS
        assert sum(not graph.closed for graph in backend.graphs) == report["held"]
    finally:
        detach(encoder)


# --- reasons -----------------------------------------------------------------------------------------------------------------


def test_steps_outside_the_steady_state_are_eager_and_counted(encoder):
    step, _ = attach_fake(encoder, warmup_steps=0)
    call = call_of(encoder)
    run(step, call, keep_all_outputs=True)
    run(step, call, drop=0)
    run(step, call, inputs=call.inputs._replace(cache_channel=None, cache_time=None, cache_channel_len=None))
    embedded = torch.randn(2, 6, encoder.d_model)
    run(
        step,
        call,
        bypass_pre_encode=True,
        inputs=call.inputs._replace(signal=embedded, signal_len=torch.tensor([6, 6])),
    )
    expected = {"keep_all_outputs": 1, "first_chunk": 1, "no_caches": 1, "bypass_pre_encode": 1}
    assert step.report()["eager"] == expected and step.report()["held"] == 0


def test_a_first_chunk_is_graphed_where_that_is_wanted_and_has_a_graph_of_its_own(encoder):
    step, _ = attach_fake(encoder, warmup_steps=0, first_chunk=True)
    call = call_of(encoder)
    first = call._replace(drop=0)
    for _ in range(2):
        assert same(run(step, call), eager(encoder, call))
        assert same(run(step, first), eager(encoder, first))
    assert step.report()["captured"] == 2 and step.report()["replayed"] == 4 and step.report()["eager"] == {}
    assert not torch.equal(eager(encoder, call)[0], eager(encoder, first)[0])
    with pytest.raises(ConfigError, match="first_chunk"):
        GraphOptions(first_chunk=1)


def test_missing_lengths_are_a_reason(encoder):
    call = call_of(encoder)
    assert why_eager(encoder, call._replace(inputs=call.inputs._replace(signal_len=None))) == "no_lengths"


def test_unsafe_surroundings_are_eager_and_counted(encoder, monkeypatch):
    step, backend = attach_fake(encoder, warmup_steps=0)
    call = call_of(encoder)
    backend.capturing = True
    run(step, call)
    backend.capturing = False
    encoder.train()
    run(step, call)
    encoder.eval().requires_grad_(True)
    assert run(step, call)[0].requires_grad, "a caller that wants gradients gets them"
    with torch.no_grad():
        run(step, call)
    encoder.requires_grad_(False)
    monkeypatch.setattr("workbench.encoder.key.autocast_on", lambda: True)
    run(step, call)
    monkeypatch.setattr("workbench.encoder.key._on_cuda", lambda inputs: False)
    run(step, call)
    assert step.report()["eager"] == {"capturing": 1, "training": 1, "grad": 1, "autocast": 1, "not_cuda": 1}
    assert step.report()["replayed"] == 1


def test_without_a_gpu_every_steady_step_says_not_cuda(model):
    model.eval().requires_grad_(False)
    step = set_streaming_cuda_graphs(model)
    try:
        call = call_of(model.encoder)
        assert same(run(step, call), eager(model.encoder, call))
        assert step.report()["eager"] == {"not_cuda": 1}
    finally:
        assert set_streaming_cuda_graphs(model, False) is None


def test_autocast_is_asked_in_both_signatures():
    assert autocast_on(lambda device: device == "cuda") is True

    def older():
        return True

    assert autocast_on(older) is True and autocast_on() is False


def test_refusing_at_the_limit_keeps_the_old_graphs(encoder):
    step, backend = attach_fake(encoder, max_graphs=1, warmup_steps=0, when_full="refuse")
    run(step, call_of(encoder, batch=1))
    run(step, call_of(encoder, batch=2))
    run(step, call_of(encoder, batch=1))
    report = step.report()
    assert report["eager"] == {"max_graphs": 1} and report["replayed"] == 2 and report["evicted"] == 0
    assert not backend.graphs[0].closed


def test_evicting_drops_the_least_recently_used_after_a_synchronise(encoder):
    step, backend = attach_fake(encoder, max_graphs=2, warmup_steps=0)
    for batch in (1, 2, 1, 3):
        run(step, call_of(encoder, batch=batch))
    assert [graph.closed for graph in backend.graphs] == [False, True, False]
    assert step.report()["evicted"] == 1 and backend.synchronized == 1


def test_a_failed_capture_marks_only_its_shape_and_is_not_retried(encoder):
    step, backend = attach_fake(encoder, warmup_steps=0)
    run(step, call_of(encoder, batch=1))
    backend.fail = 1
    bad = call_of(encoder, batch=2)
    with pytest.warns(UserWarning, match="out of memory while capturing"):
        assert same(run(step, bad), eager(encoder, bad))
    assert same(run(step, bad), eager(encoder, bad))
    run(step, call_of(encoder, batch=1))
    run(step, call_of(encoder, batch=3))
    report = step.report()
    assert report["eager"] == {"capture_failed": 2} and report["captured"] == 2 and report["replayed"] == 3
    assert list(report["failures"].values()) == ["RuntimeError: out of memory while capturing"]
    step.disable_cuda_graphs()
    step.maybe_enable_cuda_graphs()
    run(step, bad)
    assert step.report()["captured"] == 3, "re-enabling gives a failed shape another chance"


def test_forced_mode_raises_instead_of_falling_back_but_streams_can_begin_and_end(encoder):
    step, backend = attach_fake(encoder, mode="forced")
    call = call_of(encoder)
    run(step, call, drop=0)
    run(step, call, keep_all_outputs=True)
    run(step, call)
    assert step.report()["captured"] == 1, "forced mode needs no warm-up calls"
    encoder.train()
    with pytest.raises(GraphError, match="training"):
        run(step, call)
    encoder.eval()
    backend.fail = 1
    with pytest.warns(UserWarning), pytest.raises(GraphError, match=r"capture_failed.*out of memory"):
        run(step, call_of(encoder, batch=4))


def test_mode_off_stays_eager(encoder):
    step, _ = attach_fake(encoder, mode="off", warmup_steps=0)
    run(step, call_of(encoder))
    assert step.report()["eager"] == {"off": 1}
    assert step.maybe_enable_cuda_graphs() is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_graphs": 0}, "max_graphs: got 0"),
        ({"max_graphs": 2.5}, "max_graphs: got 2.5"),
        ({"warmup_steps": -1}, "warmup_steps: got -1"),
        ({"when_full": "drop"}, "when_full: got 'drop'; allowed are evict, refuse"),
        ({"mode": "on"}, "mode: got 'on'; allowed are auto, forced, off"),
    ],
)
def test_bad_options_say_what_is_allowed(model, options, message):
    with pytest.raises(ConfigError, match=message):
        set_streaming_cuda_graphs(model, True, **options)
    assert attached_step(model.encoder) is None


def test_an_object_without_a_streaming_step_is_refused():
    with pytest.raises(ModelError, match="Linear"):
        set_streaming_cuda_graphs(torch.nn.Linear(2, 2))


# --- guards --------------------------------------------------------------------------------------------------------------------


def _replace_positional_table(encoder):
    encoder.pos_enc.extend_pe(encoder.max_audio_length + 1000, torch.device("cpu"), torch.float32)
    assert encoder.pos_enc.pe.size(1) > 2 * encoder.max_audio_length


def _move_weights(encoder):
    encoder._apply(lambda t: t.clone())


def _swap_parameter(encoder):
    layer = encoder.layers[0].feed_forward1.linear1
    layer.weight = torch.nn.Parameter(layer.weight.detach().clone() * 2, requires_grad=False)


def _swap_module(encoder):
    encoder.layers[1].feed_forward2 = copy.deepcopy(encoder.layers[1].feed_forward2)


def _parametrise(encoder):
    class Twice(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    torch.nn.utils.parametrize.register_parametrization(encoder.layers[0].feed_forward1.linear2, "weight", Twice())


@pytest.mark.parametrize(
    "change", [_replace_positional_table, _move_weights, _swap_parameter, _swap_module, _parametrise]
)
def test_whatever_moves_what_a_graph_points_at_makes_it_capture_anew(model, monkeypatch, change):
    monkeypatch.setattr("workbench.encoder.key._on_cuda", lambda inputs: True)
    encoder = copy.deepcopy(model.encoder).requires_grad_(False)
    step, backend = attach_fake(encoder, warmup_steps=0)
    call = call_of(encoder)
    run(step, call)
    change(encoder)
    assert same(run(step, call), eager(encoder, call))
    report = step.report()
    assert (report["captured"], report["invalidated"], report["held"]) == (2, 1, 1)
    assert backend.graphs[0].closed and backend.synchronized >= 1


def test_moving_the_encoder_frees_its_graphs_at_once_and_a_move_to_the_same_place_does_not(encoder):
    step, backend = attach_fake(encoder, warmup_steps=0)
    run(step, call_of(encoder))
    encoder.to("cpu").float()
    assert step.report()["held"] == 1
    encoder.double()
    report = step.report()
    assert (report["held"], report["held_bytes"], report["invalidated"]) == (0, 0, 1) and backend.graphs[0].closed
    encoder.float()


class FrozenBackend(FakeBackend):
    """Replays what was computed at capture: what a graph does whose weights were replaced behind its back."""

    def replay(self, graph, inputs):
        return tuple(t.clone() for t in graph.stable)


def test_the_result_of_a_stale_replay_never_reaches_the_caller(model, monkeypatch):
    monkeypatch.setattr("workbench.encoder.key._on_cuda", lambda inputs: True)
    encoder = copy.deepcopy(model.encoder).requires_grad_(False)
    step = attach(encoder, GraphOptions(warmup_steps=0), FrozenBackend())
    call = call_of(encoder)
    before = run(step, call)
    _swap_parameter(encoder)
    after = run(step, call)
    assert same(after, eager(encoder, call)) and not torch.equal(before[0], after[0])
    layer = encoder.layers[1].feed_forward1.linear1
    layer.weight.data = layer.weight.data * 3  # the same parameter, other memory
    assert same(run(step, call), eager(encoder, call))
    assert step.report()["invalidated"] == 2 and step.report()["replayed"] == 3


def test_the_guard_is_quiet_when_nothing_moved(model):
    guard = PointerGuard(model.encoder)
    model.encoder.load_state_dict(model.encoder.state_dict())
    with torch.no_grad():
        next(model.encoder.parameters()).add_(0.0)
    assert not guard.moved()


# --- lifecycle -----------------------------------------------------------------------------------------------------------------


def test_detach_leaves_the_encoder_as_it_was(encoder):
    before = dict(vars(encoder))
    step, backend = attach_fake(encoder, warmup_steps=0)
    run(step, call_of(encoder))
    assert detach(encoder) is True and detach(encoder) is False
    assert vars(encoder) == before and list(vars(encoder)) == list(before)
    assert backend.graphs[0].closed and backend.released >= 1


def test_attaching_twice_drops_the_first_step(encoder):
    first, backend = attach_fake(encoder, warmup_steps=0)
    run(first, call_of(encoder))
    second, _ = attach_fake(encoder)
    assert attached_step(encoder) is second and backend.graphs[0].closed


def test_another_replacement_of_the_step_is_not_overwritten(encoder):
    encoder.cache_aware_stream_step = lambda *args, **kwargs: None
    try:
        with pytest.raises(ModelError, match="already replaced"):
            attach_fake(encoder)
    finally:
        del encoder.cache_aware_stream_step


def test_disable_gives_memory_back_and_enable_captures_again(encoder):
    step, _ = attach_fake(encoder, warmup_steps=0)
    call = call_of(encoder)
    run(step, call)
    assert step.disable_cuda_graphs() is True and step.disable_cuda_graphs() is False
    report = step.report()
    assert (report["held"], report["held_bytes"], report["enabled"]) == (0, 0, False)
    run(step, call)
    assert step.report()["eager"] == {"disabled": 1}
    assert step.maybe_enable_cuda_graphs() is True and step.maybe_enable_cuda_graphs() is False
    run(step, call)
    assert step.report()["captured"] == 2


def test_drop_extra_pre_encoded_is_restored_when_the_step_raises(encoder):
    step, _ = attach_fake(encoder)
    call = call_of(encoder)
    with pytest.raises(ValueError, match="audio_signal"):
        run(step, call, drop=0, inputs=call.inputs._replace(signal=call.inputs.signal[:, :5]))
    assert encoder.streaming_cfg.drop_extra_pre_encoded == 2


def test_precapture_captures_before_traffic(encoder):
    step, _ = attach_fake(encoder, warmup_steps=3)
    encoder.requires_grad_(True)
    assert step.precapture([StepShape(batch=1), StepShape(batch=2), StepShape(batch=2, att_context_size=(56, 0))]) == 3
    assert step.precapture([StepShape(batch=1)]) == 0, "already there"
    encoder.requires_grad_(False)
    assert encoder.att_context_size == [56, 3]
    run(step, call_of(encoder, batch=2))
    assert step.report()["replayed"] == 1 and step.report()["eager"] == {}


def test_precapture_says_why_it_cannot(encoder):
    step, backend = attach_fake(encoder, max_graphs=1, when_full="refuse")
    backend.fail = 1
    with pytest.warns(UserWarning), pytest.raises(GraphError, match=r"capture_failed.*out of memory"):
        step.precapture([StepShape(batch=1)])
    step.precapture([StepShape(batch=1)])
    with pytest.raises(GraphError, match="max_graphs"):
        step.precapture([StepShape(batch=2)])
    encoder.train()
    with pytest.raises(GraphError, match="training"):
        step.precapture([StepShape(batch=1)])


def test_copies_of_an_encoder_start_without_graphs_of_their_own(encoder):
    step, _ = attach_fake(encoder, warmup_steps=0, max_graphs=5)
    run(step, call_of(encoder))
    twin = copy.deepcopy(encoder)
    twin_step = attached_step(twin)
    assert twin_step is not step and twin_step.encoder is twin and twin_step.options.max_graphs == 5
    assert twin.cache_aware_stream_step.__self__ is twin_step and twin_step.report()["held"] == 0
    stored = io.BytesIO()
    torch.save(encoder, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert attached_step(loaded).encoder is loaded


def test_an_encoder_that_dies_takes_its_graphs_along(model, monkeypatch):
    monkeypatch.setattr("workbench.encoder.key._on_cuda", lambda inputs: True)
    encoder = copy.deepcopy(model.encoder).requires_grad_(False)
    step, backend = attach_fake(encoder, warmup_steps=0)
    run(step, call_of(encoder))
    backend.graphs[0].run = None  # the stand-in recomputes through the encoder; a real graph holds no reference to it
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(encoder)
        del encoder
        assert gone() is None, "encoder and step must not form a cycle"
        with pytest.raises(ModelError, match="no longer exists"):
            _ = step.encoder
        del step
        assert backend.graphs[0].closed and backend.synchronized == 1
    finally:
        gc.enable()


def test_eight_threads_get_their_own_results(encoder):
    step, _ = attach_fake(encoder, max_graphs=3, warmup_steps=1)
    wrong = []

    def work(seed):
        torch.manual_seed(seed)
        for index in range(6):
            call = call_of(encoder, batch=1 + (seed + index) % 4)
            call = call._replace(drop=0 if index == 0 else None)
            got = run(step, call)
            if not same(got, want_of(call)):
                wrong.append(seed)

    reference = copy.deepcopy(encoder)
    detach(reference)
    lock = threading.Lock()

    def want_of(call):
        with lock:
            return eager(reference, call)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    report = step.report()
    assert report["replayed"] + sum(report["eager"].values()) == 48


# --- NeMo's own switches ---------------------------------------------------------------------------------------------------------


def test_the_import_line_makes_nemos_usage_and_hooks_work(model):
    import workbench.encoder.nemo_api as nemo_api

    assert {"StreamingEncoder", "ASRModel", "GreedyBatchedRNNTLabelLoopingComputer"} <= set(nemo_api.INSTALLED)
    encoder = model.encoder
    before = dict(vars(encoder))
    step = encoder.set_streaming_cuda_graphs(True, max_graphs=3)
    assert isinstance(step, GraphedEncoderStep) and step.options.max_graphs == 3
    assert model.disable_cuda_graphs() is True and step.report()["enabled"] is False
    assert model.maybe_enable_cuda_graphs() is True and step.report()["enabled"] is True
    for hook, enabled in (
        ("on_train_epoch_start", False),
        ("on_train_epoch_end", True),
        ("on_validation_epoch_start", True),
    ):
        getattr(model, hook)()
        assert step.report()["enabled"] is enabled, hook
    model.disable_cuda_graphs()
    model.on_test_epoch_start()
    assert step.report()["enabled"] is True
    encoder.set_streaming_cuda_graphs(False)
    assert vars(encoder) == before


def test_nemos_recursive_switch_finds_the_step(model):
    from nemo.collections.common.parts.optional_cuda_graphs import WithOptionalCudaGraphs

    import workbench.encoder.nemo_api  # noqa: F401

    step = set_streaming_cuda_graphs(model)
    WithOptionalCudaGraphs.disable_cuda_graphs_recursive(model, attribute_path="streaming_cuda_graphs")
    assert step.report()["enabled"] is False
    WithOptionalCudaGraphs.enable_cuda_graphs_recursive(model, attribute_path="streaming_cuda_graphs")
    assert step.report()["enabled"] is True
    set_streaming_cuda_graphs(model, False)


def test_conformer_stream_step_goes_through_the_attached_step(model):
    step = set_streaming_cuda_graphs(model)
    call = call_of(model.encoder)
    with torch.inference_mode():
        model.conformer_stream_step(*call.inputs, keep_all_outputs=False)
    assert step.report()["eager"] == {"not_cuda": 1}
    set_streaming_cuda_graphs(model, False)


def test_a_nemo_with_its_own_step_keeps_it():
    class Native(torch.nn.Linear):
        def cache_aware_stream_step(self, *args, **kwargs):
            raise AssertionError("not called")

        def set_streaming_cuda_graphs(self, enabled=True, warmup_steps=3, max_graphs=8):
            return ("native", enabled, warmup_steps, max_graphs)

    encoder = Native(2, 2)
    assert set_streaming_cuda_graphs(encoder, True, max_graphs=4, warmup_steps=0) == ("native", True, 1, 4)
    assert attached_step(encoder) is None
    with pytest.raises(ConfigError, match="own graphed step"):
        set_streaming_cuda_graphs(encoder, True, mode="forced")


def test_pipelines_take_the_switch_from_their_configuration(model):
    from omegaconf import OmegaConf

    import workbench.encoder.nemo_api as nemo_api

    if "BaseBuilder" not in nemo_api.INSTALLED:
        pytest.skip("this NeMo has no inference pipelines")
    from nemo.collections.asr.inference.model_wrappers.cache_aware_asr_inference_wrapper import (
        CacheAwareASRInferenceWrapper,
    )

    from workbench.encoder.nemo_hooks import _also_switch_on

    wrapper = CacheAwareASRInferenceWrapper.__new__(CacheAwareASRInferenceWrapper)
    wrapper.asr_model = model
    assert find_encoder(wrapper) is model.encoder
    for given_asr, attached in (({}, False), ({"use_cuda_graphs": False}, False), ({"use_cuda_graphs": True}, True)):
        cfg = OmegaConf.create({"asr": given_asr})
        OmegaConf.set_struct(cfg, True)
        _also_switch_on(lambda cls, cfg, decoding: wrapper)(None, cfg, None)
        assert (attached_step(model.encoder) is not None) is attached
    wrapper.set_streaming_cuda_graphs(False)
    assert attached_step(model.encoder) is None


def test_steady_call_has_the_shapes_of_a_real_step(model):
    for context, frames in (([56, 0], 17), ([56, 1], 25), ([56, 3], 41), ([56, 6], 65), ([56, 13], 121)):
        model.encoder.set_default_att_context_size(context)
        call = call_of(model.encoder, batch=2)
        assert call.inputs.signal.shape == (2, 80, frames)
        assert isinstance(call, StepCall) and call.keep_all_outputs is False
        assert eager(model.encoder, call)[0].shape[-1] == context[1] + 1


# --- the table -------------------------------------------------------------------------------------------------------------------


def test_the_table_without_a_gpu_says_where_a_recorded_one_is():
    from workbench.errors import RecordError
    from workbench.measure.graphed_table import run_graphed_table, table_cells

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RecordError, match=r"graphed_step\.json"):
        run_graphed_table("tiny")
    with pytest.raises(RecordError, match="dtypes: got float64"):
        table_cells([(56, 0)], [1], ["float64"])


def test_default_rows_follow_the_contexts_of_the_shape():
    from workbench.measure.graphed_table import Cell, default_cells, table_cells

    assert default_cells("nemotron-0.6b")[:5] == (
        *(Cell((56, 0), 1), Cell((56, 0), 32)),
        *(Cell((56, 3), 8), Cell((56, 3), 32), Cell((56, 13), 32)),
    )
    assert {cell.context for cell in default_cells("nemotron-en-0.6b")} == {(70, 0), (70, 13)}
    cells = table_cells([(56, 0), (56, 1)], [1, 2], ["float32", "bfloat16"])
    assert len(cells) == 8 and cells[0] == Cell((56, 0), 1, "float32") and cells[-1] == Cell((56, 1), 2, "bfloat16")


def test_markdown_has_the_columns_of_both_tables_and_a_peer_only_where_measured():
    from workbench.measure.graphed_table import markdown_table
    from workbench.results import Record

    row = {
        "context": [56, 3],
        "batch": 8,
        "dtype": "float32",
        "eager_ms_p50": 40.0,
        "graphed_ms_p50": 8.0,
        "speedup": 5.0,
    }
    row |= {"bare_replay_ms_p50": 7.5, "streams_eager": 64, "streams_graphed": 320, "peer_ms_p50": None}
    row |= {"bytes_eager_peak": 3_000_000_000, "bytes_graphed_peak": 3_400_000_000, "bytes_held": 450_000_000}
    record = Record("graphed_table", config={"frame_ms": 80}, rows=[row])
    text = markdown_table(record)
    assert "| [56, 3] (320 ms) | 8 | float32 | 40.00 | 8.00 | 7.50 | 5.0× | 64 → 320 | – | – | – |" in text
    assert "| 3,000 MB | 3,400 MB | +400 MB | 450 MB |" in text and "NeMo's own graphs" not in text
    profile = {
        "launches_eager": 1200,
        "kernels_eager": 1300,
        "launches_graphed": 1,
        "gpu_idle_eager": 0.95,
        "gpu_idle_graphed": 0.1,
    }
    record = Record("graphed_table", config={"frame_ms": 80}, rows=[row | profile | {"peer_ms_p50": 8.5}])
    assert "| 1,200 → 1,300 | 1 | 95% → 10% | 8.50 |" in markdown_table(record)
