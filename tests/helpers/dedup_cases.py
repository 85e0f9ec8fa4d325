"""A recipe that leaves out duplicates, a source of many samples that takes no room, and what they should come to.

Importable, so that worker processes find them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import xxhash

import forebay as fb
from forebay.building import dedup
from forebay.columns import Column, Ragged
from forebay.recipe import Rows
from forebay.source import Failure, Part, PartDigest, Sample, Source, SourceFile

LINES = 1000  # to a file of `CountingSource`


class DistinctRecipe(fb.RawRecipe, frozen=True, kw_only=True):
    """Every line once, but blank ones as often as they come. A line that holds `bad` is a failure.

    With `alike`, lines are equal that have so many first bytes in common; their identities then share one upper half.
    """

    kind: ClassVar[str] = "distinct"

    alike: int = 0

    def identity(self, sample: Sample) -> bytes | None:
        if not sample.data:
            return None
        if self.alike:
            return (b"\1" + sample.data[: self.alike]).rjust(16, b"\0")
        return xxhash.xxh3_128_digest(sample.data)

    def make(self, samples: Iterable[Sample]) -> Rows:
        taken = list(samples)
        bad = tuple(Failure(sample.id, "bad") for sample in taken if b"bad" in sample.data)
        made = fb.RawRecipe.make(self, [sample for sample in taken if b"bad" not in sample.data])
        return Rows(made.columns, (*bad, *made.failures), made.statistics)


class NoisyRecipe(DistinctRecipe, frozen=True, kw_only=True):
    """Remembers which samples of this process it was asked for."""

    asked: ClassVar[list[str]] = []

    def identity(self, sample: Sample) -> bytes | None:
        self.asked.append(sample.id)
        return DistinctRecipe.identity(self, sample)


def distinct_lines(files: Sequence[Sequence[bytes]], alike: int = 0) -> list[bytes]:
    """The definition: what is kept of some lines, the first of equals, in order."""
    seen: set[bytes] = set()
    kept = []
    for line in (line for file in files for line in file):
        name = line[:alike] if alike else line
        if not line or name not in seen:
            kept.append(line)
        seen.add(name)
    return kept


def rows_of(root: Any) -> list[bytes]:
    """Every row of a cache of raw lines."""
    cache = fb.open_cache(root)
    rows = cache.read(np.arange(len(cache)))["data"]
    assert isinstance(rows, Ragged)
    return [bytes(rows[row]) for row in range(len(rows))]


def write_file(path: Path, lines: Sequence[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


class CountRecipe(fb.RawRecipe, frozen=True, kw_only=True):
    """Numbers, of which all that leave the same rest when divided by `period` are the same."""

    kind: ClassVar[str] = "counts"
    sample_ids: ClassVar[str] = "number"

    period: int

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="number", dtype="int64"),)

    def identity(self, sample: Sample) -> bytes:
        return xxhash.xxh3_128_digest((sample.data % self.period).to_bytes(8, "little"))

    def make(self, samples: Iterable[Sample]) -> Rows:
        return Rows({"number": np.array([sample.data for sample in samples], np.int64)})


@dataclass(frozen=True)
class CountingSource(Source):
    """The numbers from 0 on, a thousand to a file that is nowhere."""

    count: int
    unit: ClassVar[str] = "samples"

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "counting"}

    def files(self) -> list[SourceFile]:
        return [self.look(str(number)) for number in range(self.count // LINES)]

    def look(self, path: str) -> SourceFile:
        return SourceFile(path, LINES)

    def weight(self, file: SourceFile) -> int:
        return LINES

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        if start < LINES:
            yield LINES

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Iterator[Sample]:
        first = int(part.file.path) * LINES
        for number in range(first + part.start, first + part.stop):
            yield Sample(str(number), number)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return 0


@contextmanager
def sorting_in(size: int | None) -> Iterator[None]:
    """Sort identities in `size` bytes of memory; None: as usual."""
    with patch.object(dedup, "SORT_BYTES", dedup.SORT_BYTES if size is None else size):
        yield
