"""Notices that a module's weights or buffers are no longer where a captured graph reads them.

A graph holds addresses. Moving or re-casting a model, swapping a layer, or an offline call longer than the positional table (which
replaces `pos_enc.pe`) frees memory that old graphs would go on reading, with every shape unchanged.

    guard = PointerGuard(encoder)
    guard.moved()        # False until a tensor of the encoder is replaced or its storage moves

`moved` runs before every replay: about 0.1 ms for a 24-layer encoder, in C loops over the modules' own dictionaries. Loading
weights in place (`load_state_dict`, an optimiser step) moves nothing, and graphs then compute with the new values.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch


class PointerGuard:
    """The identity of every submodule, parameter and buffer of a module, and the address of every tensor among them."""

    def __init__(self, module: Any) -> None:
        holders = [(m._modules, m._parameters, m._buffers) for m in module.modules()]
        # The live dictionaries, not their contents: a replaced entry is found by looking again.
        self._dicts = [d for group in holders for d in group if d]
        # Kept alive, so that a successor cannot be created at the same address and pass for the original.
        self._submodules = list(module.modules())[1:]
        self._tensors = [t for _, p, b in holders for t in chain(p.values(), b.values()) if t is not None]
        self._ids = self._read_ids()
        self._addresses = self._read_addresses()

    def moved(self) -> bool:
        """Whether anything was replaced or moved since the guard was taken."""
        return self._read_ids() != self._ids or self._read_addresses() != self._addresses

    def _read_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._dicts))))

    def _read_addresses(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._tensors))
