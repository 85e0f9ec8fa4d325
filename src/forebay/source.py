"""Sources: ordered raw samples in files with an identity, cut into parts.

file a.jsonl  ├──────part──────┼───part───┤      chunk 0 = [a 0:900]
file b.jsonl  ├─part─┼────────part────────┤      chunk 1 = [a 900:1400, b 0:350]   …
"""

import os
import stat
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.errors import SourceChanged, SourceNotFound, SourceUnreadable, StoreUnavailable

Unit = Literal["bytes", "samples"]
_UNREADABLE = "unreadable: "
WHOLE_FILE = 1 << 62  # more than any file has: cut into one part


class SourceFile(msgspec.Struct, frozen=True):
    """The identity of one source file: enough to detect whether it changed.

    `stream` is true of a file that can only be read from its beginning (a compressed one): it is scanned once by the
    planner, which then knows the digest of its bytes, and its parts go to one worker in order.
    """

    path: str
    size: int
    mtime_ns: int = 0
    etag: str = ""
    stream: bool = False
    digest: int | None = None
    ctime_ns: int = 0  # when its content or metadata last changed; cannot be set; 0: unknown
    inode: int = 0  # 0: unknown

    @classmethod
    def unreadable(cls, path: str, problem: str) -> "SourceFile":
        """A listed name without a readable file, such as a broken link or a pipe."""
        return cls(path=path, size=0, etag=_UNREADABLE + problem)

    @property
    def problem(self) -> str:
        """Why the file cannot be read; empty if unknown."""
        return self.etag.removeprefix(_UNREADABLE) if self.etag.startswith(_UNREADABLE) else ""

    def same_identity(self, other: "SourceFile") -> bool:
        """True if size, time, etag, ctime and inode show no change."""
        pairs = ((self.ctime_ns, other.ctime_ns), (self.inode, other.inode))
        return self.same_look(other) and all(mine == theirs or not mine or not theirs for mine, theirs in pairs)

    def same_look(self, other: "SourceFile") -> bool:
        """True if size, time and etag are equal, as they are in a copy that keeps times."""
        return (self.size, self.mtime_ns, self.etag) == (other.size, other.mtime_ns, other.etag)


_CLOCK_STEP_NS = 20_000_000  # file systems of disks take times from a clock that moves every few milliseconds,
_COARSE_STEPS_NS = (2_000_000_000, 1_000_000_000)  # and others keep whole seconds, FAT every second one


def settling_seconds(touched_ns: int, now_ns: int) -> float:
    """Seconds in which a file that was touched can change again without getting another time.

    >>> settling_seconds(1_500_000_000, 1_505_000_000), settling_seconds(1_000_000_000, 1_505_000_000)
    (0.015, 0.495)
    """
    step = next((step for step in _COARSE_STEPS_NS if touched_ns % step == 0), _CLOCK_STEP_NS)
    return max(0, min(step, touched_ns + step - now_ns)) / 1e9


def open_regular(path: str, flags: int) -> int:
    """Open a regular file; anything else, such as a pipe, raises without blocking."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # another process, such as a file server, must give up its lease first
        descriptor = os.open(path, flags)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise source_unreadable(path, "it is not a regular file")


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one file, in the unit of the source."""

    file: SourceFile
    start: int
    stop: int

    @property
    def weight(self) -> int:
        return self.stop - self.start


class Sample(msgspec.Struct, frozen=True):
    """One raw sample. Its id is unique in the source and stays the same as the source grows."""

    id: str
    data: Any


class SampleBatch:
    """Samples in order, without an object for each."""

    __slots__ = ()

    @property
    @abstractmethod
    def count(self) -> int: ...

    @abstractmethod
    def samples(self) -> Iterator[Sample]: ...


@dataclass(frozen=True, slots=True)
class TextBatch(SampleBatch):
    """Samples that are texts: their ids and the texts."""

    ids: list[str]
    texts: list[str]

    @property
    def count(self) -> int:
        return len(self.texts)

    def samples(self) -> Iterator[Sample]:
        return map(Sample, self.ids, self.texts)


class BatchedSamples(Iterable[Sample]):
    """Samples that can also be taken in batches where their source reads them so; either way, once through."""

    @abstractmethod
    def batches(self) -> Iterator[Sample | SampleBatch]: ...


@dataclass(slots=True)
class PartDigest:
    """What `Source.digest` returns for a part, taken while it was read; None unless all of it was."""

    value: int | None = None


class Annotated(msgspec.Struct, frozen=True):
    """A sample's bytes with metadata: an image and the tags of its sidecar."""

    content: bytes
    metadata: dict[str, Any] = {}


MOST_LEVELS = 64
SHOWN_SUFFIXES = 6
CHANGED_MEANWHILE = "changed while it was read"
TOO_DEEP = f"lists and objects lie in each other more than {MOST_LEVELS} deep"


def is_shallow(metadata: Any, levels: int = MOST_LEVELS) -> bool:
    """True if metadata is not nested deeper than JSON libraries can always read and write.

    >>> is_shallow({"a": [1, [2]]}, levels=3), is_shallow({"a": [1, [2]]}, levels=2)
    (True, False)
    """
    if not isinstance(metadata, dict | list | tuple):
        return True
    inner = metadata.values() if isinstance(metadata, dict) else metadata
    return levels > 0 and all(is_shallow(each, levels - 1) for each in inner)


class Failure(msgspec.Struct, frozen=True):
    """A sample that could not be made into a row: which, a short reason code, and a sentence."""

    sample: str
    reason: str
    detail: str = ""


Samples = Iterable[Sample | Failure | SampleBatch]


class Listing(NamedTuple):
    """The files of a source as one walk found them."""

    files: Sequence[SourceFile]
    left_out: Mapping[str, int]  # how many files of its folders are not read, by suffix


_listings: ContextVar[dict[Hashable, Listing] | None] = ContextVar("forebay_listings", default=None)


@contextmanager
def listed_once() -> Iterator[None]:
    """Cache the listing inside this block, for reports that need it several times."""
    token = _listings.set({})
    try:
        yield
    finally:
        _listings.reset(token)


def listing_of(find: Callable[..., Listing], *arguments: Hashable) -> Listing:
    """The listing that `find` returns for these arguments, or returned before within `listed_once`."""
    listings = _listings.get()
    if listings is None:
        return find(*arguments)
    if (find, arguments) not in listings:
        listings[find, arguments] = find(*arguments)
    return listings[find, arguments]


@runtime_checkable
class Source(Protocol):
    """Where samples come from: the base of every source. A new one passes `forebay.testing.SourceContract`.

    Abstract methods are required; the others are hooks with defaults. A source is small and picklable, and opens
    nothing when it is created. A missing file raises `FileNotFoundError`, an error of the disk or the network
    `OSError`; a sample with bad content is yielded as a `Failure`.
    """

    kind: ClassVar[str] = ""  # under which `forebay.kinds` finds its class again
    unstated: ClassVar[tuple[str, ...]] = ()  # fields that its description leaves out while they have their default
    read_by: ClassVar[tuple[str, ...]] = ()  # keys of its description that decide which samples a file has
    remote: ClassVar[bool] = False  # True: asking it contacts another machine, which takes more than a cache's word

    @property
    @abstractmethod
    def unit(self) -> Unit:
        """The unit of part ranges."""

    @abstractmethod
    def files(self) -> Sequence[SourceFile]:
        """Every file there is now, in the order of their samples."""

    @abstractmethod
    def look(self, path: str) -> SourceFile:
        """The present state of one file; raises `FileNotFoundError` if it is gone."""

    @abstractmethod
    def weight(self, file: SourceFile) -> int:
        """The size of a file in the unit of the source; for a stream, an estimate from its beginning."""

    @abstractmethod
    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        """Yield where parts of `file` after `start` may end: about `first` after `start`, then about every `every`.

        The last one is the end of the file. A file without content after `start` yields none.
        """

    @abstractmethod
    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        """The samples of one part in order, alone or in batches.

        A source that hashes the bytes it reads sets `digest`. With `preview`, for estimates, it may read fewer samples
        and need not hash.
        """

    @abstractmethod
    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        """A 64-bit hash of the raw content of a range; for a stream, of its first `stop` stored bytes."""

    @property
    def reads_planned_files(self) -> bool:
        """Whether `read` compares each file that it reads with its part, and raises `SourceChanged` if it differs.

        Otherwise a build compares every file of a chunk before and after it reads it.
        """
        return False

    @property
    def files_grow(self) -> bool:
        """Whether a longer file has the old samples followed by new ones. False: it is a different sample."""
        return True

    def describe(self) -> Mapping[str, Any]:
        """JSON values with its `kind`, from which it is opened again: the fields of a dataclass, unless overridden."""
        described: dict[str, Any] = {"kind": self.kind}
        own: Any = self
        for field in fields(own):
            value = getattr(self, field.name)
            if field.compare and (field.name not in self.unstated or value != field.default):
                described[field.name] = list(value) if isinstance(value, tuple) else value
        return described

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Self:
        """The source that `describe` described. `KeyError` if a field is missing: the cache may be untrusted."""
        own: Any = cls
        stated = [field.name for field in fields(own) if field.compare and field.name not in cls.unstated]
        return msgspec.convert({**description, **{name: description[name] for name in stated}}, cls)

    def unwalked(self) -> Self:
        """Return the source with the planned files only: no folder is searched."""
        return self

    def is_walked(self) -> bool:
        """Whether `listing` may search for files; False if they come only from an untrusted cache."""
        return True

    def without_gone(self) -> Self:
        """Return the source without paths that no longer exist; itself if all exist or none does."""
        return self

    def workers(self) -> int | None:
        """The number of worker processes, unless the caller or the recipe sets it; 0: the calling process."""
        return None

    def looking(self) -> Callable[[str], SourceFile]:
        """Return a function like `look` for checking all files; a source may list them once."""
        return self.look

    def sample_ends(self, file: SourceFile) -> NDArray[np.uint64] | None:
        """Return where the samples of a stream end, from one pass; `cuts` may cut there.

        None if only `cuts` can tell, or if there are too many to hold. Called in several threads.
        """
        return None

    def scanned(self, file: SourceFile) -> SourceFile:
        """The file as `cuts` left it: a stream now has its digest, another file is returned as it is."""
        return file

    def with_lines(self, failures: Sequence[Failure], parts: Iterable[Part]) -> tuple[Failure, ...]:
        """Failures of samples in some parts, with line numbers where samples are lines."""
        return tuple(failures)

    def annotations(self, files: Sequence[SourceFile]) -> Iterator[Mapping[str, Any]]:
        """The metadata of every sample of its files in order, as they were listed.

        A source that knows it without reading the samples overrides this.
        """
        for file in files:
            start = 0
            for stop in self.cuts(file, 0, WHOLE_FILE, WHOLE_FILE):
                samples = samples_of(self, Part(self.scanned(file), start, stop))
                contents = (sample.data for sample in samples if isinstance(sample, Sample))
                yield from (data.metadata for data in contents if isinstance(data, Annotated))
                start = stop

    def rebased(self, root: str) -> Self:
        """The same source with files named relative to `root`, as a plan has them."""
        return self

    def touched_ns(self, file: SourceFile) -> int:
        """Return when the files of a sample of this file were last written to."""
        return file.mtime_ns

    def stamp(self, file: SourceFile) -> str:
        """`ctime_ns:inode` of each file that a sample is read from, joined by commas; empty where that is unknown."""
        return ""

    def edited_beside(self, known: SourceFile, current: SourceFile) -> str:
        """The path of an edited companion of an unedited file, such as its sidecar.

        Empty where the file itself may have changed. A path is returned only if it decides only the metadata
        of samples: their bytes are then read from `found` alone.
        """
        return ""

    def check_beside(self, planned: SourceFile, current: SourceFile) -> None:
        """Raise `SourceChanged` if the companion of a file, such as its sidecar, is not the planned one."""
        return None

    def listing(self, apart: str = "") -> Listing:
        """`files()`, and how many files of its folders are not read; those below the folder `apart` do not count."""
        return Listing(self.files(), {})

    def notes(self, files: Sequence[SourceFile] = ()) -> tuple[str, ...]:
        """Return notes for the user about how the source is read.

        `files` are its files as they were listed: a source may read the beginnings of a few, and walks no folder.
        """
        return ()


def samples_of(
    source: Source, part: Part, *, digest: PartDigest | None = None, preview: bool = False
) -> Iterator[Sample | Failure]:
    """The samples of one part, one by one. Yielded samples are not kept here: they may be large."""
    for item in source.read(part, digest=digest, preview=preview):
        waiting = deque(item.samples() if isinstance(item, SampleBatch) else (item,))
        del item
        while waiting:
            yield waiting.popleft()


SameLook = Callable[[SourceFile, SourceFile], bool]


def differing_files(
    source: Source,
    planned: Iterable[SourceFile],
    listed: Iterable[SourceFile] = (),
    is_same: SameLook = SourceFile.same_identity,
) -> Iterator[tuple[SourceFile, SourceFile | Exception]]:
    """The planned files that differ by stat, each in its present state or with the error.

    `listed` are files as they were found after they were planned: one that was as planned is not looked at again.
    """
    look, was_found = cache(source.looking), _Following(listed)
    for known in planned:
        before = was_found.named(known.path)
        if before is not None and not before.problem and is_same(known, before):
            continue
        try:
            current = look()(known.path)
        except (SourceNotFound, StoreUnavailable):
            raise  # no file can be looked up
        except (OSError, SourceUnreadable) as error:
            yield known, error
            continue
        if not is_same(known, current):
            yield known, current


class _Following:
    """Finds files in a listing, which is read once, from its beginning to its end, and both are in order of paths.

    A path that comes before the last one that was asked for is not found, and then the file is looked at again.
    """

    def __init__(self, listed: Iterable[SourceFile]) -> None:
        self._left = iter(listed)
        self._next = next(self._left, None)

    def named(self, path: str) -> SourceFile | None:
        while self._next is not None and self._next.path < path:  # a file that is not planned
            self._next = next(self._left, None)
        file = self._next
        if file is None or file.path != path:
            return None
        self._next = next(self._left, None)
        return file


def part_sum(source: Source, part: Part, read: PartDigest | None = None) -> int:
    """The digest of a part of the source: that of the whole file if planned, otherwise the one that was `read`."""
    if part.file.digest is not None:
        return part.file.digest
    known = None if read is None else read.value
    return source.digest(part.file, part.start, part.stop) if known is None else known


def not_read(counts: Mapping[str, int]) -> str:
    """The number of unread files with the most frequent suffixes; empty if there are none.

    >>> not_read({".csv": 5, ".br": 7})
    '12 files were not read: .br 7, .csv 5'
    """
    total = sum(counts.values())
    if not total:
        return ""
    frequent = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    shown = [f"{suffix} {count:,}" for suffix, count in frequent[:SHOWN_SUFFIXES]]
    more = total - sum(count for _, count in frequent[:SHOWN_SUFFIXES])
    shown += [f"others {more:,}"] if more else []
    were = "file was" if total == 1 else "files were"
    return f"{total:,} {were} not read: {', '.join(shown)}"


def source_unreadable(path: str, problem: str) -> SourceUnreadable:
    hint = "fix the file, or leave it out of the source"
    return SourceUnreadable(f"cannot read '{path}': {problem}", hint=hint, path=path, problem=problem)


def files_changed(root: str, files: Mapping[str, str], advice: str = "") -> SourceChanged:
    """The error about source files of a cache and how each has changed."""
    shown = "; ".join(f"'{path}' {how}" for path, how in list(files.items())[:3])
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    hint = advice or f"build a new cache that reuses this one: `forebay build … --into NEW --reuse {root}`"
    return SourceChanged(f"the source of '{root}' has changed: {shown}{more}", hint=hint, root=root, files=dict(files))
