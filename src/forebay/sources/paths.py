"""From what a user names (files, folders, globs) to the files of a source.

A source has a root, the folder that its files share, and names every file relative to it. So a source that moved, or
that another machine mounts elsewhere, still has the same names and makes the same bytes.
"""

import glob
import os
import stat
from collections.abc import Iterable, Sequence

import msgspec

from forebay.errors import SourceNotFound, SourceUnreadable
from forebay.source import SourceFile

STREAM_SUFFIXES = (".gz", ".zst")


def common_root(patterns: Sequence[str]) -> str:
    """The deepest folder that all patterns share.

    >>> common_root(["/data/text/*.jsonl", "/data/more/a.jsonl"])
    '/data'
    """
    if not patterns:
        raise SourceNotFound("", "no path was given")
    return os.path.commonpath([_fixed_folder(os.path.abspath(pattern)) for pattern in patterns])


def named_below(paths: Sequence[str | os.PathLike[str]], root: str | None) -> tuple[str, tuple[str, ...]]:
    """A root for what a user names, and every name relative to it.

    >>> named_below(["/data/text/*.jsonl", "/data/more"], root="/data")
    ('/data', ('text/*.jsonl', 'more'))
    """
    names = [os.path.abspath(path) for path in paths]
    shared = os.path.abspath(root) if root else common_root(names)
    return shared, tuple(os.path.relpath(name, shared) for name in names)


def renamed(root: str, patterns: Sequence[str], new_root: str) -> tuple[str, ...]:
    """The same patterns, relative to another root.

    >>> renamed("/data/text", ["*.jsonl"], "/data")
    ('text/*.jsonl',)
    """
    return tuple(os.path.relpath(full_path(root, pattern), new_root) for pattern in patterns)


def find_files(root: str, patterns: Sequence[str], suffixes: tuple[str, ...] = ()) -> list[SourceFile]:
    """Every file that a pattern names, once, sorted by name.

    A folder stands for all files below it, hidden ones left out. `suffixes` choose among the files of folders and
    globs; a file named by itself is meant, and so is one whose ending a glob names, as `*.py` does.
    """
    found: set[str] = set()
    for pattern in patterns:
        matches = {os.path.relpath(path, root) for path in _expand(full_path(root, pattern), suffixes)}
        if not matches:
            raise SourceNotFound(full_path(root, pattern), _why_none(full_path(root, pattern), suffixes))
        found |= matches
    return [_found(root, name) for name in sorted(found)]


def full_path(root: str, name: str) -> str:
    """Where a file is; `..` is resolved by name, so that a root which is gone does not stand in the way.

    >>> full_path("/data/text", "../more/a.jsonl")
    '/data/more/a.jsonl'
    """
    return os.path.normpath(os.path.join(root, name))


def look(root: str, name: str) -> SourceFile:
    status = os.stat(full_path(root, name))
    if not stat.S_ISREG(status.st_mode):
        raise SourceUnreadable(full_path(root, name), "it is no regular file")
    return SourceFile(
        path=name,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        stream=name.endswith(STREAM_SUFFIXES),
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
    )


def plain_file(file: SourceFile) -> SourceFile:
    """A file of a kind that is not decompressed, whatever its name ends with."""
    return msgspec.structs.replace(file, stream=False)


def _found(root: str, name: str) -> SourceFile:
    try:
        return look(root, name)
    except FileNotFoundError as error:
        raise SourceUnreadable(full_path(root, name), "it is a link to nothing, or vanished meanwhile") from error


def _raise(error: OSError) -> None:
    raise error


def _fixed_folder(pattern: str) -> str:
    """The folder above the first wildcard; a plain file's own folder; a folder itself."""
    if not glob.has_magic(pattern):
        return pattern if os.path.isdir(pattern) else os.path.dirname(pattern)
    fixed = pattern[: min(pattern.index(mark) for mark in "*?[" if mark in pattern)]
    return os.path.dirname(fixed)


def _expand(pattern: str, suffixes: tuple[str, ...]) -> Iterable[str]:
    if os.path.isfile(pattern):
        yield pattern
        return
    for path in _matches(pattern):
        is_meant = not suffixes or (names_ending(pattern) and not os.path.isdir(path))
        yield from (file for file in _below(path) if is_meant or file.endswith(suffixes))


def _matches(pattern: str) -> Iterable[str]:
    return [pattern] if os.path.isdir(pattern) else glob.iglob(pattern, recursive=True)


def names_ending(pattern: str) -> bool:
    """Whether a glob says how the files end that it names; `.gz` and `.zst` say nothing of what is in them.

    >>> names_ending("odd/*.py"), names_ending("part-*.jsonl.gz"), names_ending("data/*"), names_ending("*.gz")
    (True, True, False, False)
    """
    for suffix in STREAM_SUFFIXES:
        pattern = pattern.removesuffix(suffix)
    ending = os.path.splitext(pattern)[1]
    return bool(ending) and not glob.has_magic(ending)


def _why_none(pattern: str, suffixes: tuple[str, ...]) -> str:
    """What to say where nothing was found: that nothing is there, or that its names do not fit."""
    if not suffixes or not any(_matches(pattern)):
        return "no file matches"
    endings = ", ".join(suffix for suffix in suffixes if not suffix.endswith(STREAM_SUFFIXES))
    return f"no file there ends in {endings}; name others by a glob like '*.py', or by --suffix if they are plain text"


def _below(path: str) -> Iterable[str]:
    if not os.path.isdir(path):
        yield path
        return
    for folder, folders, names in os.walk(path, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))
