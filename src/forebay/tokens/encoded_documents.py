"""Encode the documents of a chunk into one array of ids, in batches, with begin and end tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.columns import Array
from forebay.errors import TokenizerUnusable
from forebay.source import Failure, Sample
from forebay.tokens.encoders import Encoder

BATCH_CHARS = 1 << 20
BATCH_DOCUMENTS = 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """The begin and end tokens of a document, and the range of ids."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    size: int  # ids are below it
    dtype: np.dtype[Any]
    control: frozenset[int] = frozenset()  # ids that text must not produce

    def around(self, ids: Array, offsets: Array) -> tuple[Array, Array]:
        """The ids of documents with begin and end tokens, and the length of each."""
        lengths = np.diff(offsets) + len(self.begin) + len(self.end)
        framed = np.empty(int(lengths.sum()), self.dtype)
        stops = np.cumsum(lengths)
        inside = np.ones(len(framed), np.bool_)
        for edge, number in [(stops - lengths, self.begin), (stops - 1, self.end)]:
            if number:
                framed[edge] = number[0]
                inside[edge] = False
        framed[inside] = ids
        return framed, lengths


@dataclass(slots=True)
class Documents:
    """The encoded documents of a chunk."""

    ids: Array
    lengths: Array  # (documents,) int64
    numbers: Array  # (documents,) int64, the number of the sample in the chunk
    names: list[str]  # (documents,) the ids of the samples
    failed: list[tuple[int, Failure]] = field(default_factory=list)  # sample number, failure
    characters: int = 0

    @property
    def failures(self) -> tuple[Failure, ...]:
        """In the order of the samples."""
        return tuple(failure for _, failure in sorted(self.failed, key=lambda each: each[0]))


def encode_documents(samples: Iterable[Sample], encoder: Encoder, frame: Frame) -> Documents:
    """Encode all samples. A sample that is not text, is empty, or would forge a control token is a failure."""
    ids: list[Array] = [np.zeros(0, frame.dtype)]
    lengths: list[Array] = [np.zeros(0, np.int64)]
    numbers: list[int] = []
    found = Documents(ids[0], lengths[0], lengths[0], [])
    for batch in _batches(_texts(samples, found, numbers)):
        encoded = _encoded(batch, encoder, frame)
        forged = _forged(*encoded, frame)
        if forged:
            encoded = _encoded(_without_forged(forged, batch, found, numbers), encoder, frame)
        framed, each = frame.around(*encoded)
        ids.append(framed)
        lengths.append(each)
    found.ids, found.lengths = np.concatenate(ids), np.concatenate(lengths)
    found.numbers = np.array(numbers, np.int64)
    return found


def _texts(samples: Iterable[Sample], found: Documents, numbers: list[int]) -> Iterator[str]:
    for number, sample in enumerate(samples):
        text = _text(sample)
        if isinstance(text, Failure):
            found.failed.append((number, text))
            continue
        found.characters += len(text)
        found.names.append(sample.id)
        numbers.append(number)
        yield text


def _text(sample: Sample) -> str | Failure:
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
    return data


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= BATCH_CHARS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(batch: list[str], encoder: Encoder, frame: Frame) -> tuple[Array, Array]:
    ids, offsets = encoder.encode(batch)
    if len(ids) and int(ids.max()) >= frame.size:
        raise TokenizerUnusable("", f"it returned the id {int(ids.max()):,}, but its vocabulary has {frame.size:,} ids")
    return ids, offsets


def _forged(ids: Array, offsets: Array, frame: Frame) -> list[int]:
    """The texts that produced a control token: some models encode its text like any other word."""
    if not frame.control or not len(ids) or int(ids.max()) < min(frame.control):
        return []
    places = np.flatnonzero(np.isin(ids, list(frame.control)))
    found: list[int] = np.unique(np.searchsorted(offsets, places, side="right") - 1).tolist()
    return found


def _without_forged(forged: list[int], batch: list[str], found: Documents, numbers: list[int]) -> list[str]:
    """The batch, which is the end of `found`, without the forged texts, which become failures."""
    first = len(numbers) - len(batch)
    for at in reversed(forged):
        name, number = found.names.pop(first + at), numbers.pop(first + at)
        why = Failure(name, "control-token", "the tokenizer makes a control token of its text")
        found.failed.append((number, why))
        found.characters -= len(batch[at])
    return [text for at, text in enumerate(batch) if at not in forged]
