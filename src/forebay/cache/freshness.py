"""Whether the files behind a plan are still what they were.

same size, same times           fresh
other mtime, ctime or inode     its planned ranges are hashed again: same content is fresh, other content is changed
larger, planned ranges the same grown: what was planned holds, the rest can be appended
smaller, or other content       changed
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

from forebay.cache.plan import Plan
from forebay.cache.publish import sound_record
from forebay.cache.published import open_chunk
from forebay.cache.records import GONE
from forebay.errors import Damaged, HubNotFound, HubUnreachable, SourceChanged, SourceUnreadable
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.chunk_file import ChunkFile
from forebay.format.generation import ChunkTable
from forebay.source import Part, Source, SourceFile
from forebay.store.base import Store

UNFINISHED = "grew, and its last sample was not finished when it was planned"
WHOLE = 1 << 62  # more than any file has
Same = Callable[[SourceFile, SourceFile], bool]


@dataclass(frozen=True, slots=True)
class Freshness:
    """What became of the planned files."""

    changed: Mapping[str, str] = field(default_factory=dict)  # path -> how
    missing: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    now: Mapping[str, SourceFile] = field(default_factory=dict)  # files whose look differs, content does not

    @property
    def stale(self) -> dict[str, str]:
        return {**self.changed, **dict.fromkeys(self.missing, GONE)}


def check_freshness(
    store: Store,
    source: Source,
    plan: Plan,
    layer: str,
    table: ChunkTable,
    is_same: Same = SourceFile.same_identity,
    made: Mapping[int, ChunkRecord] | None = None,
) -> Freshness:
    """Look at every planned file; hash only those whose look changed.

    A file that was copied has another ctime and inode: what only reports passes `SourceFile.same_look`, so that it does
    not read all of a source that was moved. `made` are chunks that this build wrote: they count as if listed.
    """
    past = Past(store, plan, layer, table, made or {})
    ends = cache(plan.ends)  # asked for only where a file is another
    files_grow = getattr(source, "files_grow", True)
    changed: dict[str, str] = {}
    missing: list[str] = []
    now: dict[str, SourceFile] = {}
    passed_over = plan.unreadable
    for path, known in plan.files.items():
        try:
            found = source.look(path)
        except FileNotFoundError:
            if path not in passed_over:
                missing.append(path)
            continue
        except (HubNotFound, HubUnreachable):
            raise  # nobody can be asked about any file
        except (OSError, SourceUnreadable) as error:  # a folder or a pipe in its place, or no permission
            if path not in passed_over:
                changed[path] = f"cannot be looked at: {error}"
            continue
        if is_same(known, found):
            continue
        if path not in ends():  # it had no samples, so none of them can be another
            now[path] = found
        elif found.size < known.size or (found.size != known.size and not files_grow):
            changed[path] = f"has {found.size:,} bytes, {known.size:,} were planned"
        elif not past.is_same(source, known, found):
            changed[path] = "has other content than was planned"
        else:
            now[path] = found
    for path in [path for path, found in now.items() if path in ends() and found.size > plan.files[path].size]:
        # Of a stream this takes decompressing it, and growing or refreshing it finds out.
        if not now[path].stream and not can_grow(source, now[path], ends()[path]):
            changed[path] = UNFINISHED
            del now[path]
    grown = tuple(path for path, found in now.items() if found.size > plan.files[path].size or path not in ends())
    return Freshness(changed, tuple(missing), grown, now)


def can_grow(source: Source, file: SourceFile, end: int) -> bool:
    """Whether a sample can begin where the planned part of a file that grew ends."""
    try:
        next(iter(source.cuts(file, end, 1, 1)), None)
    except SourceChanged:
        return False
    return True


def reported(source: Source, plan: Plan, changed: Mapping[str, str]) -> dict[str, str]:
    """Changed files under the name of what was edited: of an image whose sidecar was edited, that of the sidecar."""
    found: dict[str, str] = {}
    for path, how in changed.items():
        try:
            beside = source.edited_beside(plan.files[path], source.look(path))
        except (OSError, SourceUnreadable):
            beside = ""
        found[beside or path] = f"was edited, added or removed; it describes '{path}'" if beside else how
    return found


def source_changed(root: str, plan: Plan, changed: Mapping[str, str]) -> SourceChanged:
    """The error about changed files, with advice that works for the cache."""
    return SourceChanged(root, changed, refresh_advice(root, plan))


def refresh_advice(root: str, plan: Plan) -> str:
    """What to do about changed files: a plan that leaves out duplicates cannot be amended."""
    if plan.deduplicates:
        return (
            "the cache leaves out duplicates and cannot be refreshed: put the old content back, or build a new cache "
            "from the changed source"
        )
    return f"run `forebay refresh {root}` to make its rows again, or put the old content back"


def check_content(store: Store, source: Source, plan: Plan, layer: str, table: ChunkTable) -> dict[str, str]:
    """Hash the planned ranges of every file again, whatever it looks like; path -> how it differs."""
    past = Past(store, plan, layer, table)
    stale: dict[str, str] = {}
    passed_over = plan.unreadable
    for path, known in plan.files.items():
        try:
            found = source.look(path)
            if found.size < known.size or not past.is_same(source, known, found):
                stale[path] = "has other content than was planned"
        except FileNotFoundError:
            stale |= {} if path in passed_over else {path: GONE}
        except (HubNotFound, HubUnreachable):
            raise
        except (OSError, SourceUnreadable) as error:
            stale |= {} if path in passed_over else {path: f"cannot be read: {error}"}
    return stale


def is_made_from(store: Store, source: Source, plan: Plan, layer: str, record: ChunkRecord) -> bool:
    """Whether a chunk of the base layer was made from what its slice of the source holds now.

    A chunk of another source can be sound, of the same recipe and of the same number. True where the source cannot be
    read: then nobody can tell.
    """
    key = layout.chunk(layer, record.chunk, record.revision)
    try:
        sums = ChunkFile(store.map(key), key).source_sums()
        return [part_sum(source, part) for part in plan.parts(record.chunk)] == list(sums)
    except (OSError, SourceUnreadable):
        return True


def part_sum(source: Source, part: Part) -> int:
    """The digest of a part of the source: of the whole file where the plan knows that."""
    return source.digest(part.file, part.start, part.stop) if part.file.digest is None else part.file.digest


def can_be_read(source: Source, file: SourceFile, start: int, stop: int) -> bool:
    """Whether samples of a file begin and end where a part of it was planned to."""
    if source.unit == "samples":
        return True  # which are counted, so that any number of them is whole
    try:
        return next(iter(source.cuts(file, start, stop - start, WHOLE)), None) == stop
    except SourceChanged:
        return False


class Past:
    """What the content of the source was, as far as published chunks know it."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        layer: str,
        table: ChunkTable,
        made: Mapping[int, ChunkRecord] = MappingProxyType({}),
    ) -> None:
        self._store, self._plan, self._layer, self._table, self._made = store, plan, layer, table, made
        self._revisions = plan.revisions(layer)
        self._sums: dict[int, list[int]] = {}  # chunk -> digests of its parts

    def is_same(self, source: Source, known: SourceFile, found: SourceFile) -> bool:
        """Whether all that was read of a file is still so, and samples begin and end where the other parts do."""
        if known.digest is not None:
            return source.digest(found, 0, known.size) == known.digest
        looks_same = known.same_look(found)
        return all(self._holds(source, found, place, looks_same) for place in self._plan.places_of(known.path))

    def _holds(self, source: Source, found: SourceFile, place: tuple[int, int, int, int], looks_same: bool) -> bool:
        same = self.is_same_part(source, found, place)
        if same is False and looks_same and not self._is_listed(place[0]):
            same = None  # rather the chunk is of another source: it is not adopted, and made again
        return can_be_read(source, found, *place[2:]) if same is None else same

    def is_same_part(self, source: Source, found: SourceFile, place: tuple[int, int, int, int]) -> bool | None:
        """Whether one planned part is what its chunk was made from; None where that was never made."""
        chunk, part, start, stop = place
        if chunk not in self._sums:
            self._sums[chunk] = self._read_sums(chunk)
        sums = self._sums[chunk]
        if not sums:
            return None
        return part < len(sums) and source.digest(found, start, stop) == sums[part]

    def _is_listed(self, chunk: int) -> bool:
        """Whether a chunk is listed, or was made by this build, that is made from what is planned now."""
        if chunk in self._made:
            return True
        at = self._table.position(chunk)
        return at is not None and bool(self._table.numbers["revision"][at] >= self._revisions[chunk])

    def _read_sums(self, chunk: int) -> list[int]:
        """The digests that a chunk keeps, listed or left by a killed build; none where there is no sound chunk."""
        position = self._table.position(chunk)
        listed = self._table.record(position) if position is not None and self._is_listed(chunk) else None
        known = self._made.get(chunk, listed)
        if known is not None:
            try:
                return open_chunk(self._store, self._layer, known).source_sums()
            except Damaged:
                return []  # what it was made from cannot be told any more; verify reports the chunk itself
        record = sound_record(self._store, self._layer, chunk, int(self._revisions[chunk]))
        return open_chunk(self._store, self._layer, record).source_sums() if record else []
