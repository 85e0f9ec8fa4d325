"""Compare a source with what its plan and chunks were made from.

same size, same times           fresh
other mtime, ctime or inode     its planned ranges are hashed, once: same content is fresh, other content is changed
larger, planned ranges the same grown: what was planned holds, the rest can be appended
smaller, or other content       changed

    plan 0   chunk 3 = a.png b.png                        generation 0 lists chunk 3, revision 0
    plan 1   chunk 3 = a.png b.png, from revision 1 on    b.json was edited, and a refresh was begun

Until revision 1 is listed, the rows are those of plan 0. The newer plan knows the files as they are now, so it alone
would call them fresh.

What source files were found to hold when they were hashed, so that the same content at a new time is hashed once.

A source that was copied has other times than its plan. `seen.bin` has 16 bytes for each part of such a file: a hash of
its path, its size, its times, where the part begins and ends, and the digest that it was found to have. Whoever expects
another digest, or finds other times, does not find the hash. With a key it is a tag, which nobody else can make.

The file is advisory: it may be lost, damaged or read-only at any time, which costs hashing again.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import MappingProxyType

import msgspec

from forebay.cache.catalog import (
    layer_columns,
    open_chunk,
    outdated_chunks,
    published_record,
    read_column,
    sound_record,
)
from forebay.cache.plan import Plan
from forebay.cache.records import GONE
from forebay.columns import Array
from forebay.errors import Damaged, ForebayError, HubNotFound, HubUnreachable, SourceChanged, SourceUnreadable
from forebay.format import layout
from forebay.format.chunk import ChunkFile, ChunkRecord
from forebay.format.generation import ChunkTable, Generation
from forebay.format.tensors import hmac_key, tag
from forebay.source import WHOLE_FILE, SameLook, Source, SourceFile, differing_files, part_sum, settling_seconds
from forebay.store.base import MAX_DOCUMENT_BYTES, Missing, Store, is_url, read_document

_ENTRY_BYTES = 16
_MOST_ENTRIES = MAX_DOCUMENT_BYTES // _ENTRY_BYTES


class SeenContent:
    """The record of a cache for one source, read when it is first asked."""

    def __init__(self, store: Store, source: Source) -> None:
        self._store, self._source, self._key = store, source, hmac_key()
        self._added: set[bytes] = set()

    def has(self, file: SourceFile, start: int, stop: int, digest: int) -> bool:
        """Whether a part has a digest; hashes it unless it was found to have that one."""
        entry = self._entry(file, start, stop, digest)
        if entry is not None and (entry in self._added or entry in self._known):
            return True
        same = self._source.digest(file, start, stop) == digest
        if same and entry is not None:
            self._added.add(entry)
        return same

    def keep(self) -> None:
        """Write what was added; a cache that cannot be written to is left as it is."""
        if not self._added:
            return
        entries = self._known | self._added if len(self._known | self._added) <= _MOST_ENTRIES else self._added
        with suppress(OSError, ForebayError):
            self._store.replace(layout.SEEN, [b"".join(sorted(entries))], durable=False)

    @cached_property
    def _known(self) -> frozenset[bytes]:
        try:
            content = read_document(self._store, layout.SEEN)
        except (Missing, OSError, ForebayError):
            return frozenset()
        whole = len(content) - len(content) % _ENTRY_BYTES
        return frozenset(content[at : at + _ENTRY_BYTES] for at in range(0, whole, _ENTRY_BYTES))

    def _entry(self, file: SourceFile, start: int, stop: int, digest: int) -> bytes | None:
        """Return the entry of a digest; None for a file whose changes might go unnoticed."""
        if not file.ctime_ns and not file.etag:
            return None
        described = self._source.describe()
        place = (described.get("kind"), described.get("root"), *msgspec.structs.astuple(file), start, stop)
        text = repr((*place, self._source.stamp(file), digest)).encode()  # a path may not be UTF-8
        whole = hashlib.sha256(text).digest() if self._key is None else tag(self._key, [text])
        return whole[:_ENTRY_BYTES]


UNFINISHED = "grew, and its last sample was not finished when it was planned"


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
    is_same: SameLook = SourceFile.same_identity,
    listed: Iterable[SourceFile] = (),
) -> Freshness:
    """Look at every planned file; hash only those whose look changed.

    A file that was copied has another ctime and inode: what only reports passes `SourceFile.same_look`, so that it does
    not read all of a source that was moved. `listed` are files as this verb found them after they were planned: one
    that was as planned is not looked at again.
    """
    planned = (file for _, file in plan.files.items())
    return compare_content(store, source, plan, layer, table, differing_files(source, planned, listed, is_same))


def compare_content(
    store: Store,
    source: Source,
    plan: Plan,
    layer: str,
    table: ChunkTable,
    differing: Iterable[tuple[SourceFile, SourceFile | Exception]],
    made: Mapping[int, ChunkRecord] | None = None,
) -> Freshness:
    """What became of planned files that look different now, by their content.

    `made` are chunks that this build wrote: they count as if listed.
    """
    seen = SeenContent(store, source)
    past = SourceDigests(store, plan, layer, table, made or {}, seen)
    ends = cache(plan.ends)
    changed: dict[str, str] = {}
    missing: list[str] = []
    now: dict[str, SourceFile] = {}
    passed_over = plan.unreadable
    for known, found in differing:
        path = known.path
        if isinstance(found, Exception):
            if path in passed_over:
                continue
            if isinstance(found, FileNotFoundError):
                missing.append(path)
            else:  # a folder or a pipe in its place, or no permission
                changed[path] = f"cannot be looked at: {found}"
            continue
        # A change after this gives the file another time than `found` has.
        time.sleep(settling_seconds(found.ctime_ns or found.mtime_ns, time.time_ns()))
        if path not in ends():  # it had no samples, so none of them can be another
            now[path] = found
        elif found.size < known.size or (found.size != known.size and not source.files_grow):
            changed[path] = f"has {found.size:,} bytes, {known.size:,} were planned"
        elif not past.is_same(source, known, found):
            changed[path] = "has other content than was planned"
        else:
            now[path] = found
    seen.keep()
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
    allowed = " --check-source" if is_url(str(plan.source.get("root", ""))) else ""
    return f"run `forebay refresh {root}{allowed}` to make its rows again, or put the old content back"


def check_content(store: Store, source: Source, plan: Plan, layer: str, table: ChunkTable) -> dict[str, str]:
    """Hash the planned ranges of every file again, whatever it looks like; path -> how it differs."""
    past = SourceDigests(store, plan, layer, table)
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
    key = record.key(layer)
    try:
        sums = ChunkFile(store.view(key), key).source_sums()
        return [part_sum(source, part) for part in plan.parts(record.chunk)] == list(sums)
    except (OSError, SourceUnreadable):
        return True


def can_be_read(source: Source, file: SourceFile, start: int, stop: int) -> bool:
    """Whether samples of a file begin and end where a part of it was planned to."""
    if source.unit == "samples":
        return True  # which are counted, so that any number of them is whole
    try:
        return next(iter(source.cuts(file, start, stop - start, WHOLE_FILE)), None) == stop
    except SourceChanged:
        return False


class SourceDigests:
    """What the content of the source was, as far as published chunks know it."""

    def __init__(
        self,
        store: Store,
        plan: Plan,
        layer: str,
        table: ChunkTable,
        made: Mapping[int, ChunkRecord] = MappingProxyType({}),
        seen: SeenContent | None = None,
    ) -> None:
        self._store, self._plan, self._layer, self._table, self._made = store, plan, layer, table, made
        self._seen, self._revisions = seen, plan.revisions(layer)
        self._sums: dict[int, list[int]] = {}  # chunk -> digests of its parts

    def is_same(self, source: Source, known: SourceFile, found: SourceFile) -> bool:
        """Whether all that was read of a file is still so, and samples begin and end where the other parts do."""
        if known.digest is not None:
            return self._has(source, found, 0, known.size, known.digest)
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
        return part < len(sums) and self._has(source, found, start, stop, sums[part])

    def _has(self, source: Source, found: SourceFile, start: int, stop: int, digest: int) -> bool:
        if self._seen is not None:
            return self._seen.has(found, start, stop, digest)
        return source.digest(found, start, stop) == digest

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
                return []  # what it was made from is unknown; verify reports the chunk itself
        record = sound_record(self._store, self._layer, chunk, int(self._revisions[chunk]))
        return open_chunk(self._store, self._layer, record).source_sums() if record else []


Row = dict[str, Array]
Stale = Callable[[Plan], Mapping[str, str]]  # the files that are not what a plan says -> how they differ


def plan_of_rows(plan: Plan, layer: str, chunk: int, revision: int) -> Plan:
    """The plan that a revision of a chunk was made by."""
    for number, segment in enumerate(plan.segments):
        if segment.amends and segment.asked(layer).get(chunk, 0) > revision:
            return plan.first(number)
    return plan


def stale_files(source: Source, plan: Plan, layer: str, table: ChunkTable, stale: Stale) -> dict[str, str]:
    """The files that are not what the listed rows were made from, by the name of what was edited.

    `stale` compares the source with a plan: with the newest one, and for outdated chunks with the one they are of.
    """
    found = reported(source, plan, stale(plan))
    older: dict[int, set[str]] = {}  # segments of the plan -> paths that outdated chunks were made from by it
    for chunk in outdated_chunks(table, plan.revisions(layer)).tolist():
        at = table.position(chunk)
        assert at is not None
        made_by = plan_of_rows(plan, layer, chunk, int(table.numbers["revision"][at]))
        older.setdefault(len(made_by.segments), set()).update(part.file.path for part in made_by.parts(chunk))
    for segments, paths in older.items():
        made_by = plan.first(segments)
        found |= reported(source, made_by, {path: how for path, how in stale(made_by).items() if path in paths})
    return found


def reusable_rows(
    store: Store, source: Source, plan: Plan, layer: str, listed: Generation, chunk: int
) -> dict[str, Row]:
    """Rows of an outdated chunk, by sample id, whose samples differ in nothing but their metadata.

    A sample counts that has the name of its file, if nobody has written to that file since it was planned, and if what
    describes it is all that was edited. Empty where the chunk is not outdated, or is damaged.
    """
    record = published_record(listed, layer, chunk)
    if record is None or record.revision >= plan.revisions(layer)[chunk]:
        return {}
    known = plan_of_rows(plan, layer, chunk, record.revision).files
    pairs = [(known[part.file.path], part.file) for part in plan.parts(chunk) if part.file.path in known]
    same = {
        now.path
        for then, now in pairs
        if then.same_file(now) and (then.etag == now.etag or source.edited_beside(then, now))
    }
    name = listed.recipe(layer).sample_ids
    try:
        rows = rows_in(store, listed, layer, record) if same and name else iter(())
        return {path: row for row in rows if (path := _text(row[name])) in same}
    except Damaged:
        return {}  # all of it is made anew; verify reports the chunk


def rows_in(
    store: Store, listed: Generation, layer: str, record: ChunkRecord, names: Sequence[str] = ()
) -> Iterator[Row]:
    """The rows of a listed chunk, with the columns named, or with all."""
    declared = layer_columns(listed.recipe(layer).columns, layer == listed.base)
    file = open_chunk(store, layer, record, columns=declared, keyed=listed.tagged)
    wanted = names or [column.name for column in declared]
    columns = {name: read_column(store, layer, file, name) for name in wanted}
    return ({name: values[at] for name, values in columns.items()} for at in range(record.rows))


def _text(values: Array) -> str:
    return values.tobytes().decode("utf-8", "surrogateescape")
