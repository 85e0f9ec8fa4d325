"""The samples of a source one by one, each with the identity that its row depends on.

key        hash of recipe, libraries, source and path       finds the row in L1 and L2
identity   size, times, etag, ctime and inode               stored with the row; another identity is a miss
"""

import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from forebay.errors import SourceChanged, SourceInvalid, SourceUnreadable
from forebay.format.layout import CHUNK_VERSION
from forebay.images.tags import ImageUnreadable
from forebay.recipe import RowRecipe, canonical_json, hooks_of
from forebay.source import Failure, Part, Sample, Source, SourceFile, samples_of, settling_seconds

CheckSource = Literal["read", "open"]
# Errors of one sample. An error of the disk or of this process says nothing about samples.
_SAMPLE_ERRORS = (FileNotFoundError, NotADirectoryError, PermissionError, SourceUnreadable)


class Identity(msgspec.Struct, frozen=True):
    """The state of a sample's files when its row was made."""

    path: str
    row: int
    size: int
    mtime_ns: int
    etag: str
    stamp: str  # ctime and inode of every file; empty where they are unknown or not checked

    def is_current(self, now: "Identity") -> bool:
        """Return whether nothing shows that the sample has changed since."""
        return now in (self, msgspec.structs.replace(self, stamp=""))


class CurrentSample(NamedTuple):
    """A sample in its present state."""

    file: SourceFile
    key: bytes
    identity: Identity


class ListedSamples:
    """The samples that a source had when it was listed, in its order."""

    def __init__(self, source: Source, recipe: RowRecipe, check: CheckSource) -> None:
        self.source, self.check = source, check
        self._files: Sequence[SourceFile] = source.files()
        self._is_whole = source.unit == "bytes"
        if self._is_whole and source.files_grow:
            raise SourceInvalid(
                f"samples of a '{source.describe()['kind']}' source cannot be read one by one",
                hint="use images, an image manifest or Parquet, or build a cache",
            )
        described = {name: value for name, value in source.describe().items() if name != "patterns"}
        described["root"] = os.path.abspath(str(described.get("root", "")))
        self._root = described["root"]
        self._key_prefix = canonical_json(_row_maker(recipe) | {"source": described})
        weights = [1 if self._is_whole else source.weight(file) for file in self._files]
        self._ends = np.cumsum(weights, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, index: int) -> CurrentSample:
        """Return the present sample; raise `ImageUnreadable` if its file cannot be accessed."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[number - 1]) if number else 0)
        file = self._files[number]
        stamp = ""
        if self.check == "read":
            file = self._stat(file.path)
            stamp = self.source.stamp(file)
        identity = Identity(file.path, row, file.size, file.mtime_ns, file.etag, stamp)
        name = f"{row} {file.path}".encode("utf-8", "surrogateescape")
        return CurrentSample(file, hashlib.blake2b(self._key_prefix + name, digest_size=16).digest(), identity)

    def read(self, located: CurrentSample) -> Sample:
        """Read one sample; raise `SourceChanged` if its file changes meanwhile."""
        file = located.file
        times = [self.source.touched_ns(file)]
        times += [int(one.partition(":")[0]) for one in located.identity.stamp.split(",") if one]
        _wait_for_clock_step(max(times))
        part = (
            Part(file, 0, file.size) if self._is_whole else Part(file, located.identity.row, located.identity.row + 1)
        )
        try:
            samples = list(samples_of(self.source, part))
        except _SAMPLE_ERRORS as error:
            raise _unreadable(file.path, error) from error
        now = self._stat(file.path)
        if not now.same_identity(file) or located.identity.stamp not in ("", self.source.stamp(now)):
            raise SourceChanged(f"'{file.path}' of '{self._root}' changed while it was read", hint="read it again")
        if len(samples) != 1:
            raise SourceChanged(f"'{file.path}' of '{self._root}' has {len(samples)} samples where one was listed")
        [sample] = samples
        if isinstance(sample, Failure):
            raise ImageUnreadable(sample.reason, f"'{sample.sample}': {sample.detail}")
        return sample

    def _stat(self, path: str) -> SourceFile:
        try:
            return self.source.look(path)
        except _SAMPLE_ERRORS as error:
            raise _unreadable(path, error) from error


def _row_maker(recipe: RowRecipe) -> dict[str, Any]:
    """Return what determines a row besides its sample: recipe fields and library versions."""
    return {
        "format": CHUNK_VERSION,
        "recipe": dict(recipe.row_fields()),
        "libraries": dict(hooks_of(recipe).versions()),
    }


def _unreadable(path: str, error: Exception) -> ImageUnreadable:
    reason = "not-found" if isinstance(error, FileNotFoundError) else "unreadable"
    return ImageUnreadable(reason, f"'{path}': {error}")


def _wait_for_clock_step(touched_ns: int) -> None:
    # A file written twice within one clock step has the same mtime twice.
    now = time.time_ns()
    if touched_ns <= now:
        time.sleep(settling_seconds(touched_ns, now))
