"""The plan: which parts of the source make which chunk. Append-only, fixed before any work starts.

    segment 0   files  a b c      chunk 0 = a[0:900]   chunk 1 = a[900:1400] b[0:350]   chunk 2 = …
    segment 1   files  b d        chunk 3 = b[350:800] d[0:120]                         grown later
    segment 2   files  a          chunk 0 = a[0:910]    from revision 1 on              refreshed: a was edited

A segment has files, cut into the parts that chunks are made of, and the files it leaves out.
A later segment that names a file again holds what is now known of it. A segment that amends adds no chunk: it says what
chunks that are planned are made from now, and from which revision of their files on they are so. Where the recipe
deduplicates, the plan also says which samples of a slice are equal to earlier ones.

What planning has found so far, kept beside the plan: a planning that was killed continues where it was.

planning/<hash of what was asked>.bin      the answer, and the hash of it

The question names a file with its size and times, so an answer is used only while the file is the same. All of them are
removed once the plan is written, or if it cannot be made.
"""

import os
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, takewhile
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import DTypeLike

from forebay.columns import Array
from forebay.errors import Damaged, ForebayError, IndexCorrupt, SourceUnreadable
from forebay.format import layout
from forebay.format.chunk import sound_offsets
from forebay.format.layout import FORMAT_VERSION, MAX_NUMBER, MAX_REVISION, one_line
from forebay.format.tensors import hmac_key, seal, unseal
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
from forebay.store.base import Buffer, Entry, Missing, Store, is_full, load_index

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
    unreadable: Mapping[str, str] | None = None  # files that were skipped -> why; None where none may be

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


DIGEST_BYTES = 32  # at the end of the file of a segment


class Plan:
    """All segments of a cache's plan."""

    def __init__(
        self,
        segments: Sequence[Segment],
        digests: Sequence[str],
        dropped: Mapping[str, int] | None = None,
        etags: Sequence[str] = (),
    ) -> None:
        self.segments = tuple(segments)
        self.digests = tuple(digests)
        self.dropped = dict(dropped or {})  # layer -> its highest revision when it was last dropped
        self.etags = tuple(etags)  # and sizes of the files that segments were read from; further ones were written here

    def first(self, segments: int) -> "Plan":
        """The first segments of the plan, as it was when it had no more."""
        return Plan(self.segments[:segments], self.digests[:segments], self.dropped, self.etags[:segments])

    def as_read(self) -> "Plan":
        """The segments that were read and checked, without those that this process wrote since."""
        return self.first(sum(1 for _ in takewhile(bool, self.etags)))

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

    A segment is written once, so one that was read for a `known` plan is not read again while its file has the same
    size and etag, nor one that this process wrote while its file ends with the same digest.
    """
    segments: list[Segment] = []
    digests: list[str] = []
    etags: list[str] = []
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
        etags.append(_stamp(entry))
    return Plan(segments, digests, dropped, etags)


def _stamp(entry: Entry) -> str:
    """Size and etag of a file; empty where the store has no etags."""
    return f"{entry.size}-{entry.etag}" if entry.etag else ""


def _known_segment(store: Store, entry: Entry, known: Plan | None, number: int) -> tuple[Segment, str] | None:
    """A segment of a known plan with its digest, if its file is still the same: a segment can be taken back."""
    if known is None or number >= len(known.segments) or entry.size < DIGEST_BYTES:
        return None
    if etag := known.etags[number] if number < len(known.etags) else "":
        return (known.segments[number], known.digests[number]) if _stamp(entry) == etag else None
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


MOST_BYTES = 1 << 30  # of an answer: more is not one of forebay's
_SUM_BYTES = 8


class KeptResults:
    """Answers by question; that one cannot be kept, or is damaged, only means that the work is done again."""

    def __init__(self, store: Store) -> None:
        self._store, self._is_new = store, is_made_to_plan(store)
        self._asked: set[str] = set()
        self._there: set[str] = set()  # of those, what was found or kept
        self.is_used = hmac_key() is None  # with a key, a plan is signed: nothing that is not signed may shape it

    def find(self, *question: Any) -> bytes | None:
        if not self.is_used:
            return None
        try:
            content = self._store.read(key := self._key(question), 0, MOST_BYTES + 1)
        except (Missing, OSError, ForebayError):
            return None
        self._there.add(key)
        answer, found = content[:-_SUM_BYTES], content[-_SUM_BYTES:]
        return answer if len(content) <= MOST_BYTES and found == _sum(answer) else None

    def keep(self, answer: bytes, *question: Any) -> None:
        if not self.is_used:
            return
        with suppress(OSError, ForebayError):
            self._there.add(key := self._key(question))
            self._store.replace(key, [answer, _sum(answer)], durable=False)

    def remove(self, is_planned: bool = False) -> None:
        """Remove the answers that were asked for, and the folders that were made for them; others may still plan.

        When all is planned, every answer was found or kept here; before, workers may have kept more.
        """
        with suppress(OSError, ForebayError):
            there = set() if is_planned else {entry.key for entry in self._store.entries(layout.PLANNING)}
            for key in self._there if is_planned else self._asked & there:
                self._store.delete(key)
        remove_planning_folder(self._store, self._is_new)

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
    kept.remove(is_planned=True)


def is_made_to_plan(store: Store) -> bool:
    """Whether a cache has no folder yet, so that whoever plans it makes one."""
    root = store.local_path("")
    return root is not None and not os.path.exists(root)


def remove_planning_folder(store: Store, with_root: bool) -> None:
    """Remove the folder of what planning keeps, and the root where planning made it, if nothing is in them."""
    root = store.local_path("")
    if root is not None:
        with suppress(OSError):
            os.rmdir(os.path.join(root, layout.PLANNING))
            if with_root:
                os.rmdir(root)


def identity_facts(file: SourceFile) -> list[Any]:
    """What a question says of a file: with other content, it is another question."""
    return [file.path, file.size, file.mtime_ns, file.ctime_ns, file.inode, file.etag]


def _sum(answer: bytes) -> bytes:
    value: bytes = xxhash.xxh3_64_digest(answer)
    return value
