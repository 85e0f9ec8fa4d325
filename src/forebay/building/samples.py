"""The samples of a slice, as a recipe reads them: once through, failures set aside."""

from collections.abc import Iterator
from typing import TypeGuard

from forebay.building.dedup import DuplicateFilter
from forebay.errors import RecipeInvalid
from forebay.source import BatchedSamples, Failure, Part, PartDigest, Sample, SampleBatch, Source


class ChunkSamples(BatchedSamples):
    """Iterates once over the samples of a slice; samples with bad content become failures.

    Duplicates are counted, but not yielded. `digests` are those that the source computed while it
    read; with `preview` there are none, and the source may have a cheaper way to read.
    """

    def __init__(
        self, source: Source, parts: list[Part], duplicates: DuplicateFilter | None = None, preview: bool = False
    ) -> None:
        self.count = 0
        self.failures: list[Failure] = []
        self.digests = [PartDigest() for _ in parts]
        self.is_preview = preview
        self._duplicates = duplicates
        self._batches = self._read(source, parts)
        self._samples = self._one_by_one()

    def __iter__(self) -> Iterator[Sample]:
        return self._samples

    def batches(self) -> Iterator[Sample | SampleBatch]:
        return self._batches

    def check_exhausted(self) -> None:
        if next(self._samples, None) is not None:
            raise RecipeInvalid("the recipe left samples unread; it must read all of them")

    def _one_by_one(self) -> Iterator[Sample]:
        for batch in self._batches:
            if isinstance(batch, SampleBatch):
                yield from batch.samples()
            else:
                yield batch

    def _read(self, source: Source, parts: list[Part]) -> Iterator[Sample | SampleBatch]:
        for part, digest in zip(parts, self.digests, strict=True):
            for one in source.read(part, preview=True) if self.is_preview else source.read(part, digest=digest):
                samples: list[Sample | SampleBatch] = []
                if isinstance(one, SampleBatch) and self._duplicates is None:
                    self.count += one.count
                    samples.append(one)
                elif isinstance(one, SampleBatch):
                    yield from filter(self._keeps, one.samples())
                elif self._keeps(one):
                    samples.append(one)
                del one
                while samples:
                    yield samples.pop()  # no reference to it stays here: it may be large

    def _keeps(self, sample: Sample | Failure) -> TypeGuard[Sample]:
        """Count a sample; False if it failed, or is a duplicate."""
        self.count += 1
        is_first = self._duplicates is None or self._duplicates.keeps(sample)
        if isinstance(sample, Failure):
            self.failures.append(sample)
            return False
        return is_first
