"""Batches for language models, of the columns `tokens` and `seq_lens`:

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

With compiled code, each row is read once from where it is, a mapped file or a decoded block, and all its tensors are
written in that pass; else its columns are copied first, and numpy derives the same.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from forebay import compiled
from forebay.columns import Array, Column, Ragged
from forebay.errors import choice_error
from forebay.feeding.stream import CHAT_COLUMNS, PACKED_COLUMNS, Read, Weights, checked_whole
from forebay.masks.documents import (
    IGNORED_LABEL,
    LabelStyle,
    fill_document_ids,
    fill_packed,
    whole_lengths,
)
from forebay.masks.train_on import TrainOn, label_weights, token_weights
from forebay.read.cache import Cache
from forebay.read.chunk_maps import slices
from forebay.read.gather import RowAddresses, longest_rows
from forebay.torch.batches import Batch, Blank, Buffers, LoadedBatch, plain_batch, wrap

Derived = Literal["positions", "document_ids", "cu_seqlens", "num_label_tokens"]
Written = dict[str, Array]
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_TOKENS = {("uint16", 1, False), ("uint32", 1, False)}  # what compiled code reads: type, sides, whether ragged
_LENGTHS = {("uint32", 0, True), ("int32", 0, True)}
_WRITTEN = ("tokens", "seq_lens", "labels", "positions")
_OF_BLANKS = ("tokens", "tokens", "seq_lens", "labels", "positions")  # as `pack_rows` takes them: stored, wide, …
Blanks = tuple[Blank | None, ...]


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
    further: tuple[str, ...] = ()  # columns that were asked for, also those that labels are made of

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that batches are made of."""
        if self.loss_mask is not None:
            return (*PACKED_COLUMNS, self.loss_mask)
        return PACKED_COLUMNS if self.train_on is None else CHAT_COLUMNS

    @property
    def per_token(self) -> tuple[str, ...]:
        """The tensors of one int64 per token that are written together."""
        labels = () if self.labels is None else ("labels",)
        return ("tokens", *labels, *(("positions",) if "positions" in self.derive else ()))

    @property
    def needs_arrays(self) -> bool:
        """Whether something is made of the tensors that are written together."""
        return self.train_on is not None or self.loss_mask is not None or self.derives_more

    @property
    def derives_more(self) -> bool:
        """Whether something is derived that is not written together with the tokens."""
        return self.derive not in ((), ("positions",))

    def __post_init__(self) -> None:
        unknown = [name for name in self.derive if name not in get_args(Derived)]
        if unknown:
            raise choice_error("each name of derive", unknown[0], get_args(Derived))
        if self.labels is None and ("num_label_tokens" in self.derive or self.loss_mask is not None):
            needs = "derive=['num_label_tokens']" if self.loss_mask is None else f"loss_mask={self.loss_mask!r}"
            raise ValueError(f"{needs} needs labels (got labels=None); pass labels='shifted' or 'unshifted'")
        if self.max_documents is not None and checked_whole("max_documents", self.max_documents) < 1:
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
            f"{' and '.join(names)} passed, but this applies to packed-token batches only; leave `collate` out, "
            "or derive them with forebay.masks"
        )


def training_batch(read: Read, training: PackedTargets, buffers: Buffers, weights: Weights | None = None) -> Batch:
    """Return the tensors that a language model is trained on; a row of weight 0 becomes a row of padding."""
    tokens, lengths = read["tokens"], read["seq_lens"]
    assert not isinstance(tokens, Ragged)
    assert isinstance(lengths, Ragged)
    documents = seq_lens = padded_lengths(lengths, training.max_documents)
    if weights is not None and not weights.all():
        tokens, lengths = _emptied(tokens, lengths, weights == 0, training.pad)
        seq_lens = padded_lengths(lengths, training.max_documents)
    if training.as_stored:
        written: Written = {"tokens": buffers.as_pinned(tokens)}
    else:
        arrays = buffers.several(len(training.per_token), tokens.shape, _INT64)
        written = dict(zip(training.per_token, arrays, strict=True))
        fill_packed(
            tokens,
            _whole_lengths(tokens, seq_lens, training),
            training.labels or "shifted",
            wide=written["tokens"],
            labels=written.get("labels"),
            positions=written.get("positions"),
        )
    written["seq_lens"] = buffers.as_pinned(seq_lens)
    return _completed(written, read, training, buffers, documents)


def batches_in_place(
    tokens: RowAddresses,
    lengths: RowAddresses,
    size: int,
    together: int,
    reads: Iterator[Read],
    training: PackedTargets,
    buffers: Buffers,
) -> Iterator[Batch]:
    """Yield what `training_batch` returns, for `size` rows at a time; `reads` has the other columns.

    One compiled call writes `together` batches: threads that make batches compete for the GIL at each call. Helpers
    write the next ones while tensors are made of those before.
    """
    assert compiled.native is not None
    (width,), dtype = tokens.column.shape, tokens.column.array_dtype
    shifted, blanks = training.labels != "unshifted", _Blanks.of(training, size, width, dtype)
    ahead = 1 if compiled.native.count_helpers() else 0
    begun: deque[tuple[slice, list[Blanks], object]] = deque()
    try:
        for some in slices(len(tokens.addresses), size * together):
            counts = lengths.counts[some]
            made = blanks.lent(counts, buffers)
            places = (tokens.addresses[some], dtype.itemsize, width, lengths.addresses[some], counts)
            begun.append((some, made, compiled.native.start_packing(*places, shifted, size, made)))
            if len(begun) > ahead:
                yield from _packed(*begun.popleft(), tokens, lengths, size, reads, training, buffers)
        while begun:
            yield from _packed(*begun.popleft(), tokens, lengths, size, reads, training, buffers)
    finally:
        for _, _, work in begun:  # rows stay where they are until then
            compiled.native.finish(work)


def _packed(
    some: slice,
    made: list[Blanks],
    work: object,
    tokens: RowAddresses,
    lengths: RowAddresses,
    size: int,
    reads: Iterator[Read],
    training: PackedTargets,
    buffers: Buffers,
) -> Iterator[Batch]:
    """Yield the batches of some rows once they are written."""
    del made[compiled.native.finish(work) :]
    del work  # it holds the memory too
    made.reverse()  # only a batch that was yielded holds its memory
    for first in range(some.start, max(some.start + 1, some.stop), size):
        read = next(reads)
        if made:
            yield _of_blanks(made.pop(), read, training, buffers)
        else:  # numpy says what is wrong, after the batches before it
            wrong = slice(first, min(first + size, some.stop))
            columns = {"tokens": tokens.part(wrong).copied(), "seq_lens": lengths.part(wrong).copied(), **read}
            yield training_batch(columns, training, buffers)


class _Blanks(NamedTuple):
    """The memory of batches that `pack_rows` writes, as `lend_packed` takes it."""

    size: int  # rows of a batch
    documents: int  # 0: those of the row with the most
    width: int
    token_bytes: int  # 0: tokens become int64
    labels: bool
    positions: bool

    @classmethod
    def of(cls, training: PackedTargets, size: int, width: int, stored: np.dtype[Any]) -> "_Blanks":
        token_bytes = stored.itemsize if training.as_stored else 0
        derived = (training.labels is not None, "positions" in training.derive)
        return cls(size, training.max_documents or 0, width, token_bytes, *derived)

    def lent(self, counts: NDArray[np.int64], buffers: Buffers) -> list[Blanks]:
        """Return memory for rows of `counts` documents, up to the first batch that has too many."""
        if buffers.pool is not None:
            return compiled.native.lend_packed(buffers.pool, counts, *self)
        made: list[Blanks] = []
        for some, most in zip(slices(len(counts), self.size), longest_rows(counts, self.size), strict=True):
            if most > (self.documents or most):
                break
            shape = (some.stop - some.start, self.width)
            seq_lens = buffers.empty((shape[0], self.documents or max(1, most)), _INT32)
            stored = buffers.empty(shape, np.dtype(f"u{self.token_bytes}")) if self.token_bytes else None
            wide = (not self.token_bytes, self.labels, self.positions)
            tokens, labels, positions = (buffers.empty(shape, _INT64) if each else None for each in wide)
            made.append((stored, tokens, seq_lens, labels, positions))
        return made


def _of_blanks(blanks: Blanks, read: Read, training: PackedTargets, buffers: Buffers) -> Batch:
    """Return a batch of memory that was written."""
    batch, tensor = LoadedBatch(), wrap if buffers.pool is None else from_dlpack
    for name, blank in zip(_OF_BLANKS, blanks, strict=True):
        if blank is not None:
            batch[name] = tensor(blank)
    if not (read or training.needs_arrays):
        return batch
    return _completed({name: values.numpy() for name, values in batch.items()}, read, training, buffers)


def can_be_in_place(caches: Sequence[Cache]) -> bool:
    """Whether `batches_in_place` takes rows of these caches."""
    tokens, lengths = ({_stored_as(cache.column(name)) for cache in caches} for name in PACKED_COLUMNS)
    return compiled.native is not None and len(tokens) == 1 and tokens <= _TOKENS and lengths <= _LENGTHS


def _stored_as(column: Column) -> tuple[str, int, bool]:
    return column.dtype, len(column.shape), column.ragged


def _completed(
    written: Written, read: Read, training: PackedTargets, buffers: Buffers, documents: Array | None = None
) -> Batch:
    """Return the batch; `documents` are the lengths of all rows, if some of those only fill the batch."""
    batch: Batch = {name: wrap(written[name]) for name in _WRITTEN if name in written}
    if training.needs_arrays:
        seq_lens = written["seq_lens"]
        batch |= _further(written, seq_lens, seq_lens if documents is None else documents, read, training, buffers)
    rest = {name: read[name] for name in read if name in training.further or name not in training.columns}
    return batch | plain_batch(rest, buffers) if rest else batch


def _further(
    written: Written, seq_lens: Array, documents: Array, read: Read, training: PackedTargets, buffers: Buffers
) -> Batch:
    found: Written = {}
    shape = written["tokens"].shape
    if "labels" in written and (weights := _weights(written["labels"], documents, read, training)) is not None:
        found["loss_weights"] = buffers.as_pinned(weights)
    if "num_label_tokens" in training.derive:
        found["num_label_tokens"] = buffers.as_pinned(np.asarray(np.count_nonzero(written["labels"] != IGNORED_LABEL)))
    whole = _whole_lengths(written["tokens"], seq_lens, training)
    if "document_ids" in training.derive:
        found["document_ids"] = buffers.empty(shape, _INT32)
        fill_document_ids(found["document_ids"], whole)
    if "cu_seqlens" in training.derive:
        found["cu_seqlens"] = buffers.as_pinned(_boundaries(whole, training.max_documents))
    batch: Batch = {name: wrap(values) for name, values in found.items()}
    if "cu_seqlens" in training.derive:
        batch["max_seqlen"] = int(whole.max(initial=0)) if training.max_documents is None else shape[1]
    return batch


def _weights(labels: Array, documents: Array, read: Read, training: PackedTargets) -> Array | None:
    """Set labels that the loss does not count to -100, and return the weights of the others; None if all are equal."""
    assert training.labels is not None
    if training.loss_mask is not None:
        column = read[training.loss_mask]
        weights = label_weights(labels, _token_numbers(column, labels.shape, training.loss_mask), training.labels)
        return weights if np.asarray(column).dtype.kind not in "biu" else None
    if training.train_on is None:
        return None
    spans, last_turn = read["spans"], read["last_turn"]
    assert isinstance(spans, Ragged)
    assert isinstance(last_turn, Ragged)
    counted = token_weights(
        spans.values, spans.offsets, documents, last_turn.values, labels.shape[1], training.train_on
    )
    weights = label_weights(labels, counted, training.labels)
    return weights if training.train_on.is_weighted else None


def _token_numbers(values: Array | Ragged, shape: tuple[int, ...], column: str) -> NDArray[np.float32]:
    """Return the numbers of a `loss_mask` column."""
    if isinstance(values, Ragged) or values.shape != shape:
        found = "ragged" if isinstance(values, Ragged) else f"of shape {values.shape[1:]}"
        raise ValueError(f"rows of '{column}' are {found}; a loss_mask has one number per token, {shape[1:]}")
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
    padded = np.zeros((len(lengths), _width(int(counts.max(initial=0)), max_documents)), np.int32)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = lengths.values
    return padded


def _width(most: int, max_documents: int | None) -> int:
    """Return the width of `seq_lens`, for rows of at most `most` documents."""
    if max_documents is not None and most > max_documents:
        raise ValueError(f"a row has {most} documents, more than max_documents={max_documents}; raise it")
    return max_documents or max(1, most)


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
    return whole_lengths(seq_lens, tokens.shape[1])
