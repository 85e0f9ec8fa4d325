"""Encode the documents of a chunk and pack them into rows.

documents   ├── 7 ──┤├─ 3 ─┤├ 2 ┤           capacity 5
pieces      ├ 5 ┤├2┤├─ 3 ─┤├ 2 ┤           a document longer than a row is split
rows        ├ 5 ┤  ├─ 3 ─┤├2┤  ├ 2 ┤···   best fit: every piece goes where it leaves the least room

row     tokens     ┌ document 0 ─────┬ document 4 ┬ padding ┐
        seq_lens   │ 7               │ 3          │         │
        documents  │ (0, 512)        │ (4, 0)     │         │     number of the sample in the chunk, offset of the piece
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from forebay import kernels
from forebay.columns import Array, Ragged
from forebay.errors import ModelUnusable, RecipeInvalid
from forebay.source import BatchedSamples, Failure, Sample, SampleBatch, TextBatch
from forebay.tokens.piecewise import PiecewiseEncoder

BATCH_DOCUMENTS = 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """The begin and end tokens of a document, -1 for none, and the range of ids."""

    begin: int
    end: int
    size: int  # ids are below it
    dtype: np.dtype[Any]
    control: frozenset[int] = frozenset()  # ids that text must not produce

    def around(self, ids: Array, offsets: Array) -> tuple[Array, Array]:
        """The ids of documents with begin and end tokens, and the length of each."""
        lengths = np.diff(offsets) + (self.begin >= 0) + (self.end >= 0)
        framed, ids = np.empty(int(lengths.sum()), self.dtype), np.ascontiguousarray(ids, np.uint32)
        kernels.frame_documents(framed, framed.itemsize, ids, offsets, self.begin, self.end)
        return framed, lengths


@dataclass(slots=True)
class Documents:
    """The encoded documents of a chunk."""

    ids: Sequence[Array]  # parts, one behind the other; no document is in two of them
    lengths: Array  # (documents,) int64
    numbers: Array  # (documents,) int64, the number of the sample in the chunk
    names: list[str]  # (documents,) the ids of the samples
    starts: Array | None = None  # (documents,) int64, where each begins in `ids`; one behind the other if None
    failed: list[tuple[int, Failure]] = field(default_factory=list)  # sample number, failure
    characters: int = 0


def encode_documents(samples: Iterable[Sample], encoder: PiecewiseEncoder, frame: Frame) -> Documents:
    """Encode all samples. What is not text, is empty, too large, becomes no token, or forges a control token fails."""
    ids: list[Array] = [np.zeros(0, frame.dtype)]
    lengths: list[Array] = [np.zeros(0, np.int64)]
    numbers: list[int] = []
    documents = Documents(ids, lengths[0], lengths[0], [])
    for batch in _batches(samples, encoder, documents, numbers):
        encoded = encoder.encode(batch)
        refused = _refused(*encoded, frame)
        if refused:
            encoded = encoder.encode(_without_refused(refused, batch, documents, numbers))
        del batch  # before more memory is taken, and before the next one is read
        framed, each = frame.around(*encoded)
        del encoded
        ids.append(framed)
        lengths.append(each)
    documents.lengths = np.concatenate(lengths)
    documents.numbers = np.array(numbers, np.int64)
    return documents


def _batches(
    samples: Iterable[Sample], encoder: PiecewiseEncoder, documents: Documents, numbers: list[int]
) -> Iterator[list[str]]:
    """The texts of the samples in batches for the encoder; failures and the names of the others go to `documents`."""
    batch: list[str] = []
    number = characters = 0
    for item in _texts_together(samples, encoder):
        if isinstance(item, TextBatch):
            batch += item.texts
            documents.names += item.ids
            numbers.extend(range(number, number := number + len(item.texts)))
            added = sum(map(len, item.texts))
        else:
            text, added = _text(item, encoder), 0
            if isinstance(text, Failure):
                documents.failed.append((number, text))
            else:
                batch.append(text)
                documents.names.append(item.id)
                numbers.append(number)
                added = len(text)
            del text
            number += 1
        del item
        characters += added
        if characters + 2 * added > encoder.call_chars or len(batch) >= BATCH_DOCUMENTS:  # the next may be longer
            documents.characters += characters
            full, batch, characters = [batch], [], 0
            yield full.pop()  # no reference to it stays here
    if batch:
        documents.characters += characters
        yield batch


def _texts_together(samples: Iterable[Sample], encoder: PiecewiseEncoder) -> Iterator[Sample | TextBatch]:
    for item in samples.batches() if isinstance(samples, BatchedSamples) else samples:
        if isinstance(item, SampleBatch) and not (isinstance(item, TextBatch) and encoder.are_short(item.texts)):
            yield from item.samples()
        else:
            holder = [item]
            del item
            yield holder.pop()  # no reference to it stays here: it may be large


def _text(sample: Sample, encoder: PiecewiseEncoder) -> str | Failure:
    data = sample.data
    if isinstance(data, bytes):
        try:
            data = data.decode()
        except UnicodeDecodeError as error:
            return Failure(sample.id, "not-utf8", f"byte {error.start:,} of the document: {error.reason}")
    if not isinstance(data, str):
        return Failure(sample.id, "not-text", f"it is of type {type(data).__name__}")
    if not data:
        return Failure(sample.id, "empty", "the document has no text")
    problem = encoder.problem(data)
    return data if problem is None else Failure(sample.id, "too-large", problem)


_NO_TOKEN = ("empty", "the tokenizer makes no token of its text")  # of blanks, where it strips them
_FORGED = ("control-token", "the tokenizer makes a control token of its text")


def _refused(ids: Array, offsets: Array, frame: Frame) -> dict[int, tuple[str, str]]:
    """The texts without a token, and those with a control token: some models encode its text like any other word."""
    largest = int(ids.max(initial=0))
    if len(ids) and largest >= frame.size:
        raise ModelUnusable(f"the tokenizer returned the id {largest:,}, but its vocabulary has {frame.size:,} ids")
    problems = dict.fromkeys(np.flatnonzero(offsets[1:] == offsets[:-1]).tolist(), _NO_TOKEN)
    if frame.control and largest >= min(frame.control):
        forged = np.flatnonzero(np.isin(ids, list(frame.control)))
        problems |= dict.fromkeys(np.unique(np.searchsorted(offsets, forged, side="right") - 1).tolist(), _FORGED)
    return problems


def _without_refused(
    refused: Mapping[int, tuple[str, str]], batch: list[str], documents: Documents, numbers: list[int]
) -> list[str]:
    """The batch, which is the end of `documents`, without rejected texts, which become failures."""
    first = len(numbers) - len(batch)
    for at in sorted(refused, reverse=True):
        name, number = documents.names.pop(first + at), numbers.pop(first + at)
        documents.failed.append((number, Failure(name, *refused[at])))
        documents.characters -= len(batch[at])
    return [text for at, text in enumerate(batch) if at not in refused]


@dataclass(frozen=True, slots=True, eq=False)
class DocumentPieces:
    """Documents or parts of them that fit a row, in the order of documents."""

    document: Array  # (pieces,) int64, the index of the document
    offset: Array  # (pieces,) int64, the offset of the piece in its document
    length: Array  # (pieces,) int64


def split_documents(lengths: Array, capacity: int) -> DocumentPieces:
    """Cut documents longer than `capacity` into full pieces and a rest.

    >>> split_documents(np.array([7, 3]), 5).length.tolist()
    [5, 2, 3]
    """
    lengths = np.asarray(lengths, np.int64)
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts
    offset = (np.arange(len(document)) - first[document]) * capacity
    return DocumentPieces(document, offset, np.minimum(lengths[document] - offset, capacity))


def pack_best_fit(lengths: Array, capacity: int) -> Array:
    """The bin of every item, best fit decreasing; of equally full bins, the oldest is used.

    Bins are numbered by their first item, in the order of items.

    >>> pack_best_fit(np.array([5, 2, 4, 3]), 7).tolist()
    [0, 0, 1, 1]
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths must be 1 to {capacity} (got {lengths.min()} to {lengths.max()})")
    # A stable sort of small integers is a radix sort: linear in the items.
    order = np.argsort((capacity - lengths).astype(np.min_scalar_type(capacity)), kind="stable")
    bins = np.empty(len(lengths), np.int64)
    descending = np.empty(len(lengths), np.int64)
    kernels.best_fit(descending, lengths[order], capacity)
    bins[order] = descending
    return _numbered_by_first_item(bins)


def _numbered_by_first_item(bins: Array) -> Array:
    """The same grouping, with bins numbered in the order of their first items."""
    first = np.empty(bins.max() + 1 if len(bins) else 0, np.int64)
    first[bins[::-1]] = np.arange(len(bins))[::-1]  # of several writes to one index, the last one counts
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbered: Array = rank[bins]
    return numbered


LongDocuments = Literal["split", "truncate", "drop", "error"]


@dataclass(frozen=True, slots=True, eq=False)
class DocumentCut:
    """The tokens to store of every document, and the samples that are left out."""

    lengths: Array  # (documents,) int64, 0 for a dropped document
    failed: tuple[tuple[int, Failure], ...] = ()  # sample number, failure


def cut_long(documents: Documents, capacity: int, policy: LongDocuments) -> DocumentCut:
    """Apply the policy for documents longer than a row."""
    lengths = documents.lengths
    long = np.flatnonzero(lengths > capacity)
    if policy == "split" or not len(long):
        return DocumentCut(lengths)
    if policy == "truncate":
        return DocumentCut(np.minimum(lengths, capacity))
    first = int(long[0])
    if policy == "error":
        raise document_too_long(documents.names[first], int(lengths[first]), capacity)
    cut_lengths = lengths.copy()
    cut_lengths[long] = 0
    details = [f"{length:,} tokens, a row holds {capacity:,}" for length in lengths[long].tolist()]
    failures = [Failure(documents.names[at], "too-long", detail) for at, detail in zip(long, details, strict=True)]
    return DocumentCut(cut_lengths, tuple(zip(documents.numbers[long].tolist(), failures, strict=True)))


def in_order(failed: Iterable[tuple[int, Failure]]) -> tuple[Failure, ...]:
    """The failures of a chunk in the order of their samples."""
    return tuple(failure for _, failure in sorted(failed, key=lambda each: each[0]))


def pack_rows(documents: Documents, lengths: Array, capacity: int, pad: int) -> dict[str, Any]:
    """The columns of a chunk: the kept part of every document, packed into rows, best fit."""
    pieces = split_documents(lengths, capacity)
    row = pack_best_fit(pieces.length, capacity)
    order = np.argsort(row, kind="stable")  # by row, within it in the order of documents
    placed = DocumentPieces(pieces.document[order], pieces.offset[order], pieces.length[order])
    edges = np.concatenate([[0], np.cumsum(np.bincount(row))]) if len(row) else np.zeros(1, np.int64)
    which = documents.numbers[placed.document]
    return {
        "tokens": _laid_out(documents, placed, row[order], edges, capacity, pad),
        "seq_lens": Ragged(placed.length.astype(np.uint32), edges),
        "documents": Ragged(np.stack([which, placed.offset], axis=1).astype(np.uint32), edges),
    }


def _laid_out(documents: Documents, placed: DocumentPieces, row: Array, edges: Array, capacity: int, pad: int) -> Array:
    tokens = np.full((len(edges) - 1, capacity), pad, documents.ids[0].dtype)
    ends = np.cumsum(placed.length)
    begins = ends - placed.length
    first = begins[edges[:-1]] if len(row) else begins
    targets = row * capacity + begins - first[row]
    starts = np.cumsum(documents.lengths) - documents.lengths if documents.starts is None else documents.starts
    sources = starts[placed.document] + placed.offset
    flat, part_start = tokens.reshape(-1), 0
    for ids in documents.ids:
        here = np.flatnonzero((sources >= part_start) & (sources < part_start + len(ids)))
        copy_runs(flat, ids, *_runs(targets[here], sources[here] - part_start, placed.length[here]))
        part_start += len(ids)
    return tokens


def copy_runs(out: Array, ids: Array, targets: Array, starts: Array, lengths: Array) -> None:
    """Runs are long: copying each is several times faster than indexing per token."""
    in_bytes = (each * out.itemsize for each in (targets, starts, lengths))
    kernels.copy_runs(out, np.ascontiguousarray(ids, out.dtype), *in_bytes)


def _runs(targets: Array, sources: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Join pieces that are adjacent both in their document and in the rows into one copy."""
    if not len(lengths):
        return targets, sources, lengths
    continues = (targets[1:] == targets[:-1] + lengths[:-1]) & (sources[1:] == sources[:-1] + lengths[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    return targets[first], sources[first], np.add.reduceat(lengths, first)


def document_too_long(document: str, tokens: int, capacity: int, advice: str = "set long='split'") -> RecipeInvalid:
    message = f"document '{document}' has {tokens:,} tokens; rows hold {capacity:,}"
    return RecipeInvalid(message, hint=f"raise `sequence_length`, or {advice}", document=document, tokens=tokens)
