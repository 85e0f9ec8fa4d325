"""The plan: which parts of the source make which chunk. Append-only, fixed before any work starts.

    segment 0   files  a b c      chunk 0 = a[0:900]   chunk 1 = a[900:1400] b[0:350]   chunk 2 = …
    segment 1   files  b d        chunk 3 = b[350:800] d[0:120]                         grown later
    segment 2   files  a          chunk 0 = a[0:910]    from revision 1 on              refreshed: a was edited

A later segment that names a file again holds what is now known of it. A segment that amends adds no chunk: it says what
chunks that are planned are made from now, and from which revision of their files on they are so. Where the recipe
deduplicates, the plan also says which samples of a slice are equal to earlier ones.

What planning has found so far, kept beside the plan: a planning that was killed continues where it was.

planning/<hash of what was asked>.bin      the answer, and the hash of it

The question names a file with its size and times, so an answer is used only while the file is the same. All of them are
removed once the plan is written, or if it cannot be made.
"""

import os
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from forebay.cache.segment import LeftOut, Segment, decode_segment
from forebay.columns import Array
from forebay.errors import Damaged, ForebayError, IndexCorrupt
from forebay.format import layout
from forebay.format.layout import FORMAT_VERSION
from forebay.format.tensors import hmac_key, seal, unseal
from forebay.recipe import canonical_json
from forebay.source import Part, SourceFile
from forebay.store.base import Buffer, Entry, Missing, Store, is_full, load_index

DIGEST_BYTES = 32  # at the end of the file of a segment


class Plan:
    """All segments of a cache's plan."""

    def __init__(
        self, segments: Sequence[Segment], digests: Sequence[str], dropped: Mapping[str, int] | None = None
    ) -> None:
        self.segments = tuple(segments)
        self.digests = tuple(digests)
        self.dropped = dict(dropped or {})  # layer -> its highest revision when it was last dropped

    def first(self, segments: int) -> "Plan":
        """The first segments of the plan, as it was when it had no more."""
        return Plan(self.segments[:segments], self.digests[:segments], self.dropped)

    def __len__(self) -> int:
        """The number of chunks planned."""
        return self.segments[-1].first_chunk + self.segments[-1].added if self.segments else 0

    @property
    def source(self) -> Mapping[str, Any]:
        return self._segment(-1).source

    @property
    def described(self) -> dict[str, Any]:
        """The source as it was last described, with the patterns of everything that the cache grew by."""
        descriptions = [segment.source for segment in self.segments if not segment.amends]
        patterns = dict.fromkeys(pattern for one in descriptions for pattern in one.get("patterns", ()))
        last = dict(self.segments[-1].source) if self.segments else {}
        return {**last, **({"patterns": list(patterns)} if patterns else {})}

    @property
    def weight(self) -> int:
        return self._segment(0).weight

    def _segment(self, at: int) -> Segment:
        if not self.segments:
            raise Damaged(f"the cache has no plan: '{layout.plan_segment(0)}' is gone; run `forebay repair`")
        return self.segments[at]

    def parts(self, chunk: int) -> list[Part]:
        segment, position = self._place_of(chunk)
        return segment.parts(position)

    def left_out(self, chunk: int) -> LeftOut | None:
        segment, position = self._place_of(chunk)
        return segment.left_out(position)

    def revisions(self, layer: str) -> Array:
        """The lowest revision of every chunk of a layer that is made from what is planned now."""
        found = np.full(len(self), self.dropped.get(layer, -1) + 1, np.int64)
        for segment in self.segments:
            numbers = segment.revisions(layer) if segment.amends else None
            if numbers is not None:
                found[segment.chunk_numbers] = np.maximum(found[segment.chunk_numbers], numbers)
        return found

    @property
    def unreadable(self) -> dict[str, str]:
        """The files that were skipped because they could not be read -> why."""
        found: dict[str, str] = {}
        for segment in self.segments:
            for path in segment.files.paths() if found else ():
                found.pop(path, None)  # a later segment knows it better
            found |= segment.unreadable or {}
        return found

    def may_skip(self, chunk: int) -> bool:
        """Whether parts of a chunk that cannot be read are left out of it."""
        return self._place_of(chunk)[0].unreadable is not None

    @property
    def amended_base(self) -> str:
        """The base layer of a plan that was amended, empty where it was not."""
        return next((segment.amends for segment in self.segments if segment.amends), "")

    @property
    def deduplicates(self) -> bool:
        """Whether samples that are equal to earlier ones are left out."""
        return any(segment.identities for segment in self.segments)

    @property
    def duplicates(self) -> int:
        """How many samples are left out in all."""
        return sum(len(segment.tensors["duplicates"]) for segment in self.segments if segment.identities)

    @cached_property
    def weights(self) -> Array:
        """What every chunk takes from the source, in its unit."""
        found = np.zeros(len(self), np.int64)
        for segment in self.segments:
            found[segment.chunk_numbers] = segment.weights()
        return found

    def weight_of(self, chunk: int) -> int:
        self._place_of(chunk)
        return int(self.weights[chunk])

    def streams(self) -> dict[int, str]:
        """chunk -> the compressed file whose parts should be made in order by one worker, where it has one."""
        found: dict[int, str] = {}
        for segment in self.segments:
            files = segment.tensors["part_file"]
            of_stream = np.flatnonzero(segment.tensors["file_stream"][files])
            chunks = segment.chunk_numbers[np.searchsorted(segment.tensors["chunk_parts"], of_stream, side="right") - 1]
            if segment.amends:
                anew = set(segment.chunk_numbers.tolist())
                found = {chunk: path for chunk, path in found.items() if chunk not in anew}
            for chunk, file in zip(chunks.tolist(), files[of_stream].tolist(), strict=True):
                found.setdefault(chunk, segment.files.path(file))
        return found

    @cached_property
    def files(self) -> Mapping[str, SourceFile]:
        """Every planned file as it was last seen."""
        return PlannedFiles(self.segments)

    def ends(self) -> dict[str, int]:
        """How far every file is planned, in the unit of the source."""
        ends: dict[str, int] = {}
        for number, segment in enumerate(self.segments):
            edges = segment.tensors["chunk_parts"].astype(np.int64)
            holds = np.repeat(self._owners[0][segment.chunk_numbers] == number, edges[1:] - edges[:-1])
            stops = segment.tensors["part_stop"][holds].tolist()
            for file, stop in zip(segment.tensors["part_file"][holds].tolist(), stops, strict=True):
                path = segment.files.path(file)
                ends[path] = max(stop, ends.get(path, 0))
        return ends

    def places_of(self, path: str) -> Iterator[tuple[int, int, int, int]]:
        """(chunk, part of that chunk, start, stop) of everything planned from one file."""
        owners = self._owners[0]
        for number, segment in enumerate(self.segments):
            file = segment.files.find(path)
            if file is not None:
                yield from (place for place in segment.places_of(file) if owners[place[0]] == number)

    def _place_of(self, chunk: int) -> tuple[Segment, int]:
        """The segment that says what a chunk is made from, and where in it."""
        if not 0 <= chunk < len(self):
            raise Damaged(
                f"chunk {chunk} is not in the plan, which has {len(self):,} chunks; run `forebay verify`, then "
                "`forebay repair`"
            )
        owners, positions = self._owners
        return self.segments[int(owners[chunk])], int(positions[chunk])

    @cached_property
    def _owners(self) -> tuple[Array, Array]:
        """Of every chunk, the last segment that says what it is made from, and where in it."""
        owners, positions = np.zeros(len(self), np.int64), np.zeros(len(self), np.int64)
        for number, segment in enumerate(self.segments):
            owners[segment.chunk_numbers] = number
            positions[segment.chunk_numbers] = np.arange(len(segment))
        return owners, positions


class PlannedFiles(Mapping[str, SourceFile]):
    """path -> file, read from the columns of the segments: of millions, no object is kept."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        # Of most plans the first segment has nearly all files; the names of the others are few.
        self._later = [frozenset((*segment.files.paths(), *segment.dropped)) for segment in segments[1:]]

    def __getitem__(self, path: str) -> SourceFile:
        for number in reversed(range(len(self._segments))):
            if number and path not in self._later[number - 1]:
                continue
            segment = self._segments[number]
            at = None if path in segment.dropped else segment.files.find(path)
            if at is not None:
                return segment.files[at]
            break
        raise KeyError(path)

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self.get(path) is not None

    def __iter__(self) -> Iterator[str]:
        return (file.path for file in self._newest())

    def __len__(self) -> int:
        return len(self._segments[0].files) if len(self._segments) == 1 else sum(1 for _ in self._newest())

    def items(self) -> ItemsView[str, SourceFile]:
        return _Items(self)

    def _newest(self) -> Iterator[SourceFile]:
        """Every file once, where it was first named, as the last segment that names it knows it."""
        for number, segment in enumerate(self._segments):
            later = self._later[number:]
            for file in segment.files:
                if number and any(before.files.find(file.path) is not None for before in self._segments[:number]):
                    continue
                is_last = file.path not in segment.dropped and not any(file.path in names for names in later)
                newest = file if is_last else self.get(file.path)
                if newest is not None:
                    yield newest


class _Items(ItemsView[str, SourceFile]):
    """Both without a search for each."""

    _mapping: PlannedFiles

    def __iter__(self) -> Iterator[tuple[str, SourceFile]]:
        return ((file.path, file) for file in self._mapping._newest())


def load_plan(store: Store, known: Plan | None = None) -> Plan:
    """The plan as it is now: every segment, each checked against its digest.

    A segment that is among those of a `known` plan, by the digest at the end of its file, is neither read nor checked
    again.
    """
    segments: list[Segment] = []
    digests: list[str] = []
    dropped: dict[str, int] = {}
    for entry in store.entries(layout.PLAN):
        if (one := layout.parse_dropped(entry.key)) is not None:
            dropped[one[0]] = max(one[1], dropped.get(one[0], -1))
        if layout.parse_segment(entry.key) != len(segments):
            continue
        found = _known_segment(store, entry, known, len(segments))
        segment, digest = found or decode_segment(load_index(store, entry.key), store.address, entry.key)
        planned = segments[-1].first_chunk + segments[-1].added if segments else 0
        if (segment.number, segment.first_chunk) != (len(segments), planned):
            raise IndexCorrupt(store.address, entry.key, f"it does not continue the plan at chunk {planned}")
        segments.append(segment)
        digests.append(digest)
    return Plan(segments, digests, dropped)


def _known_segment(store: Store, entry: Entry, known: Plan | None, number: int) -> tuple[Segment, str] | None:
    """A segment of a known plan with its digest, if the file still ends with it: a segment can be taken back."""
    if known is None or number >= len(known.segments) or entry.size < DIGEST_BYTES:
        return None
    try:
        digest = store.read(entry.key, entry.size - DIGEST_BYTES, entry.size).hex()
    except (Missing, OSError, ForebayError):
        return None  # reading all of it says what is wrong
    return (known.segments[number], digest) if digest == known.digests[number] else None


@dataclass(frozen=True, slots=True, eq=False)
class Identities:
    """16 bytes each, read as two numbers, most significant first; in rising order, none twice."""

    high: Array  # uint64
    low: Array  # uint64

    def __len__(self) -> int:
        return len(self.high)

    def holds(self, high: Array, low: Array) -> Array:
        """Which of some identities, given in rising order, are among these."""
        first, last = (np.searchsorted(self.high, high, side=side) for side in ("left", "right"))
        found = np.zeros(len(high), np.bool_)
        alone = last - first == 1
        found[alone] = self.low[first[alone]] == low[alone]
        for start in np.unique(first[last - first > 1]).tolist():  # the same upper half, by chance or by choice
            asked = slice(*np.searchsorted(first, [start, start + 1]).tolist())
            found[asked] = _among(self.low[start : int(last[asked.start])], low[asked])
        return found

    def encode(self, segment: int) -> Sequence[Buffer]:
        """The bytes of the file; the last 32 are its digest."""
        metadata = {"format_version": FORMAT_VERSION, "type": "identities", "number": segment}
        return seal(metadata, {"high": self.high, "low": self.low})


def load_identities(store: Store, segment: Segment) -> Identities:
    """The identities that a segment added, checked against the digest that it keeps."""
    key = layout.identities(segment.number, segment.identities)
    try:
        view = load_index(store, key, in_memory=0)  # read through, then mapped
    except Missing as error:
        raise IndexCorrupt(store.address, key, "it is gone") from error
    _, tensors = unseal(view, store.address, key, "identities")
    if bytes(view[-32:]).hex() != segment.identities:
        raise IndexCorrupt(store.address, key, "it is not the file that the plan names")
    high, low = (tensors.get(name, np.empty((0, 0))) for name in ("high", "low"))
    if high.dtype != np.uint64 or low.dtype != np.uint64 or high.ndim != 1 or high.shape != low.shape:
        raise IndexCorrupt(store.address, key, "its two halves are not arrays of one length")
    return Identities(high, low)


def kept_identities(store: Store, plan: Plan) -> list[Identities]:
    return [load_identities(store, segment) for segment in plan.segments]


def _among(values: Array, asked: Array) -> Array:
    at = np.minimum(np.searchsorted(values, asked), len(values) - 1)
    among: Array = values[at] == asked
    return among


MOST_BYTES = 1 << 30  # of an answer: more is not one of ours
_SUM_BYTES = 8


class KeptResults:
    """Answers by question; that one cannot be kept, or is damaged, only means that the work is done again."""

    def __init__(self, store: Store) -> None:
        self._store, self._root = store, store.local_path("")
        self._is_new = self._root is not None and not os.path.exists(self._root)
        self._asked: set[str] = set()
        self.is_used = hmac_key() is None  # with a key, a plan is signed: nothing that is not signed may shape it

    def find(self, *question: Any) -> bytes | None:
        if not self.is_used:
            return None
        try:
            content = self._store.read(self._key(question), 0, MOST_BYTES + 1)
        except (Missing, OSError, ForebayError):
            return None
        answer, found = content[:-_SUM_BYTES], content[-_SUM_BYTES:]
        return answer if len(content) <= MOST_BYTES and found == _sum(answer) else None

    def keep(self, answer: bytes, *question: Any) -> None:
        if not self.is_used:
            return
        with suppress(OSError, ForebayError):
            self._store.replace(self._key(question), [answer, _sum(answer)], durable=False)

    def remove(self) -> None:
        """Remove the answers that were asked for, and the folders that were made for them; others may still plan."""
        with suppress(OSError, ForebayError):
            for key in self._asked & {entry.key for entry in self._store.entries(layout.PLANNING)}:
                self._store.delete(key)
        if self._root is not None:
            with suppress(OSError):
                os.rmdir(os.path.join(self._root, layout.PLANNING))
                if self._is_new:
                    os.rmdir(self._root)

    def _key(self, question: tuple[Any, ...]) -> str:
        key = layout.planning(xxhash.xxh3_128_hexdigest(canonical_json(list(question))))
        self._asked.add(key)
        return key


@contextmanager
def keeping_results(store: Store) -> Iterator[KeptResults]:
    """Results that are kept if planning is interrupted, and removed otherwise: also from a full disk, to make room."""
    kept = KeptResults(store)
    try:
        yield kept
    except (ForebayError, OSError) as error:
        if isinstance(error, ForebayError) or is_full(error):
            kept.remove()
        raise
    kept.remove()


def identity_facts(file: SourceFile) -> list[Any]:
    """What a question says of a file: with other content, it is another question."""
    return [file.path, file.size, file.mtime_ns, file.ctime_ns, file.inode, file.etag]


def _sum(answer: bytes) -> bytes:
    value: bytes = xxhash.xxh3_64_digest(answer)
    return value
