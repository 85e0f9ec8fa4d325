"""The plan: which parts of the source make which chunk. Append-only; nothing planned ever changes.

    segment 0   files  a b c      chunk 0 = a[0:900]   chunk 1 = a[900:1400] b[0:350]   chunk 2 = …
    segment 1   files  b d        chunk 3 = b[350:800] d[0:120]                         appended by `update`

Each segment has the digest of the one before it. A later segment that has a file again holds its newer size and times.
A generation can withdraw the last segment: its chunk numbers stay reserved, and its files count as unknown.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from forebay.cache.segment import LeftOut, Segment, decode_segment
from forebay.columns import Array
from forebay.errors import Damaged
from forebay.file_table import FileTable
from forebay.format import layout
from forebay.source import Part, SourceFile
from forebay.store.base import Store, index_corrupt, load_index


class Plan:
    """All segments of a cache's plan. Chunks and files of withdrawn segments are not planned."""

    def __init__(self, segments: Sequence[Segment], withdrawn: Collection[int] = ()) -> None:
        self.segments = tuple(segments)
        self.withdrawn = frozenset(withdrawn)
        self._active = tuple(one for one in self.segments if one.number not in self.withdrawn)

    def __len__(self) -> int:
        """The number of chunk numbers in use, also those of withdrawn segments."""
        return self.segments[-1].first_chunk + len(self.segments[-1]) if self.segments else 0

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(segment.digest for segment in self.segments)

    @property
    def last_digest(self) -> str:
        return self.segments[-1].digest if self.segments else ""

    def first(self, segments: int) -> "Plan":
        """The first segments of the plan, as a plan."""
        return Plan(self.segments[:segments], self.withdrawn)

    def appended(self, segment: Segment) -> "Plan":
        return Plan((*self.segments, segment), self.withdrawn)

    @cached_property
    def planned(self) -> Array:
        """Per chunk number, True unless its segment is withdrawn."""
        planned = np.zeros(len(self), np.bool_)
        for segment in self._active:
            planned[segment.first_chunk : segment.first_chunk + len(segment)] = True
        return planned

    @property
    def source(self) -> Mapping[str, Any]:
        """The source as it was last described."""
        return self._segment(-1).source

    @property
    def described(self) -> dict[str, Any]:
        """The source as it was last described, with the patterns of all segments."""
        patterns = dict.fromkeys(pattern for one in self._active for pattern in one.source.get("patterns", ()))
        last = dict(self._active[-1].source) if self._active else {}
        return {**last, **({"patterns": list(patterns)} if patterns else {})}

    @property
    def weight(self) -> int:
        return self._segment(0).weight

    def _segment(self, at: int) -> Segment:
        if not self._active:
            raise Damaged(f"the cache has no plan: '{layout.plan_segment(0)}' is gone; run `forebay repair`")
        return self._active[at]

    def segment_of(self, chunk: int) -> Segment:
        """The segment that planned a chunk."""
        if not 0 <= chunk < len(self):
            raise Damaged(
                f"chunk {chunk} is not in the plan, which has {len(self):,} chunks; run `forebay verify`, then "
                "`forebay repair`"
            )
        return self.segments[int(np.searchsorted(self._firsts, chunk, side="right")) - 1]

    @cached_property
    def _firsts(self) -> Array:
        """The first chunk of each segment; `segment_of` returns the last of several empty segments."""
        return np.array([segment.first_chunk for segment in self.segments], np.int64)

    def parts(self, chunk: int) -> list[Part]:
        segment = self.segment_of(chunk)
        return segment.parts(chunk - segment.first_chunk)

    def left_out(self, chunk: int) -> LeftOut | None:
        segment = self.segment_of(chunk)
        return segment.left_out(chunk - segment.first_chunk)

    @property
    def deduplicates(self) -> bool:
        return any(segment.identities for segment in self._active)

    @property
    def duplicates(self) -> int:
        """The number of samples that are left out as duplicates."""
        return sum(len(segment.tensors["duplicates"]) for segment in self._active if segment.identities)

    @cached_property
    def weights(self) -> Array:
        """The amount of source that each chunk covers, in the source's unit."""
        return np.concatenate([np.empty(0, np.int64), *(segment.weights() for segment in self.segments)])

    @property
    def bytes_per_unit(self) -> float:
        """The bytes of source files per unit of weight: 1 where the source counts bytes."""
        size = sum(int(segment.files.tensors["file_size"].sum()) for segment in self.segments)
        return size / max(1, int(self.weights.sum()))

    def streams(self) -> dict[int, str]:
        """chunk -> the compressed file whose parts one worker should make in order."""
        streams: dict[int, str] = {}
        for segment in self._active:
            files = segment.tensors["part_file"]
            of_stream = np.flatnonzero(segment.tensors["file_stream"][files])
            chunks = np.searchsorted(segment.tensors["chunk_parts"], of_stream, side="right") - 1 + segment.first_chunk
            for chunk, file in zip(chunks.tolist(), files[of_stream].tolist(), strict=True):
                streams.setdefault(chunk, segment.files.path(file))
        return streams

    @cached_property
    def files(self) -> "PlannedFiles":
        """Every planned file as it was last seen."""
        return PlannedFiles(self._active)

    def ends(self) -> dict[str, int]:
        """The planned length of every file, in the unit of the source."""
        ends: dict[str, int] = {}
        for segment in self._active:
            stops = segment.tensors["part_stop"].tolist()
            for file, stop in zip(segment.tensors["part_file"].tolist(), stops, strict=True):
                path = segment.files.path(file)
                ends[path] = max(stop, ends.get(path, 0))
        return ends

    def parts_of_file(self, path: str) -> Iterator[tuple[int, int, int, int]]:
        """(chunk, part of that chunk, start, stop) of everything planned from one file."""
        for segment in self._active:
            file = segment.files.find(path)
            if file is not None:
                yield from segment.parts_of_file(file)


class PlannedFiles(Mapping[str, SourceFile]):
    """path -> file, as the last segment that has it knows it; `table` has them in the order of the plan."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        if len(segments) == 1:  # of millions of files, no copy is made
            self.table = segments[0].files
            return
        newest = {file.path: file for segment in segments[1:] for file in segment.files}
        first = [newest.pop(file.path, file) for segment in segments[:1] for file in segment.files]
        self.table = FileTable.of([*first, *newest.values()])

    def __getitem__(self, path: str) -> SourceFile:
        at = self.table.find(path)
        if at is None:
            raise KeyError(path)
        return self.table[at]

    def __iter__(self) -> Iterator[str]:
        return self.table.paths()

    def __len__(self) -> int:
        return len(self.table)


def load_plan(store: Store, withdrawn: Collection[int] = (), known: Plan | None = None) -> Plan:
    """The plan as it is now: every segment, each checked against its digest and the segment before it.

    Segments that a `known` plan has are not read again: a segment is written once.
    """
    segments = list(known.segments) if known is not None else []
    for entry in store.entries(layout.PLAN):
        if layout.parse_segment(entry.key) == len(segments):
            segment = decode_segment(load_index(store, entry.key), store.address, entry.key)
            _check_continues(store, entry.key, segment, Plan(segments))
            segments.append(segment)
    return Plan(segments, withdrawn)


def _check_continues(store: Store, key: str, segment: Segment, before: Plan) -> None:
    if (segment.number, segment.first_chunk) != (len(before.segments), len(before)):
        raise index_corrupt(store.address, key, f"it does not continue the plan at chunk {len(before)}")
    if segment.previous != before.last_digest:
        raise index_corrupt(store.address, key, "it was planned after another segment than the one before it")
