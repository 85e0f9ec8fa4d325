"""Files below a root as a source: names, and the base that lists, stats, measures and hashes them.

A source has a root, the folder that its files share, and names every file relative to it. So a source that moved, or
that another machine mounts elsewhere, still has the same names and makes the same bytes.
"""

import errno
import glob
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import msgspec

from forebay.errors import SourceInvalid, SourceNotFound
from forebay.fields import checked_whole
from forebay.file_table import FileTable
from forebay.source import Failure, Listing, Source, SourceFile, Unit, listing_of, source_unreadable
from forebay.sources.bucket_files import as_file, common_url, entry_of, join_url, relative_url
from forebay.sources.compression import estimated_size, take_digest
from forebay.sources.opening import FILE_PROBLEMS, digest, file_as_it_is, full_path, state_of
from forebay.sources.walking import PassedOver, is_stream, list_objects, walk_files
from forebay.store.base import is_url, meant_url


def common_root(patterns: Sequence[str]) -> str:
    """The deepest folder that all patterns share.

    >>> common_root(["/data/text/*.jsonl", "/data/more/a.jsonl"])
    '/data'
    """
    if not patterns:
        raise SourceNotFound("no source at '': no path was passed", hint="check the path")
    return os.path.commonpath([_fixed_folder(os.path.abspath(pattern)) for pattern in patterns])


def named_below(paths: Sequence[str | os.PathLike[str]], root: str | None) -> tuple[str, tuple[str, ...]]:
    """The root of some paths, and each path relative to it.

    >>> named_below(["/data/text/*.jsonl", "/data/more"], root="/data")
    ('/data', ('text/*.jsonl', 'more'))
    """
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"paths must be strings, one per argument: jsonl('a.jsonl', 'b.jsonl'); got {type(path).__name__}"
            )
        if not os.fspath(path):
            raise SourceInvalid("a path of the source is empty", hint="pass '.' for the current folder")
    refuse_one_slash(*paths, root)
    if any(is_url(os.fspath(path)) for path in (*paths, *([root] if root else []))):
        urls = [os.fspath(path) for path in paths]
        shared = join_url(root, "") if root else common_url(urls, glob.has_magic)
        return shared, tuple(relative_url(url, shared) for url in urls)
    names = [os.path.abspath(path) for path in paths]
    shared = os.path.abspath(root) if root else common_root(names)
    return shared, tuple(os.path.relpath(name, shared) for name in names)


def refuse_one_slash(*names: str | os.PathLike[str] | None) -> None:
    for name in names:
        if meant := meant_url(name):
            raise SourceNotFound(
                f"no source at '{name!s}': a URL has two slashes: did you mean '{meant}'? A folder is './{name}'",
                hint="check the path",
            )


def renamed(root: str, patterns: Sequence[str], new_root: str) -> tuple[str, ...]:
    """The same patterns, relative to another root.

    >>> renamed("/data/text", ["*.jsonl"], "/data")
    ('text/*.jsonl',)
    """
    relative = relative_url if is_url(new_root) else os.path.relpath
    return tuple(relative(full_path(root, pattern), new_root) for pattern in patterns)


def _fixed_folder(pattern: str) -> str:
    """The folder above the first wildcard; a plain file's own folder; a folder itself."""
    if not glob.has_magic(pattern):
        return pattern if os.path.isdir(pattern) else os.path.dirname(pattern)
    fixed = pattern[: min(pattern.index(mark) for mark in "*?[" if mark in pattern)]
    return os.path.dirname(fixed)


BOM = b"\xef\xbb\xbf"
MAX_SAMPLE_BYTES = 64 * 1024 * 1024
MAX_IMAGE_BYTES = 256 * 1024 * 1024
_LIMIT = "max_sample_bytes"


def empty(sample: str, where: str) -> Failure:
    """A document with no text in it, at `line 17` or `row 17` of its file."""
    return Failure(sample, "empty", f"{where}: the document has no text")


def not_utf8(sample: str, line: int, byte: int, offset: int, reason: str) -> Failure:
    """A document with a byte at `offset` of its file (after decompression) that is not UTF-8."""
    where = f"line {line}: byte 0x{byte:02x} at offset {offset:,} of the file"
    return Failure(sample, "not-utf8", f"{where} is not UTF-8 ({reason})")


def too_large(sample: str, size: int, limit: int, where: str = "") -> Failure:
    """A sample that was skipped because it exceeds the limit."""
    return Failure(sample, "too-large", f"{where}it has {size:,} bytes, more than {_LIMIT} {limit:,}")


def checked_limit(limit: int) -> int:
    """The limit, if it is valid."""
    return checked_whole(_LIMIT, limit, 1)


@dataclass(frozen=True, slots=True)
class LocalFiles(Source):
    """The files that patterns name below a root; `paths` has the rules. Its fields are its description."""

    unit: ClassVar[Unit] = "bytes"
    unstated: ClassVar[tuple[str, ...]] = ("max_sample_bytes", "labels")
    _decompressed: ClassVar[bool] = True  # whether a file with the suffix of a compressed one is read decompressed

    root: str
    patterns: tuple[str, ...]
    walked: bool = field(default=True, kw_only=True, compare=False)  # not part of its identity

    def _suffixes(self) -> tuple[str, ...]:
        """The suffixes of files that are read in folders; empty for all."""
        return ()

    def rebased(self, root: str) -> Self:
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def unwalked(self) -> Self:
        return self if is_url(self.root) else replace(self, walked=False)

    def is_walked(self) -> bool:
        return self.walked

    def without_gone(self) -> Self:
        is_one_listing = is_url(self.root) and len(self.patterns) == 1  # whose error says that nothing is left
        left = () if is_one_listing else tuple(filter(self._names_any, self.patterns))
        return replace(self, patterns=left or self.patterns, walked=True)

    def _names_any(self, pattern: str) -> bool:
        with suppress(SourceNotFound):
            if is_url(self.root):
                return len(replace(self, patterns=(pattern,)).files()) > 0
            return any(True for _ in walk_files([full_path(self.root, pattern)], self._suffixes()))
        return False

    def files(self) -> Sequence[SourceFile]:
        return self.listing().files

    def listing(self, apart: str = "") -> Listing:
        return list_files(self.root, self.patterns, self._suffixes(), apart, self._decompressed)

    def look(self, path: str) -> SourceFile:
        return look(self.root, path, self._decompressed)

    def looking(self) -> Callable[[str], SourceFile]:
        return looking_in_listing(self) if is_url(self.root) else self.look

    def weight(self, file: SourceFile) -> int:
        return estimated_size(full_path(self.root, file.path), file) if file.stream else file.size

    def scanned(self, file: SourceFile) -> SourceFile:
        if not file.stream:
            return file
        known_digest = take_digest(full_path(self.root, file.path), file)
        return msgspec.structs.replace(
            file, digest=self.digest(file, 0, file.size) if known_digest is None else known_digest
        )

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return digest(self.root, file, start, stop)


def looking_in_listing(source: Source) -> Callable[[str], SourceFile]:
    """`source.look` for many objects of a bucket, by one listing."""
    listed: dict[str, SourceFile] = {}
    with suppress(SourceNotFound):
        listed = {file.path: file for file in source.files()}
    return lambda path: listed[path] if path in listed else source.look(path)


def list_files(
    root: str, patterns: Sequence[str], suffixes: tuple[str, ...] = (), apart: str = "", decompressed: bool = True
) -> Listing:
    """Every file that a pattern names, once, by name; and how many have another suffix, those in `apart` aside."""
    if is_url(root):
        return listing_of(list_objects, root, tuple(patterns), suffixes, decompressed)
    others = PassedOver(apart)
    matching = walk_files([full_path(root, pattern) for pattern in patterns], suffixes, others)
    files = (_listed_file(root, os.path.relpath(file.path, root), decompressed) for file in matching)
    return Listing(FileTable.of(file for file in files if file is not None).by_path(), others.counts())


def look(root: str, name: str, decompressed: bool = True) -> SourceFile:
    """The current state of a file; `FileNotFoundError` if it or one of its folders is gone."""
    if is_url(root):
        return as_file(name, entry_of(full_path(root, name)), decompressed and is_stream(name))
    try:
        status = os.stat(full_path(root, name))
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full_path(root, name)) from error
    if not stat.S_ISREG(status.st_mode):
        raise source_unreadable(full_path(root, name), "it is not a regular file")
    return file_as_it_is(name, status, decompressed and is_stream(name))


def check_readable(root: str, file: SourceFile) -> None:
    """Raise if the listing could not read the file."""
    if file.problem:
        raise source_unreadable(full_path(root, file.path), file.problem)


def _listed_file(root: str, name: str, decompressed: bool) -> SourceFile | None:
    """A file of the listing; None if it vanished. An unreadable one is an error when it is cut."""
    state = state_of(full_path(root, name))
    if isinstance(state, str):
        return SourceFile.unreadable(name, FILE_PROBLEMS[state])
    return None if state is None else file_as_it_is(name, state, decompressed and is_stream(name))
