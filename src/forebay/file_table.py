"""Files of a source in columns: some 60 bytes for each, where a list of objects takes 350.

    path      "a.jpgb.jpgc.png"    offsets  0 5 10 15
    size      4096 812 77103
    mtime_ns  …                    and the other numbers of `SourceFile`

A listing of millions is collected in columns, and a plan keeps the same columns on disk.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from forebay.source import SourceFile

NUMBERS = {"size": np.uint64, "mtime_ns": np.int64, "digest": np.uint64, "has_digest": np.uint8, "stream": np.uint8}
KNOWN_BY_SOME = {"ctime_ns": np.int64, "inode": np.uint64}  # kept where a file system has them
TEXTS = ("path", "etag")
DTYPES: Mapping[str, Any] = {
    **{f"file_{name}": dtype for name, dtype in (NUMBERS | KNOWN_BY_SOME).items()},
    **{f"file_{name}": np.uint8 for name in TEXTS},
    **{f"file_{name}_offsets": np.uint64 for name in TEXTS},
}
_AT_ONCE = 4096  # files, as lists of Python numbers
_WIDTHS = "BIQq"  # of an item: as narrow as what was appended so far; the last one has a sign


class Numbers:
    """A column of whole numbers that grows, in the narrowest type that holds all of them; equal ones take no room."""

    def __init__(self) -> None:
        self._values = array(_WIDTHS[0])
        self._same = self._run = 0  # the number that all have so far, and how many; they are not in `_values`

    def __len__(self) -> int:
        return len(self._values) or self._run

    def append(self, value: int) -> None:
        if not self._values:
            if value == self._same or not self._run:
                self._same, self._run = value, self._run + 1
                return
            self._values = _narrowest(self._same) * self._run
        while True:
            try:
                return self._values.append(value)
            except OverflowError:
                wider = _WIDTHS.index(self._values.typecode) + 1
                if wider == len(_WIDTHS):
                    raise
                self._values = array(_WIDTHS[-1] if value < 0 else _WIDTHS[wider], self._values)

    def values(self) -> NDArray[Any]:
        if self._values:
            return np.frombuffer(self._values, self._values.typecode)
        return np.broadcast_to(np.frombuffer(_narrowest(self._same), _narrowest(self._same).typecode), self._run)


def _narrowest(value: int) -> "array[int]":
    for width in _WIDTHS:
        with suppress(OverflowError):
            return array(width, [value])
    raise OverflowError(value)


class Texts:
    """A column of texts that grows: all of them end to end, and where each ends."""

    def __init__(self) -> None:
        self._joined, self._offsets = bytearray(), Numbers()
        self._offsets.append(0)

    def append(self, text: str) -> None:
        self._joined += text.encode("utf-8", "surrogateescape")
        self._offsets.append(len(self._joined))

    def values(self) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        return np.frombuffer(self._joined, np.uint8), self._offsets.values()


class FileColumns:
    """Files that are collected one by one."""

    def __init__(self) -> None:
        self._numbers = {name: Numbers() for name in (*NUMBERS, *KNOWN_BY_SOME)}
        self._texts = {name: Texts() for name in TEXTS}

    @classmethod
    def of(cls, files: Iterable[SourceFile]) -> "FileColumns":
        columns = cls()
        for file in files:
            columns.append(file)
        return columns

    def __len__(self) -> int:
        return len(self._numbers["size"])

    def append(self, file: SourceFile) -> None:
        self._texts["path"].append(file.path)
        self._texts["etag"].append(file.etag)
        numbers = self._numbers
        numbers["size"].append(file.size)
        numbers["mtime_ns"].append(file.mtime_ns)
        numbers["digest"].append(file.digest or 0)
        numbers["has_digest"].append(file.digest is not None)
        numbers["stream"].append(file.stream)
        numbers["ctime_ns"].append(file.ctime_ns)
        numbers["inode"].append(file.inode)

    def table(self) -> "FileTable":
        """What was collected; nothing can be added after it."""
        tensors: dict[str, NDArray[Any]] = {f"file_{name}": self._numbers[name].values() for name in NUMBERS}
        for name in KNOWN_BY_SOME:
            if (values := self._numbers[name].values()).any():
                tensors[f"file_{name}"] = values
        for name, texts in self._texts.items():
            tensors[f"file_{name}"], tensors[f"file_{name}_offsets"] = texts.values()
        return FileTable(tensors)


class FileTable(Sequence[SourceFile]):
    """Files in order, made as objects when they are asked for.

    >>> FileTable.of([SourceFile("a.jpg", 120), SourceFile("b.jpg", 40)])[1].size
    40
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self.tensors = tensors
        self._known = [name for name in KNOWN_BY_SOME if f"file_{name}" in tensors]
        self._sorted: tuple[NDArray[np.uint64], NDArray[Any]] | None = None

    @classmethod
    def of(cls, files: Iterable[SourceFile]) -> "FileTable":
        if isinstance(files, FileTable):
            return files
        return FileColumns.of(files).table()

    def __len__(self) -> int:
        return len(self.tensors["file_size"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(SourceFile.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # equal to a list

    @overload
    def __getitem__(self, at: int) -> SourceFile: ...
    @overload
    def __getitem__(self, at: slice) -> list[SourceFile]: ...
    def __getitem__(self, at: int | slice) -> SourceFile | list[SourceFile]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            return list(self._between(start, stop)) if step == 1 else [self[each] for each in range(start, stop, step)]
        at = range(len(self))[at]
        return next(self._between(at, at + 1))

    def __iter__(self) -> Iterator[SourceFile]:
        return self._between(0, len(self))

    def path(self, at: int) -> str:
        return self._texts("path", at, at + 1)[0]

    def paths(self) -> Iterator[str]:
        for low in range(0, len(self), _AT_ONCE):
            yield from self._texts("path", low, min(low + _AT_ONCE, len(self)))

    def same_paths(self, other: "FileTable") -> bool:
        """Whether both have the same paths in the same order."""
        return all(
            np.array_equal(self.tensors[name], other.tensors[name]) for name in ("file_path_offsets", "file_path")
        )

    def by_path(self) -> "FileTable":
        """The same files, sorted by path; itself where they are."""
        if all(before <= after for before, after in pairwise(self.paths())):
            return self
        paths = list(self.paths())
        return FileTable.of(self[at] for at in sorted(range(len(self)), key=paths.__getitem__))

    def find(self, path: str) -> int | None:
        """Where a file is, the last one of that name; None where there is none."""
        hashes, order = self._by_hash()
        wanted = np.uint64(_hash(path))
        low, high = (int(np.searchsorted(hashes, wanted, side)) for side in ("left", "right"))
        return next((at for at in map(int, order[low:high][::-1]) if self.path(at) == path), None)

    def _between(self, start: int, stop: int) -> Iterator[SourceFile]:
        """Files as objects, some thousand at a time: one by one it takes five times as long."""
        for low in range(start, stop, _AT_ONCE):
            high = min(low + _AT_ONCE, stop)
            numbers = (self.tensors[f"file_{name}"][low:high].tolist() for name in (*NUMBERS, *self._known))
            texts = (self._texts(name, low, high) for name in TEXTS)
            for path, etag, size, mtime_ns, digest, has_digest, stream, *rest in zip(*texts, *numbers, strict=True):
                kept = digest if has_digest else None
                known = dict(zip(self._known, rest, strict=True))
                yield SourceFile(path, size, mtime_ns, etag, bool(stream), kept, **known)

    def _texts(self, name: str, low: int, high: int) -> list[str]:
        edges = self.tensors[f"file_{name}_offsets"][low : high + 1].tolist()
        joined = self.tensors[f"file_{name}"][edges[0] : edges[-1]].tobytes()
        return [joined[at - edges[0] : to - edges[0]].decode("utf-8", "surrogateescape") for at, to in pairwise(edges)]

    def _by_hash(self) -> tuple[NDArray[np.uint64], NDArray[Any]]:
        """The hashes of all paths in rising order, and the files that have them: an index of 12 bytes for each."""
        if self._sorted is None:
            hashes = np.fromiter(map(_hash, self.paths()), np.uint64, len(self))
            order = np.argsort(hashes, kind="stable").astype(np.uint32 if len(self) < 1 << 32 else np.int64)
            self._sorted = hashes[order], order
        return self._sorted


def _hash(path: str) -> int:
    value: int = xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogateescape"))
    return value
