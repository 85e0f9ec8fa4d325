"""A segment of a plan: files, cut into the parts that chunks are made of; and the files it leaves out."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from forebay.columns import Array
from forebay.errors import IndexCorrupt, SourceUnreadable
from forebay.format import layout
from forebay.format.chunk import sound_offsets
from forebay.format.layout import FORMAT_VERSION, MAX_NUMBER, MAX_REVISION, one_line
from forebay.format.tensors import seal, unseal
from forebay.recipe import canonical_json
from forebay.source import (
    DTYPES,
    KNOWN_BY_SOME,
    NUMBERS,
    TEXTS,
    FileColumns,
    FileTable,
    Numbers,
    Part,
    Source,
    SourceFile,
)
from forebay.store.base import Buffer

SHOWN_FILES = 20


class Unreadable:
    """What was found so far: `found` is path -> why. Unless files may be skipped, the first one is raised."""

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.found: dict[str, str] = {}

    def without(self, files: Sequence[SourceFile]) -> Sequence[SourceFile]:
        return FileTable.of(file for file in files if file.path not in self.found) if self.found else files

    def take_listed(self, source: Source, files: Sequence[SourceFile]) -> None:
        """Note the files of which the listing itself says that they cannot be read."""
        listed = [file for file in files if file.problem]
        self.found |= {file.path: file.problem for file in listed}
        if listed and not (self.skip and self.without(files)):
            root = source.describe().get("root", "")
            raise SourceUnreadable(os.path.join(root, listed[0].path), listed[0].problem)

    def take(self, error: SourceUnreadable, files: Sequence[SourceFile]) -> None:
        """Note the file that an error names; raise it where that is not allowed, or where no other file is left."""
        path = named_in(error, (file.path for file in files))
        if not self.skip or path is None or path in self.found:
            raise error
        self.found[path] = error.problem
        if not self.without(files):
            raise error


def named_in(error: SourceUnreadable, paths: Iterable[str]) -> str | None:
    """Which of some paths an error is about: it may name it with the folder that it is in."""
    return next((path for path in paths if error.path == path or error.path.endswith(f"/{path}")), None)


def unreadable_note(found: dict[str, str]) -> tuple[str, ...]:
    """One line for a report, none where all could be read."""
    if not found:
        return ()
    shown = "; ".join(f"'{path}': {why}" for path, why in list(found.items())[:SHOWN_FILES])
    left = len(found) - SHOWN_FILES
    more = f"; and {left:,} more, which `forebay status --json` lists" if left > 0 else ""
    return (f"{len(found):,} file(s) could not be read and were left out: {shown}{more}",)


_REVISION = "revision_"  # begins the name of a tensor; what follows is the layer
_PARTS = {name: np.uint64 for name in ("chunk_parts", "part_file", "part_start", "part_stop")}
_MOST = 1 << 62  # of bytes or samples, also in sum


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """What a deduplicating plan knows of the slice of a chunk."""

    ordinals: Array  # which of its samples, failed ones counted too, are equal to earlier ones; rising
    check: int  # what `Census` made of all its samples


class PartColumns:
    """Parts of files that are collected chunk by chunk."""

    def __init__(self) -> None:
        self._chunks, self._files, self._starts, self._stops = (Numbers() for _ in range(4))
        self._chunks.append(0)

    def append(self, file: int, part: Part) -> None:
        self._files.append(file)
        self._starts.append(part.start)
        self._stops.append(part.stop)

    def end_chunk(self) -> None:
        self._chunks.append(len(self._files))

    def tensors(self) -> dict[str, Array]:
        columns = (self._chunks, self._files, self._starts, self._stops)
        return {name: column.values() for name, column in zip(_PARTS, columns, strict=True)}


class _CutFiles:
    """The files of parts that come in the order of a listing, which is copied only from where they differ from it."""

    def __init__(self, listed: FileTable) -> None:
        self._listed, self._following = listed, iter(listed)
        self._copied: FileColumns | None = None
        self._last, self._count = "", 0

    def position(self, file: SourceFile) -> int:
        if file.path != self._last:
            if self._copied is None and next(self._following, None) != file:
                self._copied = FileColumns.of(islice(self._listed, self._count))
            if self._copied is not None:
                self._copied.append(file)
            self._last, self._count = file.path, self._count + 1
        return self._count - 1

    def table(self) -> FileTable:
        """The files that have parts, and then those of the listing that have none."""
        if self._copied is None:
            return self._listed
        found, rest = self._copied.table(), FileColumns()
        cut = found.paths()
        following = next(cut, None)
        for file in self._listed:
            if file.path == following:
                following = next(cut, None)
            else:
                rest.append(file)
        return FileTable.of(chain(found, rest.table())) if len(rest) else found


@dataclass(frozen=True, eq=False)
class Segment:
    """One append to the plan: its files, its parts, and which parts make a chunk."""

    number: int
    first_chunk: int
    source: Mapping[str, Any]  # the description of the source
    weight: int  # what a chunk was meant to weigh, in the unit of the source
    tensors: Mapping[str, Array]
    identities: str = ""  # the digest of the file of identities that it added, where its recipe deduplicates
    amends: str = ""  # the base layer, where it says anew what planned chunks are made from
    dropped: tuple[str, ...] = ()  # files that are planned no more
    unreadable: Mapping[str, str] | None = None  # files that were passed over -> why; None where none may be

    @classmethod
    def of(
        cls,
        chunks: Sequence[Sequence[Part]],
        *,
        number: int,
        first_chunk: int,
        source: Mapping[str, Any],
        weight: int,
        empty: Iterable[SourceFile] = (),
    ) -> "Segment":
        """A segment of some chunks; `empty` are files without samples, so that they are known too."""
        index: dict[str, int] = {}
        files, parts = FileColumns(), PartColumns()
        for chunk in chunks:
            for part in chunk:
                position = index.setdefault(part.file.path, len(files))
                if position == len(files):
                    files.append(part.file)
                parts.append(position, part)
            parts.end_chunk()
        for file in empty:
            if index.setdefault(file.path, -1) == -1:
                files.append(file)
        return cls(number, first_chunk, dict(source), weight, {**parts.tensors(), **files.table().tensors})

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
    ) -> "Segment":
        """A segment of chunks that are cut one after the other from files in the order in which they are `listed`.

        Nothing is kept for each file but its columns. Listed files without samples come behind the others.
        """
        files, parts = _CutFiles(FileTable.of(listed)), PartColumns()
        for chunk in chunks:
            for part in chunk:
                parts.append(files.position(part.file), part)
            parts.end_chunk()
        return cls(number, first_chunk, dict(source), weight, {**parts.tensors(), **files.table().tensors})

    def __len__(self) -> int:
        """How many chunks it says something about."""
        return len(self.tensors["chunk_parts"]) - 1

    @property
    def added(self) -> int:
        """How many chunks the plan has more by it."""
        return 0 if self.amends else len(self)

    @property
    def chunk_numbers(self) -> Array:
        if self.amends:
            return self.tensors["chunk_number"].astype(np.int64)
        return np.arange(self.first_chunk, self.first_chunk + len(self), dtype=np.int64)

    def amending(
        self, base: str, chunks: Sequence[int], revisions: Mapping[str, Sequence[int]], dropped: Iterable[str]
    ) -> "Segment":
        """The same parts, for chunks that are planned; `revisions` are, by layer, the first that are made from them."""
        tensors: dict[str, Array] = {"chunk_number": np.array(chunks, np.uint64)}
        tensors |= {f"{_REVISION}{layer}": np.array(numbers, np.uint64) for layer, numbers in revisions.items()}
        return replace(self, tensors={**self.tensors, **tensors}, amends=base, dropped=tuple(sorted(dropped)))

    def passing_over(self, unreadable: Unreadable) -> "Segment":
        """The same segment, with the files that could not be read where they may be skipped."""
        return replace(self, unreadable=dict(unreadable.found)) if unreadable.skip else self

    def revisions(self, layer: str) -> Array | None:
        """The first revision of every chunk of a layer that is made as this segment says; None: any is."""
        found = self.tensors.get(f"{_REVISION}{layer}")
        return None if found is None else found.astype(np.int64)

    def asked(self, layer: str) -> dict[int, int]:
        """chunk -> the first revision of it that is made as this segment says, where not every one is."""
        revisions = self.revisions(layer)
        return {} if revisions is None else dict(zip(self.chunk_numbers.tolist(), revisions.tolist(), strict=True))

    @property
    def file_count(self) -> int:
        return len(self.tensors["file_size"])

    @cached_property
    def files(self) -> FileTable:
        """Every file that it names, in order."""
        return FileTable({name: values for name, values in self.tensors.items() if name.startswith("file_")})

    def without_change_times(self) -> "Segment":
        """The same segment, as it was written before files were also known by ctime and inode."""
        names = {f"file_{name}" for name in KNOWN_BY_SOME}
        return replace(self, tensors={name: values for name, values in self.tensors.items() if name not in names})

    def parts(self, chunk: int) -> list[Part]:
        """The parts of a chunk, counted from the start of this segment."""
        first, last = self.tensors["chunk_parts"][chunk : chunk + 2].tolist()
        return [
            Part(self.files[file], start, stop)
            for file, start, stop in zip(
                self.tensors["part_file"][first:last].tolist(),
                self.tensors["part_start"][first:last].tolist(),
                self.tensors["part_stop"][first:last].tolist(),
                strict=True,
            )
        ]

    def left_out(self, chunk: int) -> LeftOut | None:
        """What is left out of a chunk, by its number in this segment; None where duplicates were not looked for."""
        if not self.identities:
            return None
        first, last = self.tensors["chunk_duplicates"][chunk : chunk + 2].tolist()
        return LeftOut(self.tensors["duplicates"][first:last], int(self.tensors["chunk_check"][chunk]))

    def without_duplicates(self, tensors: Mapping[str, Array], identities: str) -> "Segment":
        """The same segment, with what `Census` and `find_duplicates` found."""
        return replace(self, tensors={**self.tensors, **tensors}, identities=identities)

    @cached_property
    def _parts_by_file(self) -> tuple[Array, Array]:
        """The parts ordered by file, and the file of each."""
        order = np.argsort(self.tensors["part_file"], kind="stable")
        return order, self.tensors["part_file"][order]

    def places_of(self, file: int) -> list[tuple[int, int, int, int]]:
        """(chunk, part of that chunk, start, stop) of everything planned from one file."""
        order, files = self._parts_by_file
        found = order[np.searchsorted(files, file, side="left") : np.searchsorted(files, file, side="right")]
        chunks = np.searchsorted(self.tensors["chunk_parts"], found, side="right") - 1
        within = found - self.tensors["chunk_parts"][chunks].astype(np.int64)
        starts, stops = self.tensors["part_start"][found], self.tensors["part_stop"][found]
        columns = (self.chunk_numbers[chunks].tolist(), within.tolist(), starts.tolist(), stops.tolist())
        return list(zip(*columns, strict=True))

    def weights(self) -> Array:
        """What every chunk of this segment takes from the source."""
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
        } | ({"identities": self.identities} if self.identities else {})
        if self.unreadable is not None:
            metadata |= {"unreadable": dict(self.unreadable)}
        if self.amends:
            metadata |= {"type": "amendment", "amends": self.amends, "dropped": list(self.dropped)}
        return seal(metadata, self.tensors, stored_as={**_PARTS, **DTYPES})

    def digest(self) -> str:
        """The SHA-256 that its file carries."""
        return bytes(self.encode()[-1]).hex()


def decode_segment(view: memoryview, root: str, key: str) -> tuple[Segment, str]:
    """A segment, with every number and name in it checked, and the SHA-256 that its file carries."""
    metadata, tensors = unseal(view, root, key, "plan", kinds=("amendment",))
    try:
        facts = msgspec.convert(metadata, _SegmentHeader)
        _check_description(facts.source)
        if bool(facts.amends) != (facts.type == "amendment"):
            raise ValueError(f"it is of type '{facts.type}' and amends '{facts.amends}'")
        segment = Segment(
            facts.number,
            facts.first_chunk,
            facts.source,
            facts.weight,
            tensors,
            facts.identities,
            facts.amends,
            facts.dropped,
            facts.unreadable,
        )
        _check_tensors(segment)
    except (msgspec.ValidationError, ValueError) as error:
        raise IndexCorrupt(root, key, f"it cannot be understood: {one_line(error)}") from error
    return segment, bytes(view[-32:]).hex()


class _SegmentHeader(msgspec.Struct, frozen=True):
    """What the header of a segment says; fields that a later forebay adds are ignored."""

    type: str
    number: Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
    first_chunk: Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
    source: dict[str, Any]
    weight: Annotated[int, msgspec.Meta(ge=1, lt=_MOST)]
    identities: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""
    amends: str = ""
    dropped: tuple[str, ...] = ()
    unreadable: dict[str, str] | None = None


def _check_description(source: Mapping[str, Any]) -> None:
    """Refuse a description that no source gave; only the source of its kind knows more of it."""
    if not isinstance(source.get("kind"), str):
        raise ValueError("the description of its source names no kind")
    patterns = source.get("patterns", [])
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError("'patterns' of its source is not a list of texts")
    canonical_json(source)
    for name in ("root", "patterns", "manifest", "path"):
        if b"\\u0000" in canonical_json(source.get(name)):
            raise ValueError(f"'{name}' of its source holds a NUL, which no path has")


def _check_tensors(segment: Segment) -> None:
    """Refuse arrays that could not have been written: nothing is looked up in them before."""
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
    if segment.amends:
        shapes["chunk_number"] = (np.uint64, chunks - 1)
        shapes |= {f"{_REVISION}{layer}": (np.uint64, chunks - 1) for layer in _amended_layers(segment)}
    if segment.identities:
        shapes["chunk_duplicates"], shapes["chunk_check"] = (np.uint64, chunks), (np.uint64, chunks - 1)
        shapes["duplicates"] = (np.uint32, _length(segment, "duplicates"))
    for name, (dtype, length) in shapes.items():
        found = segment.tensors.get(name)
        if found is None or found.dtype != np.dtype(dtype) or found.shape != (length,):
            raise ValueError(f"its array '{name}' is not there, or has another type or length")
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
        raise ValueError("a part of it lies outside its file")
    if (tensors["file_size"] >= _MOST).any() or not tensors["file_path"].all():
        raise ValueError("a file of it has a size or a name that no file has")
    if segment.amends:
        _check_amendment(segment)


def _check_amendment(segment: Segment) -> None:
    chunks = segment.tensors["chunk_number"]
    if (chunks >= segment.first_chunk).any() or (chunks[1:] <= chunks[:-1]).any():
        raise ValueError("it amends chunks that are not planned, or names them out of order")
    layers = _amended_layers(segment)
    if segment.amends not in layers or not all(map(layout.is_layer_name, layers)):
        raise ValueError("it does not say from which revision of its layers on it holds")
    for layer in layers:
        asked = segment.tensors[f"{_REVISION}{layer}"]
        if ((asked < 1) | (asked >= MAX_REVISION)).any():
            raise ValueError(f"it asks for a revision of layer '{layer}' that no chunk has")
    if segment.identities:
        raise ValueError("it names identities, which an amendment does not have")


def _amended_layers(segment: Segment) -> list[str]:
    return [name.removeprefix(_REVISION) for name in segment.tensors if name.startswith(_REVISION)]


def _length(segment: Segment, name: str) -> int:
    found = segment.tensors.get(name)
    return 0 if found is None else found.size
