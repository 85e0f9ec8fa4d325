"""The lines of a manifest, found by the image they name: what is kept of a line is where it is, and a hash.

{"path": "cats/a.jpg", "tags": ["cat"]}        named as its image,   cats/a.jpg
{"path": "../b.jpg"}                           named by its place,   list.jsonl@41: nothing outside is ever opened
{"path": "cats/a.jpg"}                         named by its place,   list.jsonl@63: there is one such sample already
"""

import os
import tempfile
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from forebay.columns import Array
from forebay.errors import SourceChanged, SourceUnreadable
from forebay.source import TOO_DEEP, SourceFile, is_shallow
from forebay.sources.failures import BOM
from forebay.sources.paths import look
from forebay.sources.streams import Stream
from forebay.sources.walker import is_stream

LONGEST_LINE = 1 << 24
MOST_UNPACKED = 16 << 30  # of a compressed manifest, on the disk for temporary files
_PIECE = 1 << 20
_SHOWN_MARKS = 60
_NO_IMAGE = np.uint64(0)  # in place of a hash


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

    def __init__(self, stored: "StoredText", key: str, root: str) -> None:
        self._stored, self._key, self._root = stored, key, root
        self._starts, self._stops = stored.line_bounds()
        names = (self._line(number).image for number in range(len(self._starts)))
        hashes = np.fromiter(map(_hash, names), np.uint64, len(self._starts))
        naming = np.flatnonzero(hashes != _NO_IMAGE)
        self._order = naming[np.argsort(hashes[naming], kind="stable")]
        self._sorted = hashes[self._order]
        self._again = self._repetitions()

    def named(self) -> Iterator[Line]:
        """Every line but blank ones; one that names an image which an earlier line named is a failure."""
        return (line for number in range(len(self._starts)) if (line := self._judged(number)).text.strip())

    def find(self, image: str) -> Line | None:
        """The line that names an image."""
        value = np.uint64(_hash(image))
        low, high = (int(np.searchsorted(self._sorted, value, side)) for side in ("left", "right"))
        numbers = map(int, self._order[low:high])
        return next((line for number in numbers if (line := self._judged(number)).image == image), None)

    def at(self, start: int) -> Line | None:
        """The line that begins at an offset."""
        number = int(np.searchsorted(self._starts, start))
        return self._judged(number) if number < len(self._starts) and self._starts[number] == start else None

    def _repetitions(self) -> dict[int, int]:
        """Lines that name an image again -> the first that did."""
        edges = np.flatnonzero(np.diff(self._sorted, prepend=_NO_IMAGE, append=_NO_IMAGE))
        again: dict[int, int] = {}
        for run in np.flatnonzero(np.diff(edges) > 1).tolist():  # the same hash, by name or by chance
            first: dict[str, int] = {}
            for number in map(int, self._order[edges[run] : edges[run + 1]]):
                earlier = first.setdefault(self._line(number).image, number)
                if earlier != number:
                    again[number] = earlier
        return again

    def _judged(self, number: int) -> Line:
        line = self._line(number)
        if number not in self._again:
            return line
        detail = f"line {line.number}: '{line.image}' is named by line {self._again[number] + 1} already"
        return line._replace(image="", reason="duplicate", detail=detail)

    def _line(self, number: int) -> Line:
        start, stop = int(self._starts[number]), int(self._stops[number])
        text = self._stored.read(start, min(stop, start + LONGEST_LINE))
        image, reason, detail = _image_in(text, self._key, self._root)
        if stop - start > LONGEST_LINE:
            image, reason, detail = "", "bad-json", f"it has {stop - start:,} bytes, more than {LONGEST_LINE:,}"
        return Line(number + 1, start, text, image, reason, f"line {number + 1}: {detail}" if reason else "")


@lru_cache(maxsize=2)
def open_lines(root: str, path: str, file: SourceFile, key: str) -> ImageLines:
    """The lines of a manifest as it was when looked at; kept, as every image is found by it."""
    return ImageLines(_stored(path, file), key, root)


def manifest_file(path: str) -> SourceFile:
    return look(os.path.dirname(path), os.path.basename(path))


class StoredText:
    """The bytes of a manifest, read where they are wanted: a mapped file that somebody cuts short ends the process."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._size = os.fstat(descriptor).st_size
        weakref.finalize(self, os.close, descriptor)

    def read(self, start: int, stop: int) -> bytes:
        content = os.pread(self._descriptor, stop - start, start)
        if len(content) < stop - start:
            folder, name = os.path.split(self._path)
            raise SourceChanged(folder, {name: "was cut short while it was read"})
        return content

    def line_bounds(self) -> tuple[Array, Array]:
        """Where each line begins and ends."""
        stops = np.concatenate([np.empty(0, np.int64), *self._line_ends()])
        if self._size and (not len(stops) or stops[-1] != self._size - 1):
            stops = np.append(stops, self._size)
        starts = np.concatenate([[0], stops[:-1] + 1])[: len(stops)]
        if self._size >= len(BOM) and self.read(0, len(BOM)) == BOM:
            starts[0] = len(BOM)
        return starts, stops

    def _line_ends(self) -> Iterator[Array]:
        for start in range(0, self._size, _PIECE):
            piece = np.frombuffer(self.read(start, min(start + _PIECE, self._size)), np.uint8)
            yield start + np.flatnonzero(piece == ord("\n"))


def _stored(path: str, file: SourceFile) -> StoredText:
    if not is_stream(path):
        return StoredText(path, os.open(path, os.O_RDONLY))
    with tempfile.TemporaryFile() as plain, Stream(path, file, LONGEST_LINE) as stream:
        while piece := stream.read(_PIECE):
            if stream.position > MOST_UNPACKED:
                raise SourceUnreadable(path, f"it unpacks to more than {MOST_UNPACKED:,} bytes; unpack it first")
            plain.write(piece)
        plain.flush()
        return StoredText(path, os.dup(plain.fileno()))


def _image_in(text: bytes, key: str, root: str) -> tuple[str, str, str]:
    """The image that a line names, or a reason and a sentence."""
    said: dict[str, Any] | None
    try:
        said = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return "", "bad-json", str(error)
    except RecursionError:
        said = None
    if said is None or not is_shallow(said):
        return "", "bad-json", TOO_DEEP
    name = said.get(key)
    if key not in said:
        known = ", ".join(f"'{name}'" for name in said)
        return "", "no-path", f"there is no '{key}' but {known:.{_SHOWN_MARKS}}; say which it is (--image, image=)"
    if not isinstance(name, str) or not name or "\0" in name:
        return "", "no-path", f"the field '{key}' is {name!r:.{_SHOWN_MARKS}}, not the path of an image"
    path = os.path.relpath(name, root) if os.path.isabs(name) else os.path.normpath(name)
    if path.split(os.sep)[0] in ("..", "."):
        shown = f"'{name:.{_SHOWN_MARKS}}' is not below the root '{root}'"
        return "", "outside-root", f"{shown}; choose a root above all images (--root, root=)"
    return path, "", ""


def _hash(image: str) -> int:
    value: int = xxhash.xxh3_64_intdigest(image.encode("utf-8", "surrogateescape"))
    return max(value, 1) if image else int(_NO_IMAGE)
