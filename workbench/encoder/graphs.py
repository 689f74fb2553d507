"""Captures one streaming step in a CUDA graph and replays it: the only file of the graphed step that needs a GPU.

Memory, per device:
  graph pool   intermediate tensors of every graph of one encoder; shared, because its graphs never run at the same time
  workspace    cuBLAS scratch of the capture stream. PyTorch keeps one per stream and frees all of them on request
               (`torch.compile` with graphs requests it); in a pool of its own the address stays valid and nobody else's
  ordinary     static inputs and stable outputs, allocated outside any pool, so that no other graph's pool can alias them

The capture is made by hand and not by `torch.cuda.graph`, which empties the allocator's cache first: NeMo's label-looping decoder
keeps its loop bodies' temporaries in that cache, and its next replay would touch unmapped memory (docs/graphed_step.md).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from workbench.encoder.key import StepInputs

Tensors = tuple[torch.Tensor, ...]
Run = Callable[[StepInputs], Sequence[torch.Tensor]]


class CapturedStep(Protocol):
    """A captured step; `nbytes` are its static inputs and stable outputs."""

    nbytes: int

    def close(self) -> None:
        """Give the graph's memory back. The device must be idle."""
        ...


class GraphBackend(Protocol):
    """What the graphed step needs from a device; tests use one without a GPU."""

    pool_bytes: int

    def is_capturing(self) -> bool: ...
    def capture(self, run: Run, inputs: StepInputs) -> Any: ...
    def replay(self, graph: Any, inputs: StepInputs) -> Tensors: ...
    def synchronize(self) -> None: ...
    def release_pools(self) -> None: ...


class CudaGraph:
    """One captured step with its fixed input and output memory."""

    def __init__(self, graph: torch.cuda.CUDAGraph, static: StepInputs, stable: Tensors) -> None:
        self.graph, self.static, self.stable = graph, static, stable
        self.nbytes = sum(t.numel() * t.element_size() for t in (*static, *stable))

    def close(self) -> None:
        """Destroy the graph. The device must be idle."""
        self.graph.reset()
        self.static, self.stable = StepInputs(None, None, None, None, None), ()


class _Room:
    """What the graphs of one encoder share on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream, self.workspace = _borrow(device, self)
        self.pool: torch.cuda.MemPool | None = None
        self.idle = torch.cuda.Event()
        self.last_stream: torch.cuda.Stream | None = None

    @contextmanager
    def after_last_use(self) -> Iterator[torch.cuda.Stream]:
        """The caller's current stream, ordered behind whatever last used the shared memory, on any stream."""
        current = torch.cuda.current_stream(self.device)
        if self.last_stream is not None and self.last_stream != current:
            current.wait_event(self.idle)
        try:
            yield current
        finally:
            self.idle.record(current)
            self.last_stream = current


class CudaGraphBackend:
    """Captures on a side stream and replays on the caller's current stream. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Room] = {}
        self.pool_bytes = self._wrecked_bytes = 0

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured by somebody."""
        return torch.cuda.is_current_stream_capturing()

    def capture(self, run: Run, inputs: StepInputs) -> CudaGraph:
        """Run the step once on a side stream, then capture it. Raises what `run` or CUDA raises, with the allocator restored."""
        device = inputs.signal.device
        with torch.cuda.device(device), torch.inference_mode(False), torch.no_grad(), _no_collection():
            if device.index not in self._rooms:
                self._rooms[device.index] = _Room(device)
            room = self._rooms[device.index]
            room.pool = room.pool or torch.cuda.MemPool()
            with room.after_last_use() as current:
                static = StepInputs(*(_fixed_copy(t) for t in inputs))
                room.stream.wait_stream(current)
                before = torch.cuda.memory_reserved(device)
                stable_like = self._dry_run(room, run, static)
                self.pool_bytes += max(0, torch.cuda.memory_reserved(device) - before)
                stable = tuple(_room_for(t, device) for t in stable_like)
                graph = self._record(room, run, static, stable)
                current.wait_stream(room.stream)
        return CudaGraph(graph, static, stable)

    def replay(self, graph: CudaGraph, inputs: StepInputs) -> Tensors:
        """Copy the inputs in, launch, and return copies of the outputs, all on the caller's current stream."""
        room = self._rooms[inputs.signal.device.index]
        with room.after_last_use():
            for static, given in zip(graph.static, inputs, strict=True):
                static.copy_(given)
            graph.graph.replay()
            return tuple(t.clone() for t in graph.stable)

    def synchronize(self) -> None:
        """Wait for every device that holds graphs."""
        for index in self._rooms:
            torch.cuda.synchronize(index)

    def release_pools(self) -> None:
        """Return the graphs' memory to the device, once no graph is left; the small cuBLAS workspace stays for the next capture."""
        for room in self._rooms.values():
            room.pool = None
        self.pool_bytes = self._wrecked_bytes

    def _abandon(self, graph: torch.cuda.CUDAGraph, room: _Room) -> None:
        """End a failed capture, so that the stream and the allocator leave capture mode."""
        try:
            graph.capture_end()
            graph.reset()
        except RuntimeError:
            # CUDA invalidated the capture, and PyTorch raises before it has told its allocators. The device's allocator can be told
            # from here; the pinned host allocator cannot and goes on asking this graph: both live on, and the next capture gets a
            # new pool.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(room.device.index, room.pool.id)
            _wrecks.append((graph, room.pool))
            self._wrecked_bytes, room.pool = self.pool_bytes, None

    def _dry_run(self, room: _Room, run: Run, static: StepInputs) -> list[torch.Tensor]:
        """Warm libraries up and return the outputs' layout, as tensors without storage. Leaves its memory to the capture."""
        with torch.cuda.stream(room.stream):
            with torch.cuda.use_mem_pool(room.workspace, room.device):
                _touch_workspace(room.device, static.cache_channel.dtype)
            with torch.cuda.use_mem_pool(room.pool, room.device):
                layout = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in run(static)]
        room.stream.synchronize()
        return layout

    def _record(self, room: _Room, run: Run, static: StepInputs, stable: Tensors) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        room.stream.wait_stream(torch.cuda.current_stream(room.device))
        with torch.cuda.stream(room.stream):
            try:
                with _stand_in_generator(room.device):
                    graph.capture_begin(pool=room.pool.id, capture_error_mode="thread_local")
                for target, source in zip(stable, run(static), strict=True):
                    target.copy_(source)
                graph.capture_end()
            except BaseException:
                self._abandon(graph, room)
                raise
        return graph


def _fixed_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format).copy_(tensor)


def _room_for(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for an output with exactly eager's strides where those are dense: later kernels are chosen by strides."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    if extent == like.numel():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return torch.empty_like(like, device=device)


@contextmanager
def _stand_in_generator(device: torch.device) -> Iterator[None]:
    """A capture registers the device's random generator, which then refuses every other thread until the capture ends, and for ever
    if it fails. A step in evaluation mode draws nothing, so a throw-away state is registered instead."""
    generator = torch.cuda.default_generators[device.index]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)


def _touch_workspace(device: torch.device, dtype: torch.dtype) -> None:
    """Make cuBLAS allocate the current stream's workspace now, in the pool that is active."""
    square = torch.zeros(64, 64, device=device, dtype=dtype)
    torch.mm(square, square)
    torch.addmm(square[0], square, square)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection during a capture: a collected CUDA object would be freed inside it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_wrecks: list[Any] = []  # captures that CUDA invalidated, with their pools: never freed

# Capture streams with their workspaces: given back when an encoder's graphs die, since PyTorch never frees a stream's workspace itself.
_Berth = tuple[torch.cuda.Stream, torch.cuda.MemPool]
_spare: dict[int, list[_Berth]] = {}
_known: set[tuple[int, int]] = set()


def _borrow(device: torch.device, owner: Any) -> _Berth:
    """A capture stream that no other live encoder uses: graphs captured on one stream would share its workspace and race."""
    spare = _spare.setdefault(device.index, [])
    berth = spare.pop() if spare else (_new_stream(device), torch.cuda.MemPool())
    weakref.finalize(owner, spare.append, berth).atexit = False
    return berth


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    for _ in range(32):  # PyTorch hands out 32 streams a device in turn
        stream = torch.cuda.Stream(device)
        if (device.index, stream.cuda_stream) not in _known:
            break
    _known.add((device.index, stream.cuda_stream))
    return stream
