"""NeMo's cache-aware streaming step as one CUDA graph launch: opt-in, bit-exact, eager wherever a graph would be wrong.

Why: a steady step of a FastConformer launches ~1,300 kernels, and at low latency the GPU waits for the host nine tenths of the time.
All shapes of a steady step are fixed, so it can be captured once and replayed.

    from workbench.encoder.graphed import StepShape, set_streaming_cuda_graphs
    step = set_streaming_cuda_graphs(asr_model, True)      # or asr_model.encoder; NeMo's own streaming loop then uses it
    step.precapture([StepShape(batch=1), StepShape(batch=8)])
    ... asr_model.conformer_stream_step(...) ...
    step.report()                                          # captured, replayed, held, bytes, eager steps by reason
    set_streaming_cuda_graphs(asr_model, False)            # the encoder is exactly as before

The step is attached to the encoder instance. It follows NeMo's switch for graphs (`disable_cuda_graphs`, `maybe_enable_cuda_graphs`),
so training and validation hooks release and re-enable it together with the decoder's graphs.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch

from workbench.encoder.graphs import CudaGraphBackend, GraphBackend
from workbench.encoder.guard import PointerGuard
from workbench.encoder.key import StepCall, StepInputs, StepKey, effective_drop, step_key, why_eager
from workbench.encoder.options import OUTSIDE_STEADY_STATE, GraphCounters, GraphError, GraphOptions, Mode, WhenFull
from workbench.encoder.steady import StepShape, steady_call
from workbench.errors import ConfigError, ModelError

__all__ = [
    *("GraphError", "GraphOptions", "GraphedEncoderStep", "StepShape"),
    *("attach", "attached_step", "detach", "find_encoder", "set_streaming_cuda_graphs"),
]

STEP, HOLDER, APPLY = "cache_aware_stream_step", "streaming_cuda_graphs", "_apply"
SEEN_KEYS = 256  # shapes whose use is counted towards capture; the longest unused is forgotten


class GraphedEncoderStep:
    """The graphed step of one encoder: finds or captures the graph of a step's key, replays it, counts everything.

    Safe to call from several threads and streams: one lock serialises the host side, events order the device side.
    """

    def __init__(self, encoder: Any, options: GraphOptions, backend: GraphBackend | None = None) -> None:
        # A weak reference, so that encoder and step do not keep each other alive: CUDA memory goes when the encoder goes.
        self._encoder_ref = weakref.ref(encoder)
        self.options = options
        self.counters = GraphCounters()
        self._backend: GraphBackend = backend or CudaGraphBackend()
        self._graphs: OrderedDict[StepKey, Any] = OrderedDict()
        self._capture_ms: dict[StepKey, float] = {}
        self._seen: OrderedDict[StepKey, int] = OrderedDict()
        self._failed: set[StepKey] = set()
        self._guard: PointerGuard | None = None
        self._enabled = options.mode != "off"
        self._lock = threading.RLock()
        weakref.finalize(self, _close_all, self._backend, self._graphs).atexit = False

    def __reduce__(self) -> Any:
        # Copies of a model (copy.deepcopy, torch.save) start without graphs.
        return type(self), (self.encoder, self.options)

    @property
    def encoder(self) -> Any:
        """The encoder this step belongs to."""
        encoder = self._encoder_ref()
        if encoder is None:
            raise ModelError("the encoder of this graphed step no longer exists")
        return encoder

    def step(  # noqa: PLR0913 - the signature of NeMo's cache_aware_stream_step
        self,
        processed_signal: Any,
        processed_signal_length: Any = None,
        cache_last_channel: Any = None,
        cache_last_time: Any = None,
        cache_last_channel_len: Any = None,
        keep_all_outputs: bool = True,
        drop_extra_pre_encoded: int | None = None,
        bypass_pre_encode: bool = False,
    ) -> tuple[Any, ...]:
        """Replacement for NeMo's `cache_aware_stream_step`: same arguments, same results, new tensors every time."""
        inputs = StepInputs(
            processed_signal, processed_signal_length, cache_last_channel, cache_last_time, cache_last_channel_len
        )
        call = StepCall(inputs, keep_all_outputs, drop_extra_pre_encoded, bypass_pre_encode)
        encoder = self.encoder
        with self._lock:
            if encoder.streaming_cfg is None:
                encoder.setup_streaming_params()
            reason = self._why_eager(encoder, call)
            if reason is None:
                outcome = self._graphed(encoder, call)
                if not isinstance(outcome, str):
                    return outcome
                reason = outcome
            return self._eager(encoder, call, reason)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch moves and casts a module through `_apply`; afterwards graphs of moved weights are dropped and their memory freed."""
        result = getattr(type(self.encoder), APPLY)(self.encoder, *args, **kwargs)
        with self._lock:
            self._drop_stale()
        return result

    def precapture(self, shapes: Iterable[StepShape]) -> int:
        """Capture these steady steps now; returns how many graphs were captured.

        Raises GraphError where a capture fails or the step could not be graphed at all (not on CUDA, training, switched off).
        """
        captured = self.counters.captured
        with self._lock, torch.no_grad():
            for shape in shapes:
                self._precapture(self.encoder, shape)
        return self.counters.captured - captured

    def report(self) -> dict[str, Any]:
        """Counters, graphs held and bytes held now, as plain data."""
        with self._lock:
            held_bytes = sum(graph.nbytes for graph in self._graphs.values()) + self._backend.pool_bytes
            return {
                **self.counters.as_dict(),
                "held": len(self._graphs),
                "held_bytes": held_bytes,
                "enabled": self._enabled,
                "shapes": [str(key) for key in self._graphs],
            }

    def captures(self) -> list[dict[str, Any]]:
        """Per graph held: the shape of its signal [B, F, T], the milliseconds that its capture took, the bytes of its inputs and outputs,
        and those of the pool that all share."""
        with self._lock:
            return [
                {
                    "signal": tuple(key.tensors[0][0]),
                    "capture_ms": self._capture_ms[key],
                    "bytes": graph.nbytes,
                    "pool_bytes": self._backend.pool_bytes,
                }
                for key, graph in self._graphs.items()
            ]

    @property
    def newest(self) -> Any:
        """The graph used last, or None: what a measurement replays by itself (`step.newest.graph.replay()`)."""
        return next(reversed(self._graphs.values()), None)

    def disable_cuda_graphs(self) -> bool:
        """Drop every graph and run eagerly until enabled again; returns whether that changed anything."""
        with self._lock:
            changed, self._enabled = self._enabled, False
            self._drop_all()
            return changed

    def maybe_enable_cuda_graphs(self) -> bool:
        """Allow graphs again unless the mode is `off`; returns whether that changed anything."""
        with self._lock:
            changed = not self._enabled and self.options.mode != "off"
            self._enabled = self._enabled or changed
            return changed

    def _why_eager(self, encoder: Any, call: StepCall) -> str | None:
        if self.options.mode == "off":
            return "off"
        if not self._enabled:
            return "disabled"
        return why_eager(encoder, call, self._backend.is_capturing, self.options.first_chunk)

    def _graphed(self, encoder: Any, call: StepCall) -> tuple[Any, ...] | str:
        """The results of a replay, or the reason why there is none."""
        while True:
            if self._guard is not None and self._guard.buffers_moved():
                self._invalidate()
            found = self._find_or_capture(encoder, call)
            if isinstance(found, str):
                return found
            outputs = self._backend.replay(found, call.inputs)
            # Here the device is busy and the host is not: the long check costs nothing, and a stale result never leaves.
            if not self._drop_stale():
                self.counters.replayed += 1
                return outputs

    def _drop_stale(self) -> bool:
        if self._guard is None or not self._guard.moved():
            return False
        self._invalidate()
        return True

    def _invalidate(self) -> None:
        self.counters.invalidated += len(self._graphs)
        self._drop_all()

    def _find_or_capture(self, encoder: Any, call: StepCall) -> Any:
        """The graph of this step, or the reason why there is none."""
        key = step_key(encoder, call.inputs, effective_drop(encoder, call.drop))
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph
        if key in self._failed:
            return "capture_failed"
        if self.options.mode != "forced" and not self._is_warm(key):
            return "warmup"
        return self._admit(encoder, call, key)

    def _is_warm(self, key: StepKey) -> bool:
        seen = self._seen.pop(key, 0)
        self._seen[key] = seen + 1
        if len(self._seen) > SEEN_KEYS:
            self._seen.popitem(last=False)
        return seen >= self.options.warmup_steps

    def _admit(self, encoder: Any, call: StepCall, key: StepKey) -> Any:
        if len(self._graphs) >= self.options.max_graphs:
            if self.options.when_full == "refuse":
                return "max_graphs"
            self._evict_oldest()
        started = perf_counter()
        try:
            graph = self._backend.capture(
                lambda static: self._original(encoder, call._replace(inputs=static)), call.inputs
            )
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            self._note_failure(key, error)
            return "capture_failed"
        counters = self.counters
        counters.last_capture_ms = (perf_counter() - started) * 1e3
        counters.capture_ms += counters.last_capture_ms
        counters.captured += 1
        self._graphs[key], self._capture_ms[key] = graph, counters.last_capture_ms
        self._seen.pop(key, None)
        self._guard = self._guard or PointerGuard(encoder)
        return graph

    def _note_failure(self, key: StepKey, error: Exception) -> None:
        self._failed.add(key)
        self.counters.failures[str(key)] = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(f"capturing the encoder step failed, this shape stays eager: {key}: {error}", stacklevel=2)
        self._backend.synchronize()  # an error that poisoned the device must surface here, not in a later step

    def _evict_oldest(self) -> None:
        self._backend.synchronize()
        _, graph = self._graphs.popitem(last=False)
        graph.close()
        self.counters.evicted += 1

    def _drop_all(self) -> None:
        _close_all(self._backend, self._graphs)
        self._guard = None
        self._failed.clear()

    def _eager(self, encoder: Any, call: StepCall, reason: str) -> tuple[Any, ...]:
        self.counters.eager[reason] += 1
        if self.options.mode == "forced" and self._enabled and reason not in OUTSIDE_STEADY_STATE:
            raise GraphError(reason, "; ".join(self.counters.failures.values()) if reason == "capture_failed" else "")
        return self._original(encoder, call)

    def _original(self, encoder: Any, call: StepCall) -> tuple[Any, ...]:
        """NeMo's own step. It changes `drop_extra_pre_encoded` for the call and forgets to undo that when it raises."""
        cfg = encoder.streaming_cfg
        before = cfg.drop_extra_pre_encoded
        try:
            return getattr(type(encoder), STEP)(
                encoder, *call.inputs, call.keep_all_outputs, call.drop, call.bypass_pre_encode
            )
        finally:
            cfg.drop_extra_pre_encoded = before

    def _precapture(self, encoder: Any, shape: StepShape) -> None:
        context = tuple(encoder.att_context_size)
        wanted = shape.att_context_size or context
        if wanted != context:
            encoder.set_default_att_context_size(list(wanted))
        try:
            call = steady_call(encoder, shape)
            reason = self._why_eager(encoder, call)
            self._drop_stale()
            if reason is None:
                key = step_key(encoder, call.inputs, effective_drop(encoder, call.drop))
                self._failed.discard(key)
                self._seen[key] = self.options.warmup_steps
                reason = self._find_or_capture(encoder, call)
            if isinstance(reason, str):
                raise GraphError(reason, "; ".join(self.counters.failures.values()))
        finally:
            if wanted != context:
                encoder.set_default_att_context_size(list(context))


def _close_all(backend: GraphBackend, graphs: OrderedDict[StepKey, Any]) -> None:
    """Drop every graph. The device is synchronised first: freeing a graph that still runs is not safe."""
    if graphs:
        backend.synchronize()
        for graph in graphs.values():
            graph.close()
        graphs.clear()
    backend.release_pools()


def attach(
    encoder: Any, options: GraphOptions | None = None, backend: GraphBackend | None = None
) -> GraphedEncoderStep:
    """Put a graphed step in front of `encoder.cache_aware_stream_step`, replacing one that is there already."""
    detach(encoder)
    for name in (STEP, APPLY):
        if name in vars(encoder):
            raise ModelError(f"encoder.{name} is already replaced on this instance by {vars(encoder)[name]!r}")
    step = GraphedEncoderStep(encoder, options or GraphOptions(), backend)
    setattr(encoder, HOLDER, step)
    setattr(encoder, STEP, step.step)
    setattr(encoder, APPLY, step.apply)
    return step


def detach(encoder: Any) -> bool:
    """Undo `attach`: drop the graphs and leave the instance as it was. Returns whether there was something to undo."""
    step = attached_step(encoder)
    if step is None:
        return False
    step.disable_cuda_graphs()
    for name in (HOLDER, STEP, APPLY):
        del vars(encoder)[name]
    return True


def attached_step(encoder: Any) -> GraphedEncoderStep | None:
    """The graphed step of an encoder, if one is attached."""
    step = getattr(encoder, "__dict__", {}).get(HOLDER)
    return step if isinstance(step, GraphedEncoderStep) else None


def set_streaming_cuda_graphs(  # noqa: PLR0913 - the options of NeMo's proposal and one more
    model_or_encoder: Any,
    enabled: bool = True,
    *,
    max_graphs: int = 8,
    warmup_steps: int = 1,
    when_full: WhenFull = "evict",
    mode: Mode = "auto",
    first_chunk: bool = False,
) -> Any:
    """Switch the graphed step of a model or encoder on or off; returns the attached `GraphedEncoderStep`, or None when off.

    first_chunk: graph the first chunk of an utterance as well; off by default, as in NeMo's proposal. Where NeMo has a graphed step of its own,
    that one is switched and returned instead. Raises ConfigError for a bad option and
    ModelError for an object without a cache-aware streaming step.
    """
    options = GraphOptions(max_graphs, warmup_steps, when_full, mode, first_chunk)
    encoder = find_encoder(model_or_encoder)
    native = native_setter(encoder)
    if native is not None:
        if mode != "auto" or when_full != "evict" or first_chunk:
            raise ConfigError(
                "mode, when_full and first_chunk: this NeMo has its own graphed step, which has no such options"
            )
        return native(encoder, enabled, max_graphs=max_graphs, warmup_steps=max(1, warmup_steps))
    if not enabled:
        detach(encoder)
        return None
    from workbench.encoder import decoder_shield, nemo_hooks

    nemo_hooks.install_if_loaded()
    decoder_shield.renew_decoder_graph(getattr(model_or_encoder, "asr_model", model_or_encoder))
    return attach(encoder, options)


def find_encoder(model_or_encoder: Any) -> Any:
    """The cache-aware streaming encoder of a model, of an inference wrapper, or the encoder itself."""
    candidate = model_or_encoder
    for name in ("asr_model", "encoder"):
        if not hasattr(candidate, STEP):
            candidate = getattr(candidate, name, candidate)
    if not hasattr(candidate, STEP):
        raise ModelError(f"got a {type(model_or_encoder).__name__}; graphs need an encoder with {STEP}")
    return candidate


def native_setter(encoder: Any) -> Any:
    """NeMo's own `set_streaming_cuda_graphs` of this encoder's class, or None; the one that we add does not count."""
    setter = getattr(type(encoder), "set_streaming_cuda_graphs", None)
    return None if getattr(setter, "added_by_workbench", False) else setter
