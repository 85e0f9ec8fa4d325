"""Opening and hashing the files of a source, on this machine or in a bucket."""

import errno
import os
import stat
from io import BufferedReader, RawIOBase
from typing import BinaryIO, cast

import xxhash

from forebay.source import CHANGED_MEANWHILE, SourceFile, files_changed, open_regular
from forebay.sources.bucket_files import ObjectReader, join_url
from forebay.store.base import is_url

_HASHED_BYTES = 1 << 22  # at once
FILE_PROBLEMS = {
    "symlink-loop": "it is a link that leads back to itself",
    "not-found": "it is a link to nothing",
    "not-a-file": "it is not a regular file",
    "unreadable": "there is no permission to read it",
}
_PROBLEM_OF = {
    errno.ELOOP: "symlink-loop",
    errno.EACCES: "unreadable",
    errno.EPERM: "unreadable",
}
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


def full_path(root: str, name: str) -> str:
    """The path of a file; `..` is resolved by name, so the root need not exist.

    Below a folder it is absolute: in an untrusted plan, root `.` and file `s3://…` must not name a bucket.

    >>> full_path("/data/text", "../more/a.jsonl")
    '/data/more/a.jsonl'
    """
    return join_url(root, name) if is_url(root) else os.path.abspath(os.path.join(root, name))


def open_file(path: str) -> BinaryIO:
    """A file or an object, opened for unbuffered reading."""
    return cast(BinaryIO, ObjectReader(path)) if is_url(path) else open(path, "rb", buffering=0, opener=open_regular)


def open_planned(path: str, file: SourceFile) -> BinaryIO:
    """A planned file, opened; `SourceChanged` if what was opened is another one or was edited."""
    opened = open_file(path)
    try:
        if not is_url(path):  # an object is identified by its etag, which a listing compares
            check_planned(path, file, os.fstat(opened.fileno()))
    except BaseException:  # cleaned up also on Ctrl+C
        opened.close()
        raise
    return opened


def file_as_it_is(name: str, status: os.stat_result, stream: bool = False, etag: str = "") -> SourceFile:
    """A file of a source by its stat."""
    return SourceFile(
        path=name,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        etag=etag,
        stream=stream,
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
    )


def read_planned(path: str, file: SourceFile, count: int) -> bytes:
    """The first bytes of a planned file."""
    with BufferedReader(cast(RawIOBase, open_planned(path, file))) as opened:
        return opened.read(count)


def check_planned(path: str, file: SourceFile, status: os.stat_result) -> None:
    """Raise `SourceChanged` unless a file has its planned size and time, or was appended to since."""
    is_edited = status.st_size == file.size and file.mtime_ns not in (0, status.st_mtime_ns)
    if status.st_size < file.size or is_edited:
        folder, name = os.path.split(path)
        raise files_changed(folder, {name: CHANGED_MEANWHILE})


def digest(root: str, file: SourceFile, start: int, stop: int) -> int:
    """A hash of a range of the stored bytes."""
    value: int = hashed_range(full_path(root, file.path), start, stop).intdigest()
    return value


def hashed_range(path: str, start: int, stop: int) -> xxhash.xxh3_64:
    running = xxhash.xxh3_64()
    with open_file(path) as raw:
        raw.seek(start)
        while start < stop and (content := raw.read(min(_HASHED_BYTES, stop - start))):
            running.update(content)
            start += len(content)
    return running


def state_of(path: str) -> os.stat_result | str | None:
    """The stat of a file, or its problem; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return "not-found" if os.path.islink(path) else None
        if error.errno not in _PROBLEM_OF:
            raise
        return _PROBLEM_OF[error.errno]
    return status if stat.S_ISREG(status.st_mode) else "not-a-file"
