"""Turn the columns of some rows into the tensors of a batch, in reused memory.

A cache with the columns `tokens` and `seq_lens` gives training batches:

    tokens        int64 [rows, sequence_length]
    labels        int64, same shape: "shifted" is the next token, "unshifted" the token itself; -100 = no loss
    positions     int64, same shape, from 0 in every document
    document_ids  int32, same shape, from 0 in every row
    seq_lens      int32 [rows, max_documents], zero-padded
    cu_seqlens    int32 [documents + 1], over the whole batch laid end to end, with max_seqlen, int32 []
    row_weight    float32 [rows], with drop_last=False: 0 for a row that only fills the last batch of a rank, else 1

Every other column becomes a tensor as it is stored; a ragged one becomes `name` (flat values) and `name.offsets`.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay import masks
from forebay.columns import Array, Ragged
from forebay.feeding.stream import Read, Weights
from forebay.masks.documents import LabelStyle, fill_document_ids, fill_labels, fill_positions

Batch = dict[str, torch.Tensor]
Derived = Literal["positions", "document_ids", "cu_seqlens"]
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SMALLEST = 16 * 1024  # bytes; smaller arrays are as fast from malloc


class Buffers:
    """Hands out arrays of any shape, in memory of earlier batches where some is free. Threads may share it.

    A tensor is made over a view that only its storage holds. When the last tensor over that storage is freed, so is the
    view, and its memory is free for another batch: nothing is counted or returned by hand.

        memory ◀── view ◀── storage ◀── tensor, its slices, its transposes, arrays made of it, …
           └────────── free again when the view is freed

    With a GPU, batches are in pinned memory of torch's own allocator, which also waits for copies in flight. It tracks
    them, those of slices too, by the storage that it made, so `wrap` returns the tensor with that storage.
    """

    def __init__(self, keep: int, *, pinned: bool | None = None) -> None:
        self._keep = keep
        self._pinned = torch.cuda.is_available() if pinned is None else pinned
        self._free: dict[int, deque[Array]] = {}
        self._lent: dict[int, weakref.ref[Array]] = {}

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array to write to, and then to pass to `wrap`."""
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

    def as_pinned(self, values: Array) -> Array:
        """Return an array as it is, or with a GPU copied into pinned memory."""
        if not self._pinned:
            return values
        pinned = self.empty(values.shape, values.dtype)
        np.copyto(pinned, values)
        return pinned

    def _memory(self, size: int) -> Array:
        free = self._free.get(size)
        if free is None:
            free = self._free.setdefault(size, deque(maxlen=self._keep))
        try:
            return free.pop()
        except IndexError:
            return np.empty(size, np.uint8)

    def _take_back(self, key: int, memory: Array, view: object) -> None:
        """Called when a view is freed: in any thread, at any point, so it must not take a lock."""
        del self._lent[key]
        self._free[len(memory)].append(memory)


def wrap(values: Array) -> torch.Tensor:
    """Return the tensor that an array was made from, or a tensor over its memory."""
    return values.base if isinstance(values.base, torch.Tensor) else torch.from_numpy(values)


def to_tensor(values: Array, buffers: Buffers | None = None) -> torch.Tensor:
    """Return an array as a tensor, copied only into pinned memory; ml_dtypes' bfloat16 becomes torch's."""
    if values.dtype == _BFLOAT16:
        return to_tensor(values.view(np.int16), buffers).view(torch.bfloat16)
    return wrap(values if buffers is None else buffers.as_pinned(values))


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


@dataclass(frozen=True, slots=True)
class PackedTargets:
    """The tensors of a packed-token batch beside `tokens` and `seq_lens`."""

    labels: LabelStyle | None = "shifted"
    derive: tuple[Derived, ...] = ("positions",)
    pad: int = 0  # the token of rows that only fill a batch

    def __post_init__(self) -> None:
        unknown = [name for name in self.derive if name not in get_args(Derived)]
        if unknown:
            raise ValueError(f"derive must name only {', '.join(get_args(Derived))} (got {unknown})")


def refuse_without_training(labels: LabelStyle | None, derive: Sequence[Derived]) -> None:
    """Raise where `labels` or `derive` were passed for a batch that has neither labels nor positions."""
    usual = PackedTargets()
    passed = {"labels": labels not in (None, usual.labels), "derive": tuple(derive) not in ((), usual.derive)}
    names = [name for name, is_passed in passed.items() if is_passed]
    if names:
        raise ValueError(
            f"{' and '.join(names)} passed, but `labels` and `derive` apply to packed-token batches only; drop "
            "`columns` and `collate`, or derive them with forebay.masks"
        )


def plain_batch(read: Read, buffers: Buffers) -> Batch:
    """Return columns as they are stored."""
    batch: Batch = {}
    for name, values in read.items():
        if isinstance(values, Ragged):
            batch[name] = to_tensor(values.values, buffers)
            batch[f"{name}.offsets"] = to_tensor(values.offsets, buffers)
        else:
            batch[name] = to_tensor(values, buffers)
    return batch


def training_batch(read: Read, training: PackedTargets, buffers: Buffers, weights: Weights | None = None) -> Batch:
    """Return the tensors that a language model is trained on; a row of weight 0 becomes a row of padding."""
    tokens, lengths = read["tokens"], read["seq_lens"]
    assert not isinstance(tokens, Ragged)
    assert isinstance(lengths, Ragged)
    if weights is not None and not weights.all():
        tokens, lengths = _emptied(tokens, lengths, weights == 0, training.pad)
    rest = {name: values for name, values in read.items() if name not in ("tokens", "seq_lens")}
    seq_lens = padded_lengths(lengths)
    return {
        "tokens": _widened(tokens, buffers),
        "seq_lens": to_tensor(seq_lens, buffers),
        **_derived(tokens, seq_lens, training, buffers),
        **plain_batch(rest, buffers),
    }


def _emptied(tokens: Array, lengths: Ragged, empty: NDArray[np.bool_], pad: int) -> tuple[Array, Ragged]:
    """Replace the `empty` rows by padding without documents: labels are -100, and padding sees only padding."""
    filled = np.where(empty[:, None], np.asarray(pad, tokens.dtype), tokens)
    counts = np.where(empty, 0, lengths.lengths)
    values = lengths.values[np.repeat(~empty, lengths.lengths)]
    return filled, Ragged(values, np.concatenate([[0], np.cumsum(counts)]))


def padded_lengths(lengths: Ragged) -> Array:
    """Return the document lengths of each row, int32 `[rows, max_documents]`, zero-padded.

    >>> padded_lengths(Ragged(np.array([3, 2, 7]), np.array([0, 2, 3]))).tolist()
    [[3, 2], [7, 0]]
    """
    counts = lengths.lengths
    padded = np.zeros((len(lengths), max(1, int(counts.max(initial=0)))), np.int32)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = lengths.values
    return padded


def _derived(tokens: Array, seq_lens: Array, training: PackedTargets, buffers: Buffers) -> Batch:
    found: dict[str, Array] = {}
    if training.labels is None and not training.derive:
        return {}
    whole = masks.whole_lengths(seq_lens, tokens.shape[1]) if len(tokens) else np.zeros((0, 1), np.int32)
    if training.labels is not None:
        found["labels"] = buffers.empty(tokens.shape, _INT64)
        fill_labels(found["labels"], tokens, whole, training.labels)
    if "positions" in training.derive:
        found["positions"] = buffers.empty(tokens.shape, _INT64)
        fill_positions(found["positions"], whole)
    if "document_ids" in training.derive:
        found["document_ids"] = buffers.empty(tokens.shape, _INT32)
        fill_document_ids(found["document_ids"], whole)
    if "cu_seqlens" in training.derive:
        lengths = whole[whole > 0]
        found["cu_seqlens"] = buffers.as_pinned(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        found["max_seqlen"] = buffers.as_pinned(np.asarray(lengths.max(initial=0), np.int32))
    return {name: wrap(values) for name, values in found.items()}


def _widened(tokens: Array, buffers: Buffers) -> torch.Tensor:
    wide = buffers.empty(tokens.shape, _INT64)
    np.copyto(wide, tokens)
    return wrap(wide)


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
    own = torch.from_numpy(np.array(values, np.float32 if values.dtype.kind in "fV" else values.dtype))
    return own.to(like.device, like.dtype) if own.is_floating_point() else own.to(like.device)


def to_numpy(values: torch.Tensor) -> NDArray[np.float32]:
    """Return a tensor as a float32 array."""
    found: NDArray[np.float32] = values.float().cpu().numpy()
    return found
