"""Leave out samples whose content the cache has already.

    every sample ─▶ its identity ─▶ sorted on disk ─▶ later ones of equals: left out of their chunk, by the plan
                                        ▲        └──▶ first ones: kept beside the plan, for when the cache grows
    what earlier segments kept ─────────┘

So it is the same for any number of workers, and a chunk stays a pure function of the recipe and its slice.

samples ─▶ runs: as many as memory holds, sorted, each identity once ─▶ merged, a block of every run at a time

Runs and blocks are kept in the order of the source, and every sort is stable: of equal identities the earliest sample
comes first.
"""

import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import DTypeLike

from forebay.building.planning import OnCut, scratch_folder
from forebay.cache.plan import Identities, KeptResults, LeftOut, Plan, Segment, kept_identities
from forebay.columns import Array
from forebay.errors import ForebayError, RecipeInvalid
from forebay.format.tensors import as_bytes
from forebay.recipe import Identity, Recipe, fingerprint
from forebay.source import Failure, Sample, Source
from forebay.store.base import Buffer, Store


class Scratch(AbstractContextManager["Scratch"]):
    """A file that is appended to, then mapped. It has no name, so nothing of it is left, however the process ends.

    A map of it stays valid after it is closed.
    """

    def __init__(self, folder: str | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 — closed on exit

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, values: Array) -> None:
        self._file.write(as_bytes(values))

    def mapped(self, dtype: DTypeLike) -> Array:
        """All that was appended, as one array that can be written to."""
        self._file.flush()
        if self._file.tell() == 0:
            return np.empty(0, dtype)
        return np.memmap(self._file, dtype, "r+").view(np.ndarray)


RECORD_BYTES = 144  # what merging holds at a time for one record of 24 bytes: its block, its order, and copies


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Sorted identities, each with the number of its earliest sample."""

    high: Array
    low: Array
    samples: Array

    def __len__(self) -> int:
        return len(self.high)

    def __getitem__(self, part: slice) -> "Run":
        return Run(self.high[part], self.low[part], self.samples[part])

    def key(self, position: int) -> tuple[int, int]:
        return int(self.high[position]), int(self.low[position])

    def count_up_to(self, key: tuple[int, int]) -> int:
        """How many come up to a key, itself counted."""
        high, low = (np.uint64(half) for half in key)
        first, last = (int(np.searchsorted(self.high, high, side=side)) for side in ("left", "right"))
        return first + int(np.searchsorted(self.low[first:last], low, side="right"))

    def repeats(self) -> Array:
        """Which have the identity of the one before."""
        same = (self.high[1:] == self.high[:-1]) & (self.low[1:] == self.low[:-1])
        return np.concatenate([np.zeros(min(1, len(self)), np.bool_), same])

    def sorted(self) -> "Run":
        order = np.lexsort((self.low, self.high))
        return Run(self.high[order], self.low[order], self.samples[order])

    def where(self, chosen: Array) -> "Run":
        return Run(self.high[chosen], self.low[chosen], self.samples[chosen])


class RunWriter(AbstractContextManager["RunWriter"]):
    """Takes samples in the order of the source; keeps sorted runs, and notes every sample that its own run repeats."""

    def __init__(self, capacity: int, folder: str | None) -> None:
        self.count = 0
        self._capacity = capacity
        self._lengths: list[int] = []
        with ExitStack() as opened:
            self._records = opened.enter_context(Scratch(folder))
            self._marks = opened.enter_context(Scratch(folder))
            self._opened = opened.pop_all()
        self._begin_run()

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add(self, identity: bytes | None) -> None:
        """The next sample; one without an identity only counts."""
        if identity is not None:
            self._identities += identity
            self._samples.append(self.count)
        self.count += 1
        if self.count - self._begun == self._capacity:
            self._finish_run()

    def finish(self) -> tuple[list[Run], Array]:
        """The runs, and one mark per sample: 1 where it repeats an earlier one of its run."""
        self._finish_run()
        records, runs = self._records.mapped(np.uint64), []
        for length in self._lengths:
            runs.append(Run(*(records[start : start + length] for start in (0, length, 2 * length))))
            records = records[3 * length :]
        return runs, self._marks.mapped(np.uint8)

    def _begin_run(self) -> None:
        self._begun = self.count
        self._identities = bytearray()
        self._samples = array("Q")

    def _finish_run(self) -> None:
        halves = np.frombuffer(self._identities, ">u8").astype(np.uint64).reshape(-1, 2)
        run = Run(halves[:, 0], halves[:, 1], np.frombuffer(self._samples, np.uint64)).sorted()
        repeats = run.repeats()
        marks = np.zeros(self.count - self._begun, np.uint8)
        marks[run.samples[repeats] - np.uint64(self._begun)] = 1
        self._marks.append(marks)
        once = run.where(~repeats)
        for values in (once.high, once.low, once.samples):
            self._records.append(values)
        self._lengths.append(len(once))
        self._begin_run()


def merge_runs(runs: Sequence[Run], capacity: int) -> Iterator[Run]:
    """All records in order, at most `capacity` at a time (one of every run at least); equal ones come together."""
    left = [run for run in runs if len(run)]
    block = max(1, capacity // max(1, len(left)))
    while left:
        blocks = [run[:block] for run in left]
        # Everything up to the lowest end of a block is in these blocks.
        pivot = min(part.key(len(part) - 1) for part in blocks)
        counts = [part.count_up_to(pivot) for part in blocks]
        taken = [part[:count] for part, count in zip(blocks, counts, strict=True)]
        yield _joined(taken).sorted()
        left = [run[count:] for run, count in zip(left, counts, strict=True)]
        left = [run for run in left if len(run)]


def _joined(runs: Sequence[Run]) -> Run:
    columns = ([run.high for run in runs], [run.low for run in runs], [run.samples for run in runs])
    return Run(*map(np.concatenate, columns))


IDENTITY_BYTES = 16


class DuplicateCensus:
    """Takes the identity of one sample after the other; `check` is one number for all of them in their order."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._running = xxhash.xxh3_64()

    def take(self, sample: Sample | Failure) -> bytes | None:
        """The identity of the next sample, None for one that is never left out."""
        found = None if isinstance(sample, Failure) else self._identify(sample)
        self._running.update(b"\0" if found is None else b"\1" + found)
        return found

    @property
    def check(self) -> int:
        value: int = self._running.intdigest()
        return value

    def _identify(self, sample: Sample) -> bytes | None:
        try:
            found = self._identity(sample)
        except (OSError, ForebayError):
            raise
        except Exception as error:  # a recipe may raise anything
            raise RecipeInvalid(f"the recipe cannot tell the identity of sample '{sample.id}': {error!r}") from error
        if found is not None and not (isinstance(found, bytes) and len(found) == IDENTITY_BYTES):
            raise RecipeInvalid(
                f"the recipe gave sample '{sample.id}' the identity {found!r:.80}; it must be {IDENTITY_BYTES} bytes, "
                f"or None"
            )
        return found


class DuplicateFilter:
    """Leaves out what the plan found to be duplicates, and checks that these are the samples it compared."""

    def __init__(self, identity: Identity, planned: LeftOut) -> None:
        self.left_out = len(planned.ordinals)
        self._ordinals = frozenset(planned.ordinals.tolist())
        self._check = planned.check
        self._census = DuplicateCensus(identity)
        self._seen = 0

    def keeps(self, sample: Sample | Failure) -> bool:
        """Whether the next sample of the slice is given to the recipe."""
        self._census.take(sample)
        self._seen += 1
        return self._seen - 1 not in self._ordinals

    def saw_what_was_planned(self) -> bool:
        return self._census.check == self._check


@dataclass(frozen=True, slots=True)
class ChunkIdentities:
    """The identities of the samples of a chunk, in their order."""

    check: int
    has: bytes  # for each sample, 1 if it has an identity
    identities: bytes  # of those that have one

    @classmethod
    def read(cls, source: Source, identity: Identity, segment: Segment, chunk: int) -> "ChunkIdentities":
        census, has, identities = DuplicateCensus(identity), bytearray(), bytearray()
        for part in segment.parts(chunk):
            for sample in source.read(part):
                found = census.take(sample)
                has.append(found is not None)
                identities += found or b""
        return cls(census.check, bytes(has), bytes(identities))

    def __iter__(self) -> Iterator[bytes | None]:
        identities = (
            self.identities[at : at + IDENTITY_BYTES] for at in range(0, len(self.identities), IDENTITY_BYTES)
        )
        return (next(identities) if has else None for has in self.has)

    def encode(self) -> bytes:
        return self.check.to_bytes(8, "little") + len(self.has).to_bytes(8, "little") + self.has + self.identities

    @classmethod
    def decode(cls, answer: bytes) -> "ChunkIdentities | None":
        """What `encode` gave, None for anything else."""
        check, count = (int.from_bytes(answer[at : at + 8], "little") for at in (0, 8))
        has, identities = answer[16 : 16 + count], answer[16 + count :]
        is_whole = len(answer) >= 16 and len(has) == count and IDENTITY_BYTES * has.count(1) == len(identities)
        return cls(check, has, identities) if is_whole and has.count(0) + has.count(1) == count else None


def bytes_up_to(segment: Segment) -> Array:
    """For each chunk, how many bytes of the source files are read at its end, by the weight of the chunks."""
    weights, total = np.cumsum(segment.weights(), dtype=np.float64), int(segment.files.tensors["file_size"].sum())
    found: Array = (weights / max(1.0, weights[-1] if len(weights) else 0.0) * total).astype(np.int64)
    return found


def chunk_question(recipe: str, segment: str, chunk: int) -> tuple[str, str, str, int]:
    """What identities of a chunk are kept under: the fingerprint, and the digest of the draft that cuts it."""
    return "identities", recipe, segment, chunk


LEAST_WEIGHT = {"bytes": 32 << 20, "samples": 20_000}  # less is read again sooner than it is kept, or workers start
ReadAhead = Callable[[Segment, KeptResults], None]  # has the identities of many chunks found and kept
SORT_BYTES = 256 * 1024 * 1024
LIMIT_SHARE = 4  # a fourth of a memory limit, where that is less


def deduplicate(
    store: Store,
    source: Source,
    recipe: Recipe,
    identity: Identity,
    segment: Segment,
    earlier: Plan,
    on_cut: OnCut,
    memory_limit: int | None = None,
    kept_results: KeptResults | None = None,
    read_ahead: ReadAhead | None = None,
) -> tuple[Segment, Sequence[Buffer]]:
    """A segment that continues a plan, without what repeats earlier samples, and its file of identities."""
    kept = kept_identities(store, earlier)
    budget = SORT_BYTES if memory_limit is None else min(SORT_BYTES, memory_limit // LIMIT_SHARE)
    found = kept_results if int(segment.weights().sum()) >= LEAST_WEIGHT[source.unit] else None
    if read_ahead is not None and found is not None:
        read_ahead(segment, found)
    of_recipe = fingerprint(recipe)
    search = Search(source, identity, kept, max(1, budget // RECORD_BYTES), scratch_folder(store), found, of_recipe)
    tensors, identities = search.run(segment, on_cut)
    sealed = identities.encode(segment.number)
    return segment.without_duplicates(tensors, bytes(sealed[-1]).hex()), sealed


@dataclass(frozen=True, slots=True)
class Search:
    """Looking for duplicates in a source, with room for a limited number of records at a time."""

    source: Source
    identity: Identity
    kept: Sequence[Identities]
    capacity: int
    folder: str | None
    found: KeptResults | None = None
    recipe: str = ""  # its fingerprint

    def run(self, segment: Segment, on_cut: OnCut) -> tuple[dict[str, Array], Identities]:
        """What a segment says of duplicates, and the identities that it is the first to have."""
        with RunWriter(self.capacity, self.folder) as writer:
            ends, checks = self._read(segment, writer, on_cut)
            runs, marks = writer.finish()
        identities = self._mark_repeated(runs, marks)
        return self._by_chunk(marks, ends) | {"chunk_check": np.array(checks, np.uint64)}, identities

    def _read(self, segment: Segment, writer: RunWriter, on_cut: OnCut) -> tuple[list[int], list[int]]:
        """Read every sample once; per chunk, how many there were up to its end, and what its samples are."""
        ends, checks = [0], []
        digest, last = segment.digest() if self.found else "", segment.tensors["part_file"]
        passed, total = bytes_up_to(segment), int(segment.files.tensors["file_size"].sum())
        for chunk in range(len(segment)):
            question = chunk_question(self.recipe, digest, chunk)
            answer = self.found.find(*question) if self.found else None
            census = ChunkIdentities.decode(answer) if answer is not None else None
            if census is None:
                census = ChunkIdentities.read(self.source, self.identity, segment, chunk)
                if self.found:
                    self.found.keep(census.encode(), *question)
                file = int(last[int(segment.tensors["chunk_parts"][chunk + 1]) - 1])
                on_cut(file, segment.file_count, int(passed[chunk]), total)
            for identity in census:
                writer.add(identity)
            ends.append(writer.count)
            checks.append(census.check)
        on_cut(segment.file_count, segment.file_count, total, total)
        return ends, checks

    def _mark_repeated(self, runs: Sequence[Run], marks: Array) -> Identities:
        """Mark every sample whose identity an earlier sample has; the identities that none had before."""
        with Scratch(self.folder) as high, Scratch(self.folder) as low:
            for batch in merge_runs(runs, self.capacity):
                repeats = batch.repeats()
                once = batch.where(~repeats)
                known = _any_holds(self.kept, once)
                marks[batch.samples[repeats | known[np.cumsum(~repeats) - 1]]] = 1
                fresh = once.where(~known)
                high.append(fresh.high)
                low.append(fresh.low)
            return Identities(high.mapped(np.uint64), low.mapped(np.uint64))

    def _by_chunk(self, marks: Array, ends: Sequence[int]) -> dict[str, Array]:
        counts = [0]
        with Scratch(self.folder) as ordinals:
            for start, stop in pairwise(ends):
                marked = np.flatnonzero(marks[start:stop])
                ordinals.append(marked.astype(np.uint32))
                counts.append(len(marked))
            return {"chunk_duplicates": np.cumsum(counts, dtype=np.uint64), "duplicates": ordinals.mapped(np.uint32)}


def _any_holds(kept: Iterable[Identities], run: Run) -> Array:
    known = np.zeros(len(run), np.bool_)
    for identities in kept:
        known |= identities.holds(run.high, run.low)
    return known
