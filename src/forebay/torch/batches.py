"""From the columns of some rows to the tensors of a batch, in memory that is used again.

A cache with the columns `tokens` and `seq_lens` gives training batches:

    tokens        int64 [rows, sequence_length]
    labels        int64 likewise: "next" is the next token, "aligned" the token itself; -100 where no loss is due
    positions     int64 likewise, from 0 in every document
    document_ids  int32 likewise, from 0 in every row
    seq_lens      int32 [rows, max_documents], zero-padded
    cu_seqlens    int32 [documents + 1], over the whole batch laid end to end, with max_seqlen, int32 []
    row_weight    float32 [rows], with drop_last=False: 0 for a row that only fills the last batch of a rank, else 1

Every other column becomes a tensor as it is; a ragged one `name` (flat values) and `name.offsets`.

A tensor is made over a view that only its storage holds. When the last tensor over that storage goes, so does the
view, and its memory is free for another batch: no count is kept, nothing is given back by hand.

    memory ◀── view ◀── storage ◀── tensor, its slices, its transposes, arrays made of it, …
       └────────── free again when the view goes

With a GPU, batches lie in pinned memory of torch's own allocator, which also waits for copies that are still under way:
it knows them, those of slices too, by the storage that it made, so `tensor` hands out that one.
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


Batch = dict[str, torch.Tensor]
Derived = Literal["positions", "document_ids", "cu_seqlens"]
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class PackedTargets:
    """What a batch of a token cache holds beside `tokens` and `seq_lens`."""

    labels: LabelStyle | None = "next"
    derive: tuple[Derived, ...] = ("positions",)
    pad: int = 0  # the token of rows that only fill a batch

    def __post_init__(self) -> None:
        if self.labels not in (None, *get_args(LabelStyle)):
            raise ValueError(f"labels is {self.labels!r}; 'next', 'aligned' or None is expected")
        unknown = [name for name in self.derive if name not in get_args(Derived)]
        if unknown:
            raise ValueError(f"derive names {unknown}; known are: {', '.join(get_args(Derived))}")


def refuse_without_training(labels: LabelStyle | None, derive: Sequence[Derived]) -> None:
    """Other batches have neither labels nor positions: what was asked for beyond the defaults would be left out."""
    usual = PackedTargets()
    asked = {"labels": labels not in (None, usual.labels), "derive": tuple(derive) not in ((), usual.derive)}
    left_out = [name for name, is_asked in asked.items() if is_asked]
    if left_out:
        raise ValueError(
            f"{' and '.join(left_out)} given, but only batches of `tokens` and `seq_lens` have such; leave out "
            "`columns` and `collate`, or derive them with forebay.masks"
        )


def plain_batch(read: Read, buffers: Buffers) -> Batch:
    """Columns as they are stored."""
    batch: Batch = {}
    for name, values in read.items():
        if isinstance(values, Ragged):
            batch[name] = _held(values.values, buffers)
            batch[f"{name}.offsets"] = _held(values.offsets, buffers)
        else:
            batch[name] = _held(values, buffers)
    return batch


def training_batch(read: Read, training: PackedTargets, buffers: Buffers, weights: Weights | None = None) -> Batch:
    """The tensors that a language model is trained on; a row of weight 0 is a row of padding."""
    tokens, lengths = read["tokens"], read["seq_lens"]
    assert not isinstance(tokens, Ragged)
    assert isinstance(lengths, Ragged)
    if weights is not None and not weights.all():
        tokens, lengths = _emptied(tokens, lengths, weights == 0, training.pad)
    rest = {name: values for name, values in read.items() if name not in ("tokens", "seq_lens")}
    seq_lens = padded_lengths(lengths)
    return {
        "tokens": _widened(tokens, buffers),
        "seq_lens": _held(seq_lens, buffers),
        **_derived(tokens, seq_lens, training, buffers),
        **plain_batch(rest, buffers),
    }


def _emptied(tokens: Array, lengths: Ragged, empty: NDArray[np.bool_], pad: int) -> tuple[Array, Ragged]:
    """Rows without a document: tokens of padding, whose labels are -100 and which see themselves only."""
    filled = np.where(empty[:, None], np.asarray(pad, tokens.dtype), tokens)
    counts = np.where(empty, 0, lengths.lengths)
    values = lengths.values[np.repeat(~empty, lengths.lengths)]
    return filled, Ragged(values, np.concatenate([[0], np.cumsum(counts)]))


def padded_lengths(lengths: Ragged) -> Array:
    """Lengths of the documents of each row, int32 `[rows, max_documents]`, zero-padded.

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
        found["cu_seqlens"] = buffers.hold(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        found["max_seqlen"] = buffers.hold(np.asarray(lengths.max(initial=0), np.int32))
    return {name: tensor(values) for name, values in found.items()}


def _widened(tokens: Array, buffers: Buffers) -> torch.Tensor:
    wide = buffers.empty(tokens.shape, _INT64)
    np.copyto(wide, tokens)
    return tensor(wide)


def _held(values: Array, buffers: Buffers) -> torch.Tensor:
    """A tensor of what was just read; numpy and torch have no common bfloat16."""
    if values.dtype == _BFLOAT16:
        return tensor(buffers.hold(values.view(np.int16))).view(torch.bfloat16)
    return tensor(buffers.hold(values))


def to_tensor(array: Array) -> Tensor:
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(values: Tensor | ArrayLike) -> Array:
    """What is a tensor, on any device, as an array; anything else as numpy takes it."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    if values.dtype == torch.bfloat16:
        return to_array(values.detach().contiguous().view(torch.int16)).view(_BFLOAT16)
    array: Array = values.numpy(force=True)
    return array


def to_device(values: Array, like: torch.Tensor) -> torch.Tensor:
    """Numbers as a tensor of the type and on the device of another; whole numbers stay whole."""
    own = torch.from_numpy(np.array(values, np.float32 if values.dtype.kind in "fV" else values.dtype))
    return own.to(like.device, like.dtype) if own.is_floating_point() else own.to(like.device)


def to_numpy(values: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = values.float().cpu().numpy()
    return found
