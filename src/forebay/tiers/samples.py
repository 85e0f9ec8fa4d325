"""The samples of a source one by one: by number, each as it is at the moment."""

import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from forebay.errors import ImageUnreadable, SourceChanged, SourceInvalid, SourceUnreadable
from forebay.source import Failure, Part, Sample, Source, SourceFile

CheckSource = Literal["read", "open"]

_CLOCK_STEP_NS = 20_000_000  # no file system of a disk has coarser times


class Samples:
    """As many as there were when the source was listed, in its order.

    The list travels with whoever is sent to another process, so that all agree on which sample has which number.
    """

    def __init__(self, source: Source, check: CheckSource = "read") -> None:
        self.source = source
        self._check = check
        self._files = source.files()
        self._is_whole = source.unit == "bytes"
        if self._is_whole and getattr(source, "files_grow", True):
            raise SourceInvalid(
                f"the samples of a source of kind '{source.describe()['kind']}' cannot be read one by one; use images, "
                f"a manifest of images or Parquet, or build a cache"
            )
        self._place = {name: value for name, value in source.describe().items() if name != "patterns"}
        weights = [1 if self._is_whole else source.weight(file) for file in self._files]
        self._ends = np.cumsum(weights, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def part(self, index: int) -> Part:
        """Where a sample is, in its file as it is now; `ImageUnreadable` where there is no such file any more."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        listed = self._files[number]
        file = listed if self._check == "open" else self._now(listed)
        if self._is_whole:
            return Part(file, 0, file.size)
        row = index - int(self._ends[number - 1]) if number else index
        return Part(file, row, row + 1)

    def read(self, part: Part) -> Sample:
        """One sample, of the very file that `part` names; `ImageUnreadable` where it cannot be read."""
        _wait_for_another_time(part.file)
        found = self._read_once(part)
        if isinstance(found, Failure):
            raise ImageUnreadable(found.reason, f"'{found.sample}' {found.detail}")
        if self._check == "read" and not self._now(part.file).same_identity(part.file):
            raise SourceChanged(self.root, {part.file.path: "changes while it is read"})
        return found

    @property
    def root(self) -> str:
        return str(self.source.describe().get("root", ""))

    def identity(self, part: Part) -> Mapping[str, Any]:
        """What tells a sample from all others, and from what it was before its file changed."""
        file = part.file
        which = {
            "source": self._place,
            "sample": file.path,
            "size": file.size,
            "mtime_ns": file.mtime_ns,
            "etag": file.etag,
        }
        return which if self._is_whole else {**which, "row": part.start}

    def _read_once(self, part: Part) -> Sample | Failure:
        try:
            found = list(self.source.read(part))
        except (OSError, SourceUnreadable) as error:
            raise _unreadable(part.file.path, error) from error
        if len(found) != 1:
            raise SourceChanged(self.root, {part.file.path: f"has {len(found)} samples where one was listed"})
        return found[0]

    def _now(self, listed: SourceFile) -> SourceFile:
        try:
            return self.source.look(listed.path)
        except (OSError, SourceUnreadable) as error:
            raise _unreadable(listed.path, error) from error


def _unreadable(path: str, error: Exception) -> ImageUnreadable:
    reason = "not-found" if isinstance(error, FileNotFoundError) else "unreadable"
    return ImageUnreadable(reason, f"'{path}': {error}")


def _wait_for_another_time(file: SourceFile) -> None:
    """A file that is written to twice within a step of the clock has the same time twice: let that step pass."""
    age = time.time_ns() - file.mtime_ns
    if 0 <= age < _CLOCK_STEP_NS:
        time.sleep((_CLOCK_STEP_NS - age) / 1e9)
