"""Lay encoded conversations into rows, best fit and unsplit, with their spans.

row     tokens     ┌ conversation 0 ──────────────┬ conversation 4 ──┬ padding ┐
        seq_lens   │ 9                            │ 5                │         │
        spans      │ header prompt response stop  │ prompt response… │         │
        last_turn  │ 1                            │ 3                │         │
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from typing import Any, Literal

import numpy as np

from forebay.chat.encoding import Encoded
from forebay.columns import Array, Ragged
from forebay.masks.train_on import KINDS, ROLES
from forebay.source import Failure, Sample, SampleBatch
from forebay.tokens.packing import Documents, document_too_long, pack_rows
from forebay.tokens.recipe import USE_BINS

Long = Literal["error", "drop", "truncate"]
_STOP = KINDS.index("stop")


def _distinct(ascending: Array) -> int:
    return len(ascending) and 1 + int(np.count_nonzero(np.diff(ascending)))


@dataclass(frozen=True, slots=True, eq=False)
class PackedConversations(SampleBatch):
    """The tokens and spans of samples as a chunk of a cache holds them: what re-packed rows are made of."""

    path: str  # of the chunk
    tokens: Array  # of all rows
    starts: Array  # (documents,) where each begins in `tokens`
    lengths: Array  # (documents,) tokens
    spans: Array  # (spans, 5) uint32, counted from the beginning of their document
    span_counts: Array  # (documents,)
    numbers: Array  # (documents,) the number of the sample in the chunk, ascending
    made_by: str  # the signature of the recipe that made them

    @property
    def count(self) -> int:
        return _distinct(self.numbers)

    def samples(self) -> Iterator[Sample]:
        """A sample with the documents of each conversation."""
        edges = [0, *(np.flatnonzero(np.diff(self.numbers)) + 1).tolist(), len(self.numbers)]
        span_ends = np.cumsum(self.span_counts)
        for first, stop in pairwise(edges if len(self.numbers) else []):
            here = slice(first, stop)
            one = replace(
                self,
                starts=self.starts[here],
                lengths=self.lengths[here],
                spans=self.spans[span_ends[first] - self.span_counts[first] : span_ends[stop - 1]],
                span_counts=self.span_counts[here],
                numbers=self.numbers[here],
            )
            yield Sample(f"{self.path}#{one.numbers[0]}", one)


@dataclass(slots=True, eq=False)
class Conversations:
    """The encoded documents of a chunk; a conversation has one, or several where its template changes history."""

    ids: Sequence[Array]
    starts: Array  # (documents,) where each begins in `ids`
    lengths: Array  # (documents,) tokens
    spans: Array  # (spans, 5) uint32: start and stop in the document, role, kind, message
    span_counts: Array  # (documents,)
    numbers: Array  # (documents,) the number of the sample in the chunk
    names: Sequence[str]  # (documents,) the ids of the samples
    characters: int = 0
    straddling: int = 0
    headers: int = 0

    @property
    def span_document(self) -> Array:
        return np.repeat(np.arange(len(self.lengths)), self.span_counts)


@dataclass(frozen=True, slots=True, eq=False)
class StoredDocuments:
    """Where the documents of a chunk lie in its rows; `order` is that of samples, and of documents in a sample."""

    row: Array  # (documents,) ascending
    starts: Array  # (documents,) in the row
    lengths: Array  # (documents,) tokens
    order: Array  # (documents,)

    def spans(self, spans: Ragged, width: int) -> tuple[Array, Array]:
        """The spans of documents in their order, counted from the beginning of each, and how many each has."""
        row = np.repeat(np.arange(len(spans)), spans.lengths.astype(np.int64))
        begins = self.row * width + self.starts
        owner = np.searchsorted(begins, row * width + spans.values[:, 0], side="right") - 1
        if (owner < 0).any():
            raise ValueError("it has a span before its first document")
        counts = np.bincount(owner, minlength=len(begins))
        places = spans.values.take(ranges((np.cumsum(counts) - counts)[self.order], counts[self.order]), axis=0)
        places[:, :2] -= np.repeat(self.starts[self.order].astype(np.uint32), counts[self.order])[:, None]
        return places, counts[self.order]


def stored_documents(lengths: Ragged, documents: Ragged, width: int) -> StoredDocuments:
    """The documents of a chunk, from its columns `seq_lens` and `documents`.

    Raises ValueError where a row has more tokens than `width`, or not as many lengths as documents.
    """
    counts = lengths.lengths.astype(np.int64)
    if not np.array_equal(lengths.offsets, documents.offsets):
        raise ValueError("its rows have not as many lengths as documents")
    each = lengths.values.astype(np.int64)
    row = np.repeat(np.arange(len(counts)), counts)
    passed = np.concatenate([[0], np.cumsum(each)])
    edges = passed[lengths.offsets.astype(np.int64)]
    if (np.diff(edges) > width).any():
        raise ValueError(f"a row has documents of more than {width:,} tokens")
    order = np.lexsort((documents.values[:, 1], documents.values[:, 0]))
    return StoredDocuments(row, passed[:-1] - edges[row], each, order)


@dataclass(slots=True)
class Gathered:
    """Collects encoded documents, batch by batch, or those of chunks of a cache."""

    dtype: np.dtype[Any]
    parts: list[tuple[Array, ...]] = field(default_factory=list)  # ids, starts, lengths, spans, span_counts, numbers
    names: list[str] = field(default_factory=list)
    characters: int = 0
    straddling: int = 0
    headers: int = 0
    _tokens: int = 0  # of all parts

    def add(self, encoded: Encoded, kept: Sequence[bool], numbers: Sequence[int], names: Sequence[str]) -> None:
        """Add the documents that are `kept`, with the number and the id of the sample of each."""
        keep = np.array(kept, np.bool_)
        ids, spans = encoded.ids, encoded.spans
        if not keep.all():
            ids, spans = ids[np.repeat(keep, encoded.lengths)], spans[np.repeat(keep, encoded.span_counts)]
        lengths = encoded.lengths[keep]
        self._add(ids, np.cumsum(lengths) - lengths, lengths, spans, encoded.span_counts[keep], np.array(numbers)[keep])
        self.names += compress(names, kept)
        self.straddling += encoded.straddling
        self.headers += encoded.headers

    def add_packed(self, packed: PackedConversations, number: int) -> None:
        """Add documents of a cache; `number` is that of the first sample."""
        numbers = number + np.cumsum(np.diff(packed.numbers, prepend=packed.numbers[:1]) != 0)
        self._add(packed.tokens, packed.starts, packed.lengths, packed.spans, packed.span_counts, numbers)
        self.names += [f"{packed.path}#{each}" for each in packed.numbers.tolist()]

    def _add(self, ids: Array, starts: Array, *rest: Array) -> None:
        self.parts.append((ids.astype(self.dtype, copy=False), starts + self._tokens, *rest))
        self._tokens += len(ids)

    def all(self) -> Conversations:
        """All documents; tokens are not copied to stand one behind the other."""
        none = np.zeros(0, np.int64)
        empty = (np.zeros(0, self.dtype), none, none, np.zeros((0, 5), np.uint32), none, none)
        ids, *rest = zip(empty, *self.parts, strict=True)
        starts, lengths, spans, counts, numbers = map(np.concatenate, rest)
        counted = (self.characters, self.straddling, self.headers)
        return Conversations(ids, starts, lengths, spans, counts, numbers, self.names, *counted)


@dataclass(frozen=True, slots=True, eq=False)
class ConversationCut:
    """How much of every document is kept, and the samples that are left out."""

    lengths: Array  # (documents,) 0 for one that is left out
    failed: tuple[tuple[int, Failure], ...] = ()
    truncated: int = 0  # documents
    dropped: int = 0


def cut_long(encoded: Conversations, capacity: int, policy: Long) -> ConversationCut:
    """Apply the policy to documents longer than a row. Truncated ones end with the last whole turn that fits."""
    long = encoded.lengths > capacity
    if not long.any():
        return ConversationCut(encoded.lengths)
    first = int(np.flatnonzero(long)[0])
    if policy == "error":
        advice = "set long='truncate' or long='drop' (`--long`)"
        raise document_too_long(encoded.names[first], int(encoded.lengths[first]), capacity, advice)
    lengths = encoded.lengths.copy()
    if policy == "drop":
        lengths[np.isin(encoded.numbers, encoded.numbers[long])] = 0
    else:
        ends = np.where((encoded.spans[:, 3] == _STOP) & (encoded.spans[:, 1] <= capacity), encoded.spans[:, 1], 0)
        fitting = np.zeros(len(lengths), np.int64)
        np.maximum.at(fitting, encoded.span_document, ends)
        lengths[long] = fitting[long]
    left = {int(number) for number in encoded.numbers[lengths > 0]}
    lost = [at for at in np.flatnonzero(long).tolist() if int(encoded.numbers[at]) not in left]
    failed = {int(encoded.numbers[at]): _too_long(encoded, at, capacity, policy) for at in reversed(lost)}
    return ConversationCut(
        lengths, tuple(failed.items()), int(np.count_nonzero(long & (lengths > 0))), int(np.count_nonzero(lengths == 0))
    )


def _too_long(encoded: Conversations, at: int, capacity: int, policy: Long) -> Failure:
    first = "" if policy == "drop" else ", and its first turn does not fit"
    detail = f"{int(encoded.lengths[at]):,} tokens, a row holds {capacity:,}{first}"
    return Failure(encoded.names[at], "too-long", detail)


def pack_conversations(
    encoded: Conversations, cut: ConversationCut, capacity: int, pad: int
) -> dict[str, Array | Ragged]:
    """Return the columns of a chunk."""
    count = len(encoded.lengths)
    documents = Documents(encoded.ids, encoded.lengths, np.arange(count), [], encoded.starts)  # packing needs no names
    packed = pack_rows(documents, cut.lengths, capacity, pad)
    placed = packed.documents.values[:, 0].astype(np.int64)  # documents in the order of rows
    edges = packed.documents.offsets
    identity = np.column_stack([encoded.numbers, offsets_in_samples(encoded)])[placed].astype(np.uint32)
    spans, counts = kept_spans(encoded, cut)
    ends = np.cumsum(counts)
    each = ranges((ends - counts)[placed], counts[placed])
    lengths = packed.seq_lens.values.astype(np.int64)
    passed = np.cumsum(lengths) - lengths
    in_row = passed - np.repeat(passed[edges[:-1]] if len(lengths) else passed, np.diff(edges))
    moved = spans.take(each, axis=0)
    moved[:, :2] += np.repeat(in_row.astype(np.uint32), counts[placed])[:, None]
    span_edges = np.concatenate([[0], np.cumsum(counts[placed])])[edges]
    return {
        "tokens": packed.tokens,
        "seq_lens": packed.seq_lens,
        "documents": Ragged(identity, edges),
        "spans": Ragged(moved, span_edges),
        "last_turn": Ragged(last_turns(encoded, spans, counts)[placed].astype(np.uint32), edges),
    }


def offsets_in_samples(encoded: Conversations) -> Array:
    """Where each document begins if the documents of its sample stand one behind the other."""
    passed = np.cumsum(encoded.lengths) - encoded.lengths
    first = np.ones(len(encoded.numbers), np.bool_)
    first[1:] = encoded.numbers[1:] != encoded.numbers[:-1]
    begins: Array = passed[np.flatnonzero(first)][np.cumsum(first) - 1] if len(first) else passed
    return passed - begins


def kept_spans(encoded: Conversations, cut: ConversationCut) -> tuple[Array, Array]:
    """The spans of what is kept of each document, and how many."""
    if cut.lengths is encoded.lengths:
        return encoded.spans, encoded.span_counts
    document = encoded.span_document
    inside = encoded.spans[:, 1] <= cut.lengths[document]
    return encoded.spans[inside], np.bincount(document[inside], minlength=len(encoded.lengths))


def last_turns(encoded: Conversations, spans: Array, counts: Array) -> Array:
    """The last generated message of the conversation that each document belongs to."""
    document = np.repeat(np.arange(len(counts)), counts)
    last = np.zeros(int(encoded.numbers.max(initial=-1)) + 1, np.int64)
    stops = spans[:, 3] == _STOP
    np.maximum.at(last, encoded.numbers[document[stops]], spans[stops, 4])
    return last[encoded.numbers]


def ranges(starts: Array, counts: Array) -> Array:
    """`starts[0], starts[0] + 1, … ` for each count, one behind the other."""
    passed = np.cumsum(counts) - counts
    indices: Array = np.arange(int(counts.sum())) + np.repeat(starts - passed, counts)
    return indices


def chat_statistics(
    encoded: Conversations, cut: ConversationCut, columns: Mapping[str, Any], capacity: int
) -> dict[str, int | float | list[int]]:
    """The counts of one chunk, which are summed over chunks; those of tokens have the names of the token recipe."""
    spans = columns["spans"].values
    lengths = spans[:, 1] - spans[:, 0]
    seq_lens = columns["seq_lens"]
    used = np.diff(np.append(0, np.cumsum(seq_lens.values, dtype=np.int64))[seq_lens.offsets])
    lengths_used = cut.lengths
    return {
        "conversations": _distinct(encoded.numbers[lengths_used > 0]),
        "turns": int(np.count_nonzero(spans[:, 3] == _STOP)),
        "documents": int(np.count_nonzero(lengths_used)),
        "documents_split": 0,
        "documents_cut": cut.truncated,
        "documents_dropped": cut.dropped,
        "characters": encoded.characters,
        "tokens_in": int(encoded.lengths.sum()),
        "tokens": int(used.sum()),
        "tokens_dropped": int((encoded.lengths - lengths_used).sum()),
        "tokens_by_role": np.bincount(spans[:, 2], weights=lengths, minlength=len(ROLES)).astype(int).tolist(),
        "tokens_by_kind": np.bincount(spans[:, 3], weights=lengths, minlength=len(KINDS)).astype(int).tolist(),
        "tokens_straddling": encoded.straddling,
        "raw_bytes": sum(column.nbytes for column in columns.values()),
        "rows_by_use": np.bincount(used * USE_BINS // capacity, minlength=USE_BINS + 1).tolist(),
        **({"header_tokens_trained": encoded.headers} if encoded.headers else {}),
    }
