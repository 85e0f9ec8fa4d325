"""Find the files that paths, folders and globs name, by the same rules for every source, in folders and in buckets.

- A file that is passed by name is read with any suffix.
- A folder stands for all files below it. Names that begin with a dot, and `__pycache__`, are left out.
- A glob means what it means in a shell, case-sensitive, with `**` for any number of folders; a folder
  that it matches stands for all files below it.
- Links to files and folders are followed. A real file is found once, however many links lead to it: by its real path
  where that was named, else by the first of its links.
- Suffixes choose among the files of folders, in upper or lower case. A file that a glob names by its suffix is read.
- A link to nothing, a pipe or a device whose name would be read is a file that cannot be read.
- A folder that cannot be listed is an error.
"""

import glob
import heapq
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from forebay.errors import SourceNotFound
from forebay.globs import Glob, is_hidden
from forebay.source import Listing, SourceFile, not_read
from forebay.sources.bucket_files import as_file, join_url, objects_below, relative_url, split_url
from forebay.sources.compression import FORMATS
from forebay.store.base import Entry

STREAM_SUFFIXES = tuple(FORMATS)
NO_SUFFIX = "no suffix"
_LONGEST_SUFFIX = 16


class WalkedFile(NamedTuple):
    """A file, or a link that may lead to one."""

    path: str
    real: str
    by_link: bool  # below what was named, a link leads to it
    is_meant: bool  # by its own name, not only as one of a folder
    names: Container[str]  # in its folder


class NamesIn:
    """The names in a folder, looked up one by one, which is cheaper than a listing for few names."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __contains__(self, name: object) -> bool:
        return os.path.lexists(f"{self._folder}{os.sep}{name}")


class PassedOver:
    """The files that a walk finds and does not want; those below the folder `apart` do not count.

    `is_used` says of a file that is not a sample whether it is read next to one.
    """

    def __init__(self, apart: str = "", is_used: Callable[[WalkedFile], bool] | None = None) -> None:
        self._inside = os.path.join(os.path.abspath(apart), "") if apart else "\0"
        self._is_used = is_used
        self.real: set[str] = set()

    def take(self, file: WalkedFile) -> None:
        if not file.path.startswith(self._inside) and not (self._is_used and self._is_used(file)):
            self.real.add(file.real)

    def counts(self) -> Mapping[str, int]:
        """How many there are, by suffix."""
        return Counter(map(suffix_of, self.real))


def walk_files(
    patterns: Sequence[str], suffixes: tuple[str, ...] = (), others: PassedOver | None = None
) -> Iterator[WalkedFile]:
    """Every file that the patterns, which are absolute, name: each real file once.

    The files of one pattern are sorted by path, except those behind links. `others` gets the files whose
    suffix is not wanted.
    """
    wanted = tuple(map(str.lower, suffixes))
    seen: set[str] | None = set() if len(patterns) > 1 else None  # one walk finds each once: millions are not kept
    linked: list[WalkedFile] = []
    for pattern in patterns:
        is_there = matches = False
        unwanted: Counter[str] = Counter()
        for file in _matching(pattern):
            is_there = True
            if not _is_wanted(file, wanted):
                unwanted[suffix_of(file.path)] += 1
                if others is not None:
                    others.take(file)
                continue
            matches = True
            if file.by_link:
                linked.append(file)
            elif seen is None:
                yield file
            elif file.real not in seen:
                seen.add(file.real)
                yield file
        if not matches:
            raise _none_at(pattern, is_there, os.path.isdir(pattern), suffixes, unwanted)
    if seen is None:
        seen = _paths_without_links(patterns[0], wanted, {file.real for file in linked}) if linked else set()
    for file in sorted(linked, key=lambda file: file.path):
        if file.real not in seen:
            seen.add(file.real)
            yield file
    if others is not None:
        others.real -= seen  # a link may name them differently


def _paths_without_links(pattern: str, wanted: tuple[str, ...], real: set[str]) -> set[str]:
    """The files that a pattern matches without following links."""
    matching = (file for file in _matching(pattern) if not file.by_link and file.real in real)
    return {file.real for file in matching if _is_wanted(file, wanted)}


def suffix_of(path: str) -> str:
    """The suffix of a name in lower case, with the inner one of a compressed file.

    >>> suffix_of("a/c4.00001.JSON.bz2"), suffix_of("photo.heic"), suffix_of("LICENSE")
    ('.json.bz2', '.heic', 'no suffix')
    """
    stem, suffix = os.path.splitext(os.path.basename(path).lower())
    whole = os.path.splitext(stem)[1] + suffix if suffix in STREAM_SUFFIXES else suffix
    return whole if 1 < len(whole) <= _LONGEST_SUFFIX and whole.isascii() and whole.isprintable() else NO_SUFFIX


def without_stream_suffix(path: str) -> str:
    """A name without its compression suffix.

    >>> without_stream_suffix("a.jsonl.GZ"), without_stream_suffix("a.txt")
    ('a.jsonl', 'a.txt')
    """
    stem, suffix = os.path.splitext(path)
    return stem if suffix.lower() in STREAM_SUFFIXES else path


def is_stream(path: str) -> bool:
    return path.lower().endswith(STREAM_SUFFIXES)


def with_stream_suffixes(suffixes: Sequence[str]) -> tuple[str, ...]:
    """Suffixes of plain files, and of the same files compressed.

    >>> with_stream_suffixes([".txt"])[:3]
    ('.txt', '.txt.gz', '.txt.gzip')
    """
    return tuple(suffix + ending for suffix in suffixes for ending in ("", *STREAM_SUFFIXES))


def names_suffix(pattern: str) -> bool:
    """True if a glob ends in a suffix that sets the format; `.gz` and the like do not.

    >>> names_suffix("odd/*.py"), names_suffix("part-*.jsonl.gz"), names_suffix("data/*"), names_suffix("*.gz")
    (True, True, False, False)
    """
    suffix = os.path.splitext(without_stream_suffix(pattern))[1]
    return bool(suffix) and not glob.has_magic(suffix)


def _is_wanted(file: WalkedFile, suffixes: tuple[str, ...]) -> bool:
    return not suffixes or file.is_meant or file.path.lower().endswith(suffixes)


def _none_at(
    pattern: str, is_there: bool, is_folder: bool, suffixes: tuple[str, ...], others: Mapping[str, int]
) -> SourceNotFound:
    """The error of a pattern that matches nothing: no files, or files with other suffixes."""
    if not is_there:
        problem = "the folder has no files" if is_folder else "no file matches"
        return SourceNotFound(f"no source at '{pattern}': {problem}", hint="check the path")
    plain = ", ".join(suffix for suffix in suffixes if not is_stream(suffix))
    is_text = any(map(is_stream, suffixes))  # images and Parquet are not read compressed
    also = ", also compressed" if is_text else ""
    hint = "pass a folder or a glob that has such files"
    if is_text:
        hint = "select others by a glob like '*.py', or by --suffix if they are plain text"
    seen = not_read(others) or "it holds no file"
    return SourceNotFound(
        f"no source at '{pattern}': no file there ends in {plain} (in any case{also}), {seen}", hint=hint
    )


class _Folder(NamedTuple):
    """A folder to go through: which parts of a glob its names may match, and whether all below it is meant."""

    path: str
    real: str
    by_link: bool
    states: frozenset[int]
    is_inside: bool


class _FolderEntry(NamedTuple):
    name: str
    path: str
    is_folder: bool
    is_link: bool


def _matching(pattern: str) -> Iterator[WalkedFile]:
    """Every file that one pattern names; some of them, through links, more than once."""
    if os.path.isdir(pattern):
        yield from _walk(Glob(()), _Folder(pattern, os.path.realpath(pattern), False, frozenset(), True), False)
    elif os.path.lexists(pattern):
        is_link = os.path.islink(pattern)
        yield WalkedFile(pattern, os.path.realpath(pattern), is_link, True, NamesIn(os.path.dirname(pattern)))
    else:
        names = pattern.split(os.sep)
        fixed = next((at for at, name in enumerate(names) if glob.has_magic(name)), len(names))
        top, parts = os.sep.join(names[:fixed]) or os.sep, Glob.of(names[fixed:])
        if parts.parts and os.path.isdir(top):
            start = parts.closure(0)
            first = _Folder(top, os.path.realpath(top), False, start, parts.is_end(start))
            yield from _walk(parts, first, names_suffix(pattern))


def _walk(pattern: Glob, top: _Folder, is_meant: bool) -> Iterator[WalkedFile]:
    """Files in the order of their paths. Links to folders come last: one of them finds a real folder passed already."""
    linked: list[_Folder] = [top]
    waiting: list[Iterator[WalkedFile | _Folder]] = []
    passed: set[tuple[str, frozenset[int], bool]] = set()
    while waiting or linked:
        item = next(waiting[-1], None) if waiting else heapq.heappop(linked)
        if item is None:
            waiting.pop()
        elif isinstance(item, WalkedFile):
            yield item
        elif (key := (item.real, item.states, item.is_inside)) not in passed:
            passed.add(key)
            waiting.append(_inside(pattern, item, is_meant, linked))


def _inside(pattern: Glob, folder: _Folder, is_meant: bool, linked: list[_Folder]) -> Iterator[WalkedFile | _Folder]:
    """The entries of a folder that may match, sorted by path; links to folders are added to `linked`."""
    entries = sorted(_entries(pattern, folder), key=lambda entry: entry.name + os.sep * entry.is_folder)
    names: Container[str] = {entry.name for entry in entries} if folder.is_inside else NamesIn(folder.path)
    for entry in entries:
        states = pattern.after(folder.states, entry.name)
        is_match = pattern.is_end(states)
        if not (states or (folder.is_inside and not is_hidden(entry.name))):
            continue
        real = os.path.realpath(entry.path) if entry.is_link else os.path.join(folder.real, entry.name)
        by_link = folder.by_link or entry.is_link
        if entry.is_folder:
            below = _Folder(entry.path, real, by_link, states, folder.is_inside or is_match)
            if entry.is_link:
                heapq.heappush(linked, below)
            else:
                yield below
        elif folder.is_inside or is_match:
            yield WalkedFile(entry.path, real, by_link, is_match and is_meant, names)


def _entries(pattern: Glob, folder: _Folder) -> list[_FolderEntry]:
    """The entries of a folder; if only fixed names can match, only those."""
    fixed = None if folder.is_inside else pattern.fixed_names(folder.states)
    if fixed is not None:
        paths = {name: os.path.join(folder.path, name) for name in fixed}
        there = {name: path for name, path in paths.items() if os.path.lexists(path)}
        return [_FolderEntry(name, path, os.path.isdir(path), os.path.islink(path)) for name, path in there.items()]
    with os.scandir(folder.path) as scan:
        return [_FolderEntry(entry.name, entry.path, _is_folder(entry), entry.is_symlink()) for entry in scan]


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle: reading it as a file fails with the reason
        return False


def list_objects(
    root: str,
    patterns: Sequence[str],
    suffixes: tuple[str, ...] = (),
    decompressed: bool = True,
    others_named: Callable[[str, Entry, bool], None] | None = None,
) -> Listing:
    """The objects of a bucket that patterns name, by one listing per pattern and no request per object.

    `others_named` gets the name and the entry of every other object of the listings, and whether a pattern names it.
    """
    wanted, files, others = tuple(map(str.lower, suffixes)), dict[str, SourceFile](), Counter[str]()
    for pattern in patterns:
        url = join_url(root, pattern)
        bucket, key = split_url(url)
        names = key.split("/")
        fixed = next((at for at, name in enumerate(names) if glob.has_magic(name)), len(names))
        parts, top = Glob.of(names[fixed:]), join_url(bucket, "/".join(names[:fixed]))
        is_there, unwanted, before = False, Counter[str](), len(files)
        for address, entry in objects_below(top):
            below = address.removeprefix(top).strip("/").split("/")
            is_match, is_own = parts.matches(below if below != [""] else [])
            if not is_match:
                if others_named is not None:
                    others_named(relative_url(address, root), entry, False)
                continue
            is_there = True
            name = relative_url(address, root)
            file = WalkedFile(address, address, False, address == url or (is_own and names_suffix(pattern)), ())
            if _is_wanted(file, wanted):
                before -= name in files
                files[name] = as_file(name, entry, decompressed and is_stream(name))
            else:
                unwanted[suffix_of(address)] += 1
                if others_named is not None:
                    others_named(name, entry, True)
        if len(files) == before:
            raise _none_at(url, is_there, fixed == len(names), suffixes, unwanted)
        others += unwanted
    return Listing([files[name] for name in sorted(files)], others)
