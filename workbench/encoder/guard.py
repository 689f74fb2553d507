"""Notices that a module's weights or buffers are no longer where a captured graph reads them.

A graph holds addresses. Moving or re-casting a model, swapping a layer, or an offline call longer than the positional table (which
replaces `pos_enc.pe`) leaves old graphs reading old memory, with every shape unchanged.

    guard = PointerGuard(encoder)
    guard.buffers_moved()    # a few microseconds, before a replay
    guard.moved()            # everything, ~900 tensors of a 24-layer encoder: 0.5 ms, hidden behind a replay that is running

The guard keeps the old memory alive, so a replay that is found stale while it runs has read valid, if old, weights: its result is thrown
away and nothing faults. Loading weights in place (`load_state_dict`, an optimiser step) moves nothing; graphs then use the new values.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch


class PointerGuard:
    """The identity of every submodule, parameter and buffer of a module, and the address of every tensor among them."""

    def __init__(self, module: Any) -> None:
        holders = [d for m in module.modules() for d in (m._modules, m._parameters, m._buffers) if d]
        # Live views, not contents: a replaced entry is found by looking again. Entries and memory are kept, so that a successor
        # cannot be created at the same address and pass for the original.
        self._views = [d.values() for d in holders]
        self._entries = self._look()
        self._tensors = [entry for entry in self._entries if isinstance(entry, torch.Tensor)]
        self._memory = [tensor.untyped_storage() for tensor in self._tensors]
        self._addresses = _addresses(self._tensors)
        # Buffers, and holders of one-element tensors, whose equal values would pass for identity in `moved`.
        single = [d for d in holders if any(isinstance(t, torch.Tensor) and t.numel() == 1 for t in d.values())]
        buffers = [m._buffers for m in module.modules() if m._buffers]
        self._small_views = [d.values() for d in (*buffers, *single)]
        self._small_ids = self._look_at_small()
        self._buffers = [t for d in buffers for t in d.values() if t is not None]
        self._buffer_addresses = _addresses(self._buffers)

    def buffers_moved(self) -> bool:
        """Whether a buffer, such as the positional table, was replaced or moved since the guard was taken."""
        return self._look_at_small() != self._small_ids or _addresses(self._buffers) != self._buffer_addresses

    def moved(self) -> bool:
        """Whether anything was added, replaced or moved since the guard was taken."""
        try:
            # Comparing lists asks for identity first, which is all that happens while nothing has moved.
            if self._look() != self._entries:
                return True
        except RuntimeError:
            return True  # another tensor stands here: comparing two of several elements has no single answer
        return self._look_at_small() != self._small_ids or _addresses(self._tensors) != self._addresses

    def _look(self) -> list[Any]:
        return list(chain.from_iterable(self._views))

    def _look_at_small(self) -> list[int]:
        return list(map(id, chain.from_iterable(self._small_views)))


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))
