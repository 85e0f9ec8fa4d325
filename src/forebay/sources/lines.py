"""Lines of files as samples; `.gz` and `.zst` are decompressed on the way.

A plain file is cut by looking for the newline after each cut, nothing else of it is read. A compressed file is a
stream: it is decompressed once to find the cuts; its parts are then read one after the other without a new start.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO, ClassVar

import xxhash

from forebay.errors import SourceChanged
from forebay.source import Part, Sample, SourceFile, Unit
from forebay.sources.paths import common_root, find_files, full_path, look
from forebay.sources.streams import Stream, open_stream, stream_at

_LOOK_AHEAD = 64 * 1024
_HASH_BYTES = 1 << 22
_JUDGED_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class LineSource:
    """The lines of every file below some paths. A sample's id is `file@offset`, the offset of its line in bytes."""

    kind: ClassVar[str] = "lines"
    unit: ClassVar[Unit] = "bytes"

    root: str
    patterns: tuple[str, ...]

    def describe(self) -> Mapping[str, object]:
        return {"kind": self.kind, "root": self.root, "patterns": list(self.patterns)}

    @classmethod
    def from_description(cls, description: Mapping[str, object]) -> "LineSource":
        patterns = description["patterns"]
        assert isinstance(patterns, list)
        return cls(str(description["root"]), tuple(patterns))

    def rebased(self, root: str) -> "LineSource":
        """The same files, named relative to another root."""
        moved = tuple(os.path.relpath(full_path(self.root, pattern), root) for pattern in self.patterns)
        return replace(self, root=root, patterns=moved)

    def files(self) -> list[SourceFile]:
        return find_files(self.root, self.patterns)

    def look(self, path: str) -> SourceFile:
        return look(self.root, path)

    def weight(self, file: SourceFile) -> int:
        if not file.stream:
            return file.size
        with open_stream(self._path(file)) as stream:
            return int(stream.skip(_JUDGED_BYTES) * max(1.0, file.size / max(1, stream.consumed)))

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        if file.stream:
            with open_stream(self._path(file)) as stream:
                self._pass_line_end(stream, file, start)
                yield from _stream_cuts(stream, first, every)
            return
        with open(self._path(file), "rb") as plain:
            self._check_line_start(plain, file, start)
            yield from _plain_cuts(plain, start, file.size, first, every)

    def scanned(self, file: SourceFile) -> SourceFile:
        if not file.stream:
            return file
        return SourceFile(
            path=file.path,
            size=file.size,
            mtime_ns=file.mtime_ns,
            stream=True,
            digest=self.digest(file, 0, file.size),
        )

    def read(self, part: Part) -> Iterable[Sample]:
        if part.file.stream:
            lines = stream_at(self._path(part.file), part.file, part.start).lines(part.stop)
        else:
            lines = self._plain_lines(part)
        position = part.start
        for line in lines:
            yield Sample(f"{part.file.path}@{position}", line.removesuffix(b"\n"))
            position += len(line)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        running = xxhash.xxh3_64()
        with open(self._path(file), "rb", buffering=0) as raw:
            raw.seek(start)
            while start < stop and (piece := raw.read(min(_HASH_BYTES, stop - start))):
                running.update(piece)
                start += len(piece)
        value: int = running.intdigest()
        return value

    def _path(self, file: SourceFile) -> str:
        return full_path(self.root, file.path)

    def _plain_lines(self, part: Part) -> Iterator[bytes]:
        with open(self._path(part.file), "rb", buffering=1 << 20) as plain:
            self._check_line_start(plain, part.file, part.start)
            plain.seek(part.start)
            position = part.start
            while position < part.stop and (line := plain.readline(part.stop - position)):
                yield line
                position += len(line)

    def _pass_line_end(self, stream: Stream, file: SourceFile, start: int) -> None:
        """Stand at a position that must be the end of a line, or the beginning."""
        if start:
            stream.skip(start - 1)
            stream.skip_line()
        if stream.position != start:
            raise SourceChanged(self.root, {file.path: f"has no line that starts at byte {start:,} any more"})

    def _check_line_start(self, plain: BinaryIO, file: SourceFile, start: int) -> None:
        if start:
            plain.seek(start - 1)
            if plain.read(1) != b"\n":
                raise SourceChanged(self.root, {file.path: f"has no line that starts at byte {start:,} any more"})


def lines(*paths: str | os.PathLike[str], root: str | None = None) -> LineSource:
    """Every line of some files, folders or globs."""
    names = [os.path.abspath(path) for path in paths]
    shared = os.path.abspath(root) if root else common_root(names)
    return LineSource(shared, tuple(os.path.relpath(name, shared) for name in names))


def _plain_cuts(plain: BinaryIO, start: int, size: int, first: int, every: int) -> Iterator[int]:
    position = start + first
    while position < size:
        cut = _after_newline(plain, position - 1)
        if cut is None or cut >= size:
            break
        yield cut
        position = cut + every
    if size > start:
        yield size


def _after_newline(plain: BinaryIO, position: int) -> int | None:
    """Where the line that holds the byte at `position` ends."""
    plain.seek(position)
    while piece := plain.read(_LOOK_AHEAD):
        found = piece.find(b"\n")
        if found >= 0:
            return position + found + 1
        position += len(piece)
    return None


def _stream_cuts(stream: Stream, first: int, every: int) -> Iterator[int]:
    start = stream.position
    step = first
    while stream.skip(step - 1) == step - 1 and stream.skip_line():
        if stream.at_end():
            break
        yield stream.position
        step = every
    if stream.position > start:
        yield stream.position
