"""From what a user names (files, folders, globs) to the files of a source.

A source has a root, the folder that its files share, and names every file relative to it. So a source that moved, or
that another machine mounts elsewhere, still has the same names and makes the same bytes.
"""

import errno
import glob
import os
import stat
from collections.abc import Mapping, Sequence

import msgspec

from forebay.errors import SourceNotFound, SourceUnreadable, is_url
from forebay.source import SourceFile
from forebay.sources.walker import count_left_out, found_files, is_stream


def common_root(patterns: Sequence[str]) -> str:
    """The deepest folder that all patterns share.

    >>> common_root(["/data/text/*.jsonl", "/data/more/a.jsonl"])
    '/data'
    """
    if not patterns:
        raise SourceNotFound("", "no path was passed")
    return os.path.commonpath([_fixed_folder(os.path.abspath(pattern)) for pattern in patterns])


def named_below(paths: Sequence[str | os.PathLike[str]], root: str | None) -> tuple[str, tuple[str, ...]]:
    """A root for what a user names, and every name relative to it.

    >>> named_below(["/data/text/*.jsonl", "/data/more"], root="/data")
    ('/data', ('text/*.jsonl', 'more'))
    """
    for path in (*paths, *([root] if root else [])):
        refuse_url(path)
    names = [os.path.abspath(path) for path in paths]
    shared = os.path.abspath(root) if root else common_root(names)
    return shared, tuple(os.path.relpath(name, shared) for name in names)


def refuse_url(path: str | os.PathLike[str]) -> None:
    """A URL is not the name of a local file, though a system would take it for one."""
    if is_url(os.fspath(path)):
        problem = "it is a URL, and sources are local files, or data sets on the Hugging Face hub (hub:org/name)"
        raise SourceNotFound(os.fspath(path), problem)


def renamed(root: str, patterns: Sequence[str], new_root: str) -> tuple[str, ...]:
    """The same patterns, relative to another root.

    >>> renamed("/data/text", ["*.jsonl"], "/data")
    ('text/*.jsonl',)
    """
    return tuple(os.path.relpath(full_path(root, pattern), new_root) for pattern in patterns)


def find_files(root: str, patterns: Sequence[str], suffixes: tuple[str, ...] = ()) -> list[SourceFile]:
    """Every file that a pattern names, once, sorted by name; `walker` has the rule."""
    found = found_files([full_path(root, pattern) for pattern in patterns], suffixes)
    names = sorted(os.path.relpath(file.path, root) for file in found)
    return [file for file in (_found(root, name) for name in names) if file is not None]


def left_out(root: str, patterns: Sequence[str], suffixes: tuple[str, ...], apart: str) -> Mapping[str, int]:
    """How many files `find_files` passes over for their suffix; those below the folder `apart` do not count."""
    return count_left_out([full_path(root, pattern) for pattern in patterns], suffixes, apart)


def full_path(root: str, name: str) -> str:
    """Where a file is; `..` is resolved by name, so that a root which is gone does not stand in the way.

    >>> full_path("/data/text", "../more/a.jsonl")
    '/data/more/a.jsonl'
    """
    return os.path.normpath(os.path.join(root, name))


def look(root: str, name: str) -> SourceFile:
    """One file as it is now; `FileNotFoundError` where it is gone, also where a folder on the way became a file."""
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
        stream=is_stream(name),
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
    )


def plain_file(file: SourceFile) -> SourceFile:
    """A file of a kind that is not decompressed, whatever its name ends with."""
    return msgspec.structs.replace(file, stream=False)


def check_readable(root: str, file: SourceFile) -> None:
    """Raise for a name that the listing found nothing behind which could be read."""
    if file.problem:
        raise SourceUnreadable(full_path(root, file.path), file.problem)


def _found(root: str, name: str) -> SourceFile | None:
    """A file of the listing, None where it vanished meanwhile. One that cannot be read says so when it is cut."""
    try:
        return look(root, name)
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


def _fixed_folder(pattern: str) -> str:
    """The folder above the first wildcard; a plain file's own folder; a folder itself."""
    if not glob.has_magic(pattern):
        return pattern if os.path.isdir(pattern) else os.path.dirname(pattern)
    fixed = pattern[: min(pattern.index(mark) for mark in "*?[" if mark in pattern)]
    return os.path.dirname(fixed)
