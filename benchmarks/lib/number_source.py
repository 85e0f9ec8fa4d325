"""A source of numbers and a recipe that makes rows of them: data of any size without any files to read."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np

import forebay as fb
from forebay.source import Source, Unit


@dataclass(frozen=True, slots=True)
class NumberSource(Source):
    """The numbers from 0 to `count`, as one file that is not there."""

    unit: ClassVar[Unit] = "samples"
    count: int

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "numbers", "count": self.count}

    def files(self) -> list[fb.SourceFile]:
        return [self.look("numbers")]

    def look(self, path: str) -> fb.SourceFile:
        return fb.SourceFile(path=path, size=self.count)

    def weight(self, file: fb.SourceFile) -> int:
        return self.count

    def cuts(self, file: fb.SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        yield from range(start + first, self.count, every)
        yield self.count

    def scanned(self, file: fb.SourceFile) -> fb.SourceFile:
        return file

    def read(
        self, part: fb.Part, *, digest: fb.source.PartDigest | None = None, preview: bool = False
    ) -> Iterable[fb.Sample]:
        return (fb.Sample(str(number), number) for number in range(part.start, part.stop))

    def digest(self, file: fb.SourceFile, start: int, stop: int) -> int:
        return start ^ stop


class NoiseRecipe(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """Rows of `width` random uint16, the same for the same number."""

    kind: ClassVar[str] = "noise"
    revision: ClassVar[int] = 1
    width: int
    chunk_rows: int

    def columns(self) -> tuple[fb.Column, ...]:
        return (fb.Column(name="noise", dtype="uint16", shape=(self.width,)),)

    def chunk_target(self) -> fb.ChunkTarget:
        return fb.ChunkTarget(rows=self.chunk_rows)

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        numbers = [sample.data for sample in samples]
        random = np.random.default_rng(numbers[0] if numbers else 0)
        shape = (len(numbers), self.width)
        return fb.Rows({"noise": random.integers(0, 1 << 16, shape, np.uint16)})


class NarrowRecipe(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """Each number is a chunk of 8000 short rows, in as many blocks as rows of 4 KiB would be: an index of any size."""

    kind: ClassVar[str] = "narrow"
    revision: ClassVar[int] = 1
    chunk_rows: int = 8000
    width: int = 8

    def columns(self) -> tuple[fb.Column, ...]:
        return (fb.Column(name="tokens", dtype="uint16", shape=(self.width,), rows_per_block=16),)

    def chunk_target(self) -> fb.ChunkTarget:
        return fb.ChunkTarget(rows=self.chunk_rows)

    def make(self, samples: Iterable[fb.Sample]) -> fb.Rows:
        made = [np.full((self.chunk_rows, self.width), sample.data % 65_536, np.uint16) for sample in samples]
        return fb.Rows({"tokens": np.concatenate(made)})
