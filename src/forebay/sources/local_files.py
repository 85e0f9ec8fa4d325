"""Files below a root as a source: the base that finds, stats, measures and hashes them, and its common failures."""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import msgspec
import xxhash

from forebay.errors import SourceInvalid, SourceNotFound, SourceUnreadable, is_url
from forebay.source import Failure, FileTable, Listing, Source, SourceFile, Unit, listing_of
from forebay.sources.bucket_files import look_at, open_file
from forebay.sources.compression import estimated_size
from forebay.sources.paths import PassedOver, found_files, full_path, is_stream, list_objects, renamed

BOM = b"\xef\xbb\xbf"
MAX_SAMPLE_BYTES = 64 * 1024 * 1024
MAX_IMAGE_BYTES = 256 * 1024 * 1024
_LIMIT = "max_sample_bytes"
_HASHED_BYTES = 1 << 22  # at once


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
    if limit < 1:
        raise SourceInvalid(f"{_LIMIT} must be at least 1 (got {limit})")
    return limit


@dataclass(frozen=True, slots=True)
class LocalFiles(Source):
    """The files that patterns name below a root; `paths` has the rules. Its fields are its description."""

    unit: ClassVar[Unit] = "bytes"
    unstated: ClassVar[tuple[str, ...]] = ("max_sample_bytes", "labels")
    _decompressed: ClassVar[bool] = True  # whether a file with the suffix of a compressed one is read decompressed

    root: str
    patterns: tuple[str, ...]
    walked: bool = field(default=True, kw_only=True, compare=False)  # not part of what it is: how it was come by

    def _suffixes(self) -> tuple[str, ...]:
        """Which files of a folder are read; all of them where there is none."""
        return ()

    def rebased(self, root: str) -> Self:
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def unwalked(self) -> Self:
        return self if is_url(self.root) else replace(self, walked=False)

    def is_walked(self) -> bool:
        return self.walked

    def without_gone(self) -> Self:
        left = () if is_url(self.root) else tuple(filter(self._names_any, self.patterns))
        return replace(self, patterns=left or self.patterns, walked=True)

    def _names_any(self, pattern: str) -> bool:
        with suppress(SourceNotFound):
            return any(True for _ in found_files([full_path(self.root, pattern)], self._suffixes()))
        return False

    def files(self) -> Sequence[SourceFile]:
        return self.listing().files

    def listing(self, apart: str = "") -> Listing:
        return list_files(self.root, self.patterns, self._suffixes(), apart, self._decompressed)

    def look(self, path: str) -> SourceFile:
        return look(self.root, path, self._decompressed)

    def looking(self) -> Callable[[str], SourceFile]:
        if not is_url(self.root):
            return self.look
        listed: dict[str, SourceFile] = {}
        with suppress(SourceNotFound):
            listed = {file.path: file for file in self.files()}
        return lambda path: listed[path] if path in listed else self.look(path)

    def weight(self, file: SourceFile) -> int:
        return estimated_size(full_path(self.root, file.path), file) if file.stream else file.size

    def scanned(self, file: SourceFile) -> SourceFile:
        return msgspec.structs.replace(file, digest=self.digest(file, 0, file.size)) if file.stream else file

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return digest(self.root, file, start, stop)


def list_files(
    root: str, patterns: Sequence[str], suffixes: tuple[str, ...] = (), apart: str = "", decompressed: bool = True
) -> Listing:
    """Every file that a pattern names, once, by name; and how many have another suffix, those in `apart` aside."""
    if is_url(root):
        return listing_of(list_objects, root, tuple(patterns), suffixes, decompressed)
    others = PassedOver(apart)
    found = found_files([full_path(root, pattern) for pattern in patterns], suffixes, others)
    files = (_found(root, os.path.relpath(file.path, root), decompressed) for file in found)
    return Listing(FileTable.of(file for file in files if file is not None).by_path(), others.counts())


def look(root: str, name: str, decompressed: bool = True) -> SourceFile:
    """One file as it is now; `FileNotFoundError` where it is gone, also where a folder on the way became a file."""
    if is_url(root):
        return look_at(root, name, decompressed and is_stream(name))
    try:
        status = os.stat(full_path(root, name))
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), full_path(root, name)) from error
    if not stat.S_ISREG(status.st_mode):
        raise SourceUnreadable(full_path(root, name), "it is not a regular file")
    return SourceFile(
        path=name,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        stream=decompressed and is_stream(name),
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
    )


def check_readable(root: str, file: SourceFile) -> None:
    """Raise for a name that the listing found nothing behind which could be read."""
    if file.problem:
        raise SourceUnreadable(full_path(root, file.path), file.problem)


def _found(root: str, name: str, decompressed: bool) -> SourceFile | None:
    """A file of the listing, None where it vanished meanwhile. One that cannot be read says so when it is cut."""
    try:
        return look(root, name, decompressed)
    except SourceUnreadable as error:
        problem = error.problem
    except FileNotFoundError:
        if not os.path.islink(full_path(root, name)):
            return None
        problem = "it is a link to nothing"
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        problem = "it is a link that leads back to itself"
    return SourceFile.unreadable(name, problem)


def digest(root: str, file: SourceFile, start: int, stop: int) -> int:
    """A hash of a range of the stored bytes."""
    running = xxhash.xxh3_64()
    with open_file(full_path(root, file.path)) as raw:
        raw.seek(start)
        while start < stop and (content := raw.read(min(_HASHED_BYTES, stop - start))):
            running.update(content)
            start += len(content)
    value: int = running.intdigest()
    return value
