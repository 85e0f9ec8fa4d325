"""Find the files that paths, folders and globs name, by the same rules for every source.

A source has a root, the folder that its files share, and names every file relative to it. So a source that moved, or
that another machine mounts elsewhere, still has the same names and makes the same bytes.

- A file that is named is read, whatever its name is.
- A folder stands for all files below it. Names that begin with a dot, and `__pycache__`, are left out.
- A glob means what it means in a shell, case-sensitive, with `**` for any number of folders; a folder
  that it matches stands for all files below it.
- Links to files and folders are followed. A real file is found once, however many links lead to it: by its real path
  where that was named, else by the first of its links.
- Suffixes choose among the files of folders, in upper or lower case. A file that a glob names by its suffix is read.
- A link to nothing, a pipe or a device whose name would be read is a file that cannot be read.
- A folder that cannot be listed is an error.

Files below a root as a source: the base that finds, stats, measures and hashes them, and its common failures.
"""

import errno
import glob
import heapq
import os
import stat
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import BinaryIO, ClassVar, NamedTuple, Self

import msgspec
import xxhash

from forebay.errors import SourceInvalid, SourceNotFound, SourceUnreadable
from forebay.source import (
    Failure,
    FileTable,
    Listing,
    Source,
    SourceFile,
    Unit,
    listing_of,
    not_read,
    open_regular,
)
from forebay.sources.bucket_files import (
    as_file,
    common_url,
    join_url,
    look_at,
    objects_below,
    open_object,
    relative_url,
    split_url,
)
from forebay.sources.compression import FORMATS, estimated_size, take_digest
from forebay.store.base import Entry, is_url, meant_url

STREAM_SUFFIXES = tuple(FORMATS)
NO_SUFFIX = "no suffix"
_LONGEST_SUFFIX = 16


class FoundFile(NamedTuple):
    """A file, or a link that may lead to one."""

    path: str
    real: str
    by_link: bool  # below what was named, a link leads to it
    is_meant: bool  # by its own name, not only as one of a folder
    beside: Container[str]  # the names in its folder


class NamesIn:
    """The names in a folder, looked up one by one: for few of them that costs less than listing it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __contains__(self, name: object) -> bool:
        return os.path.lexists(f"{self._folder}{os.sep}{name}")


class PassedOver:
    """The files that a walk finds and does not want; those below the folder `apart` do not count.

    `is_used` says of a file that is not a sample whether it is read beside one.
    """

    def __init__(self, apart: str = "", is_used: Callable[[FoundFile], bool] | None = None) -> None:
        self._inside = os.path.join(os.path.abspath(apart), "") if apart else "\0"
        self._is_used = is_used
        self.real: set[str] = set()

    def take(self, file: FoundFile) -> None:
        if not file.path.startswith(self._inside) and not (self._is_used and self._is_used(file)):
            self.real.add(file.real)

    def counts(self) -> Mapping[str, int]:
        """How many there are, by suffix."""
        return Counter(map(suffix_of, self.real))


def found_files(
    patterns: Sequence[str], suffixes: tuple[str, ...] = (), others: PassedOver | None = None
) -> Iterator[FoundFile]:
    """Every file that the patterns, which are absolute, name: each real file once.

    The files of one pattern are sorted by path, but for those that a link leads to. `others` gets the files whose
    suffix is not wanted.
    """
    wanted = tuple(map(str.lower, suffixes))
    seen: set[str] | None = set() if len(patterns) > 1 else None  # one walk finds each once: millions are not kept
    linked: list[FoundFile] = []
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
            raise SourceNotFound(pattern, _why_none(is_there, os.path.isdir(pattern), suffixes, unwanted))
    if seen is None:
        seen = _found_without_links(patterns[0], wanted, {file.real for file in linked}) if linked else set()
    for file in sorted(linked, key=lambda file: file.path):
        if file.real not in seen:
            seen.add(file.real)
            yield file
    if others is not None:
        others.real -= seen  # a link may name them differently


def _found_without_links(pattern: str, wanted: tuple[str, ...], real: set[str]) -> set[str]:
    """Which of some files a pattern names themselves."""
    found = (file for file in _matching(pattern) if not file.by_link and file.real in real)
    return {file.real for file in found if _is_wanted(file, wanted)}


def suffix_of(path: str) -> str:
    """How a name ends, in lower case, with what comes before the suffix of a compressed file.

    >>> suffix_of("a/c4.00001.JSON.bz2"), suffix_of("photo.heic"), suffix_of("LICENSE")
    ('.json.bz2', '.heic', 'no suffix')
    """
    stem, suffix = os.path.splitext(os.path.basename(path).lower())
    whole = os.path.splitext(stem)[1] + suffix if suffix in STREAM_SUFFIXES else suffix
    return whole if 1 < len(whole) <= _LONGEST_SUFFIX and whole.isascii() and whole.isprintable() else NO_SUFFIX


def without_stream_suffix(path: str) -> str:
    """A name without the suffix that says how the file is compressed.

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
    """Whether a glob says how the files end that it names; `.gz` and the like say nothing of what is in them.

    >>> names_suffix("odd/*.py"), names_suffix("part-*.jsonl.gz"), names_suffix("data/*"), names_suffix("*.gz")
    (True, True, False, False)
    """
    suffix = os.path.splitext(without_stream_suffix(pattern))[1]
    return bool(suffix) and not glob.has_magic(suffix)


def _is_wanted(file: FoundFile, suffixes: tuple[str, ...]) -> bool:
    return not suffixes or file.is_meant or file.path.lower().endswith(suffixes)


def _why_none(is_there: bool, is_folder: bool, suffixes: tuple[str, ...], others: Mapping[str, int]) -> str:
    """What to say where nothing was found: that nothing is there, or that its names do not fit, and what they are."""
    if not is_there:
        return "the folder has no files" if is_folder else "no file matches"
    plain = ", ".join(suffix for suffix in suffixes if not is_stream(suffix))
    is_text = any(map(is_stream, suffixes))  # images and Parquet are not read compressed
    also = ", also compressed" if is_text else ""
    other = "name a folder or a glob that has such files"
    if is_text:
        other = "name others by a glob like '*.py', or by --suffix if they are plain text"
    seen = not_read(others) or "it holds no file"
    return f"no file there ends in {plain} (in any case{also}), {seen}; {other}"


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


def _matching(pattern: str) -> Iterator[FoundFile]:
    """Every file that one pattern names; some of them, through links, more than once."""
    if os.path.isdir(pattern):
        yield from _walk(_Glob(()), _Folder(pattern, os.path.realpath(pattern), False, frozenset(), True), False)
    elif os.path.lexists(pattern):
        is_link = os.path.islink(pattern)
        yield FoundFile(pattern, os.path.realpath(pattern), is_link, True, NamesIn(os.path.dirname(pattern)))
    else:
        names = pattern.split(os.sep)
        fixed = next((at for at, name in enumerate(names) if glob.has_magic(name)), len(names))
        top, parts = os.sep.join(names[:fixed]) or os.sep, _Glob(tuple(names[fixed:]))
        if parts.parts and os.path.isdir(top):
            start = parts.closure(0)
            first = _Folder(top, os.path.realpath(top), False, start, parts.is_end(start))
            yield from _walk(parts, first, names_suffix(pattern))


def _walk(pattern: "_Glob", top: _Folder, is_meant: bool) -> Iterator[FoundFile]:
    """Files in the order of their paths. Links to folders come last: one of them finds a real folder passed already."""
    linked: list[_Folder] = [top]
    waiting: list[Iterator[FoundFile | _Folder]] = []
    passed: set[tuple[str, frozenset[int], bool]] = set()
    while waiting or linked:
        found = next(waiting[-1], None) if waiting else heapq.heappop(linked)
        if found is None:
            waiting.pop()
        elif isinstance(found, FoundFile):
            yield found
        elif (key := (found.real, found.states, found.is_inside)) not in passed:
            passed.add(key)
            waiting.append(_inside(pattern, found, is_meant, linked))


def _inside(pattern: "_Glob", folder: _Folder, is_meant: bool, linked: list[_Folder]) -> Iterator[FoundFile | _Folder]:
    """What a folder has that may be meant, sorted as paths are; links to folders are added to `linked`."""
    entries = sorted(_entries(pattern, folder), key=lambda entry: entry.name + os.sep * entry.is_folder)
    beside: Container[str] = {entry.name for entry in entries} if folder.is_inside else NamesIn(folder.path)
    for entry in entries:
        states = pattern.after(folder.states, entry.name)
        is_match = pattern.is_end(states)
        if not (states or (folder.is_inside and not _is_hidden(entry.name))):
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
            yield FoundFile(entry.path, real, by_link, is_match and is_meant, beside)


def _entries(pattern: "_Glob", folder: _Folder) -> list[_FolderEntry]:
    """What is in a folder; where only fixed names can match, those."""
    fixed = None if folder.is_inside else pattern.fixed_names(folder.states)
    if fixed is not None:
        paths = {name: os.path.join(folder.path, name) for name in fixed}
        there = {name: path for name, path in paths.items() if os.path.lexists(path)}
        return [_FolderEntry(name, path, os.path.isdir(path), os.path.islink(path)) for name, path in there.items()]
    with os.scandir(folder.path) as scan:
        return [_FolderEntry(entry.name, entry.path, _is_folder(entry), entry.is_symlink()) for entry in scan]


class _Glob(NamedTuple):
    """The parts of a glob, matched name by name. A state is how many parts the names so far have used up."""

    parts: tuple[str, ...]

    def closure(self, state: int) -> frozenset[int]:
        """A state, and those beyond a `**` that stands for no folder."""
        is_any = state < len(self.parts) and self.parts[state] == "**"
        return frozenset([state]) | (self.closure(state + 1) if is_any else frozenset())

    def after(self, states: frozenset[int], name: str) -> frozenset[int]:
        """The states after one more name, none where it does not match."""
        found: frozenset[int] = frozenset()
        for state in states:
            part = self.parts[state] if state < len(self.parts) else ""
            if part == "**":
                found |= frozenset() if _is_hidden(name) else self.closure(state)
            elif fnmatchcase(name, part) and (part.startswith(".") or not name.startswith(".")):
                found |= self.closure(state + 1)
        return found

    def matches(self, names: Sequence[str]) -> tuple[bool, bool]:
        """Whether the name of a file below the fixed part is found, and whether the last part itself matches it."""
        states = self.closure(0)
        inside, is_match = self.is_end(states), False
        for at, name in enumerate(names):
            states = self.after(states, name)
            is_match = self.is_end(states)
            if not (states or (inside and not _is_hidden(name))):
                return False, False
            if at < len(names) - 1:
                inside = inside or is_match
        return inside or is_match, is_match

    def is_end(self, states: frozenset[int]) -> bool:
        return len(self.parts) in states

    def fixed_names(self, states: frozenset[int]) -> set[str] | None:
        """The only names that can match, None where a wildcard decides."""
        names = {self.parts[state] for state in states if state < len(self.parts)}
        return None if any(map(glob.has_magic, names)) else names


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle: whoever looks at it as a file says what is wrong
        return False


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
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"paths must be strings, one per argument: jsonl('a.jsonl', 'b.jsonl'); got {type(path).__name__}"
            )
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
            raise SourceNotFound(str(name), f"a URL has two slashes: did you mean '{meant}'? A folder is './{name}'")


def renamed(root: str, patterns: Sequence[str], new_root: str) -> tuple[str, ...]:
    """The same patterns, relative to another root.

    >>> renamed("/data/text", ["*.jsonl"], "/data")
    ('text/*.jsonl',)
    """
    relative = relative_url if is_url(new_root) else os.path.relpath
    return tuple(relative(full_path(root, pattern), new_root) for pattern in patterns)


def list_objects(
    root: str,
    patterns: Sequence[str],
    suffixes: tuple[str, ...] = (),
    decompressed: bool = True,
    others_named: Callable[[str, Entry, bool], None] | None = None,
) -> Listing:
    """The objects of a bucket that patterns name: one listing for each pattern, none is asked about by itself.

    `others_named` gets the name and the entry of every other object of the listings, and whether a pattern names it.
    """
    wanted, found, others = tuple(map(str.lower, suffixes)), dict[str, SourceFile](), Counter[str]()
    for pattern in patterns:
        url = join_url(root, pattern)
        bucket, key = split_url(url)
        names = key.split("/")
        fixed = next((at for at, name in enumerate(names) if glob.has_magic(name)), len(names))
        parts, top = _Glob(tuple(names[fixed:])), join_url(bucket, "/".join(names[:fixed]))
        is_there, unwanted, before = False, Counter[str](), len(found)
        for place, entry in objects_below(top):
            below = place.removeprefix(top).strip("/").split("/")
            is_match, is_own = parts.matches(below if below != [""] else [])
            if not is_match:
                if others_named is not None:
                    others_named(relative_url(place, root), entry, False)
                continue
            is_there = True
            name = relative_url(place, root)
            file = FoundFile(place, place, False, place == url or (is_own and names_suffix(pattern)), ())
            if _is_wanted(file, wanted):
                before -= name in found
                found[name] = as_file(name, entry, decompressed and is_stream(name))
            else:
                unwanted[suffix_of(place)] += 1
                if others_named is not None:
                    others_named(name, entry, True)
        if len(found) == before:
            raise SourceNotFound(url, _why_none(is_there, fixed == len(names), suffixes, unwanted))
        others += unwanted
    return Listing([found[name] for name in sorted(found)], others)


def full_path(root: str, name: str) -> str:
    """Where a file is; `..` is resolved by name, so that a root which is gone does not stand in the way.

    Below a folder it is absolute: a stranger's plan with the root `.` and the file `s3://…` must not name a bucket.

    >>> full_path("/data/text", "../more/a.jsonl")
    '/data/more/a.jsonl'
    """
    return join_url(root, name) if is_url(root) else os.path.abspath(os.path.join(root, name))


def open_file(path: str) -> BinaryIO:
    """A file or an object for reading, without a buffer between."""
    return open_object(path) if is_url(path) else open(path, "rb", buffering=0, opener=open_regular)


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
        is_one_listing = is_url(self.root) and len(self.patterns) == 1  # which says itself that nothing is left
        left = () if is_one_listing else tuple(filter(self._names_any, self.patterns))
        return replace(self, patterns=left or self.patterns, walked=True)

    def _names_any(self, pattern: str) -> bool:
        with suppress(SourceNotFound):
            if is_url(self.root):
                return len(replace(self, patterns=(pattern,)).files()) > 0
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
        if not file.stream:
            return file
        found = take_digest(full_path(self.root, file.path), file)
        return msgspec.structs.replace(file, digest=self.digest(file, 0, file.size) if found is None else found)

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
