"""Lay encoded conversations into rows, best fit and unsplit, with their spans.

row     tokens     ┌ conversation 0 ──────────────┬ conversation 4 ──┬ padding ┐
        seq_lens   │ 9                            │ 5                │         │
        spans      │ header prompt response stop  │ prompt response… │         │
        last_turn  │ 1                            │ 3                │         │
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from typing import Any, Literal, overload

import numpy as np

from forebay.chat.encoding import Encoded
from forebay.columns import Array, Ragged
from forebay.errors import DocumentTooLong
from forebay.masks.train_on import KINDS, ROLES
from forebay.source import Failure, Sample, SampleBatch
from forebay.tokens.packing import Documents, pack_rows
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

    @property
    def span_document(self) -> Array:
        return np.repeat(np.arange(len(self.lengths)), self.span_counts)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkNames(Sequence[str]):
    """The ids of the samples of documents in chunks of a cache. Few are asked for, so none is made before."""

    chunks: list[tuple[str, Array]] = field(default_factory=list)  # path, numbers of the samples

    def __len__(self) -> int:
        return sum(len(numbers) for _, numbers in self.chunks)

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> list[str]: ...

    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        left = at
        for path, numbers in self.chunks:
            if 0 <= left < len(numbers):
                return f"{path}#{numbers[left]}"
            left -= len(numbers)
        raise IndexError(at)


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
    chunk_names: ChunkNames = field(default_factory=ChunkNames)
    characters: int = 0
    straddling: int = 0
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

    def add_packed(self, packed: PackedConversations, number: int) -> None:
        """Add documents of a cache; `number` is that of the first sample."""
        numbers = number + np.cumsum(np.diff(packed.numbers, prepend=packed.numbers[:1]) != 0)
        self._add(packed.tokens, packed.starts, packed.lengths, packed.spans, packed.span_counts, numbers)
        self.chunk_names.chunks.append((packed.path, packed.numbers))

    def _add(self, ids: Array, starts: Array, *rest: Array) -> None:
        self.parts.append((ids.astype(self.dtype, copy=False), starts + self._tokens, *rest))
        self._tokens += len(ids)

    def all(self) -> Conversations:
        """All documents; tokens are not copied to stand one behind the other."""
        none = np.zeros(0, np.int64)
        empty = (np.zeros(0, self.dtype), none, none, np.zeros((0, 5), np.uint32), none, none)
        ids, *rest = zip(empty, *self.parts, strict=True)
        starts, lengths, spans, counts, numbers = map(np.concatenate, rest)
        names = self.names or self.chunk_names
        return Conversations(ids, starts, lengths, spans, counts, numbers, names, self.characters, self.straddling)


@dataclass(frozen=True, slots=True, eq=False)
class ConversationCut:
    """How much of every document is kept, and the samples that are left out."""

    lengths: Array  # (documents,) 0 for one that is left out
    failed: tuple[tuple[int, Failure], ...] = ()
    truncated: int = 0  # documents
    dropped: int = 0


def cut_long(made: Conversations, capacity: int, policy: Long) -> ConversationCut:
    """Apply the policy to documents longer than a row. Truncated ones end with the last whole turn that fits."""
    long = made.lengths > capacity
    if not long.any():
        return ConversationCut(made.lengths)
    first = int(np.flatnonzero(long)[0])
    if policy == "error":
        advice = "set long='truncate' or long='drop' (`--long`)"
        raise DocumentTooLong(made.names[first], int(made.lengths[first]), capacity, advice)
    kept = made.lengths.copy()
    if policy == "drop":
        kept[np.isin(made.numbers, made.numbers[long])] = 0
    else:
        ends = np.where((made.spans[:, 3] == _STOP) & (made.spans[:, 1] <= capacity), made.spans[:, 1], 0)
        fitting = np.zeros(len(kept), np.int64)
        np.maximum.at(fitting, made.span_document, ends)
        kept[long] = fitting[long]
    left = {int(number) for number in made.numbers[kept > 0]}
    lost = [at for at in np.flatnonzero(long).tolist() if int(made.numbers[at]) not in left]
    failed = {int(made.numbers[at]): _too_long(made, at, capacity, policy) for at in reversed(lost)}
    return ConversationCut(
        kept, tuple(failed.items()), int(np.count_nonzero(long & (kept > 0))), int(np.count_nonzero(kept == 0))
    )


def _too_long(made: Conversations, at: int, capacity: int, policy: Long) -> Failure:
    first = "" if policy == "drop" else ", and its first turn does not fit"
    return Failure(made.names[at], "too-long", f"{int(made.lengths[at]):,} tokens, a row holds {capacity:,}{first}")


def pack_conversations(made: Conversations, cut: ConversationCut, capacity: int, pad: int) -> dict[str, Array | Ragged]:
    """Return the columns of a chunk."""
    count = len(made.lengths)
    documents = Documents(made.ids, made.lengths, np.arange(count), [], made.starts)  # packing needs no names
    packed = pack_rows(documents, cut.lengths, capacity, pad)
    placed = packed.documents.values[:, 0].astype(np.int64)  # documents in the order of rows
    edges = packed.documents.offsets
    identity = np.column_stack([made.numbers, offsets_in_samples(made)])[placed].astype(np.uint32)
    spans, counts = kept_spans(made, cut)
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
        "last_turn": Ragged(last_turns(made, spans, counts)[placed].astype(np.uint32), edges),
    }


def offsets_in_samples(made: Conversations) -> Array:
    """Where each document begins if the documents of its sample stand one behind the other."""
    passed = np.cumsum(made.lengths) - made.lengths
    first = np.ones(len(made.numbers), np.bool_)
    first[1:] = made.numbers[1:] != made.numbers[:-1]
    begins: Array = passed[np.flatnonzero(first)][np.cumsum(first) - 1] if len(first) else passed
    return passed - begins


def kept_spans(made: Conversations, cut: ConversationCut) -> tuple[Array, Array]:
    """The spans of what is kept of each document, and how many."""
    if cut.lengths is made.lengths:
        return made.spans, made.span_counts
    document = made.span_document
    inside = made.spans[:, 1] <= cut.lengths[document]
    return made.spans[inside], np.bincount(document[inside], minlength=len(made.lengths))


def last_turns(made: Conversations, spans: Array, counts: Array) -> Array:
    """The last generated message of the conversation that each document belongs to."""
    document = np.repeat(np.arange(len(counts)), counts)
    last = np.zeros(int(made.numbers.max(initial=-1)) + 1, np.int64)
    stops = spans[:, 3] == _STOP
    np.maximum.at(last, made.numbers[document[stops]], spans[stops, 4])
    return last[made.numbers]


def ranges(starts: Array, counts: Array) -> Array:
    """`starts[0], starts[0] + 1, … ` for each count, one behind the other."""
    passed = np.cumsum(counts) - counts
    found: Array = np.arange(int(counts.sum())) + np.repeat(starts - passed, counts)
    return found


def chat_statistics(
    made: Conversations, cut: ConversationCut, columns: Mapping[str, Any], capacity: int
) -> dict[str, int | float | list[int]]:
    """The counts of one chunk, which are summed over chunks; those of tokens have the names of the token recipe."""
    spans = columns["spans"].values
    lengths = spans[:, 1] - spans[:, 0]
    seq_lens = columns["seq_lens"]
    used = np.diff(np.append(0, np.cumsum(seq_lens.values, dtype=np.int64))[seq_lens.offsets])
    kept = cut.lengths
    return {
        "conversations": _distinct(made.numbers[kept > 0]),
        "turns": int(np.count_nonzero(spans[:, 3] == _STOP)),
        "documents": int(np.count_nonzero(kept)),
        "documents_split": 0,
        "documents_cut": cut.truncated,
        "documents_dropped": cut.dropped,
        "characters": made.characters,
        "tokens_in": int(made.lengths.sum()),
        "tokens": int(used.sum()),
        "tokens_dropped": int((made.lengths - kept).sum()),
        "tokens_by_role": np.bincount(spans[:, 2], weights=lengths, minlength=len(ROLES)).astype(int).tolist(),
        "tokens_by_kind": np.bincount(spans[:, 3], weights=lengths, minlength=len(KINDS)).astype(int).tolist(),
        "tokens_straddling": made.straddling,
        "raw_bytes": sum(column.nbytes for column in columns.values()),
        "rows_by_use": np.bincount(used * USE_BINS // capacity, minlength=USE_BINS + 1).tolist(),
    }
