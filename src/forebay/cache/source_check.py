"""Compare a source with the plan and the chunks made from it: one verdict per file.

same       same size and times, or the planned ranges have the same content
grown      larger, and the planned ranges have the same content: `update` appends the rest
changed    smaller, or other content
missing    gone

Files that look the same are not read. The planned ranges of others are hashed and compared with the source sums in the
listed chunks; a range whose chunk is not listed must still begin and end between samples.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from forebay.cache.catalog import open_chunk
from forebay.cache.plan import Plan
from forebay.cache.reports import GONE
from forebay.cache.state import Index
from forebay.errors import Damaged, SourceChanged, SourceNotFound, SourceUnreadable, StoreUnavailable, message_of
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable
from forebay.source import WHOLE_FILE, Source, SourceFile, differing_files, files_changed, settling_seconds
from forebay.store.base import Store, is_url

UNFINISHED = "grew, and its last sample was not finished when it was planned"
OTHER_CONTENT = "has other content than was planned"
Verdict = Literal["same", "grown", "changed", "missing"]


@dataclass(frozen=True, slots=True)
class Freshness:
    """The verdicts on planned files whose identity changed."""

    changed: Mapping[str, str] = field(default_factory=dict)  # path -> how
    missing: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    now: Mapping[str, SourceFile] = field(default_factory=dict)  # same content, as the file looks now
    unreadable: Mapping[str, OSError | SourceUnreadable] = field(default_factory=dict)  # look different; not compared

    @property
    def stale(self) -> dict[str, str]:
        unreadable = {path: f"cannot be read: {message_of(error)}" for path, error in self.unreadable.items()}
        return {**self.changed, **dict.fromkeys(self.missing, GONE), **unreadable}

    def complete(self) -> "Freshness":
        """These verdicts; raises the first read error, which may pass and does not mean that a file changed."""
        for error in self.unreadable.values():
            raise error
        return self


@dataclass(frozen=True)
class SourceCheck:
    """A source, its plan, and the chunks that were made from it."""

    store: Store
    source: Source
    plan: Plan
    folder: str  # of the base layer
    table: ChunkTable  # its listed chunks
    own_records: Mapping[int, ChunkRecord] = field(default_factory=dict)  # chunks that this build made, as if listed

    @classmethod
    def of(
        cls, index: Index, source: Source, plan: Plan | None = None, records: Mapping[int, ChunkRecord] | None = None
    ) -> "SourceCheck":
        """The comparison of a source with the base layer of an index, by its plan unless another is passed."""
        folder, table = index.folder(index.base) or "", index.table(index.base)
        return cls(index.store, source, index.plan if plan is None else plan, folder, table, records or {})

    def freshness(self, listed: Iterable[SourceFile] = (), *, full: bool = False) -> Freshness:
        """Look at every planned file, and hash those that look different; a copied file has another ctime and inode.

        `listed` are files as this verb saw them after planning: they are not looked at again. `full` hashes all files.
        """
        is_same = (lambda *_: False) if full else SourceFile.same_identity
        return self.compared(differing_files(self.source, self.plan.files.table, listed, is_same))

    def compared(self, differing: Iterable[tuple[SourceFile, SourceFile | Exception]]) -> Freshness:
        """The verdicts on planned files that look different."""
        verdicts: dict[str, tuple[Verdict, str]] = {}
        now: dict[str, SourceFile] = {}
        unreadable: dict[str, OSError | SourceUnreadable] = {}
        for known, current in differing:
            try:
                verdict = self.verdict(known, current)
            except (SourceNotFound, StoreUnavailable):
                raise
            except (OSError, SourceUnreadable) as error:
                unreadable[known.path] = error
                continue
            if isinstance(current, SourceFile) and verdict[0] == "same" and known.same_identity(current):
                continue  # of `full`: there may be millions of such files
            verdicts[known.path] = verdict
            if verdict[0] in ("same", "grown") and not isinstance(current, Exception):
                now[known.path] = current
        changed = {path: how for path, (verdict, how) in verdicts.items() if verdict == "changed"}
        missing, grown = (
            tuple(path for path, (verdict, _) in verdicts.items() if verdict == one) for one in ("missing", "grown")
        )
        return Freshness(changed, missing, grown, now, unreadable)

    def verdict(self, known: SourceFile, current: SourceFile | Exception) -> tuple[Verdict, str]:
        """Return the state of one planned file, and how it changed."""
        if isinstance(current, FileNotFoundError):
            return "missing", GONE
        if isinstance(current, Exception):  # a folder or a pipe in its place, or no permission
            return "changed", f"cannot be looked at: {message_of(current)}"
        # The kernel may report a new time only after its clock step.
        time.sleep(settling_seconds(current.ctime_ns or current.mtime_ns, time.time_ns()))
        if known.path not in self._ends:  # it had no samples
            return ("grown" if current.size else "same"), ""
        if current.size < known.size or (current.size != known.size and not self.source.files_grow):
            return "changed", f"has {current.size:,} bytes, {known.size:,} were planned"
        if not self.has_planned_content(known, current):
            return "changed", OTHER_CONTENT
        if current.size == known.size:
            return "same", ""
        # Finding out about a stream takes decompressing it: planning does.
        if not current.stream and not can_grow(self.source, current, self._ends[known.path]):
            return "changed", UNFINISHED
        return "grown", ""

    def has_planned_content(self, known: SourceFile, current: SourceFile) -> bool:
        """True if every planned range of a file is what its chunk was made from."""
        if known.digest is not None:
            return self.source.digest(current, 0, known.size) == known.digest
        return all(self._is_same_part(current, *part) for part in self.plan.parts_of_file(known.path))

    def _is_same_part(self, current: SourceFile, chunk: int, part: int, start: int, stop: int) -> bool:
        sums = self._sums_of(chunk)
        if not sums:
            return can_be_read(self.source, current, start, stop)
        return part < len(sums) and self.source.digest(current, start, stop) == sums[part]

    def _sums_of(self, chunk: int) -> list[int]:
        """The source sums of a listed chunk; none if it is not listed or damaged, which `verify` reports."""
        if chunk not in self._sums:
            at = self.table.position(chunk)
            record = self.own_records.get(chunk) or (None if at is None else self.table.record(at))
            try:
                self._sums[chunk] = open_chunk(self.store, self.folder, record).source_sums() if record else []
            except Damaged:
                self._sums[chunk] = []
        return self._sums[chunk]

    @cached_property
    def _sums(self) -> dict[int, list[int]]:
        return {}

    @cached_property
    def _ends(self) -> dict[str, int]:
        return self.plan.ends()


def unread_note(plan: Plan) -> str:
    """How many files a look cannot tell from an edit that restored size and time; empty if there are none."""
    count = sum(not (file.ctime_ns or file.inode or file.etag or file.problem) for file in plan.files.table)
    return f"{count:,} source files were compared by size and time only; `verify --full` hashes them" if count else ""


def can_grow(source: Source, file: SourceFile, end: int) -> bool:
    """True if a sample can begin where the planned part of a file that grew ends."""
    try:
        next(iter(source.cuts(file, end, 1, 1)), None)
    except SourceChanged:
        return False
    return True


def can_be_read(source: Source, file: SourceFile, start: int, stop: int) -> bool:
    """True if samples of a file begin and end where a part of it was planned to."""
    if source.unit == "samples":
        return True  # any number of them is whole
    try:
        return next(iter(source.cuts(file, start, stop - start, WHOLE_FILE)), None) == stop
    except SourceChanged:
        return False


def reported(source: Source, plan: Plan, changed: Mapping[str, str]) -> dict[str, str]:
    """Changed files under the name of what was edited: an image's sidecar instead of the image."""
    names: dict[str, str] = {}
    for path, how in changed.items():
        try:
            sidecar = source.edited_beside(plan.files[path], source.look(path))
        except (OSError, SourceUnreadable):
            sidecar = ""
        names[sidecar or path] = f"was edited, added or removed; it describes '{path}'" if sidecar else how
    return names


def source_changed(root: str, plan: Plan, changed: Mapping[str, str]) -> SourceChanged:
    """The error about changed files, with a hint that works for the cache."""
    return files_changed(root, changed, reuse_hint(root, plan))


def reuse_hint(root: str, plan: Plan) -> str:
    """What to do about changed files: a published row never changes, so a new cache reuses the others."""
    if plan.deduplicates:
        return "restore the old content, or build a new cache (a deduplicated cache cannot be reused)"
    allowed = " --allow-network" if is_url(str(plan.source.get("root", ""))) else ""
    return f"build a new cache that reuses unchanged chunks: `forebay build … --into NEW --reuse {root}{allowed}`"
