"""Notices that a module's weights or buffers are no longer where a captured graph reads them.

A graph holds addresses. Moving or re-casting a model, swapping a layer, or an offline call longer than the positional table (which
replaces `pos_enc.pe`) frees memory that old graphs would go on reading, with every shape unchanged.

    guard = PointerGuard(encoder)
    guard.moved()        # False until a tensor of the encoder is replaced or its storage moves

`moved` runs before every replay, for ~900 tensors of a 24-layer encoder, so its loops run in C over the modules' own dictionaries.
Loading weights in place (`load_state_dict`, an optimiser step) moves nothing, and graphs then compute with the new values.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch


class PointerGuard:
    """The identity of every submodule, parameter and buffer of a module, and the address of every tensor among them."""

    def __init__(self, module: Any) -> None:
        holders = [d for m in module.modules() for d in (m._modules, m._parameters, m._buffers) if d]
        # Live views, not contents: a replaced entry is found by looking again. The entries are kept alive, so that a successor
        # cannot be created at the same address and pass for the original.
        self._views = [d.values() for d in holders]
        self._entries = self._look()
        self._tensors = [entry for entry in self._entries if isinstance(entry, torch.Tensor)]
        self._single = [
            d.values() for d in holders if any(isinstance(t, torch.Tensor) and t.numel() == 1 for t in d.values())
        ]
        self._single_ids = self._look_at_single()
        self._addresses = self._read_addresses()

    def moved(self) -> bool:
        """Whether anything was added, replaced or moved since the guard was taken."""
        try:
            # Comparing lists asks for identity first, which is all that happens while nothing has moved.
            if self._look() != self._entries:
                return True
        except RuntimeError:
            return True  # another tensor stands here: comparing two of several elements has no single answer
        # Of two tensors of one element, equal values would pass for identity.
        return self._look_at_single() != self._single_ids or self._read_addresses() != self._addresses

    def _look(self) -> list[Any]:
        return list(chain.from_iterable(self._views))

    def _look_at_single(self) -> list[int]:
        return list(map(id, chain.from_iterable(self._single)))

    def _read_addresses(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._tensors))
