"""The lines of a manifest, found by the image they name: what is kept of a line is where it is, and a hash.

{"path": "cats/a.jpg", "tags": ["cat"]}        named as its image,   cats/a.jpg
{"path": "../b.jpg"}                           named by its place,   list.jsonl@41: nothing outside is ever opened
{"path": "cats/a.jpg"}                         named by its place,   list.jsonl@63: there is one such sample already
"""

import mmap
import os
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from forebay.columns import Array
from forebay.source import SourceFile
from forebay.sources.paths import STREAM_SUFFIXES, look
from forebay.sources.streams import Stream
from forebay.sources.utf8 import BOM

_PIECE = 1 << 20
_SHOWN_MARKS = 60


class Line(NamedTuple):
    """One line: the image it names, relative to the root, or why it names none."""

    number: int  # counted from 1
    start: int
    text: bytes
    image: str
    reason: str = ""
    detail: str = ""

    @property
    def check(self) -> str:
        digest: str = xxhash.xxh3_64_hexdigest(self.text)
        return digest

    def metadata(self, key: str) -> dict[str, Any]:
        """All that the line says but which image it is about."""
        said = msgspec.json.decode(self.text, type=dict[str, Any])
        return {name: value for name, value in said.items() if name != key}


class ImageLines:
    """A manifest whose lines are found by name or by place."""

    def __init__(self, text: "mmap.mmap | bytes", key: str) -> None:
        self._text, self._key = text, key
        self._starts, self._stops = _line_bounds(text)
        hashes = np.array([_hash(line.image) for line in self], np.uint64)
        self._order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[self._order]
        self._again = self._repetitions()

    def __iter__(self) -> Iterator[Line]:
        return map(self._line, range(len(self._starts)))

    def named(self) -> Iterator[Line]:
        """Every line; one that names an image which an earlier line named is a failure."""
        return (self._judged(number) for number in range(len(self._starts)))

    def find(self, image: str) -> Line | None:
        """The line that names an image."""
        return next((line for number in self._with_hash(image) if (line := self._judged(number)).image == image), None)

    def at(self, start: int) -> Line | None:
        """The line that begins at an offset."""
        number = int(np.searchsorted(self._starts, start))
        return self._judged(number) if number < len(self._starts) and self._starts[number] == start else None

    def _with_hash(self, image: str) -> list[int]:
        value = np.uint64(_hash(image))
        low, high = (int(np.searchsorted(self._sorted, value, side)) for side in ("left", "right"))
        found: list[int] = self._order[low:high].tolist()
        return found

    def _repetitions(self) -> dict[int, int]:
        """Lines that name an image again -> the first that did."""
        same = np.flatnonzero(self._sorted[1:] == self._sorted[:-1]) + 1
        again: dict[int, int] = {}
        for number in self._order[same].tolist():
            line = self._line(number)
            earlier = (other for other in self._with_hash(line.image) if other < number)
            first = next((other for other in earlier if self._line(other).image == line.image), None)
            if first is not None and line.image:
                again[number] = first
        return again

    def _judged(self, number: int) -> Line:
        line = self._line(number)
        if number not in self._again:
            return line
        detail = f"line {line.number}: '{line.image}' is named by line {self._again[number] + 1} already"
        return line._replace(image="", reason="duplicate", detail=detail)

    def _line(self, number: int) -> Line:
        start = int(self._starts[number])
        text = bytes(self._text[start : int(self._stops[number])])
        image, reason, detail = _image_in(text, self._key)
        return Line(number + 1, start, text, image, reason, f"line {number + 1}: {detail}" if reason else "")


@lru_cache(maxsize=2)
def open_lines(path: str, file: SourceFile, key: str) -> ImageLines:
    """The lines of a manifest as it was when looked at; kept, as every image is found by it."""
    return ImageLines(_stored(path, file), key)


def manifest_file(path: str) -> SourceFile:
    return look(os.path.dirname(path), os.path.basename(path))


def _stored(path: str, file: SourceFile) -> "mmap.mmap | bytes":
    """All bytes of a manifest, in the page cache rather than in memory of our own."""
    if not path.endswith(STREAM_SUFFIXES):
        with open(path, "rb") as plain:
            return mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) if file.size else b""
    with tempfile.TemporaryFile() as plain, Stream(path, file) as stream:
        while piece := stream.read(_PIECE):
            plain.write(piece)
        plain.flush()
        return mmap.mmap(plain.fileno(), 0, access=mmap.ACCESS_READ) if stream.position else b""


def _line_bounds(text: "mmap.mmap | bytes") -> tuple[Array, Array]:
    """Where each line begins and ends, blank ones left out."""
    marks = np.frombuffer(text, np.uint8)
    stops = np.flatnonzero(marks == ord("\n"))
    if len(marks) and (not len(stops) or stops[-1] != len(marks) - 1):
        stops = np.append(stops, len(marks))
    starts = np.concatenate([[0], stops[:-1] + 1]).astype(np.int64) if len(stops) else np.empty(0, np.int64)
    if text[: len(BOM)] == BOM:
        starts[0] = len(BOM)
    filled = np.array([bool(text[a:b].strip()) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)], np.bool_)
    return starts[filled], stops[filled]


def _image_in(text: bytes, key: str) -> tuple[str, str, str]:
    """The image that a line names, or a reason and a sentence."""
    try:
        said = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return "", "bad-json", str(error)
    name = said.get(key)
    if not isinstance(name, str) or not name or "\0" in name:
        return "", "no-path", f"the field '{key}' is {name!r:.{_SHOWN_MARKS}}, not the path of an image"
    path = os.path.normpath(name)
    if os.path.isabs(name) or path.split(os.sep)[0] in ("..", "."):
        return "", "outside-root", f"'{name:.{_SHOWN_MARKS}}' is not below the root; name images relative to it"
    return path, "", ""


def _hash(image: str) -> int:
    value: int = xxhash.xxh3_64_intdigest(image.encode("utf-8", "surrogateescape"))
    return value
