"""The documents of a slice as one run of ids: encoded a batch at a time, each with what begins and ends it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.columns import Array
from forebay.errors import TokenizerUnusable
from forebay.source import Failure, Sample
from forebay.tokens.encoders import Encoder

BATCH_MARKS = 1 << 20
BATCH_DOCUMENTS = 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """What is put around the ids of a document, and what ids there are."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    size: int  # ids are below it
    dtype: np.dtype[Any]
    control: frozenset[int] = frozenset()  # ids that no text may have

    def around(self, ids: Array, offsets: Array) -> tuple[Array, Array]:
        """The ids of some documents with begin and end, and the length of each."""
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
    """What was encoded so far."""

    ids: Array
    lengths: Array  # (documents,) int64
    numbers: Array  # (documents,) int64, which sample of the slice a document is
    names: list[str]  # (documents,) the ids of the samples
    failed: list[tuple[int, Failure]] = field(default_factory=list)  # which sample, and why
    characters: int = 0

    @property
    def failures(self) -> tuple[Failure, ...]:
        """In the order of the samples."""
        return tuple(failure for _, failure in sorted(self.failed, key=lambda each: each[0]))


def encode_documents(samples: Iterable[Sample], encoder: Encoder, frame: Frame) -> Documents:
    """Encode all samples. What is no text, or empty, or would forge a control token, is set aside."""
    ids: list[Array] = [np.zeros(0, frame.dtype)]
    lengths: list[Array] = [np.zeros(0, np.int64)]
    numbers: list[int] = []
    found = Documents(ids[0], lengths[0], lengths[0], [])
    for batch in _batches(_texts(samples, found, numbers)):
        encoded = _encoded(batch, encoder, frame)
        forged = _forged(*encoded, frame)
        if forged:
            encoded = _encoded(_set_aside(forged, batch, found, numbers), encoder, frame)
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
    marks = 0
    for text in texts:
        batch.append(text)
        marks += len(text)
        if marks >= BATCH_MARKS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, marks = [], 0
    if batch:
        yield batch


def _encoded(batch: list[str], encoder: Encoder, frame: Frame) -> tuple[Array, Array]:
    ids, offsets = encoder.encode(batch)
    if len(ids) and int(ids.max()) >= frame.size:
        raise TokenizerUnusable("", f"it gave the id {int(ids.max()):,}, but its vocabulary has {frame.size:,}")
    return ids, offsets


def _forged(ids: Array, offsets: Array, frame: Frame) -> list[int]:
    """Which texts became a control token: some models know its text as a word like any other."""
    if not frame.control or not len(ids) or int(ids.max()) < min(frame.control):
        return []
    places = np.flatnonzero(np.isin(ids, list(frame.control)))
    found: list[int] = np.unique(np.searchsorted(offsets, places, side="right") - 1).tolist()
    return found


def _set_aside(forged: list[int], batch: list[str], found: Documents, numbers: list[int]) -> list[str]:
    """The batch, which is the last of what was found so far, without some of its texts: those are failures."""
    first = len(numbers) - len(batch)
    for at in reversed(forged):
        name, number = found.names.pop(first + at), numbers.pop(first + at)
        why = Failure(name, "control-token", "the tokenizer makes a control token of its text")
        found.failed.append((number, why))
        found.characters -= len(batch[at])
    return [text for at, text in enumerate(batch) if at not in forged]
