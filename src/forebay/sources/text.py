"""Files as samples: whole, or text with a separator between documents."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import ClassVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from forebay.errors import ForebayError, SourceInvalid
from forebay.source import Failure, Part, PartDigest, Sample, Samples, SourceFile, files_changed
from forebay.sources.compression import DecompressedStream, stream_at
from forebay.sources.opening import full_path, read_planned
from forebay.sources.paths import (
    BOM,
    MAX_SAMPLE_BYTES,
    LocalFiles,
    check_readable,
    checked_limit,
    empty,
    named_below,
    not_utf8,
    too_large,
)
from forebay.sources.pieces import Block, Reading, cut_between_pieces, piece_bounds, piece_ends
from forebay.sources.walking import with_stream_suffixes, without_stream_suffix
from forebay.store.base import is_url

_PIECE = 1 << 20
_LOOKED_FILES = 8


def cut_whole(root: str, file: SourceFile, start: int, max_sample_bytes: int) -> Iterator[int]:
    """Yield the end of a file; for a stream, its length after decompression."""
    check_readable(root, file)
    if start:
        raise files_changed(root, {file.path: "grew, but it is one sample and cannot be appended to"})
    if not file.stream:
        yield file.size
        return
    with DecompressedStream(full_path(root, file.path), file, max_sample_bytes) as stream:
        while stream.read(_PIECE):
            pass
        yield stream.position


def read_whole(
    root: str,
    part: Part,
    max_sample_bytes: int,
    digest: PartDigest | None = None,
) -> bytes | Failure:
    """The content of a file, with its planned size; a failure if that is above the limit."""
    if part.stop > max_sample_bytes:
        return too_large(part.file.path, part.stop, max_sample_bytes)
    path = full_path(root, part.file.path)
    if part.file.stream:
        content = _decompressed(path, part, max_sample_bytes)
    else:
        content = read_planned(path, part.file, part.stop + 1)
    if len(content) != part.stop:
        size = f"{len(content):,}" if len(content) < part.stop else f"more than {part.stop:,}"
        how = f"has {size} bytes, {part.stop:,} were planned, and it is one sample"
        raise files_changed(root, {part.file.path: how})
    if digest is not None and not part.file.stream:
        digest.value = xxhash.xxh3_64_intdigest(content)
    return content


def _decompressed(path: str, part: Part, max_sample_bytes: int) -> bytes:
    content = BytesIO()
    with stream_at(path, part.file, 0, max_sample_bytes) as stream:
        while piece := stream.read(min(_PIECE, part.stop + 1 - content.tell())):
            content.write(piece)
    return content.getvalue()


_TABLES = (".csv", ".tsv")


@dataclass(frozen=True, slots=True)
class TextSource(LocalFiles):
    """The documents of UTF-8 text files; a byte order mark at the start of a file is left out.

    Without a separator a file is one document with the name of the file. With one, documents are those of `str.split`
    without an empty last one; their ids are `file@offset`, in bytes after decompression. A document of more than
    `max_sample_bytes` is a failure.
    """

    kind: ClassVar[str] = "text"
    read_by: ClassVar[tuple[str, ...]] = ("separator", "max_sample_bytes")

    separator: str | None = None
    suffixes: tuple[str, ...] = ()
    max_sample_bytes: int = MAX_SAMPLE_BYTES

    @property
    def files_grow(self) -> bool:
        return self.separator is not None  # a file that is one document is another one with more behind it

    def _suffixes(self) -> tuple[str, ...]:
        return with_stream_suffixes(self.suffixes)

    def notes(self, files: Sequence[SourceFile] = ()) -> tuple[str, ...]:
        if self.separator is not None:
            return self._other_line_ends(self.separator, files)
        names = (*self.patterns, *self.suffixes)
        tables = [name for name in names if without_stream_suffix(name).lower().endswith(_TABLES)]
        if not tables:
            return ()
        return (
            f"a table is read as plain text, each file as one document ('{tables[0]}'): to read one column, write it "
            f"as JSON lines or Parquet and name the column (text=…, --text …)",
        )

    def _other_line_ends(self, separator: str, files: Sequence[SourceFile]) -> tuple[str, ...]:
        """A note if the separator never matches because the first files have Windows line ends."""
        windows = separator.replace("\n", "\r\n")
        if "\r" in separator or windows == separator or is_url(self.root):
            return ()
        with suppress(OSError, ForebayError):  # planning names a file that cannot be read
            for file in islice(files, _LOOKED_FILES):
                path = full_path(self.root, file.path)
                with DecompressedStream(path, file, self.max_sample_bytes) if file.stream else open(path, "rb") as raw:
                    begin = raw.read(_PIECE)
                if separator.encode() not in begin and windows.encode() in begin:
                    return (
                        f"'{path}' has Windows line ends, so the separator {separator!r} is not found in its first "
                        f"{len(begin):,} bytes; pass {windows!r} to separate documents there (separator=…, "
                        f"--separator …)",
                    )
        return ()

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        if self.separator is None:
            return cut_whole(self.root, file, start, self.max_sample_bytes)
        return cut_between_pieces(self.root, self.separator.encode(), file, start, first, every, self.max_sample_bytes)

    def sample_ends(self, file: SourceFile) -> NDArray[np.uint64] | None:
        separator = self.separator
        return None if separator is None else piece_ends(self.root, separator.encode(), file, self.max_sample_bytes)

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        if self.separator is None:
            return self._only_document(part, digest)
        separator = self.separator.encode()
        reading = Reading(self.root, part, separator, self.max_sample_bytes, digest)
        return reading.samples(lambda block: _in_block(reading, block, part.file.path, separator))

    def _only_document(self, part: Part, digest: PartDigest | None) -> Iterator[Sample | Failure]:
        content = read_whole(self.root, part, self.max_sample_bytes, digest)
        yield content if isinstance(content, Failure) else _whole_document(content, part.file.path)


def text(
    *paths: str | os.PathLike[str],
    separator: str | None = None,
    suffixes: Iterable[str] = (".txt", ".md"),
    root: str | None = None,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
) -> TextSource:
    r"""The documents of text files, folders or globs: one per file, or with a separator between.

    Files that end in `.gz`, `.zst`, `.bz2` or `.xz` as well are decompressed while they are read. A separator is found
    as it is written: in files with Windows line ends, `"\r\n---\r\n"` separates and `"\n---\n"` does not.

    >>> text("/data/books/*.txt.zst", separator="<|endoftext|>").patterns
    ('*.txt.zst',)
    >>> text("/data/notes.txt", separator="\n---\n").separator  # a separate line
    '\n---\n'
    """
    if separator is not None and not separator.encode():
        raise SourceInvalid("a separator has at least one character", hint="leave it out for one document per file")
    return TextSource(*named_below(paths, root), separator, _listed(suffixes), checked_limit(max_sample_bytes))


def _listed(suffixes: Iterable[str]) -> tuple[str, ...]:
    """Suffixes as a tuple; a text would be taken for a list of its characters."""
    if isinstance(suffixes, str):
        raise TypeError(f"suffixes is {suffixes!r}; pass a list: [{suffixes!r}]")
    return tuple(suffixes)


def _whole_document(content: bytes, path: str) -> Sample | Failure:
    begin = len(BOM) if content.startswith(BOM) else 0
    if begin == len(content):
        return empty(path, "line 1")
    try:
        return Sample(path, str(memoryview(content)[begin:], "utf-8"))
    except UnicodeDecodeError as error:
        bad = begin + error.start
        return not_utf8(path, 1 + content.count(b"\n", 0, bad), content[bad], bad, error.reason)


def _in_block(reading: Reading, block: Block, path: str, separator: bytes) -> Iterator[Sample | Failure]:
    lines = _Lines(reading, block)
    for begin, end in piece_bounds(block, separator):
        sample = f"{path}@{reading.position + begin}"
        if reading.position + begin == 0 and block.startswith(BOM):
            begin = min(len(BOM), end)
        if begin == end:
            yield empty(sample, f"line {lines.at(begin)}")
            continue
        try:
            yield Sample(sample, str(memoryview(block)[begin:end], "utf-8"))
        except UnicodeDecodeError as error:
            bad = begin + error.start
            yield not_utf8(sample, lines.at(bad), block[bad], reading.position + bad, error.reason)


class _Lines:
    """The line numbers of rising offsets in a block."""

    def __init__(self, reading: Reading, block: Block) -> None:
        self._reading, self._block = reading, block
        self._counted = self._newlines = 0

    def at(self, offset: int) -> int:
        self._newlines += self._block.count(b"\n", self._counted, offset)
        self._counted = offset
        return self._reading.first_line() + self._newlines


@dataclass(frozen=True, slots=True)
class FileSource(LocalFiles):
    """The bytes of every file below some paths, named relative to `root`; one of more than `max_sample_bytes` fails."""

    kind: ClassVar[str] = "files"
    read_by: ClassVar[tuple[str, ...]] = ("max_sample_bytes",)
    _decompressed: ClassVar[bool] = False
    files_grow: ClassVar[bool] = False  # a file is one sample: with more bytes it is another one

    suffixes: tuple[str, ...] = ()
    max_sample_bytes: int = MAX_SAMPLE_BYTES

    def _suffixes(self) -> tuple[str, ...]:
        return self.suffixes

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return cut_whole(self.root, file, start, self.max_sample_bytes)

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        content = read_whole(self.root, part, self.max_sample_bytes, digest=digest)
        yield content if isinstance(content, Failure) else Sample(part.file.path, content)


def files(
    *paths: str | os.PathLike[str],
    suffixes: Iterable[str] = (),
    root: str | None = None,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
) -> FileSource:
    """All files of some folders, globs or paths, unchanged.

    >>> files("src", suffixes=[".py"]).patterns
    ('.',)
    """
    return FileSource(*named_below(paths, root), _listed(suffixes), checked_limit(max_sample_bytes))
