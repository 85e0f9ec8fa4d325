"""A segment of the plan: files, cut into the parts that chunks are made of. Written once.

If the recipe deduplicates, a segment also has the samples of each slice that are equal to earlier ones.
"""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from forebay.columns import Array
from forebay.file_table import KNOWN_BY_SOME, NUMBERS, TEXTS, FileTable
from forebay.format.chunk import sound_offsets
from forebay.format.layout import FORMAT_VERSION, MAX_NUMBER, one_line
from forebay.format.tensors import seal, unseal
from forebay.recipe import canonical_json
from forebay.source import (
    Part,
    SourceFile,
)
from forebay.store.base import Buffer, index_corrupt

_PARTS = {name: np.uint64 for name in ("chunk_parts", "part_file", "part_start", "part_stop")}
# What a segment's digest covers besides its header: no times, inodes or roots, so that a lost one can be planned again.
_DIGESTED: dict[str, DTypeLike] = {
    **_PARTS,
    "file_path": np.uint8,
    "file_path_offsets": np.uint64,
    "file_size": np.uint64,
    "chunk_duplicates": np.uint64,
    "chunk_check": np.uint64,
    "duplicates": np.uint32,
}
_AT_ONCE = 1 << 20  # items of an array that are hashed at once
_MOST = 1 << 62  # of bytes or samples, also in sum


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """The duplicates in the slice of a chunk, from a deduplicating plan."""

    ordinals: Array  # which of its samples, failed ones counted too, are equal to earlier ones; rising
    check: int  # hash of all its samples, to notice other ones


@dataclass(frozen=True, eq=False)
class Segment:
    """One append to the plan: its files, its parts, and which parts make a chunk."""

    number: int
    first_chunk: int
    source: Mapping[str, Any]  # the description of the source
    weight: int  # what a chunk was meant to weigh, in the unit of the source
    tensors: Mapping[str, Array]
    previous: str = ""  # the digest of the segment before it
    cache_id: str = ""  # of the cache whose plan has it; set when it is appended
    identities: str = ""  # the digest of the identities file, if the recipe deduplicates

    @classmethod
    def planned(
        cls,
        chunks: Iterable[Sequence[Part]],
        listed: Iterable[SourceFile],
        *,
        number: int,
        first_chunk: int,
        source: Mapping[str, Any],
        weight: int,
        previous: str = "",
    ) -> "Segment":
        """A segment of chunks that are cut one after the other from files in the order in which they are `listed`.

        Memory holds the columns of the files, no object per file. A file that was scanned may have a digest that the
        listed one has not.
        """
        files, scanned = FileTable.of(listed), dict[int, SourceFile]()
        part_file, part_start, part_stop, chunk_parts = array("Q"), array("Q"), array("Q"), array("Q", [0])
        following, position, known = iter(files), -1, SourceFile("", 0)
        for chunk in chunks:
            for part in chunk:
                while part.file.path != known.path:
                    position, known = position + 1, next(following)
                if part.file != known:
                    scanned[position] = part.file
                part_file.append(position)
                part_start.append(part.start)
                part_stop.append(part.stop)
            chunk_parts.append(len(part_file))
        table = files.with_files(scanned) if scanned else files
        columns = (chunk_parts, part_file, part_start, part_stop)
        parts = {name: np.frombuffer(values, np.uint64) for name, values in zip(_PARTS, columns, strict=True)}
        return cls(number, first_chunk, dict(source), weight, {**parts, **table.tensors}, previous)

    def __len__(self) -> int:
        """The number of its chunks."""
        return len(self.tensors["chunk_parts"]) - 1

    @property
    def chunk_numbers(self) -> range:
        return range(self.first_chunk, self.first_chunk + len(self))

    @property
    def file_count(self) -> int:
        return len(self.tensors["file_size"])

    @cached_property
    def files(self) -> FileTable:
        """Its files, in order."""
        return FileTable({name: values for name, values in self.tensors.items() if name.startswith("file_")})

    def parts(self, chunk: int) -> list[Part]:
        """The parts of a chunk, counted from the start of this segment."""
        first, last = self.tensors["chunk_parts"][chunk : chunk + 2].tolist()
        columns = (self.tensors[name][first:last].tolist() for name in ("part_file", "part_start", "part_stop"))
        return [Part(self.files[file], start, stop) for file, start, stop in zip(*columns, strict=True)]

    def left_out(self, chunk: int) -> LeftOut | None:
        """The duplicates in a chunk, counted from the start of this segment; None if the recipe keeps duplicates."""
        if not self.identities:
            return None
        first, last = self.tensors["chunk_duplicates"][chunk : chunk + 2].tolist()
        return LeftOut(self.tensors["duplicates"][first:last], int(self.tensors["chunk_check"][chunk]))

    def without_duplicates(self, tensors: Mapping[str, Array], identities: str) -> "Segment":
        """The same segment with the duplicates that a search returned."""
        return replace(self, tensors={**self.tensors, **tensors}, identities=identities)

    @cached_property
    def _parts_by_file(self) -> tuple[Array, Array]:
        """The parts ordered by file, and the file of each."""
        order = np.argsort(self.tensors["part_file"], kind="stable")
        return order, self.tensors["part_file"][order]

    def parts_of_file(self, file: int) -> list[tuple[int, int, int, int]]:
        """(chunk, part of that chunk, start, stop) of everything planned from one file."""
        order, files = self._parts_by_file
        own = order[np.searchsorted(files, file, side="left") : np.searchsorted(files, file, side="right")]
        chunks = np.searchsorted(self.tensors["chunk_parts"], own, side="right") - 1
        within = own - self.tensors["chunk_parts"][chunks].astype(np.int64)
        starts, stops = self.tensors["part_start"][own], self.tensors["part_stop"][own]
        columns = ((chunks + self.first_chunk).tolist(), within.tolist(), starts.tolist(), stops.tolist())
        return list(zip(*columns, strict=True))

    def weights(self) -> Array:
        """The amount of source that each chunk of this segment covers."""
        parts = self.tensors["part_stop"].astype(np.int64) - self.tensors["part_start"].astype(np.int64)
        passed = np.concatenate([[0], np.cumsum(parts)])
        edges = self.tensors["chunk_parts"].astype(np.int64)
        weights: Array = passed[edges[1:]] - passed[edges[:-1]]
        return weights

    def encode(self) -> Sequence[Buffer]:
        metadata = {
            "format_version": FORMAT_VERSION,
            "type": "plan",
            "number": self.number,
            "first_chunk": self.first_chunk,
            "source": dict(self.source),
            "weight": self.weight,
            "previous": self.previous,
            "cache_id": self.cache_id,
        } | ({"identities": self.identities} if self.identities else {})
        return seal(metadata, self.tensors)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over what determines the samples of its chunks, and the digest of the segment before it."""
        facts = (self.number, self.first_chunk, self.source.get("kind"), self.weight, self.identities, self.previous)
        digest = hashlib.sha256(canonical_json(list(facts)))
        for name, dtype in _DIGESTED.items():
            values = self.tensors.get(name)
            digest.update(canonical_json([name, None if values is None else len(values)]))
            for start in range(0, 0 if values is None else len(values), _AT_ONCE):
                piece = np.ascontiguousarray(self.tensors[name][start : start + _AT_ONCE], np.dtype(dtype))
                digest.update(piece.data)
        return digest.hexdigest()


def decode_segment(view: memoryview, root: str, key: str) -> Segment:
    """A segment, with every number and name in it checked."""
    metadata, tensors = unseal(view, root, key, "plan")
    try:
        facts = msgspec.convert(metadata, _SegmentHeader)
        _check_description(facts.source)
        segment = Segment(tensors=tensors, **msgspec.structs.asdict(facts))
        _check_tensors(segment)
    except (msgspec.ValidationError, ValueError) as error:
        raise index_corrupt(root, key, f"it is malformed: {one_line(error)}") from error
    return segment


class _SegmentHeader(msgspec.Struct, frozen=True):
    """The header of a segment; fields that a later forebay adds are ignored."""

    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
    first_chunk: Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
    source: dict[str, Any]
    weight: Annotated[int, msgspec.Meta(ge=1, lt=_MOST)]
    previous: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
    cache_id: str = ""
    identities: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""


def _check_description(source: Mapping[str, Any]) -> None:
    """Reject a description that no source wrote; only the source of its kind can check more."""
    if not isinstance(source.get("kind"), str):
        raise ValueError("the description of its source has no kind")
    patterns = source.get("patterns", [])
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError("'patterns' of its source is not a list of texts")
    canonical_json(source)
    for name in ("root", "patterns", "manifest", "path"):
        if b"\\u0000" in canonical_json(source.get(name)):
            raise ValueError(f"'{name}' of its source contains a NUL")


def _check_tensors(segment: Segment) -> None:
    """Reject arrays of other types or shapes before using them."""
    parts, files, chunks = (_length(segment, name) for name in ("part_file", "file_size", "chunk_parts"))
    shapes: dict[str, tuple[DTypeLike, int]] = {
        name: (np.uint64, parts) for name in ("part_file", "part_start", "part_stop")
    }
    shapes |= {f"file_{name}": (dtype, files) for name, dtype in NUMBERS.items()}
    shapes |= {f"file_{name}_offsets": (np.uint64, files + 1) for name in TEXTS}
    shapes |= {f"file_{name}": (np.uint8, _length(segment, f"file_{name}")) for name in TEXTS}
    shapes |= {
        f"file_{name}": (dtype, files) for name, dtype in KNOWN_BY_SOME.items() if f"file_{name}" in segment.tensors
    }
    shapes["chunk_parts"] = (np.uint64, chunks)
    if segment.identities:
        shapes["chunk_duplicates"], shapes["chunk_check"] = (np.uint64, chunks), (np.uint64, chunks - 1)
        shapes["duplicates"] = (np.uint32, _length(segment, "duplicates"))
    for name, (dtype, length) in shapes.items():
        values = segment.tensors.get(name)
        if values is None or values.dtype != np.dtype(dtype) or values.shape != (length,):
            raise ValueError(f"its array '{name}' is missing, or has another type or length")
    _check_values(segment, parts, files)


def _check_values(segment: Segment, parts: int, files: int) -> None:
    tensors = segment.tensors
    edges = {"chunk_parts": parts, **{f"file_{name}_offsets": len(tensors[f"file_{name}"]) for name in TEXTS}}
    if segment.identities:
        edges["chunk_duplicates"] = len(tensors["duplicates"])
    for name, end in edges.items():
        if not sound_offsets(tensors[name], end):
            raise ValueError(f"its array '{name}' does not rise from 0 to {end:,}")
    start, stop = tensors["part_start"], tensors["part_stop"]
    if (tensors["part_file"] >= files).any() or (start > stop).any() or float(stop.sum(dtype=np.float64)) >= _MOST:
        raise ValueError("a part of it is outside its file")
    if (tensors["file_size"] >= _MOST).any() or not tensors["file_path"].all():
        raise ValueError("a file of it has an impossible size or name")


def _length(segment: Segment, name: str) -> int:
    values = segment.tensors.get(name)
    return 0 if values is None else values.size
