"""Images listed in a JSONL manifest; the other fields of a line are the metadata of its image.

{"path": "cats/a.jpg", "tags": ["cat"]}        named as its image,   cats/a.jpg
{"path": "../b.jpg"}                           named by its offset,  list.jsonl@41: outside the root, never opened
{"path": "cats/a.jpg"}                         named by its offset,  list.jsonl@63: a duplicate
"""

import errno
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import xxhash

from forebay.columns import Array
from forebay.errors import SourceNotFound
from forebay.file_table import FileTable
from forebay.source import (
    TOO_DEEP,
    Annotated,
    Failure,
    Part,
    PartDigest,
    Sample,
    Samples,
    Source,
    SourceFile,
    Unit,
    files_changed,
    is_shallow,
    source_unreadable,
)
from forebay.sources.bucket_files import entries_of, join_url, objects_below, relative_url
from forebay.sources.compression import DecompressedStream
from forebay.sources.image_files import clean_etag, image_digest, read_image, stamp
from forebay.sources.opening import FILE_PROBLEMS, file_as_it_is, full_path, open_planned, state_of
from forebay.sources.paths import BOM, MAX_IMAGE_BYTES, checked_limit, look, looking_in_listing, refuse_one_slash
from forebay.sources.walking import is_stream
from forebay.store.base import Entry, is_url

LONGEST_LINE = 1 << 24
MOST_UNPACKED = 16 << 30  # of a compressed manifest, on the disk for temporary files
_PIECE = 1 << 20
_SHOWN_CHARS = 60
_NO_IMAGE = np.uint32(0)  # in place of a hash
_LINE = re.compile(r"[^!+]*")  # the hash of a line in an etag: before a problem, or before the etag of an object


class Line(NamedTuple):
    """One line: its image, relative to the root, or the reason why it has none."""

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
        """All fields of the line but the path."""
        fields = msgspec.json.decode(self.text, type=dict[str, Any])
        return {name: value for name, value in fields.items() if name != key}


class ImageLines:
    """The lines of a manifest, by image or by offset."""

    def __init__(self, stored: "StoredText", key: str, root: str) -> None:
        self._stored, self._key, self._root = stored, key, root
        self._end = stored.end()
        self._starts = stored.line_starts()
        self._order, self._sorted = self._by_hash()
        self._repeated = self._repetitions()

    def _by_hash(self) -> tuple[Array, Array]:
        """The lines with an image, ordered by the hash of its name, and these hashes; with `_starts`, 12 bytes a line.

        Hashes may collide, so `find` compares names.
        """
        names = (self._line(number).image for number in range(len(self._starts)))
        hashes = np.fromiter(map(_hash, names), np.uint32, len(self._starts))
        order = np.argsort(hashes, kind="stable").astype(self._stored.width)
        named = order[np.count_nonzero(hashes == _NO_IMAGE) :]
        return named, hashes[named]

    def named(self) -> Iterator[Line]:
        """Every line that is not blank; a line that repeats an image is a failure."""
        for number in range(len(self._starts)):
            if (line := self._checked(number)).text.strip():
                yield line

    def find(self, image: str) -> Line | None:
        """The line that names an image."""
        value = np.uint32(_hash(image))
        low, high = (int(np.searchsorted(self._sorted, value, side)) for side in ("left", "right"))
        numbers = map(int, self._order[low:high])
        return next((line for number in numbers if (line := self._checked(number)).image == image), None)

    def at(self, start: int) -> Line | None:
        """The line that begins at an offset."""
        number = int(np.searchsorted(self._starts, start))
        return self._checked(number) if number < len(self._starts) and self._starts[number] == start else None

    def _repetitions(self) -> dict[int, int]:
        """Lines with a repeated image -> the first line with it."""
        edges = np.flatnonzero(np.diff(self._sorted, prepend=_NO_IMAGE, append=_NO_IMAGE))
        again: dict[int, int] = {}
        for run in np.flatnonzero(np.diff(edges) > 1).tolist():  # the same hash, by name or by chance
            first: dict[str, int] = {}
            for number in map(int, self._order[edges[run] : edges[run + 1]]):
                earlier = first.setdefault(self._line(number).image, number)
                if earlier != number:
                    again[number] = earlier
        return again

    def _checked(self, number: int) -> Line:
        line = self._line(number)
        if number not in self._repeated:
            return line
        detail = f"line {line.number}: '{line.image}' is named by line {self._repeated[number] + 1} already"
        return line._replace(image="", reason="duplicate", detail=detail)

    def _line(self, number: int) -> Line:
        start = int(self._starts[number])
        stop = int(self._starts[number + 1]) - 1 if number + 1 < len(self._starts) else self._end
        text = self._stored.read(start, min(stop, start + LONGEST_LINE))
        image, reason, detail = _image_in(text, self._key, self._root)
        if stop - start > LONGEST_LINE:
            image, reason, detail = "", "bad-json", f"it has {stop - start:,} bytes, more than {LONGEST_LINE:,}"
        return Line(number + 1, start, text, image, reason, f"line {number + 1}: {detail}" if reason else "")


@lru_cache(maxsize=2)
def open_lines(root: str, path: str, file: SourceFile, key: str) -> ImageLines:
    """The lines of a manifest, cached because every image is looked up in it."""
    return ImageLines(_stored(path, file), key, root)


class StoredText:
    """The bytes of a manifest, read on demand. Not mapped: truncating a mapped file would kill the process."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self.size = os.fstat(descriptor).st_size
        self.width: type[np.unsignedinteger[Any]] = np.uint32 if self.size < 1 << 32 else np.uint64  # of an offset
        weakref.finalize(self, os.close, descriptor)

    def read(self, start: int, stop: int) -> bytes:
        content = os.pread(self._descriptor, stop - start, start)
        if len(content) < stop - start:
            folder, name = os.path.split(self._path)
            raise files_changed(folder, {name: "was truncated while it was read"})
        return content

    def end(self) -> int:
        """The end of the last line."""
        return self.size - (self.size > 0 and self.read(self.size - 1, self.size) == b"\n")

    def line_starts(self) -> Array:
        """The start of each line."""
        width = self.width
        ends = np.concatenate([np.empty(0, width), *(piece.astype(width) for piece in self._line_ends())])
        starts = np.concatenate([np.zeros(min(self.size, 1), width), ends[ends < self.end()] + width(1)])
        if self.size >= len(BOM) and self.read(0, len(BOM)) == BOM:
            starts[0] = len(BOM)
        return starts

    def _line_ends(self) -> Iterator[Array]:
        for start in range(0, self.size, _PIECE):
            piece = np.frombuffer(self.read(start, min(start + _PIECE, self.size)), np.uint8)
            yield start + np.flatnonzero(piece == ord("\n"))


def _stored(path: str, file: SourceFile) -> StoredText:
    if not is_stream(path) and not is_url(path):
        with open_planned(path, file) as plain:
            return StoredText(path, os.dup(plain.fileno()))
    with (
        tempfile.TemporaryFile() as plain,
        DecompressedStream(path, file, LONGEST_LINE, True) if is_stream(path) else open_planned(path, file) as stored,
    ):
        while piece := stored.read(_PIECE):
            if plain.tell() + len(piece) > MOST_UNPACKED:
                raise source_unreadable(path, f"it unpacks to more than {MOST_UNPACKED:,} bytes; unpack it first")
            plain.write(piece)
        plain.flush()
        return StoredText(path, os.dup(plain.fileno()))


def _image_in(text: bytes, key: str, root: str) -> tuple[str, str, str]:
    """(image, "", "") of a line, or ("", reason, sentence)."""
    fields: dict[str, Any] | None
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return "", "bad-json", str(error)
    except RecursionError:
        fields = None
    if fields is None or not is_shallow(fields):
        return "", "bad-json", TOO_DEEP
    name = fields.get(key)
    if key not in fields:
        known = ", ".join(f"'{name}'" for name in fields)
        return "", "no-path", f"there is no '{key}' but {known:.{_SHOWN_CHARS}}; say which it is (--image, image=)"
    if not isinstance(name, str) or not name or "\0" in name:
        return "", "no-path", f"the field '{key}' is {name!r:.{_SHOWN_CHARS}}, not the path of an image"
    path = _below(name, root)
    if path.split(os.sep)[0] in ("..", "."):
        shown = f"'{name:.{_SHOWN_CHARS}}' is not below the root '{root}'"
        return "", "outside-root", f"{shown}; choose a root above all images (--root, root=)"
    return path, "", ""


def _below(name: str, root: str) -> str:
    """A path of a manifest relative to the root; it begins with `..` if it is outside."""
    if not is_url(root):
        return os.path.relpath(name, root) if os.path.isabs(name) else os.path.normpath(name)
    if not is_url(name):
        return ".." if name.startswith("/") else os.path.normpath(name)
    try:
        return relative_url(name, root)
    except SourceNotFound:  # in another bucket, or not in one
        return ".."


def _hash(image: str) -> int:
    value: int = xxhash.xxh32_intdigest(image.encode("utf-8", "surrogateescape"))
    return max(value, 1) if image else int(_NO_IMAGE)


@dataclass(frozen=True, slots=True)
class ImageManifestSource(Source):
    """The images of a JSONL manifest, in its order, named relative to `root`; `image` is the field of their paths.

    A line is part of its sample: a changed line is a changed image. A line without a readable image is a failure,
    named by its offset; an image that appears later is a new sample.
    """

    kind: ClassVar[str] = "image_manifest"
    unit: ClassVar[Unit] = "samples"
    files_grow: ClassVar[bool] = False
    read_by: ClassVar[tuple[str, ...]] = ("image", "max_sample_bytes")
    unstated: ClassVar[tuple[str, ...]] = ("max_sample_bytes",)

    root: str
    manifest: str  # relative to the root
    image: str = "path"
    max_sample_bytes: int = MAX_IMAGE_BYTES

    def files(self) -> Sequence[SourceFile]:
        listed = self._listed_objects() if is_url(self.root) else None
        return FileTable.of(self._planned(line, listed) for line in self._lines().named())

    def looking(self) -> Callable[[str], SourceFile]:
        return looking_in_listing(self) if is_url(self.root) else self.look

    def look(self, path: str) -> SourceFile:
        line = self._line_of(path)
        return self._failed(line) if self._is_line_name(path) else self._look(line)

    def stamp(self, file: SourceFile) -> str:
        return stamp(self.root, file)

    def edited_beside(self, known: SourceFile, current: SourceFile) -> str:
        before, now = ((file.size, file.mtime_ns, file.etag.partition("+")[2]) for file in (known, current))
        is_same_image = before == now and not self._is_line_name(current.path)
        if not is_same_image or known.etag == current.etag:
            return ""
        return f"{self.manifest}@{self._line_of(current.path).start}"

    def weight(self, file: SourceFile) -> int:
        return 1

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return iter(range(start + 1, 2))

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        line = self._line_of(part.file.path)
        if _LINE.match(part.file.etag)[0] != line.check:  # type: ignore[index]  # it matches nothing at least
            raise files_changed(self.root, {part.file.path: f"has another line in '{self.manifest}' than was planned"})
        if self._is_line_name(part.file.path):
            yield self._failure(part.file, line)
            return
        content = read_image(self.root, part.file, self.max_sample_bytes)
        if isinstance(content, Failure):
            yield content
        else:
            yield Sample(part.file.path, Annotated(content, line.metadata(self.image)))

    def annotations(self, files: Sequence[SourceFile]) -> Iterator[Mapping[str, Any]]:
        return (line.metadata(self.image) for line in self._lines().named() if not line.reason)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        line = self._line_of(file.path)
        image = 0 if self._is_line_name(file.path) else image_digest(self.root, file)
        value: int = xxhash.xxh3_64_intdigest(image.to_bytes(8, "little") + line.text)
        return value

    def _lines(self) -> ImageLines:
        return open_lines(self.root, full_path(self.root, self.manifest), look(self.root, self.manifest), self.image)

    def _line_of(self, path: str) -> Line:
        offset = self._offset_of(path)
        line = self._lines().find(path) if offset is None else self._lines().at(offset)
        if line is None:
            raise FileNotFoundError(errno.ENOENT, f"no line of the manifest '{self.manifest}' names it", path)
        return line

    def _planned(self, line: Line, listed: Mapping[str, Entry] | None) -> SourceFile:
        """The image of a line, or the line itself if the image cannot be read; `listed` are the objects of a bucket."""
        if line.reason:
            return self._failed(line)
        try:
            return self._look(line) if listed is None else self._object(line, listed.get(line.image))
        except FileNotFoundError:
            return self._failed(line)

    def _listed_objects(self) -> dict[str, Entry]:
        """The images in a bucket, by one listing of the folder that all of them share."""
        named = {line.image for line in self._lines().named() if not line.reason}
        shared = os.path.commonpath([f"/{os.path.dirname(name)}" for name in named] or ["/"])[1:]
        listed = ((relative_url(url, self.root), one) for url, one in objects_below(full_path(self.root, shared)))
        return {name: entry for name, entry in listed if name in named}

    def _object(self, line: Line, entry: Entry | None) -> SourceFile:
        """An image in a bucket; its etag is that of its line and its own."""
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", full_path(self.root, line.image))
        return SourceFile(path=line.image, size=entry.size, etag=f"{line.check}+{clean_etag(entry.etag)}")

    def _look(self, line: Line) -> SourceFile:
        if is_url(self.root):
            return self._object(line, entries_of([full_path(self.root, line.image)])[0])
        path = full_path(self.root, line.image)
        state = state_of(path)
        if not isinstance(state, os.stat_result):
            raise FileNotFoundError(errno.ENOENT, FILE_PROBLEMS.get(state or "", os.strerror(errno.ENOENT)), path)
        return file_as_it_is(line.image, state, etag=line.check)

    def _failed(self, line: Line) -> SourceFile:
        reason = line.reason or self._problem(line) or ""
        return SourceFile(path=f"{self.manifest}@{line.start}", size=0, etag=f"{line.check}!{reason}")

    def _problem(self, line: Line) -> str | None:
        state = None if is_url(self.root) else state_of(full_path(self.root, line.image))
        return "not-found" if state is None else None if isinstance(state, os.stat_result) else state

    def _failure(self, file: SourceFile, line: Line) -> Failure:
        reason = file.etag.partition("!")[2]
        detail = line.detail or f"line {line.number}: '{line.image}' could not be read when the cache was planned"
        return Failure(file.path, reason, detail)

    def _offset_of(self, path: str) -> int | None:
        match = re.fullmatch(rf"{re.escape(self.manifest)}@(\d+)", path)
        return int(match[1]) if match else None

    def _is_line_name(self, path: str) -> bool:
        return self._offset_of(path) is not None


def image_manifest(
    path: str | os.PathLike[str],
    *,
    image: str = "path",
    root: str | os.PathLike[str] | None = None,
    max_sample_bytes: int = MAX_IMAGE_BYTES,
) -> ImageManifestSource:
    """The images that a `.jsonl`, compressed or not, names in the field `image`; the rest is metadata.

    Paths are relative to `root`, by default the folder of the manifest, or absolute, and lie below it. In a bucket, an
    absolute path is a URL.

    >>> image_manifest("/data/train.jsonl", image="file_name").root
    '/data'
    """
    refuse_one_slash(path, root)
    below, manifest = _named_manifest(os.fspath(path), None if root is None else os.fspath(root))
    return ImageManifestSource(below, manifest, image, checked_limit(max_sample_bytes))


def _named_manifest(path: str, root: str | None) -> tuple[str, str]:
    """(root, manifest relative to it): both on this machine, or both in one bucket."""
    if not is_url(path) and (root is None or not is_url(root)):
        path = os.path.abspath(path)
        below = os.path.abspath(root) if root is not None else os.path.dirname(path)
        return below, os.path.relpath(path, below)
    for each in (path, root or path):
        if not is_url(each):
            raise SourceNotFound(
                f"no source at '{each}': a manifest and its images are both on this machine, or both in one bucket",
                hint="check the path",
            )
    below = join_url(root if root is not None else path, "" if root is not None else "..")
    return below, relative_url(path, below)
