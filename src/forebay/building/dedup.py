"""Drop samples that duplicate content in the cache.

    every sample ─▶ its identity ─▶ sorted blocks in a temporary file ─▶ each partition sorted ─┬─▶ repeats: left out
    identities of earlier segments ─────────────────────────────────────────────────────────────┘   by the plan

A partition is a range of identities. Each block has an identity once, so that one which millions of samples share does
not fill memory.

The first sample of each content stays; its identity is stored next to the plan, for later segments. The result is the
same for any number of workers, and a chunk stays a pure function of the recipe and its slice.
"""

import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import IO

import numpy as np
import xxhash
from numpy.typing import DTypeLike

from forebay.building.cutting import OnCut
from forebay.building.listing import scratch_folder
from forebay.cache.identities import Identities, all_identities
from forebay.cache.plan import Plan
from forebay.cache.segment import LeftOut, Segment
from forebay.columns import Array
from forebay.errors import RecipeInvalid
from forebay.format.tensors import as_bytes
from forebay.kinds import WRONG
from forebay.recipe import Identity
from forebay.source import Failure, Sample, Source, samples_of
from forebay.store.base import Buffer, Store

IDENTITY_BYTES = 16
PARTITION_BITS = 12  # a partition of a billion identities has a quarter of a million
RECORD_BYTES = 144  # held at a time for one record of 24 bytes: its block, its order, and copies
SORT_BYTES = 256 * 1024 * 1024
LIMIT_SHARE = 4  # a fourth of a memory limit, where that is less


class DuplicateCensus:
    """Collects sample identities in order; `check` is one hash over all of them."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._running = xxhash.xxh3_64()

    def take(self, sample: Sample | Failure) -> bytes | None:
        """The identity of the next sample; None for one without."""
        identity = None if isinstance(sample, Failure) else self._identify(sample)
        self._running.update(b"\0" if identity is None else b"\1" + identity)
        return identity

    @property
    def check(self) -> int:
        value: int = self._running.intdigest()
        return value

    def _identify(self, sample: Sample) -> bytes | None:
        try:
            identity = self._identity(sample)
        except WRONG as error:
            raise RecipeInvalid(f"the recipe cannot tell the identity of sample '{sample.id}': {error!r}") from error
        if identity is not None and not (isinstance(identity, bytes) and len(identity) == IDENTITY_BYTES):
            raise RecipeInvalid(
                f"the recipe gave sample '{sample.id}' the identity {identity!r:.80}; it must be "
                f"{IDENTITY_BYTES} bytes, or None"
            )
        return identity


class DuplicateFilter:
    """Leaves out the planned duplicates, and checks that the samples are those that were compared."""

    def __init__(self, identity: Identity, planned: LeftOut) -> None:
        self.left_out = len(planned.ordinals)
        self._ordinals = frozenset(planned.ordinals.tolist())
        self._check = planned.check
        self._census = DuplicateCensus(identity)
        self._seen = 0

    def keeps(self, sample: Sample | Failure) -> bool:
        """True if the next sample of the slice goes to the recipe."""
        self._census.take(sample)
        self._seen += 1
        return self._seen - 1 not in self._ordinals

    def saw_what_was_planned(self) -> bool:
        return self._census.check == self._check


def deduplicate(
    store: Store,
    source: Source,
    identity: Identity,
    segment: Segment,
    earlier: Plan,
    on_cut: OnCut,
    memory_limit: int | None = None,
) -> tuple[Segment, Sequence[Buffer]]:
    """A segment that continues a plan without duplicates of earlier samples, and its identities file."""
    known, folder = all_identities(store, earlier), scratch_folder(store)
    budget = SORT_BYTES if memory_limit is None else min(SORT_BYTES, memory_limit // LIMIT_SHARE)
    with ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(5)]
        high, low, ordinals, repeated = map(Scratch, files[1:])
        records = Records(files[0], repeated, max(1, budget // RECORD_BYTES))
        ends, checks = _read(source, identity, segment, records, on_cut)
        records.flush()
        marks = repeated.mapped(np.bool_)
        for partition in records.partitions():
            _mark_repeats(partition, known, marks, high, low)
        counts = [0]
        for start, stop in pairwise(ends):
            repeats = np.flatnonzero(marks[start:stop])
            ordinals.append(repeats.astype(np.uint32))
            counts.append(len(repeats))
        tensors = {"chunk_duplicates": np.cumsum(counts, dtype=np.uint64), "duplicates": ordinals.mapped(np.uint32)}
        tensors["chunk_check"] = np.array(checks, np.uint64)
        sealed = Identities(high.mapped(np.uint64), low.mapped(np.uint64)).encode(segment.number)
    return segment.without_duplicates(tensors, bytes(sealed[-1]).hex()), sealed


def _read(
    source: Source, identity: Identity, segment: Segment, records: "Records", on_cut: OnCut
) -> tuple[list[int], list[int]]:
    """Read every sample once; return the cumulative count and the check of each chunk's samples."""
    ends, checks = [0], []
    total = int(segment.files.tensors["file_size"].sum())
    weights = np.cumsum(segment.weights(), dtype=np.float64)
    passed = (weights / max(1.0, weights[-1] if len(weights) else 0.0) * total).astype(np.int64)
    for chunk in range(len(segment)):
        census = DuplicateCensus(identity)
        for part in segment.parts(chunk):
            for sample in samples_of(source, part):
                records.add(census.take(sample))
        file = int(segment.tensors["part_file"][int(segment.tensors["chunk_parts"][chunk + 1]) - 1])
        on_cut(file, segment.file_count, int(passed[chunk]), total)
        ends.append(records.count)
        checks.append(census.check)
    on_cut(segment.file_count, segment.file_count, total, total)
    return ends, checks


class Records:
    """The identities of samples in the order of the source, in a temporary file, sorted in blocks.

    Blocks of as many as memory holds are written one after the other: a partition has a range in each of them. A sample
    that repeats an identity of its block has no record; `repeated` gets one flag per sample.
    """

    def __init__(self, file: IO[bytes], repeated: "Scratch", capacity: int) -> None:
        self.count = 0
        self._file, self._repeated, self._capacity = file, repeated, capacity
        self._edges: list[Array] = []  # for each block, where its partitions begin and end
        self._begun = 0  # the first sample of the block
        self._identities, self._samples = bytearray(), array("Q")

    def add(self, identity: bytes | None) -> None:
        """The next sample; one without an identity only counts."""
        if identity is not None:
            self._identities += identity
            self._samples.append(self.count)
        self.count += 1
        if self.count - self._begun == self._capacity:
            self._write_block()

    def flush(self) -> None:
        self._write_block()
        self._file.flush()

    def partitions(self) -> Iterator[Array]:
        """Rows of high, low and sample, sorted by identity; of equal ones the earliest sample comes first."""
        if not self._edges[-1][-1]:
            return
        records = np.memmap(self._file, np.uint64, "r").reshape(-1, 3)
        for number in range(1 << PARTITION_BITS):
            rows = np.concatenate([records[edges[number] : edges[number + 1]] for edges in self._edges])
            if len(rows):
                yield _sorted(rows)

    def _write_block(self) -> None:
        halves = np.frombuffer(self._identities, ">u8").astype(np.uint64).reshape(-1, 2)
        rows = _sorted(np.column_stack([halves, np.frombuffer(self._samples, np.uint64)]))
        repeats = _repeats(rows)
        flags = np.zeros(self.count - self._begun, np.bool_)
        flags[rows[repeats, 2] - np.uint64(self._begun)] = True
        self._repeated.append(flags)
        rows = rows[~repeats]
        edges = np.searchsorted(
            rows[:, 0] >> np.uint64(64 - PARTITION_BITS), np.arange((1 << PARTITION_BITS) + 1, dtype=np.uint64)
        )
        self._edges.append(edges + (int(self._edges[-1][-1]) if self._edges else 0))
        self._file.write(as_bytes(rows))
        self._begun, self._identities, self._samples = self.count, bytearray(), array("Q")


def _sorted(rows: Array) -> Array:
    """Rows by identity, equal ones in their order."""
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]


def _repeats(rows: Array) -> Array:
    """True for each sorted row that has the same identity as the row before it."""
    repeats = np.zeros(len(rows), np.bool_)
    repeats[1:] = (rows[1:, :2] == rows[:-1, :2]).all(axis=1)
    return repeats


class Scratch:
    """An array in a temporary file: appended to, then mapped. A map of it stays valid after it is closed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def append(self, values: Array) -> None:
        self._file.write(as_bytes(values))

    def mapped(self, dtype: DTypeLike) -> Array:
        self._file.flush()
        return np.memmap(self._file, dtype, "r+").view(np.ndarray) if self._file.tell() else np.empty(0, dtype)


def _mark_repeats(rows: Array, known: Sequence[Identities], marks: Array, high: Scratch, low: Scratch) -> None:
    """Mark samples that repeat an earlier identity, and keep the new identities."""
    repeats = _repeats(rows)
    once = rows[~repeats]
    is_known = np.zeros(len(once), np.bool_)
    for identities in known:
        is_known |= identities.holds(once[:, 0], once[:, 1])
    marks[rows[repeats, 2]] = True
    marks[once[is_known, 2]] = True
    high.append(once[~is_known, 0])
    low.append(once[~is_known, 1])
