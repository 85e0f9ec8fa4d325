"""Tensors of a batch, in reused memory: columns as they are stored, and arrays as tensors.

Every column becomes a tensor as it is stored; a ragged one becomes `name` (flat values) and `name.offsets`. Batches for
language models are made in `forebay.torch.token_batch`. `show_batch(batch)` is a table of any dict of tensors.
"""

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay.columns import Array, Columns, Ragged
from forebay.records import html_table

Batch = dict[str, Any]  # of tensors; max_seqlen is an int
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_LINE = 64  # bytes
_SMALLEST = 16 * 1024  # bytes; smaller arrays are as fast from malloc


class Buffers:
    """Provides memory of any shape, reused from earlier batches if possible. Threads may share it.

    Memory belongs to the storage of one tensor. When the last tensor over that storage is freed, its memory is free for
    another batch: nothing is counted or returned by hand. At most `limit_bytes` of all shapes together stay free.

        memory ◀── storage ◀── tensor, its slices, its transposes, arrays made of it, …
           └─────── free again when the storage is freed

    With a GPU, batches are in pinned memory of torch's own allocator, which also waits for copies in flight. It tracks
    them, those of slices too, by the storage that it made, so `wrap` returns the tensor with that storage.
    """

    def __init__(self, limit_bytes: int, pinned: bool | None = None) -> None:
        self._limit = limit_bytes
        self._pinned = torch.cuda.is_available() if pinned is None else pinned
        self._lock = threading.Lock()
        self._returned: deque[Array] = deque()
        self._free: dict[int, list[Array]] = {}  # by size, the one that was used last at the end
        self._free_bytes = self._newest = 0  # newest: the size that was returned last
        self._lent: dict[int, weakref.ref[Array]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has its own memory.
        return Buffers, (self._limit, self._pinned)

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for further batches."""
        with self._lock:
            self._collect()
            return self._free_bytes

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array to write to, and then to pass to `wrap`."""
        size = prod(shape) * dtype.itemsize
        if self._pinned:
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            return torch.empty(shape, dtype=kind, pin_memory=True).numpy()
        if size < _SMALLEST:
            return np.empty(shape, dtype)
        memory = self._memory(size)
        view: Array = np.ndarray(shape, dtype, memory)
        self._lent[id(view)] = weakref.ref(view, partial(self._take_back, id(view), memory))
        return view

    def as_pinned(self, values: Array) -> Array:
        """Return an array as it is, or with a GPU copied into pinned memory."""
        if not self._pinned:
            return values
        pinned = self.empty(values.shape, values.dtype)
        np.copyto(pinned, values)
        return pinned

    def _memory(self, size: int) -> Array:
        with self._lock:
            self._collect()
            if size not in self._free:
                return _aligned(size)
            memory = self._free[size].pop()
            self._free_bytes -= size
            if not self._free[size]:
                del self._free[size]
            return memory

    def _collect(self) -> None:
        """Take back returned memory, and free the least recently used sizes above the limit."""
        while self._returned:
            memory = self._returned.popleft()
            size = len(memory)
            if size != self._newest:  # the sizes that were used longest ago come first
                self._free[size] = self._free.pop(size, [])
                self._newest = size
            self._free.setdefault(size, []).append(memory)
            self._free_bytes += size
        while self._free_bytes > self._limit and self._free:
            size, free = next(iter(self._free.items()))
            free.pop()
            self._free_bytes -= size
            if not free:
                del self._free[size]

    def _take_back(self, key: int, memory: Array, view: object) -> None:
        """Called when a view is freed: in any thread, at any point, so it must not take a lock."""
        del self._lent[key]
        self._returned.append(memory)


def _aligned(size: int) -> Array:
    """Return memory aligned to a CPU cache line, so stores of compiled code never cross two lines."""
    memory = np.empty(size + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + size]


def wrap(values: Array) -> torch.Tensor:
    """Return the tensor that an array was made from, or a tensor over its memory."""
    base = values.base
    if base is None or type(base) is np.ndarray:  # isinstance of a Tensor takes as long as making one
        return torch.from_numpy(values)
    return base if isinstance(base, torch.Tensor) else torch.from_numpy(values)


def to_tensor(values: Array, buffers: Buffers | None = None) -> torch.Tensor:
    """Return an array as a tensor, copied only into pinned memory; ml_dtypes' bfloat16 becomes torch's."""
    if values.dtype == _BFLOAT16:
        return to_tensor(values.view(np.int16), buffers).view(torch.bfloat16)
    return wrap(values if buffers is None else buffers.as_pinned(values))


def plain_batch(read: Columns, buffers: Buffers) -> Batch:
    """Return columns as they are stored."""
    batch: Batch = {}
    for name, values in read.items():
        if isinstance(values, Ragged):
            batch[name] = to_tensor(values.values, buffers)
            batch[f"{name}.offsets"] = to_tensor(values.offsets, buffers)
        else:
            batch[name] = to_tensor(values, buffers)
    return batch


def tensor_bytes(batch: Mapping[str, object]) -> int:
    """Return the bytes of a batch's tensors."""
    return sum(value.nbytes for value in batch.values() if isinstance(value, Tensor))


def to_array(values: Tensor | ArrayLike) -> Array:
    """Return a tensor of any device as an array; torch's bfloat16 becomes ml_dtypes'. Else, `np.asarray`."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    if values.dtype == torch.bfloat16:
        return to_array(values.detach().contiguous().view(torch.int16)).view(_BFLOAT16)
    array: Array = values.numpy(force=True)
    return array


def to_device(values: Array, like: torch.Tensor) -> torch.Tensor:
    """Return an array on the device of `like`, floats also of its dtype; integers keep theirs."""
    tensor = torch.from_numpy(np.array(values, np.float32 if values.dtype.kind in "fV" else values.dtype))
    return tensor.to(like.device, like.dtype) if tensor.is_floating_point() else tensor.to(like.device)


def to_numpy(values: torch.Tensor) -> NDArray[np.float32]:
    """Return a tensor as a float32 array."""
    array: NDArray[np.float32] = values.float().cpu().numpy()
    return array


@dataclass(frozen=True, slots=True)
class BatchTable:
    """The contents of a batch: lines as text, a table in a notebook."""

    batch: Mapping[str, object]

    def __repr__(self) -> str:
        width = max(map(len, self._facts), default=0)
        return "\n".join(f"{name:{width}}  {fact}" for name, fact in self._facts.items()) or "an empty batch"

    def _repr_html_(self) -> str:
        return html_table("Batch", self._facts)

    @property
    def _facts(self) -> dict[str, str]:
        return {str(name): _fact(value) for name, value in self.batch.items()}


def show_batch(batch: Mapping[str, object]) -> BatchTable:
    """Return a table of the batch: leave `show_batch(batch)` as the last line of a notebook cell."""
    return BatchTable(dict(batch))


def _fact(value: object) -> str:
    if not isinstance(value, Tensor | np.ndarray):
        return type(value).__name__
    where = f" on {value.device}" if isinstance(value, Tensor) and value.device.type != "cpu" else ""
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, value.shape))}]{where}"
