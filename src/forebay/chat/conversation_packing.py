"""Lay encoded conversations into rows, best fit and unsplit, with their spans.

row     tokens     ┌ conversation 0 ──────────────┬ conversation 4 ──┬ padding ┐
        seq_lens   │ 9                            │ 5                │         │
        spans      │ header prompt response stop  │ prompt response… │         │
        last_turn  │ 1                            │ 3                │         │
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from forebay.chat.encoding import Encoded
from forebay.chat.token_bytes import offsets_of
from forebay.columns import Array, Ragged
from forebay.masks.train_on import KINDS, ROLES
from forebay.source import Failure, Sample, SampleBatch
from forebay.tokens.packing import DocumentCut, Documents, document_too_long, pack_rows
from forebay.tokens.recipe import row_statistics

Long = Literal["error", "drop", "truncate"]
_STOP = KINDS.index("stop")


@dataclass(frozen=True, slots=True, eq=False)
class Conversations:
    """Encoded documents by sample: one each, or several where its template changes history."""

    ids: Sequence[Array]  # parts, one behind the other; no document is in two of them
    starts: Array  # (documents,) where each begins in `ids`
    lengths: Array  # (documents,) tokens
    spans: Array  # (spans, 5) uint32: start and stop in the document, role, kind, message
    span_counts: Array  # (documents,)
    numbers: Array  # (documents,) the number of the sample in the chunk, ascending
    names: Sequence[str]  # (documents,) the ids of the samples
    characters: int = 0
    straddling: int = 0
    headers: int = 0

    @property
    def span_document(self) -> Array:
        return np.repeat(np.arange(len(self.lengths)), self.span_counts)

    @property
    def count(self) -> int:
        return _distinct(self.numbers)

    def documents(self, first: int, stop: int) -> "Conversations":
        some, span_edges = slice(first, stop), offsets_of(self.span_counts)
        return replace(
            self,
            starts=self.starts[some],
            lengths=self.lengths[some],
            spans=self.spans[span_edges[first] : span_edges[stop]],
            span_counts=self.span_counts[some],
            numbers=self.numbers[some],
            names=self.names[some],
        )

    def numbered_from(self, number: int) -> "Conversations":
        """The same with consecutive numbers of samples."""
        return replace(self, numbers=number + np.cumsum(np.diff(self.numbers, prepend=self.numbers[:1]) != 0))


def encoded_conversations(
    encoded: Encoded, keep: Array, numbers: Array, names: Sequence[str], characters: int
) -> Conversations:
    """Those documents of a batch to keep, with the number and the id of the sample of each."""
    lengths = encoded.lengths[keep]
    return Conversations(
        [encoded.ids[np.repeat(keep, encoded.lengths)]],
        offsets_of(lengths)[:-1],
        lengths,
        encoded.spans[np.repeat(keep, encoded.span_counts)],
        encoded.span_counts[keep],
        numbers,
        names,
        characters,
        encoded.straddling,
        encoded.headers,
    )


def joined(parts: Sequence[Conversations], dtype: np.dtype[Any]) -> Conversations:
    """The documents of all parts in order."""
    none = np.zeros(0, np.int64)
    parts = [Conversations([np.zeros(0, dtype)], none, none, np.zeros((0, 5), np.uint32), none, none, []), *parts]
    begins = offsets_of([sum(map(len, part.ids)) for part in parts])
    return Conversations(
        ids=[ids.astype(dtype, copy=False) for part in parts for ids in part.ids],
        starts=np.concatenate([part.starts + begin for part, begin in zip(parts, begins, strict=False)]),
        lengths=np.concatenate([part.lengths for part in parts]),
        spans=np.concatenate([part.spans for part in parts]),
        span_counts=np.concatenate([part.span_counts for part in parts]),
        numbers=np.concatenate([part.numbers for part in parts]),
        names=[name for part in parts for name in part.names],
        characters=sum(part.characters for part in parts),
        straddling=sum(part.straddling for part in parts),
        headers=sum(part.headers for part in parts),
    )


@dataclass(frozen=True, slots=True)
class PackedConversations(SampleBatch):
    """The conversations of a chunk of a cache, to be packed into other rows."""

    conversations: Conversations
    signature: str  # of the recipe that made them

    @property
    def count(self) -> int:
        return self.conversations.count

    def samples(self) -> Iterator[Sample]:
        """A sample with the documents of each conversation."""
        numbers, names = self.conversations.numbers, self.conversations.names
        edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)] if len(numbers) else []
        for first, stop in pairwise(edges):
            yield Sample(names[first], replace(self, conversations=self.conversations.documents(first, stop)))


def stored_conversations(rows: Mapping[str, Any], path: str) -> Conversations:
    """The conversations in the rows of a chunk, in the order of their numbers.

    Raises ValueError where a row has more tokens than its width, or not as many lengths as documents.
    """
    tokens, seq_lens, documents, spans = (rows[name] for name in ("tokens", "seq_lens", "documents", "spans"))
    width, lengths = tokens.shape[1], seq_lens.values.astype(np.int64)
    if not np.array_equal(seq_lens.offsets, documents.offsets):
        raise ValueError("its rows have not as many lengths as documents")
    passed = offsets_of(lengths)
    edges = passed[seq_lens.offsets.astype(np.int64)]
    if (np.diff(edges) > width).any():
        raise ValueError(f"a row has documents of more than {width:,} tokens")
    row = np.repeat(np.arange(len(tokens)), seq_lens.lengths.astype(np.int64))
    in_row = passed[:-1] - edges[row]
    starts = row * width + in_row
    span_row = np.repeat(np.arange(len(tokens)), spans.lengths.astype(np.int64))
    owner = np.searchsorted(starts, span_row * width + spans.values[:, 0], side="right") - 1
    if (owner < 0).any():
        raise ValueError("it has a span before its first document")
    counts = np.bincount(owner, minlength=len(starts))
    order = np.lexsort((documents.values[:, 1], documents.values[:, 0]))
    moved = spans.values.take(ranges(offsets_of(counts)[order], counts[order]), axis=0)
    moved[:, :2] -= np.repeat(in_row[order].astype(np.uint32), counts[order])[:, None]
    numbers = documents.values[order, 0].astype(np.int64)
    names = [f"{path}#{number}" for number in numbers.tolist()]
    return Conversations([tokens.reshape(-1)], starts[order], lengths[order], moved, counts[order], numbers, names)


def cut_long(encoded: Conversations, capacity: int, policy: Long) -> DocumentCut:
    """Apply the policy to documents longer than a row. Truncated ones end with the last whole turn that fits."""
    long = encoded.lengths > capacity
    if not long.any():
        return DocumentCut(encoded.lengths)
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
    return DocumentCut(lengths, tuple(failed.items()))


def _too_long(encoded: Conversations, at: int, capacity: int, policy: Long) -> Failure:
    first = "" if policy == "drop" else ", and its first turn does not fit"
    detail = f"{int(encoded.lengths[at]):,} tokens, a row holds {capacity:,}{first}"
    return Failure(encoded.names[at], "too-long", detail)


def pack_conversations(encoded: Conversations, cut: DocumentCut, capacity: int, pad: int) -> dict[str, Array | Ragged]:
    """Return the columns of a chunk."""
    count = len(encoded.lengths)
    documents = Documents(encoded.ids, encoded.lengths, np.arange(count), [], encoded.starts)  # packing needs no names
    packed = pack_rows(documents, cut.lengths, capacity, pad)
    in_rows = packed["documents"].values[:, 0].astype(np.int64)  # documents in the order of rows
    edges = packed["documents"].offsets
    identity = np.column_stack([encoded.numbers, offsets_in_samples(encoded)])[in_rows].astype(np.uint32)
    document = encoded.span_document
    inside = encoded.spans[:, 1] <= cut.lengths[document]
    spans, counts = encoded.spans[inside], np.bincount(document[inside], minlength=count)
    each = ranges(offsets_of(counts)[in_rows], counts[in_rows])
    lengths = packed["seq_lens"].values.astype(np.int64)
    passed = np.cumsum(lengths) - lengths
    in_row = passed - np.repeat(passed[edges[:-1]] if len(lengths) else passed, np.diff(edges))
    moved = spans.take(each, axis=0)
    moved[:, :2] += np.repeat(in_row.astype(np.uint32), counts[in_rows])[:, None]
    span_edges = offsets_of(counts[in_rows])[edges]
    return {
        **packed,
        "documents": Ragged(identity, edges),
        "spans": Ragged(moved, span_edges),
        "last_turn": Ragged(last_turns(encoded, spans, counts)[in_rows].astype(np.uint32), edges),
    }


def offsets_in_samples(encoded: Conversations) -> Array:
    """The offset of each document in its sample."""
    passed = np.cumsum(encoded.lengths) - encoded.lengths
    first = np.ones(len(encoded.numbers), np.bool_)
    first[1:] = encoded.numbers[1:] != encoded.numbers[:-1]
    begins: Array = passed[np.flatnonzero(first)][np.cumsum(first) - 1] if len(first) else passed
    return passed - begins


def last_turns(encoded: Conversations, spans: Array, counts: Array) -> Array:
    """The last generated message of the conversation that each document belongs to."""
    document = np.repeat(np.arange(len(counts)), counts)
    last = np.zeros(int(encoded.numbers.max(initial=-1)) + 1, np.int64)
    stops = spans[:, 3] == _STOP
    np.maximum.at(last, encoded.numbers[document[stops]], spans[stops, 4])
    return last[encoded.numbers]


def _distinct(ascending: Array) -> int:
    return len(ascending) and 1 + int(np.count_nonzero(np.diff(ascending)))


def ranges(starts: Array, counts: Array) -> Array:
    """`starts[0], starts[0] + 1, … ` for each count, one behind the other."""
    passed = np.cumsum(counts) - counts
    indices: Array = np.arange(int(counts.sum())) + np.repeat(starts - passed, counts)
    return indices


def chat_statistics(
    encoded: Conversations, cut: DocumentCut, columns: Mapping[str, Any], capacity: int
) -> dict[str, int | float | list[int]]:
    """The counts of one chunk, which are summed over chunks."""
    spans = columns["spans"].values
    return {
        "conversations": _distinct(encoded.numbers[cut.lengths > 0]),
        "turns": int(np.count_nonzero(spans[:, 3] == _STOP)),
        **row_statistics(encoded.lengths, cut.lengths, columns, encoded.characters, capacity),
        "tokens_straddling": encoded.straddling,
        **tokens_by_label(spans),
        **({"header_tokens_trained": encoded.headers} if encoded.headers else {}),
    }


def tokens_by_label(spans: Array) -> dict[str, list[int]]:
    """How many tokens of some spans have each role and each kind."""
    lengths = spans[:, 1] - spans[:, 0]
    counts = {"role": (2, len(ROLES)), "kind": (3, len(KINDS))}
    return {
        f"tokens_by_{name}": np.bincount(spans[:, at], weights=lengths, minlength=count).astype(int).tolist()
        for name, (at, count) in counts.items()
    }


def shown_by_label(statistics: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The same with the names of roles and kinds."""
    names = {"tokens_by_role": ROLES, "tokens_by_kind": KINDS}
    return {name: dict(zip(labels, statistics.get(name, []), strict=False)) for name, labels in names.items()}
