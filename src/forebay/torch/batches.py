"""Turn the columns of some rows into the tensors of a batch, in reused memory.

A cache with the columns `tokens` and `seq_lens` gives training batches:

    tokens        int64 [rows, sequence_length]
    labels        int64, same shape: "shifted" is the next token, "unshifted" the token itself; -100 = no loss
    positions     int64, same shape, from 0 in every document
    document_ids  int32, same shape, from 0 in every row
    seq_lens      int32 [rows, max_documents], zero-padded
    cu_seqlens    int32 [documents + 1], over the whole batch laid end to end, with max_seqlen, an int
    num_label_tokens  int64 [], the labels that are not -100
    row_weight    float32 [rows], with drop_last=False: 0 for a row that only fills the last batch of a rank, else 1
    loss_weights  float32 [rows, sequence_length], for `train_on` with several weights: that of each label

The rows of a chat cache have spans: labels are -100 for tokens that `train_on` does not name. Another cache may have a
column with one number per token, `loss_mask`: labels are -100 where it is 0, and weights of floats are `loss_weights`.

With `max_documents` shapes do not depend on the documents: `seq_lens` has this width, and `cu_seqlens`
rows · (max_documents + 1) + 1 entries, the last one repeated; `max_seqlen` is then the length of a row.

Every other column becomes a tensor as it is stored; a ragged one becomes `name` (flat values) and `name.offsets`.
"""

import threading
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
from forebay.errors import choice_error
from forebay.feeding.stream import CHAT_COLUMNS, PACKED_COLUMNS, Read, Weights
from forebay.masks.conversations import TrainOn, label_weights, token_weights
from forebay.masks.documents import IGNORED_LABEL, LabelStyle, fill_document_ids, fill_packed

Batch = dict[str, Any]  # of tensors; max_seqlen is an int
Derived = Literal["positions", "document_ids", "cu_seqlens", "num_label_tokens"]
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_SMALLEST = 16 * 1024  # bytes; smaller arrays are as fast from malloc


class Buffers:
    """Hands out arrays of any shape, in memory of earlier batches where some is free. Threads may share it.

    A tensor is made over a view that only its storage holds. When the last tensor over that storage is freed, so is the
    view, and its memory is free for another batch: nothing is counted or returned by hand. At most `limit_bytes` of all
    shapes together stay free.

        memory ◀── view ◀── storage ◀── tensor, its slices, its transposes, arrays made of it, …
           └────────── free again when the view is freed

    With a GPU, batches are in pinned memory of torch's own allocator, which also waits for copies in flight. It tracks
    them, those of slices too, by the storage that it made, so `wrap` returns the tensor with that storage.
    """

    def __init__(self, limit_bytes: int, *, pinned: bool | None = None) -> None:
        self._limit = limit_bytes
        self._pinned = torch.cuda.is_available() if pinned is None else pinned
        self._lock = threading.Lock()
        self._returned: deque[Array] = deque()
        self._free: dict[int, list[Array]] = {}  # by size, the one that was used last at the end
        self._lent: dict[int, weakref.ref[Array]] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept for further batches."""
        with self._lock:
            self._collect()
            return sum(size * len(free) for size, free in self._free.items())

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
        with self._lock:
            self._collect()
            free = self._free.pop(size, [])
            memory = free.pop() if free else None
            if free:
                self._free[size] = free
        return np.empty(size, np.uint8) if memory is None else memory

    def _collect(self) -> None:
        """Take up what was returned, and drop memory of the sizes that were used longest ago beyond the limit."""
        while self._returned:
            memory = self._returned.popleft()
            self._free[len(memory)] = [*self._free.pop(len(memory), []), memory]
        total = sum(size * len(free) for size, free in self._free.items())
        while total > self._limit and self._free:
            size = next(iter(self._free))
            self._free[size].pop()
            total -= size
            if not self._free[size]:
                del self._free[size]

    def _take_back(self, key: int, memory: Array, view: object) -> None:
        """Called when a view is freed: in any thread, at any point, so it must not take a lock."""
        del self._lent[key]
        self._returned.append(memory)


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
    train_on: TrainOn | None = None  # None: the loss counts all tokens, and rows have no spans
    loss_mask: str | None = None  # a column with one number per token
    max_documents: int | None = None
    as_stored: bool = False  # tokens keep their type, and nothing is derived: `derive_on_device` does it

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that batches are made of."""
        if self.loss_mask is not None:
            return (*PACKED_COLUMNS, self.loss_mask)
        return PACKED_COLUMNS if self.train_on is None else CHAT_COLUMNS

    def __post_init__(self) -> None:
        unknown = [name for name in self.derive if name not in get_args(Derived)]
        if unknown:
            raise choice_error("each name of derive", unknown[0], get_args(Derived))
        if self.labels is None and ("num_label_tokens" in self.derive or self.loss_mask is not None):
            raise ValueError("num_label_tokens and loss_mask need labels (got labels=None)")
        if self.max_documents is not None and self.max_documents < 1:
            raise ValueError(f"max_documents must be at least 1 (got {self.max_documents})")


def refuse_without_training(
    labels: LabelStyle | Literal["auto"] | None,
    derive: Sequence[Derived] | None,
    train_on: object = None,
    loss_mask: str | None = None,
    max_documents: int | None = None,
) -> None:
    """Raise where an argument was passed that has no effect on a batch without labels and positions."""
    passed = {
        "labels": labels not in (None, "auto"),
        "derive": bool(derive),
        "train_on": train_on is not None,
        "loss_mask": loss_mask is not None,
        "max_documents": max_documents is not None,
    }
    names = [name for name, is_passed in passed.items() if is_passed]
    if names:
        raise ValueError(
            f"{' and '.join(names)} passed, but this applies to packed-token batches only; leave `collate` out, and "
            "`tokens` and `seq_lens` out of `columns`, or derive them with forebay.masks"
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
    rest = {name: values for name, values in read.items() if name not in training.columns}
    seq_lens = padded_lengths(lengths, training.max_documents)
    if training.as_stored:
        stored = {"tokens": to_tensor(tokens, buffers), "seq_lens": to_tensor(seq_lens, buffers)}
        return stored | plain_batch(rest, buffers)
    counted = None if training.loss_mask is None else _token_numbers(read[training.loss_mask], tokens, training)
    if training.train_on is not None and training.labels is not None:
        spans, last_turn = read["spans"], read["last_turn"]
        assert isinstance(spans, Ragged)
        assert isinstance(last_turn, Ragged)
        whole = padded_lengths(read["seq_lens"])  # type: ignore[arg-type]
        counted = token_weights(
            spans.values, spans.offsets, whole, last_turn.values, tokens.shape[1], training.train_on
        )
    is_weighted = training.train_on is not None and training.train_on.is_weighted
    if training.loss_mask is not None:
        is_weighted = np.asarray(read[training.loss_mask]).dtype.kind not in "biu"
    derived = _derived(tokens, seq_lens, training, buffers, counted, is_weighted)
    return {
        "tokens": derived.pop("tokens"),
        "seq_lens": to_tensor(seq_lens, buffers),
        **derived,
        **plain_batch(rest, buffers),
    }


def _token_numbers(values: Array | Ragged, tokens: Array, training: PackedTargets) -> NDArray[np.float32]:
    """Return the numbers of a `loss_mask` column."""
    if isinstance(values, Ragged) or values.shape != tokens.shape:
        shape = "ragged" if isinstance(values, Ragged) else f"of shape {values.shape[1:]}"
        raise ValueError(
            f"rows of '{training.loss_mask}' are {shape}; a loss_mask has one number per token, {tokens.shape[1:]}"
        )
    return values.astype(np.float32)


def _emptied(tokens: Array, lengths: Ragged, empty: NDArray[np.bool_], pad: int) -> tuple[Array, Ragged]:
    """Replace the `empty` rows by padding without documents: labels are -100, and padding sees only padding."""
    filled = np.where(empty[:, None], np.asarray(pad, tokens.dtype), tokens)
    counts = np.where(empty, 0, lengths.lengths)
    values = lengths.values[np.repeat(~empty, lengths.lengths)]
    return filled, Ragged(values, np.concatenate([[0], np.cumsum(counts)]))


def padded_lengths(lengths: Ragged, max_documents: int | None = None) -> Array:
    """Return the document lengths of each row, int32 `[rows, max_documents]`, zero-padded.

    Without `max_documents`, the row with the most documents decides.

    >>> padded_lengths(Ragged(np.array([3, 2, 7]), np.array([0, 2, 3]))).tolist()
    [[3, 2], [7, 0]]
    """
    counts = lengths.lengths
    most = max(1, int(counts.max(initial=0)))
    if max_documents is not None and most > max_documents:
        raise ValueError(f"a row has {most} documents, more than max_documents={max_documents}; raise it")
    padded = np.zeros((len(lengths), max_documents or most), np.int32)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = lengths.values
    return padded


def _derived(
    tokens: Array,
    seq_lens: Array,
    training: PackedTargets,
    buffers: Buffers,
    counted: Array | None,
    is_weighted: bool,
) -> Batch:
    found: dict[str, Array] = {"tokens": buffers.empty(tokens.shape, _INT64)}
    whole = _whole_lengths(tokens, seq_lens, training)
    if training.labels is not None:
        found["labels"] = buffers.empty(tokens.shape, _INT64)
    if "positions" in training.derive:
        found["positions"] = buffers.empty(tokens.shape, _INT64)
    fill_packed(
        tokens,
        whole,
        training.labels or "shifted",
        wide=found["tokens"],
        labels=found.get("labels"),
        positions=found.get("positions"),
    )
    if counted is not None and training.labels is not None:
        weights = label_weights(found["labels"], counted, training.labels)
        if is_weighted:
            found["loss_weights"] = buffers.as_pinned(weights)
    if "num_label_tokens" in training.derive:
        count = np.count_nonzero(found["labels"] != IGNORED_LABEL)
        found["num_label_tokens"] = buffers.as_pinned(np.asarray(count))
    if "document_ids" in training.derive:
        found["document_ids"] = buffers.empty(tokens.shape, _INT32)
        fill_document_ids(found["document_ids"], whole)
    if "cu_seqlens" in training.derive:
        found["cu_seqlens"] = buffers.as_pinned(_boundaries(whole, training.max_documents))
    batch: Batch = {name: wrap(values) for name, values in found.items()}
    if "cu_seqlens" in training.derive:
        batch["max_seqlen"] = int(whole.max(initial=0)) if training.max_documents is None else tokens.shape[1]
    return batch


def _boundaries(whole: Array, max_documents: int | None) -> NDArray[np.int32]:
    """Return where documents and padding begin and end in the rows laid end to end.

    With `max_documents`, further segments of length 0 fill it up to a fixed size.

    >>> _boundaries(np.array([[3, 2], [5, 0]]), max_documents=2).tolist()
    [0, 3, 5, 10, 10, 10, 10]
    """
    ends = np.cumsum(whole[whole > 0])
    count = len(ends) if max_documents is None else len(whole) * (max_documents + 1)
    found = np.full(count + 1, whole.sum(), np.int32)
    found[0], found[1 : len(ends) + 1] = 0, ends
    return found


def _whole_lengths(tokens: Array, seq_lens: Array, training: PackedTargets) -> NDArray[np.int32]:
    """Return lengths that fill each row; where nothing is derived of them, they need not be those of documents."""
    if not len(tokens) or (training.labels is None and not training.derive):
        return np.full((len(tokens), 1), tokens.shape[1], np.int32)
    return masks.whole_lengths(seq_lens, tokens.shape[1])


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
