"""Memory for batches, used again once nobody holds a tensor in it.

A tensor is made over a view that only its storage holds. When the last tensor over that storage goes, so does the
view, and its memory is free for another batch: no count is kept, nothing is given back by hand.

    memory ◀── view ◀── storage ◀── tensor, its slices, its transposes, arrays made of it, …
       └────────── free again when the view goes

With a GPU, batches lie in pinned memory of torch's own allocator, which also waits for copies that are still under way:
it knows them, those of slices too, by the storage that it made, so `tensor` hands out that one.
"""

import weakref
from collections import deque
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from forebay.columns import Array

_SMALLEST = 16 * 1024  # bytes; smaller arrays are as fast from malloc


class Buffers:
    """Arrays of any shape, in memory that was used before where some is free. Safe to share between threads."""

    def __init__(self, keep: int, *, pinned: bool | None = None) -> None:
        self._keep = keep
        self._pinned = torch.cuda.is_available() if pinned is None else pinned
        self._free: dict[int, deque[Array]] = {}
        self._lent: dict[int, weakref.ref[Array]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array to be written, then handed to `tensor`."""
        size = prod(shape) * dtype.itemsize
        if self._pinned:
            pinned: Array = torch.empty(shape, dtype=_torch_dtype(dtype), pin_memory=True).numpy()
            return pinned
        if size < _SMALLEST:
            return np.empty(shape, dtype)
        memory = self._memory(size)
        view = np.ndarray(shape, dtype, memory)
        self._lent[id(view)] = weakref.ref(view, partial(self._take_back, id(view), memory))
        return view

    def hold(self, values: Array) -> Array:
        """What was just read, ready for a tensor: as it is, or copied into pinned memory."""
        if not self._pinned:
            return values
        held = self.empty(values.shape, values.dtype)
        np.copyto(held, values)
        return held

    def _memory(self, size: int) -> Array:
        free = self._free.get(size)
        if free is None:
            free = self._free.setdefault(size, deque(maxlen=self._keep))
        try:
            return free.pop()
        except IndexError:
            return np.empty(size, np.uint8)

    def _take_back(self, key: int, memory: Array, view: object) -> None:
        """Called when a view goes: in any thread, in the middle of anything. So it takes no lock."""
        del self._lent[key]
        self._free[len(memory)].append(memory)


def tensor(values: Array) -> torch.Tensor:
    """The tensor that an array was made of, or one over it."""
    return values.base if isinstance(values.base, torch.Tensor) else torch.from_numpy(values)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
