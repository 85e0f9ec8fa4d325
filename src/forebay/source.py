"""What a source is: ordered raw samples in files that have an identity, cut into parts.

file a.jsonl  ├──────part──────┼───part───┤      chunk 0 = [a 0:900]
file b.jsonl  ├─part─┼────────part────────┤      chunk 1 = [a 900:1400, b 0:350]   …

Files of a source in columns: some 40 bytes for each, where a list of objects takes 350.

    path      "a.jpgb.jpgc.png"    offsets  0 5 10 15
    size      4096 812 77103
    mtime_ns  …                    and the other numbers of `SourceFile`

A listing of millions is collected in columns, and a plan keeps the same columns on disk.
"""

import os
import stat
import zlib
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast, overload, runtime_checkable

import msgspec
import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from forebay.errors import HubNotFound, HubUnreachable, SourceUnreadable, TooManyFailures

Unit = Literal["bytes", "samples"]
_UNREADABLE = "unreadable: "
WHOLE_FILE = 1 << 62  # more than any file has: cut into one part


class SourceFile(msgspec.Struct, frozen=True):
    """One file of a source as it was when looked at: enough to tell whether it changed.

    `stream` is true of a file that can only be read from its beginning (a compressed one): it is scanned once by the
    planner, which then knows the digest of its bytes, and its parts go to one worker in order.
    """

    path: str
    size: int
    mtime_ns: int = 0
    etag: str = ""
    stream: bool = False
    digest: int | None = None
    ctime_ns: int = 0  # when its content or its facts last changed, which nobody can set; 0: unknown
    inode: int = 0  # 0: unknown

    @classmethod
    def unreadable(cls, path: str, problem: str) -> "SourceFile":
        """A name that a listing found, with nothing behind it that could be read: a link to nothing, a pipe."""
        return cls(path=path, size=0, etag=_UNREADABLE + problem)

    @property
    def problem(self) -> str:
        """Why the listing says that it cannot be read, nothing where that is not known before it is tried."""
        return self.etag.removeprefix(_UNREADABLE) if self.etag.startswith(_UNREADABLE) else ""

    def same_identity(self, other: "SourceFile") -> bool:
        """Whether nothing shows that it changed: also a new content of the same size, dated back, has another ctime."""
        pairs = ((self.ctime_ns, other.ctime_ns), (self.inode, other.inode))
        return self.same_look(other) and all(mine == theirs or not mine or not theirs for mine, theirs in pairs)

    def same_file(self, other: "SourceFile") -> bool:
        """Whether it is the same file and nobody has written to it, whatever its etag; False where that is unknown."""
        mine, theirs = ((one.size, one.mtime_ns, one.ctime_ns, one.inode) for one in (self, other))
        return mine == theirs and all((self.ctime_ns, self.inode))

    def same_look(self, other: "SourceFile") -> bool:
        """Whether size, time and etag are the same: what a copy that keeps times keeps."""
        return (self.size, self.mtime_ns, self.etag) == (other.size, other.mtime_ns, other.etag)


_CLOCK_STEP_NS = 20_000_000  # file systems of disks take times from a clock that moves every few milliseconds,
_COARSE_STEPS_NS = (2_000_000_000, 1_000_000_000)  # and others keep whole seconds, FAT every second one


def settling_seconds(touched_ns: int, now_ns: int) -> float:
    """How long a file that was touched at some time can still be changed without getting another time.

    >>> settling_seconds(1_500_000_000, 1_505_000_000), settling_seconds(1_000_000_000, 1_505_000_000)
    (0.015, 0.495)
    """
    step = next((step for step in _COARSE_STEPS_NS if touched_ns % step == 0), _CLOCK_STEP_NS)
    return max(0, min(step, touched_ns + step - now_ns)) / 1e9


def open_regular(path: str, flags: int) -> int:
    """Open a file of a source; what took its place, such as a pipe, is neither waited for nor read: it raises."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # another process, such as a file server, must give up its lease first
        descriptor = os.open(path, flags)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise SourceUnreadable(path, "it is not a regular file")


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
    """A sample's bytes with what is said about them: an image and the tags of its sidecar."""

    content: bytes
    metadata: dict[str, Any] = {}


MOST_LEVELS = 64
SHOWN_SUFFIXES = 6
CHANGED_MEANWHILE = "changed while it was read"
TOO_DEEP = f"lists and objects lie in each other more than {MOST_LEVELS} deep"


def is_shallow(metadata: Any, levels: int = MOST_LEVELS) -> bool:
    """Whether metadata can be read and written anywhere: what is deeper fails or not by how deep a stack is already.

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


_MOST_CHARS = 300
_ADVICE = {
    "no-text": "set the text field to one of them (text=…, --text …)",
    "not-text": "name another field as the text (text=…, --text …)",
    "null": "name another field as the text (text=…, --text …)",
    "no-messages": "name the field that holds the messages (names={'messages': …}, --names messages=…)",
    "bad-json": "check that the files are JSON lines, one object in each line",
    "not-utf8": "convert the files to UTF-8, or read them as what they are",
    "outside-root": "name the folder that the paths are below (root=…, --root …)",
}


class Reasons:
    """Why samples failed: how often each reason, and the first sample of each."""

    def __init__(self, failures: Iterable[Failure] = ()) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, Failure] = {}
        for failure in failures:
            self.add(failure)

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, failure: Failure) -> None:
        self._counts[failure.reason] += 1
        self._examples.setdefault(failure.reason, failure)

    def most_frequent(self) -> tuple[str, int, str]:
        """The reason that most failures have, how many, and the first sample of them in words."""
        reason, count = self._counts.most_common(1)[0]
        return reason, count, _words(self._examples[reason])

    def advice(self) -> str:
        """What to do about the most frequent reason."""
        reason, _, _ = self.most_frequent()
        example = self._examples[reason]
        if reason == "bad-json" and "`array`" in example.detail:
            return "it looks like one JSON array, not JSON lines: write one object in each line"
        if reason == "not-found" and example.detail.startswith("line "):
            return _ADVICE["outside-root"]
        return _ADVICE.get(reason, "check that the samples are what the recipe reads")


def _words(example: Failure) -> str:
    words = f"'{example.sample}': {example.detail}" if example.detail else f"'{example.sample}'"
    return words if len(words) <= _MOST_CHARS else f"{words[:_MOST_CHARS]}…"


def check_failures(
    root: str, failures: int, samples: int, allowed: int | float | None, expected: int | None = None
) -> None:
    """Raise where more failed than is allowed: a count, or a share of the samples that there are or will be."""
    of = samples if expected is None else expected
    if allowed is not None and failures > (allowed if isinstance(allowed, int) else allowed * of):
        raise TooManyFailures(root, failures, samples, f"{allowed:,}" if isinstance(allowed, int) else f"{allowed:.2%}")


def allows_all(allowed: int | float | None) -> bool:
    """Whether the caller said that every sample may fail: a share of 100 %."""
    return isinstance(allowed, float) and allowed >= 1


class Listing(NamedTuple):
    """The files of a source as one walk found them."""

    files: Sequence[SourceFile]
    left_out: Mapping[str, int]  # how many files of its folders are not read, by suffix


_listings: ContextVar[dict[Hashable, Listing] | None] = ContextVar("forebay_listings", default=None)


@contextmanager
def listed_once() -> Iterator[None]:
    """List the same objects once within it, for a report that is asked for several things about them."""
    token = _listings.set({})
    try:
        yield
    finally:
        _listings.reset(token)


def listing_of(find: Callable[..., Listing], *arguments: Hashable) -> Listing:
    """What `find` returns for these arguments, or returned before within `listed_once`."""
    kept = _listings.get()
    if kept is None:
        return find(*arguments)
    if (find, arguments) not in kept:
        kept[find, arguments] = find(*arguments)
    return kept[find, arguments]


@runtime_checkable
class Source(Protocol):
    """Where samples come from: the base of every source. A new one passes `forebay.testing.SourceContract`.

    What is abstract it must have; the rest are hooks with their defaults. It is picklable, small, and opens nothing
    until asked. A missing file raises `FileNotFoundError`, an error of the disk or the network `OSError`; a sample with
    bad content is yielded as a `Failure`.
    """

    kind: ClassVar[str] = ""  # under which `forebay.kinds` finds its class again
    unstated: ClassVar[tuple[str, ...]] = ()  # fields that its description leaves out while they have their default
    read_by: ClassVar[tuple[str, ...]] = ()  # keys of its description that decide which samples a file has
    remote: ClassVar[bool] = False  # True: asking it contacts another machine, which takes more than a cache's word

    @property
    @abstractmethod
    def unit(self) -> Unit:
        """What the ranges of its parts count."""

    @abstractmethod
    def files(self) -> Sequence[SourceFile]:
        """Every file there is now, in the order of their samples."""

    @abstractmethod
    def look(self, path: str) -> SourceFile:
        """One file as it is now; `FileNotFoundError` where it is gone."""

    @abstractmethod
    def weight(self, file: SourceFile) -> int:
        """How much a file holds, in the unit of the source; of a stream, estimated from its beginning."""

    @abstractmethod
    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        """Where parts of `file` from `start` on may end: about `first` after start, then about each `every`.

        The last one is the end of the file. A file that has nothing after `start` gives none.
        """

    @abstractmethod
    def read(self, part: Part) -> Iterable[Sample | Failure]:
        """The samples of one part, in order."""

    @abstractmethod
    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        """A 64-bit hash of the raw content of a range; for a stream, of its first `stop` stored bytes."""

    @property
    def reads_planned_files(self) -> bool:
        """Whether `read` compares each file that it reads with its part, and raises `SourceChanged` if it differs.

        Otherwise a build looks at every file of a chunk before and after it is read.
        """
        return False

    @property
    def files_grow(self) -> bool:
        """False where a file that got longer is another sample, not an old one with more behind it."""
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
        """The source that `describe` described. `KeyError` where a field is missing: a cache may be a stranger's."""
        own: Any = cls
        stated = [field.name for field in fields(own) if field.compare and field.name not in cls.unstated]
        return msgspec.convert({**description, **{name: description[name] for name in stated}}, cls)

    def unwalked(self) -> Self:
        """The source as a cache names it: its files are those that are planned, no folder is walked to find more."""
        return self

    def is_walked(self) -> bool:
        """Whether `listing` may search for files; False if only a cache, maybe a stranger's, names them."""
        return True

    def without_gone(self) -> Self:
        """The source without names of which nothing is left; itself where all are there, or none is. It is walked."""
        return self

    def workers(self) -> int | None:
        """The number of worker processes, unless the caller or the recipe sets it; 0: the calling process."""
        return None

    def looking(self) -> Callable[[str], SourceFile]:
        """Return a `look` for checking all files: a source may list them once for it."""
        return self.look

    def sample_ends(self, file: SourceFile) -> NDArray[np.uint64] | None:
        """Where every sample of a stream ends, found by one pass, at which `cuts` may cut it.

        None where only `cuts` finds that, or where there are too many to hold. It is called in several threads.
        """
        return None

    def scanned(self, file: SourceFile) -> SourceFile:
        """The file as `cuts` left it: a stream now has its digest, another file is returned as it is."""
        return file

    def read_hashed(self, part: Part, digest: PartDigest) -> Iterable[Sample | Failure | SampleBatch]:
        """What `read` returns, in batches where the source has them, hashed on the way where that is possible."""
        return self.read(part)

    def glance(self, part: Part) -> Iterable[Sample | Failure | SampleBatch]:
        """What `read` returns, for estimates only, where that can be had for less."""
        return self.read(part)

    def annotations(self, files: Sequence[SourceFile]) -> Iterator[Mapping[str, Any]]:
        """The metadata of every sample of its files in order, as they were listed.

        A source that knows it without reading the samples overrides this.
        """
        for file in files:
            start = 0
            for stop in self.cuts(file, 0, WHOLE_FILE, WHOLE_FILE):
                samples = self.read(Part(self.scanned(file), start, stop))
                found = (one.data for one in samples if isinstance(one, Sample))
                yield from (data.metadata for data in found if isinstance(data, Annotated))
                start = stop

    def rebased(self, root: str) -> Self:
        """The same source with files named relative to `root`, so that a plan recognises them."""
        return self

    def touched_ns(self, file: SourceFile) -> int:
        """When anything that a sample of this file is read from was last written to."""
        return file.mtime_ns

    def stamp(self, file: SourceFile) -> str:
        """`ctime_ns:inode` of each file that a sample is read from, joined by commas; empty where that is unknown."""
        return ""

    def edited_beside(self, known: SourceFile, found: SourceFile) -> str:
        """The path of what describes a file, such as its sidecar, where that was edited and the file itself was not.

        Empty where the file itself may have changed. A path is returned only if it decides nothing but the metadata
        of samples: their bytes are then read from `found` alone.
        """
        return ""

    def check_beside(self, planned: SourceFile, found: SourceFile) -> None:
        """Raise `SourceChanged` if what describes a file, such as its sidecar, has another name than was planned."""
        return None

    def listing(self, apart: str = "") -> Listing:
        """`files()`, and how many files of its folders are not read; those below the folder `apart` do not count."""
        return Listing(self.files(), {})

    def notes(self, files: Sequence[SourceFile] = ()) -> tuple[str, ...]:
        """What a user should know about how it reads what was named.

        `files` are its files as they were listed: a source may read the beginnings of a few, and walks no folder.
        """
        return ()


SameLook = Callable[[SourceFile, SourceFile], bool]


def differing_files(
    source: Source,
    planned: Iterable[SourceFile],
    listed: Iterable[SourceFile] = (),
    is_same: SameLook = SourceFile.same_identity,
) -> Iterator[tuple[SourceFile, SourceFile | Exception]]:
    """The planned files that look different, each as it is now, or with the error of looking at it.

    `listed` are files as they were found after they were planned: one that was as planned is not looked at again.
    """
    look, was_found = cache(source.looking), _Following(listed)
    for known in planned:
        before = was_found.named(known.path)
        if before is not None and not before.problem and is_same(known, before):
            continue
        try:
            found = look()(known.path)
        except (HubNotFound, HubUnreachable):
            raise  # nobody can be asked about any file
        except (OSError, SourceUnreadable) as error:
            yield known, error
            continue
        if not is_same(known, found):
            yield known, found


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
        found = self._next
        if found is None or found.path != path:
            return None
        self._next = next(self._left, None)
        return found


def part_sum(source: Source, part: Part, read: PartDigest | None = None) -> int:
    """The digest of a part of the source: of the whole file where the plan knows that, else as it was `read`."""
    if part.file.digest is not None:
        return part.file.digest
    known = None if read is None else read.value
    return source.digest(part.file, part.start, part.stop) if known is None else known


def not_read(counts: Mapping[str, int]) -> str:
    """How many files are not read, with the most frequent suffixes; nothing where there are none.

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


NUMBERS = {"size": np.uint64, "mtime_ns": np.int64, "digest": np.uint64, "has_digest": np.uint8, "stream": np.uint8}
KNOWN_BY_SOME = {"ctime_ns": np.int64, "inode": np.uint64}  # kept where a file system has them
TEXTS = ("path", "etag")
DTYPES: Mapping[str, Any] = {
    **{f"file_{name}": dtype for name, dtype in (NUMBERS | KNOWN_BY_SOME).items()},
    **{f"file_{name}": np.uint8 for name in TEXTS},
    **{f"file_{name}_offsets": np.uint64 for name in TEXTS},
}
_AT_ONCE = 4096  # files, as lists of Python numbers, and texts that are compressed together
_COMPARED_AT_ONCE = 1 << 19  # items
_KEPT_BYTES = 1 << 20  # of texts that were decompressed last: some twenty thousand, which may be read in any order
_WIDTHS = "BIQq"  # of an item: as narrow as what was appended so far; the last one has a sign


class Numbers:
    """A column of whole numbers that grows, in the narrowest type that holds all of them; equal ones take no room."""

    def __init__(self) -> None:
        self._values = array(_WIDTHS[0])
        self._same = self._run = 0  # the number that all have so far, and how many; they are not in `_values`

    def __len__(self) -> int:
        return len(self._values) or self._run

    def append(self, value: int) -> None:
        if not self._values:
            if value == self._same or not self._run:
                self._same, self._run = value, self._run + 1
                return
            self._values = _narrowest(self._same) * self._run
        while True:
            try:
                return self._values.append(value)
            except OverflowError:
                wider = _WIDTHS.index(self._values.typecode) + 1
                if wider == len(_WIDTHS):
                    raise
                self._values = array(_WIDTHS[-1] if value < 0 else _WIDTHS[wider], self._values)

    def copy(self) -> "Numbers":
        copied = Numbers()
        copied._values, copied._same, copied._run = self._values[:], self._same, self._run
        return copied

    def values(self) -> NDArray[Any]:
        if self._values:
            return np.frombuffer(self._values, self._values.typecode)
        one = _narrowest(self._same)
        return np.broadcast_to(np.frombuffer(one, one.typecode), self._run)


def _narrowest(value: int) -> "array[int]":
    for width in _WIDTHS:
        with suppress(OverflowError):
            return array(width, [value])
    raise OverflowError(value)


class MadeColumn:
    """A column of which a piece is made when it is asked for."""

    def __init__(self, dtype: DTypeLike, length: int, between: Callable[[int, int], NDArray[Any]]) -> None:
        self.dtype, self.shape, self.size = np.dtype(dtype), (length,), length
        self._between = between

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, asked: slice) -> NDArray[Any]:
        start, stop, step = asked.indices(self.size)
        if step != 1:
            raise ValueError(f"a column that is made piece by piece cannot be read in steps of {step}")
        return self._between(start, max(start, stop))


class Texts:
    """A column of texts that grows: all of them end to end, and where each ends.

    Paths have much in common, and digests use few characters: they are compressed, some thousand at a time.
    """

    def __init__(self) -> None:
        self._blocks, self._starts = list[bytes](), array("Q", [0])  # the last of these is where the next one begins
        self._lengths, self._joined = array("I"), bytearray()  # of the block that is being filled
        self._kept: tuple[tuple[int, NDArray[np.uint64], bytes], ...] = ()  # blocks that were asked for, the last first
        self._is_complete = False

    def append(self, text: str) -> None:
        if self._is_complete:
            raise ValueError("no text can be added to a column that was read")
        before = len(self._joined)
        self._joined += text.encode("utf-8", "surrogateescape")
        self._lengths.append(len(self._joined) - before)
        if len(self._lengths) == _AT_ONCE:
            self._blocks.append(zlib.compress(self._lengths.tobytes() + self._joined, 1))
            self._starts.append(self._starts[-1] + len(self._joined))
            self._lengths, self._joined = array("I"), bytearray()

    def values(self) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """All texts end to end, and their edges, of which there is one more; nothing can be added after it."""
        self._is_complete = True
        count, size = len(self._blocks) * _AT_ONCE + len(self._lengths), self._starts[-1] + len(self._joined)
        if not self._blocks:
            return self._characters(0, size), self._edges(0, count + 1)
        made = MadeColumn(np.uint8, size, self._characters), MadeColumn(np.uint64, count + 1, self._edges)
        return cast("tuple[NDArray[np.uint8], NDArray[np.uint64]]", made)

    def _characters(self, start: int, stop: int) -> NDArray[np.uint8]:
        first, last = (bisect_right(self._starts, at) - 1 for at in (start, max(start, stop - 1)))
        joined = b"".join(self._block(number)[1] for number in range(first, last + 1))
        return np.frombuffer(joined, np.uint8)[start - self._starts[first] : stop - self._starts[first]]

    def _edges(self, start: int, stop: int) -> NDArray[np.uint64]:
        """Where some texts begin, or the last one ends."""
        first, last = start // _AT_ONCE, max(start, stop - 1) // _AT_ONCE
        pieces = (self._block(number)[0] + np.uint64(self._starts[number]) for number in range(first, last + 1))
        edges: NDArray[np.uint64] = np.concatenate([piece[:_AT_ONCE] for piece in pieces])
        return edges[start - first * _AT_ONCE : stop - first * _AT_ONCE]

    def _block(self, number: int) -> tuple[NDArray[np.uint64], bytes]:
        """The edges of the texts of a block, and the texts."""
        kept = self._kept  # replaced as a whole: several threads may read
        found = next((one for one in kept if one[0] == number), None) or (number, *self._unpacked(number))
        recent = [found, *(one for one in kept if one[0] != number)]
        sizes = accumulate(edges.nbytes + len(joined) for _, edges, joined in recent)
        self._kept = tuple(one for one, size in zip(recent, sizes, strict=True) if one is found or size <= _KEPT_BYTES)
        return found[1:]

    def _unpacked(self, number: int) -> tuple[NDArray[np.uint64], bytes]:
        if number < len(self._blocks):
            content = zlib.decompress(self._blocks[number])
            lengths = np.frombuffer(content, np.uint32, _AT_ONCE)
            joined = content[lengths.nbytes :]
        else:
            lengths, joined = np.frombuffer(self._lengths, np.uint32), bytes(self._joined)
        edges = np.zeros(len(lengths) + 1, np.uint64)
        np.cumsum(lengths, out=edges[1:])
        return edges, joined


class FileColumns:
    """Files that are collected one by one."""

    def __init__(self) -> None:
        self._numbers = {name: Numbers() for name in (*NUMBERS, *KNOWN_BY_SOME)}
        self._numbers["ctime_ns"] = self._numbers["mtime_ns"]  # until a file was touched after it was last written to
        self._texts = {name: Texts() for name in TEXTS}

    @classmethod
    def of(cls, files: Iterable[SourceFile]) -> "FileColumns":
        columns = cls()
        for file in files:
            columns.append(file)
        return columns

    def __len__(self) -> int:
        return len(self._numbers["size"])

    def append(self, file: SourceFile) -> None:
        self._texts["path"].append(file.path)
        self._texts["etag"].append(file.etag)
        numbers = self._numbers
        numbers["size"].append(file.size)
        if file.ctime_ns != file.mtime_ns and numbers["ctime_ns"] is numbers["mtime_ns"]:
            numbers["ctime_ns"] = numbers["mtime_ns"].copy()
        if numbers["ctime_ns"] is not numbers["mtime_ns"]:
            numbers["ctime_ns"].append(file.ctime_ns)
        numbers["mtime_ns"].append(file.mtime_ns)
        numbers["digest"].append(file.digest or 0)
        numbers["has_digest"].append(file.digest is not None)
        numbers["stream"].append(file.stream)
        numbers["inode"].append(file.inode)

    def table(self) -> "FileTable":
        """What was collected; nothing can be added after it."""
        tensors: dict[str, NDArray[Any]] = {f"file_{name}": self._numbers[name].values() for name in NUMBERS}
        for name in KNOWN_BY_SOME:
            if (values := self._numbers[name].values()).any():
                tensors[f"file_{name}"] = values
        for name, texts in self._texts.items():
            tensors[f"file_{name}"], tensors[f"file_{name}_offsets"] = texts.values()
        return FileTable(tensors)


class FileTable(Sequence[SourceFile]):
    """Files in order, made as objects when they are asked for.

    >>> FileTable.of([SourceFile("a.jpg", 120), SourceFile("b.jpg", 40)])[1].size
    40
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self.tensors = tensors
        self._known = [name for name in KNOWN_BY_SOME if f"file_{name}" in tensors]
        self._sorted: tuple[NDArray[np.uint64], NDArray[Any]] | None = None

    @classmethod
    def of(cls, files: Iterable[SourceFile]) -> "FileTable":
        if isinstance(files, FileTable):
            return files
        return FileColumns.of(files).table()

    def __len__(self) -> int:
        return len(self.tensors["file_size"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(SourceFile.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # equal to a list

    @overload
    def __getitem__(self, at: int) -> SourceFile: ...
    @overload
    def __getitem__(self, at: slice) -> list[SourceFile]: ...
    def __getitem__(self, at: int | slice) -> SourceFile | list[SourceFile]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            return list(self._between(start, stop)) if step == 1 else [self[each] for each in range(start, stop, step)]
        at = range(len(self))[at]
        return next(self._between(at, at + 1))

    def __iter__(self) -> Iterator[SourceFile]:
        return self._between(0, len(self))

    def path(self, at: int) -> str:
        return self._texts("path", at, at + 1)[0]

    def paths(self) -> Iterator[str]:
        for low in range(0, len(self), _AT_ONCE):
            yield from self._texts("path", low, min(low + _AT_ONCE, len(self)))

    def same_paths(self, other: "FileTable") -> bool:
        """Whether both have the same paths in the same order."""
        names = ("file_path_offsets", "file_path")
        return all(_same_values(self.tensors[name], other.tensors[name]) for name in names)

    def by_path(self) -> "FileTable":
        """The same files, sorted by path; itself where they are."""
        if all(before <= after for before, after in pairwise(self.paths())):
            return self
        plain = FileTable({name: values[:] for name, values in self.tensors.items()})  # read in any order, for a while
        paths = list(plain.paths())
        return FileTable.of(plain[at] for at in sorted(range(len(self)), key=paths.__getitem__))

    def find(self, path: str) -> int | None:
        """Where a file is, the last one of that name; None where there is none."""
        hashes, order = self._by_hash()
        wanted = np.uint64(_hash(path))
        low, high = (int(np.searchsorted(hashes, wanted, side)) for side in ("left", "right"))
        return next((at for at in map(int, order[low:high][::-1]) if self.path(at) == path), None)

    def _between(self, start: int, stop: int) -> Iterator[SourceFile]:
        """Files as objects, some thousand at a time: one by one it takes five times as long."""
        for low in range(start, stop, _AT_ONCE):
            high = min(low + _AT_ONCE, stop)
            numbers = (self.tensors[f"file_{name}"][low:high].tolist() for name in (*NUMBERS, *self._known))
            texts = (self._texts(name, low, high) for name in TEXTS)
            for path, etag, size, mtime_ns, digest, has_digest, stream, *rest in zip(*texts, *numbers, strict=True):
                kept = digest if has_digest else None
                known = dict(zip(self._known, rest, strict=True))
                yield SourceFile(path, size, mtime_ns, etag, bool(stream), kept, **known)

    def _texts(self, name: str, low: int, high: int) -> list[str]:
        edges = self.tensors[f"file_{name}_offsets"][low : high + 1].tolist()
        joined = self.tensors[f"file_{name}"][edges[0] : edges[-1]].tobytes()
        return [joined[at - edges[0] : to - edges[0]].decode("utf-8", "surrogateescape") for at, to in pairwise(edges)]

    def _by_hash(self) -> tuple[NDArray[np.uint64], NDArray[Any]]:
        """The hashes of all paths in rising order, and the files that have them: an index of 12 bytes for each."""
        if self._sorted is None:
            hashes = np.fromiter(map(_hash, self.paths()), np.uint64, len(self))
            order = np.argsort(hashes, kind="stable").astype(np.uint32 if len(self) < 1 << 32 else np.int64)
            self._sorted = hashes[order], order
        return self._sorted


def _same_values(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Whether two columns are equal, compared piece by piece."""
    pieces = (slice(low, low + _COMPARED_AT_ONCE) for low in range(0, len(left), _COMPARED_AT_ONCE))
    return len(left) == len(right) and all(np.array_equal(left[piece], right[piece]) for piece in pieces)


def _hash(path: str) -> int:
    value: int = xxhash.xxh3_64_intdigest(path.encode("utf-8", "surrogateescape"))
    return value
