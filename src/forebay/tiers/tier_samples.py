"""The samples of a source one by one, and the keys of their rows.

    {"fingerprint":…,"made_with":…,"sample":"cats/a.jpg","size":…,"mtime_ns":…,"etag":…,…}    hashed, it is the key
    {"content":…,"etag":…,"read_as":…,"stamp":…}                                              what the sample was

The key holds what makes pixels, and nothing else. Paths are relative to the root of the source, so that a data set
that is moved finds its rows. All else is in the second line: where it differs from what the sample is now (another
ctime, an edited sidecar), the sample is read again, and its pixels are kept if its bytes hash to the same content.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import xxhash

from forebay.errors import ImageUnreadable, SourceChanged, SourceInvalid, SourceUnreadable
from forebay.recipe import RowRecipe, canonical_json, versions_of
from forebay.source import Annotated, Failure, Part, Sample, Source, SourceFile, settling_seconds
from forebay.tiers.tier_value import KEY_BYTES, identity_bytes

CheckSource = Literal["read", "open"]
# What is the matter with a sample itself; trouble with the disk, or with this process, says nothing about samples.
_OF_ONE_SAMPLE = (FileNotFoundError, NotADirectoryError, PermissionError, SourceUnreadable)
_PLACES = ("root", "patterns", "manifest")  # where a source is; samples are named relative to it
_CHOICES = ("labels", "max_sample_bytes")  # what is read of a file beside its pixels, and whether it is read


class Seen(msgspec.Struct, frozen=True):
    """The sample that a row was made from: its files, how they were read, and a hash of its bytes."""

    stamp: str = ""  # ctime and inode of every file, empty where nobody asked
    etag: str = ""
    read_as: dict[str, Any] = {}
    content: int | None = None

    def is_still(self, now: "Seen") -> bool:
        """Whether nothing shows that the sample, or what is said about it, is another now."""
        return (self.etag, self.read_as) == (now.etag, now.read_as) and now.stamp in ("", self.stamp)


class TierSamples:
    """As many as there were when the source was listed, in its order.

    The list travels with whoever is sent to another process, so that all agree on which sample has which number.
    """

    def __init__(self, source: Source, check: CheckSource = "read", files: Sequence[SourceFile] | None = None) -> None:
        self.source = source
        self.check = check
        self.files = source.files() if files is None else files
        self.root = str(source.describe().get("root", ""))
        self._is_whole = source.unit == "bytes"
        if self._is_whole and source.files_grow:
            raise SourceInvalid(
                f"the samples of a source of kind '{source.describe()['kind']}' cannot be read one by one; use images, "
                f"a manifest of images or Parquet, or build a cache"
            )
        described = {name: value for name, value in source.describe().items() if name not in _PLACES}
        self._read_as = {name: described.pop(name) for name in _CHOICES if name in described}
        self._described = described
        weights = [1 if self._is_whole else source.weight(file) for file in self.files]
        self._ends = None if set(weights) <= {1} else np.cumsum(weights, dtype=np.int64)
        self._count = sum(weights)

    def __len__(self) -> int:
        return self._count

    def file(self, index: int) -> tuple[SourceFile, SourceFile]:
        """The file of a sample as it was listed and as it is now; `ImageUnreadable` where it cannot be looked at."""
        listed = self.files[self._number(index)]
        return listed, listed if self.check == "open" else self._now(listed)

    def stamp(self, file: SourceFile) -> str:
        """What the file system has beside size and mtime (ctime, inode); empty where it is not to be asked."""
        return "" if self.check == "open" else self.source.stamp(file)

    def seen(self, file: SourceFile) -> Seen:
        """A sample as it is now; its bytes are not read."""
        return Seen(self.stamp(file), file.etag, self._read_as)

    def read(self, index: int, file: SourceFile) -> Sample:
        """One sample of the very file that was looked at; `ImageUnreadable` where it cannot be read."""
        times = [self.source.touched_ns(file)]
        times += [int(one.partition(":")[0]) for one in self.stamp(file).split(",") if one]
        _wait_until_settled(max(times))
        found = self._read_once(self._part(index, file))
        if isinstance(found, Failure):
            raise ImageUnreadable(found.reason, f"'{found.sample}': {found.detail}")
        if not self._now(file).same_identity(file):  # what it is now must not be kept under the name of what it was
            why = "changes while it is read" if self.check == "read" else "changed since the source was listed"
            raise SourceChanged(self.root, {file.path: why})
        return found

    def identity(self, index: int, file: SourceFile) -> Mapping[str, Any]:
        """What tells the pixels of a sample from all others, and from what they were before its file changed.

        The etag is left out where it says what describes the file: another sidecar, or line, makes no other pixels.
        """
        try:
            is_beside = self.source.edited_beside(msgspec.structs.replace(file, etag=""), file)
        except _OF_ONE_SAMPLE as error:
            raise _unreadable(file.path, error) from error
        which = {
            "source": self._described,
            "sample": file.path,
            "size": file.size,
            "mtime_ns": file.mtime_ns,
            "etag": "" if is_beside else file.etag,
        }
        return which if self._is_whole else {**which, "row": self._part(index, file).start}

    def _number(self, index: int) -> int:
        """Of a sample's file."""
        return index if self._ends is None else int(np.searchsorted(self._ends, index, side="right"))

    def _part(self, index: int, file: SourceFile) -> Part:
        if self._is_whole:
            return Part(file, 0, file.size)
        number = self._number(index)
        row = 0 if self._ends is None else index - (int(self._ends[number - 1]) if number else 0)
        return Part(file, row, row + 1)

    def _read_once(self, part: Part) -> Sample | Failure:
        try:
            found = list(self.source.read(part))
        except _OF_ONE_SAMPLE as error:
            raise _unreadable(part.file.path, error) from error
        if len(found) != 1:
            raise SourceChanged(self.root, {part.file.path: f"has {len(found)} samples where one was listed"})
        return found[0]

    def _now(self, listed: SourceFile) -> SourceFile:
        try:
            return self.source.look(listed.path)
        except _OF_ONE_SAMPLE as error:
            raise _unreadable(listed.path, error) from error


def _unreadable(path: str, error: Exception) -> ImageUnreadable:
    reason = "not-found" if isinstance(error, FileNotFoundError) else "unreadable"
    return ImageUnreadable(reason, f"'{path}': {error}")


def _wait_until_settled(touched_ns: int) -> None:
    """A file that is written to twice within a step of the clock has the same time twice: let that step pass."""
    now = time.time_ns()
    if touched_ns <= now:  # a time that is still to come says nothing
        time.sleep(settling_seconds(touched_ns, now))


_UNKNOWN = bytes(KEY_BYTES)


class Named(NamedTuple):
    """A sample as it is now: its number, its file, its row's key in the tiers."""

    number: int
    file: SourceFile
    key: bytes
    seen: Seen


class RowNames:
    """Names the rows that a recipe makes of samples.

    The versions of the libraries that decode are part of a name: what another version of them kept is not taken for
    what decoding afresh would give.
    """

    def __init__(self, samples: TierSamples, recipe: RowRecipe) -> None:
        self._samples = samples
        self._made_by = {"fingerprint": made_by(recipe), "made_with": versions_of(recipe)}
        self._keys = bytearray(KEY_BYTES * len(samples))  # of files as they were listed; zeros where not known yet

    def named(self, index: int) -> Named:
        """`ImageUnreadable` where the sample's file cannot be looked at."""
        listed, file = self._samples.file(index)
        seen = self._samples.seen(file)
        if file is not listed and not file.same_identity(listed):
            return Named(index, file, key_of(self.identity(index, file)), seen)
        place = slice(KEY_BYTES * index, KEY_BYTES * (index + 1))
        key = bytes(self._keys[place])
        if key == _UNKNOWN:
            key = key_of(self.identity(index, listed))
            self._keys[place] = key
        return Named(index, file, key, seen)

    def identity(self, index: int, file: SourceFile, seen: Seen | None = None) -> bytes:
        """All that the pixels of a row depend on, and what its sample was."""
        names = {**self._made_by, **self._samples.identity(index, file)}
        return identity_bytes(names, msgspec.to_builtins(seen or Seen()))


def made_by(recipe: RowRecipe) -> str:
    """The fingerprint of what a tier keeps: two recipes that differ in other fields only share rows."""
    return hashlib.sha256(canonical_json(recipe.stored_fields())).hexdigest()


def key_of(identity: bytes) -> bytes:
    return hashlib.blake2b(identity.partition(b"\n")[0], digest_size=KEY_BYTES).digest()


def content_of(sample: Sample) -> int | None:
    """A hash of the bytes that pixels are made from, without what is said about them."""
    content = sample.data.content if isinstance(sample.data, Annotated) else sample.data
    return xxhash.xxh3_64_intdigest(content) if isinstance(content, bytes) else None


def seen_in(identity: bytes) -> Seen:
    """The sample that a row was made from; nothing where that cannot be read."""
    try:
        return msgspec.json.decode(identity.partition(b"\n")[2], type=Seen)
    except msgspec.DecodeError:
        return Seen()
