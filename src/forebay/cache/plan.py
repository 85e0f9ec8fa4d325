"""The plan: which parts of the source make which chunk. Append-only, fixed before any work starts.

    segment 0   files  a b c      chunk 0 = a[0:900]   chunk 1 = a[900:1400] b[0:350]   chunk 2 = …
    segment 1   files  b d        chunk 3 = b[350:800] d[0:120]                         grown later
    segment 2   files  a          chunk 0 = a[0:910]    from revision 1 on              refreshed: a was edited

A later segment that names a file again holds what is now known of it. A segment that amends adds no chunk: it says what
chunks that are planned are made from now, and from which revision of their files on they are so. Where the recipe
deduplicates, the plan also says which samples of a slice are equal to earlier ones.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from forebay.cache.unreadable import Unreadable
from forebay.columns import Array, Ragged
from forebay.errors import Damaged, ForebayError, IndexCorrupt
from forebay.format import layout
from forebay.format.chunk import sound_offsets
from forebay.format.documents import one_line
from forebay.format.layout import FORMAT_VERSION, MAX_NUMBER, MAX_REVISION
from forebay.format.sealed import seal, unseal
from forebay.recipe import canonical_json
from forebay.source import Part, Source, SourceFile
from forebay.store.base import Buffer, Store
from forebay.store.local import LocalStore
from forebay.store.pieces import load_index

_KNOWN_BY_SOME = {"ctime_ns": np.int64, "inode": np.uint64}  # kept where a file system has them
_REVISION = "revision_"  # begins the name of a tensor; what follows is the layer
_NUMBERS = {"size": np.uint64, "mtime_ns": np.int64, "digest": np.uint64, "has_digest": np.uint8, "stream": np.uint8}
_TEXTS = ("path", "etag")
_MOST = 1 << 62  # of bytes or samples, also in sum


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """What a deduplicating plan knows of the slice of a chunk."""

    ordinals: Array  # which of its samples, failed ones counted too, are equal to earlier ones; rising
    check: int  # what `Census` made of all its samples


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
        """A segment of consecutive chunks; `empty` are files without samples, so that they are known too."""
        files = {part.file.path: part.file for parts in chunks for part in parts}
        files |= {file.path: file for file in empty if file.path not in files}
        index = {path: position for position, path in enumerate(files)}
        parts = [part for group in chunks for part in group]
        tensors: dict[str, Array] = {
            "chunk_parts": np.cumsum([0, *map(len, chunks)], dtype=np.uint64),
            "part_file": np.array([index[part.file.path] for part in parts], np.uint64),
            "part_start": np.array([part.start for part in parts], np.uint64),
            "part_stop": np.array([part.stop for part in parts], np.uint64),
        }
        return cls(number, first_chunk, dict(source), weight, tensors | _file_tensors(list(files.values())))

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
        """The same segment, with the files that could not be read where they may be passed over."""
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

    def path(self, position: int) -> str:
        return self._text("path", position)

    def file(self, position: int) -> SourceFile:
        numbers = {name: int(self.tensors[f"file_{name}"][position]) for name in _NUMBERS}
        has_digest = numbers.pop("has_digest")
        return SourceFile(
            path=self.path(position),
            etag=self._text("etag", position),
            size=numbers["size"],
            mtime_ns=numbers["mtime_ns"],
            stream=bool(numbers["stream"]),
            digest=numbers["digest"] if has_digest else None,
            **{
                name: int(self.tensors[f"file_{name}"][position])
                for name in _KNOWN_BY_SOME
                if f"file_{name}" in self.tensors
            },
        )

    def without_change_times(self) -> "Segment":
        """The same segment, as it was written before files were also known by ctime and inode."""
        names = {f"file_{name}" for name in _KNOWN_BY_SOME}
        return replace(self, tensors={name: values for name, values in self.tensors.items() if name not in names})

    def parts(self, chunk: int) -> list[Part]:
        """The parts of a chunk, counted from the start of this segment."""
        first, last = self.tensors["chunk_parts"][chunk : chunk + 2].tolist()
        return [
            Part(self.file(file), start, stop)
            for file, start, stop in zip(
                self.tensors["part_file"][first:last].tolist(),
                self.tensors["part_start"][first:last].tolist(),
                self.tensors["part_stop"][first:last].tolist(),
                strict=True,
            )
        ]

    def left_out(self, chunk: int) -> LeftOut | None:
        """What is left out of a chunk, counted from the start of this segment; None where nothing was ever judged."""
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

    def encode(self) -> list[Buffer]:
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
        ordered = dict(sorted(self.tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
        return seal(metadata, ordered)

    def digest(self) -> str:
        """The SHA-256 that its file carries."""
        return bytes(self.encode()[-1]).hex()

    def _text(self, name: str, position: int) -> str:
        rows = Ragged(self.tensors[f"file_{name}"], self.tensors[f"file_{name}_offsets"])
        return rows[position].tobytes().decode("utf-8", "surrogateescape")


class Plan:
    """All segments of a cache's plan."""

    def __init__(self, segments: Sequence[Segment], digests: Sequence[str]) -> None:
        self.segments = tuple(segments)
        self.digests = tuple(digests)

    def first(self, segments: int) -> "Plan":
        """The plan as it was when it had so many segments."""
        return Plan(self.segments[:segments], self.digests[:segments])

    def __len__(self) -> int:
        """The number of chunks planned."""
        return self.segments[-1].first_chunk + self.segments[-1].added if self.segments else 0

    @property
    def source(self) -> Mapping[str, Any]:
        return self._segment(-1).source

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
        found = np.zeros(len(self), np.int64)
        for segment in self.segments:
            numbers = segment.revisions(layer) if segment.amends else None
            if numbers is not None:
                found[segment.chunk_numbers] = np.maximum(found[segment.chunk_numbers], numbers)
        return found

    @property
    def unreadable(self) -> dict[str, str]:
        """The files that were passed over as they could not be read -> why."""
        found: dict[str, str] = {}
        for segment in self.segments:
            for path in map(segment.path, range(segment.file_count)):
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
                found.setdefault(chunk, segment.path(file))
        return found

    @cached_property
    def files(self) -> dict[str, SourceFile]:
        """Every planned file as it was last seen."""
        found: dict[str, SourceFile] = {}
        for segment in self.segments:
            found |= {file.path: file for file in map(segment.file, range(segment.file_count))}
            for path in segment.dropped:
                found.pop(path, None)
        return found

    def ends(self) -> dict[str, int]:
        """How far every file is planned, in the unit of the source."""
        ends: dict[str, int] = {}
        for number, segment in enumerate(self.segments):
            edges = segment.tensors["chunk_parts"].astype(np.int64)
            holds = np.repeat(self._owners[0][segment.chunk_numbers] == number, edges[1:] - edges[:-1])
            stops = segment.tensors["part_stop"][holds].tolist()
            for file, stop in zip(segment.tensors["part_file"][holds].tolist(), stops, strict=True):
                path = segment.path(file)
                ends[path] = max(stop, ends.get(path, 0))
        return ends

    @cached_property
    def _segments_of(self) -> dict[str, list[tuple[int, int]]]:
        """path -> (segment, file in it)."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, segment in enumerate(self.segments):
            for file in range(segment.file_count):
                found.setdefault(segment.path(file), []).append((number, file))
        return found

    def places_of(self, path: str) -> Iterator[tuple[int, int, int, int]]:
        """(chunk, part of that chunk, start, stop) of everything planned from one file."""
        owners = self._owners[0]
        for number, file in self._segments_of.get(path, ()):
            yield from (place for place in self.segments[number].places_of(file) if owners[place[0]] == number)

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


def check_kind(store: Store, source: Source, plan: Plan) -> None:
    """Parts count in the unit of their source, and `repair` reads all of them with one source.

    So does a build that goes on: what it has still to make is read as what is there was.
    """
    if not plan.segments:
        return
    planned, given = plan.source, source.describe()
    old, new = planned.get("kind"), given.get("kind")
    if old != new:
        raise ForebayError(
            f"the cache at '{store.address}' was built from a source of kind '{old}' and cannot grow by one of kind "
            f"'{new}'; use '{old}' again, or build a new cache"
        )
    for name in getattr(source, "read_by", ()):
        if planned.get(name) != given.get(name):
            raise ForebayError(
                f"the cache at '{store.address}' was built from a source with {name}={planned.get(name)!r} and cannot "
                f"go on with {name}={given.get(name)!r}; give the same again, or build a new cache"
            )


def files_apart(store: Store, source: Source) -> list[SourceFile]:
    """The files of a source, but for those of a cache that lies among them: it must not become part of itself."""
    root = source.describe().get("root")
    if not isinstance(store, LocalStore) or root is None:
        return source.files()
    own = os.path.abspath(store.address) + os.sep
    return [file for file in source.files() if not os.path.normpath(os.path.join(root, file.path)).startswith(own)]


def load_plan(store: Store) -> Plan:
    """The plan as it is now: every segment, each checked against its digest."""
    segments: list[Segment] = []
    digests: list[str] = []
    for entry in store.keys(layout.PLAN):
        if layout.parse_segment(entry.key) != len(segments):
            continue
        segment, digest = decode_segment(load_index(store, entry.key), store.address, entry.key)
        planned = segments[-1].first_chunk + segments[-1].added if segments else 0
        if (segment.number, segment.first_chunk) != (len(segments), planned):
            raise IndexCorrupt(store.address, entry.key, f"it does not continue the plan at chunk {planned}")
        segments.append(segment)
        digests.append(digest)
    return Plan(segments, digests)


def decode_segment(view: memoryview, root: str, key: str) -> tuple[Segment, str]:
    """A segment, with every number and name in it checked, and the SHA-256 that its file carries."""
    metadata, tensors = unseal(view, root, key, "plan", kinds=("amendment",))
    try:
        facts = msgspec.convert(metadata, _Metadata)
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


class _Metadata(msgspec.Struct, frozen=True):
    """What the header of a segment says; fields that a later forebay adds are passed over."""

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
    shapes |= {f"file_{name}": (dtype, files) for name, dtype in _NUMBERS.items()}
    shapes |= {f"file_{name}_offsets": (np.uint64, files + 1) for name in _TEXTS}
    shapes |= {f"file_{name}": (np.uint8, _length(segment, f"file_{name}")) for name in _TEXTS}
    shapes |= {
        f"file_{name}": (dtype, files) for name, dtype in _KNOWN_BY_SOME.items() if _has(segment, f"file_{name}")
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
    edges = {"chunk_parts": parts, **{f"file_{name}_offsets": len(tensors[f"file_{name}"]) for name in _TEXTS}}
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


def _has(segment: Segment, name: str) -> bool:
    return name in segment.tensors


def _length(segment: Segment, name: str) -> int:
    found = segment.tensors.get(name)
    return 0 if found is None else found.size


def _file_tensors(files: list[SourceFile]) -> dict[str, Array]:
    columns: dict[str, list[int]] = {
        "size": [file.size for file in files],
        "mtime_ns": [file.mtime_ns for file in files],
        "digest": [file.digest or 0 for file in files],
        "has_digest": [file.digest is not None for file in files],
        "stream": [file.stream for file in files],
    }
    tensors: dict[str, Array] = {
        f"file_{name}": np.array(columns[name], dtype=dtype) for name, dtype in _NUMBERS.items()
    }
    for name, dtype in _KNOWN_BY_SOME.items():
        if any(getattr(file, name) for file in files):
            tensors[f"file_{name}"] = np.array([getattr(file, name) for file in files], dtype=dtype)
    for name in _TEXTS:
        text = Ragged.of_bytes([getattr(file, name).encode("utf-8", "surrogateescape") for file in files])
        tensors[f"file_{name}"] = text.values
        tensors[f"file_{name}_offsets"] = text.offsets.astype(np.uint64)
    return tensors
