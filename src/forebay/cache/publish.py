"""Publish chunks: write the next generation, after everything that it lists."""

import platform
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import inf

import msgspec
import numpy as np

from forebay.cache.catalog import (
    _NOT_LISTABLE,
    STRANGE_NAMES,
    UNPUBLISHED,
    Snapshot,
    generation_numbers,
    load_generation,
    newest_number,
    outdated_chunks,
    read_recipe_document,
    sound_record,
)
from forebay.cache.claims import MOST_BUILDERS, is_dead
from forebay.cache.plan import DIGEST_BYTES, Plan
from forebay.columns import Array
from forebay.errors import (
    Damaged,
    ForebayError,
    IndexCorrupt,
    NotForebay,
    SourceEmpty,
)
from forebay.format import layout
from forebay.format.chunk import MADE_BY, UNKNOWN, ChunkRecord, library_versions
from forebay.format.generation import (
    ChunkTable,
    Generation,
    HandedChunks,
    ListedLayer,
    decode_handed,
    decode_listed,
)
from forebay.format.layout import MAX_REVISION
from forebay.format.tensors import hmac_key
from forebay.store.base import Buffer, Missing, Pieces, Store, holds, load_index, read_document, this_process

_FEW_FILES = 8
_MOST_HANDED_BYTES = 64 << 20  # of one list of chunks, about 400,000 of them
_WRITERS = 8  # threads that write announcements
_LISTED_AT_ONCE = 1000  # keys that a bucket lists in one answer
LOST_SECONDS = 5.0  # to wait at most after another was first
LOOKS = 6  # at a name that is taken and not listed, before the next one is used
Adopts = Mapping[str, Callable[[ChunkRecord], bool]]  # layer -> which of its unlisted chunks may be listed


def publish(
    store: Store,
    made: Mapping[str, Iterable[ChunkRecord]],
    versions: Mapping[str, str],
    skipped: set[str] | None = None,
    planned: Plan | None = None,
    adopts: Adopts | None = None,
    max_failures: int | float | None = None,
    listed: Generation | None = None,
) -> Generation:
    """The newest generation, after one more if there are chunks that it does not list.

    `made` are records of chunks that this process wrote itself, by layer. Without a key, any other unlisted chunk that
    `adopts` allows (every one unless it is passed) is adopted by reading and hashing it; one that is not sound, or not
    allowed, is not listed, and its key goes into `skipped`. With a key nothing is adopted: a generation lists what the
    one before it lists, what is in `made`, and the segments of the plan in `planned`, which this process wrote or
    compared with the source. With nothing to adopt, which is how a builder lists what it made while it works, those
    segments are not read again, layers that others have begun are left to them, and chunk files are listed only where
    that takes fewer requests than to ask for each that was made. Where there is no row to list, nothing is
    published, and the answer has the number UNPUBLISHED. Rows that are published are never followed by none: that
    raises `SourceEmpty`. `max_failures` is the limit for later commands; None keeps the one of the generation before.
    A plan that was replaced or edited since it was read raises `IndexCorrupt`, once all that was made is listed. In a
    folder the whole plan is read for that: bits that rot, or an edit whose time is put back, leave the etag as it was.
    So it is read again by a builder that publishes last, not by those to which that one announces what is listed.
    `listed` is a generation that this process has read or written: while it is the newest it is not read again, but
    for one that was written and is the last of a build.
    """
    own = {layer: list(records) for layer, records in made.items()}
    is_last = adopts is None or bool(adopts)
    taken: list[Snapshot] = []

    def drafted() -> tuple[int | None, Generation]:
        taken[:] = [Snapshot.take(store, known=_trusted(store, planned) if is_last else planned, listed=listed)]
        return _next(taken[0], own, versions, skipped, planned, adopts, max_failures)

    generation = _published(store, drafted, read_back=is_last)
    if not is_last:
        return generation
    if not generation.digest and generation.number != UNPUBLISHED:
        generation = load_generation(store, generation.number)
    check_listed_plan(store, taken[0].plan, generation.plan)
    return generation


def _trusted(store: Store, planned: Plan | None) -> Plan | None:
    """What of a plan need not be read again at the end of a build: what a bucket has under the same etags."""
    return None if planned is None or store.local_path(layout.PLAN) is not None else planned.as_read()


def check_listed_plan(store: Store, plan: Plan, digests: Sequence[str]) -> None:
    """Raise where a plan, as it is now, is not the one that a generation lists."""
    for number, digest in enumerate(digests):
        if plan.digests[number : number + 1] != (digest,):
            raise IndexCorrupt(store.address, layout.plan_segment(number), "it is not the one that is published")


def announce(store: Store, generation: Generation, made: HandedChunks, owners: Iterable[str]) -> None:
    """Announce what a generation lists, which was read back, to other builders; who gets no announcement reads it.

    Sums that are not finite are not announced.
    """
    try:
        data = [b"".join(ListedLayer.of(generation, made).encode(hmac_key()))]
    except ValueError:
        return

    def write(owner: str) -> None:
        with suppress(OSError, ForebayError):
            store.replace(layout.listed(owner), data, durable=False)
            if not holds(store, layout.builder(owner)):  # it has ended, and has removed that first
                store.delete(layout.listed(owner))

    with ThreadPoolExecutor(_WRITERS) as pool:  # in a bucket, hundreds of builders would wait for one another
        list(pool.map(write, owners))


class Announcement:
    """What another builder may announce to this one of the newest generation, about chunks that were `made` alike.

    It is believed if it is sealed, lists the chunks of `revisions` and nothing else, and has the digest that the
    generation ends with: whoever wrote it has read and checked that file. It never ends a build: whoever cannot read it
    reads the generation.
    """

    def __init__(
        self, store: Store, made: HandedChunks, revisions: str, max_failures: int | float | None, seconds: float
    ) -> None:
        self._store, self._made, self._revisions, self._limit = store, made, revisions, max_failures
        self._key = layout.listed(str(this_process()))
        self._seconds, self._since = seconds, None if revisions else -inf  # when it was first waited for

    def is_awaited(self) -> bool:
        """Whether it may still come: nothing was refused, and it was not waited for too long, all waits together."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return now - self._since < self._seconds

    def find(self) -> ListedLayer | None:
        """What was announced, None where nothing is to be believed."""
        try:
            content = memoryview(read_document(self._store, self._key))
            found = decode_listed(content, self._store.address, self._key, hmac_key())
            if self._fits(found):
                return found
        except (Missing, OSError):
            return None
        except ForebayError:
            pass
        self._since = -inf  # whoever wrote it has said all it will say
        return None

    def _fits(self, found: ListedLayer) -> bool:
        is_same = found.made == self._made and found.revisions == self._revisions
        if not is_same or not found.totals.rows or self._limit not in (None, found.max_failures):
            return False
        is_newest = found.generation == newest_number(self._store)
        return is_newest and found.digest == _digest_at_end(self._store, found)


def _digest_at_end(store: Store, listed: ListedLayer) -> str:
    key = layout.generation(listed.generation)
    entry = store.head(key)
    end = 0 if entry is None else entry.size - (DIGEST_BYTES if hmac_key() is not None else 0)  # a tag comes last
    return store.read(key, max(0, end - DIGEST_BYTES), max(0, end)).hex()


def handed_chunks(
    store: Store, about: HandedChunks, known: Mapping[str, list[ChunkRecord]], is_at_work: Callable[[str], bool]
) -> dict[str, list[ChunkRecord]]:
    """What other builders at work left to be listed, made alike, by key; `known` ones are not read again.

    One that cannot be read, or is of another plan or recipe, is left to its owner, who lists its chunks itself when it
    ends. Chunks of a builder that is gone may have been made again since: they are read and hashed like any other.
    """
    own, found = str(this_process()), dict[str, list[ChunkRecord]]()
    keys = {entry.key: entry.size for entry in store.entries(layout.BUILDERS)}
    owners = ((key, layout.parse_handed(key)) for key, size in keys.items() if size <= _MOST_HANDED_BYTES)
    # Thousands of lists that dead builders left are skipped before a stranger's are limited.
    beating = ((key, owner) for key, owner in owners if owner not in (None, own) and layout.builder(owner) in keys)
    for key, owner in islice(((key, owner) for key, owner in beating if not is_dead(owner)), MOST_BUILDERS):
        if not is_at_work(owner):
            continue
        if key in known:
            found[key] = known[key]
            continue
        with suppress(Missing, ForebayError, OSError):
            of, records = decode_handed(load_index(store, key), store.address, key, hmac_key())
            if of == about:
                found[key] = records
    return found


def publish_found(
    snapshot: Snapshot, versions: Mapping[str, str], skipped: set[str], planned: Plan, adopts: Adopts
) -> Snapshot:
    """`publish` without chunks of this process, by an index that was read; the index after it.

    Where another builder has published since, what it published is read: a generation is only ever added to.
    """
    taken: list[Snapshot] = [snapshot]

    def drafted() -> tuple[int | None, Generation]:
        if not taken[-1].is_newest():
            taken.append(Snapshot.take(snapshot.store, known=planned))
        return _next(taken[-1], {}, versions, skipped, planned, adopts)

    generation = _published(snapshot.store, drafted)
    return taken[-1].followed_by(generation)


def _next(
    snapshot: Snapshot,
    made: Mapping[str, Iterable[ChunkRecord]],
    versions: Mapping[str, str],
    skipped: set[str] | None,
    planned: Plan | None,
    adopts: Adopts | None,
    max_failures: int | float | None = None,
) -> tuple[int | None, Generation]:
    """The generation that follows, with the number to create it under: None where there is nothing to publish."""
    newest = snapshot.newest
    draft = _draft(snapshot, made, versions, set() if skipped is None else skipped, planned, adopts)
    draft = draft if max_failures is None else replace(draft, max_failures=max_failures)
    if newest is not None and newest.same_content(draft) and newest.max_failures == draft.max_failures:
        return None, newest
    if newest is None and not any(int(table.rows.sum()) for table in draft.layers.values()):
        return None, draft.numbered(UNPUBLISHED)
    if newest is not None:
        _check_rows_left(snapshot.store, newest, draft)
    return (newest.number + 1 if newest else 0), draft


def _check_rows_left(store: Store, newest: Generation, draft: Generation) -> None:
    before, after = (int(one.table(newest.base).rows.sum()) for one in (newest, draft))
    if before and not after:
        raise SourceEmpty(
            store.address,
            f"the source, as it is now, gives no row, and generation {newest.number} has {before:,}",
            f"put samples into the source and run `forebay refresh {store.address}`, or put the old content back",
        )


def publish_over_damaged(store: Store, sound: Generation | None, adopts: Adopts | None = None) -> Generation:
    """What a sound generation lists, and without a key what may be adopted besides, above every damaged generation."""

    def drafted() -> tuple[int, Generation]:
        numbers = [*generation_numbers(store), -1 if sound is None else sound.number]
        return max(numbers) + 1, _draft(Snapshot(store, sound), {}, {}, set(), None, adopts)

    return _published(store, drafted)


def publish_without(store: Store, layers: Collection[str]) -> Generation | None:
    """The newest generation, after one more without some layers if it lists them; None if nothing is published."""

    def drafted() -> tuple[int | None, Generation]:
        listed = load_generation(store)
        if not listed.recipes.keys() & set(layers):
            return None, listed
        kept = replace(
            listed,
            recipes={name: text for name, text in listed.recipes.items() if name not in layers},
            constants={name: digest for name, digest in listed.constants.items() if name not in layers},
            layers={name: table for name, table in listed.layers.items() if name not in layers},
        )
        return listed.number + 1, kept

    return _published(store, drafted) if generation_numbers(store) else None


def _published(
    store: Store, drafted: Callable[[], tuple[int | None, Generation]], read_back: bool = True
) -> Generation:
    """Create what is drafted; where another builder was first, draft again on top of what it published.

    What a builder lists while it works is not read back: it is when the builder ends, or publishes again.

    A name that is taken and not listed is either new and not visible here yet, as on a network file system, or a
    folder or a link that is not a generation: after a few looks the next number is used.
    """
    looks = lost = 0
    while looks < LOOKS * STRANGE_NAMES:
        began = time.monotonic()
        number, draft = drafted()
        if number is None:
            return draft
        number += looks // LOOKS
        key, data = layout.generation(number), draft.numbered(number).encode(hmac_key())
        if _created(store, key, data):
            if read_back:
                return load_generation(store, number)
            return draft.numbered(number)
        if number not in generation_numbers(store):
            looks += 1
            time.sleep(0.01 * (looks % LOOKS))
        else:  # of many who publish at once, each would read the index again for every one of the others
            lost += 1
            time.sleep(random.uniform(0.0, min(LOST_SECONDS, 2 ** min(lost, 20) * (time.monotonic() - began))))
    raise ForebayError(
        f"no generation can be published at '{store.address}': the next {STRANGE_NAMES} names are taken by what is not "
        f"a generation; look at them with `ls -l {store.address}/{layout.GENERATIONS}` and move them away"
    )


def _created(store: Store, key: str, data: Sequence[Buffer]) -> bool:
    try:
        return store.create(key, data)
    except NotForebay:  # a folder or a link has the name
        return False


def builder_versions(recipe_versions: Mapping[str, str]) -> dict[str, str]:
    """What shapes bytes here, for the record in a generation."""
    own = {"python": platform.python_version(), "numpy": np.__version__, **library_versions()}
    return {name: str(version) for name, version in {**own, **recipe_versions}.items()}


def differing_versions(known: Iterable[Mapping[str, str]], now: Mapping[str, str]) -> str:
    """Which libraries are of a version that no one before had, in words; empty where there is none.

    >>> differing_versions([{"numpy": "2.1"}, {"numpy": "2.2", "zstd": "1"}], {"numpy": "2.3", "zstd": "1"})
    'numpy 2.3 (before: 2.1, 2.2)'
    """
    before: dict[str, set[str]] = {}
    for versions in known:
        for name, version in versions.items():
            before.setdefault(name, set()).add(version)
    others = (
        f"{name} {version} (before: {', '.join(sorted(before[name]))})"
        for name, version in now.items()
        if name in before and version not in before[name]
    )
    return ", ".join(others)


def _draft(
    snapshot: Snapshot,
    made: Mapping[str, Iterable[ChunkRecord]],
    versions: Mapping[str, str],
    skipped: set[str],
    planned: Plan | None,
    adopts: Adopts | None,
) -> Generation:
    """What to publish next. Whatever the newest generation carries is taken from it, not from the files of now.

    So a recipe that rotted, or that somebody exchanged, stays out of every later generation.
    """
    store, newest = snapshot.store, snapshot.newest
    before = newest.layers if newest else {}
    texts, carried = (newest.recipes, dict(newest.constants)) if newest else ({}, {})
    # A published layer stays until `forebay drop`; a key signs no layer that this process does not build.
    only_own = hmac_key() is not None or bool(made and adopts is not None and not adopts)
    names = sorted({*before, *(made if only_own else _begun_layers(snapshot))})
    plan = listed_plan(snapshot, planned)
    history = newest.versions if newest else ()
    maker, finder = _makers(history, versions)
    tables = {name: before.get(name) or ChunkTable.of([]) for name in names}
    own = {name: [_made_by(record, maker) for record in made.get(name, ())] for name in names}
    cache = newest.cache if newest else store.read(layout.CACHE).decode()
    base = layout.decode_cache_document(cache, store.address, layout.CACHE).base
    layers: dict[str, ChunkTable] = {}
    for name in sorted(names, key=lambda name: name != base):  # what lies above needs the table of the base layer
        allowed = adoption_rule(name, adopts, None if name == base else layers.get(base))
        asked = plan.revisions(name)
        layers[name] = _with_unlisted(snapshot, name, tables[name], own[name], skipped, asked, allowed, finder)
        if name == base:
            layers[name] = _with_whole_refresh(tables[name], layers[name], asked)
    layers = _without_outdated(layers, plan)
    # What others have begun may be withdrawn again as long as it has no chunk file, and what a generation lists stays.
    known = {base, *before, *made, *(adopts or ())}
    names = [name for name in names if name in known or snapshot.chunk_files(name)]
    is_new = any(_lists_other(layers[name], tables[name], own[name]) for name in names)
    return Generation(
        number=0,
        cache=cache,
        recipes={name: texts.get(name) or store.read(layout.recipe(name)).decode() for name in names},
        constants=_constants(store, [name for name in names if name not in texts]) | carried,
        plan=_plan_in_use(plan, layers.get(base), len(newest.plan) if newest else 0).digests,
        versions=(*history, dict(versions)) if is_new and versions and dict(versions) not in history else history,
        layers={name: layers[name] for name in names},
        source=plan.source if plan.segments else newest.source if newest else {},
        max_failures=newest.max_failures if newest else None,
    )


def _makers(history: Sequence[Mapping[str, str]], versions: Mapping[str, str]) -> tuple[int, int]:
    """Which set of versions made the chunks of this process, and which those that it adopts."""
    found = 0 if len(history) <= 1 else UNKNOWN
    if not versions:
        return found, found
    maker = history.index(dict(versions)) if dict(versions) in history else len(history)
    return maker, UNKNOWN if maker else found


def _made_by(record: ChunkRecord, number: int) -> ChunkRecord:
    """A record that says which set of versions made its chunk; the first set is not written."""
    if not number:
        return record
    return msgspec.structs.replace(record, statistics={**record.statistics, MADE_BY: number})


def adoption_rule(layer: str, adopts: Adopts | None, base: ChunkTable | None) -> Callable[[ChunkRecord], bool] | None:
    """Which unlisted chunks of a layer may be listed, None: none. One above the base must be of the rows below it."""
    if hmac_key() is not None or (adopts is not None and layer not in adopts):
        return None
    rule = adopts[layer] if adopts is not None else None

    def allowed(record: ChunkRecord) -> bool:
        if base is not None:
            at = base.position(record.chunk)
            if at is None or (base.rows[at], base.digests["ids"][at].tobytes()) != (record.rows, record.base):
                return False
        return rule is None or rule(record)

    return allowed


def _begun_layers(snapshot: Snapshot) -> list[str]:
    """Layers whose recipe can be read; one that cannot be has no place in a generation."""
    found = []
    for layer in snapshot.layers():
        with suppress(Damaged):
            found += [layer] if read_recipe_document(snapshot.store, layer) else []
    return found


def listed_plan(snapshot: Snapshot, planned: Plan | None = None) -> Plan:
    """The plan that the next generation lists, which is the one to work by.

    The newest generation's segments come first. Others follow only where the plan of now continues those, and with a
    key only those in `planned`, which this process wrote or compared with the source. Of a plan that is damaged or
    another one only the digests are known: then it has no chunks, and nothing is adopted by it.
    """
    listed = snapshot.newest.plan if snapshot.newest else ()
    try:
        plan = snapshot.plan
    except Damaged:
        if snapshot.newest is None:
            raise
        return Plan((), listed)
    if plan.digests[: len(listed)] != listed:
        return Plan((), listed)
    if hmac_key() is None:
        return plan
    own = () if planned is None else planned.digests
    is_own = plan.digests[: len(own)] == own and own[: len(listed)] == listed
    return plan.first(len(own if is_own else listed))


def _plan_in_use(plan: Plan, base: ChunkTable | None, listed: int) -> Plan:
    """The plan without segments at its end of which nothing is listed yet: they can be taken back.

    The first one stays, as do segments without chunks, which only name files.
    """
    while base is not None and len(plan.segments) > max(1, listed) and len(plan.segments[-1]):
        segment = plan.segments[-1]
        asked = segment.asked(segment.amends) if segment.amends else dict.fromkeys(segment.chunk_numbers.tolist(), 0)
        revisions = zip(base.chunks.tolist(), base.numbers["revision"].tolist(), strict=True)
        if any(revision >= asked.get(chunk, MAX_REVISION) for chunk, revision in revisions):
            break
        plan = plan.first(len(plan.segments) - 1)
    return plan


def _with_whole_refresh(before: ChunkTable, after: ChunkTable, asked: Array) -> ChunkTable:
    """The table after, but with chunks of a refresh only if it lists all of them: until then, as they were before.

    Where the cuts of a file move, its samples change chunks. A chunk of the new cuts beside one of the old would have
    samples twice, or lack some that both generations have.
    """
    if after is before or not len(outdated_chunks(after, asked)):
        return after
    new = _refreshed(after, asked) - _refreshed(before, asked)
    kept = [before.record(at) for at, chunk in enumerate(before.chunks.tolist()) if chunk in new]
    return _with(after.without(np.array(sorted(new), np.int64)), kept)


def _refreshed(table: ChunkTable, asked: Array) -> set[int]:
    """The chunks that a table lists as a refresh asks for them."""
    planned = table.chunks < len(asked)
    wanted = asked[table.chunks[planned]]
    return set(table.chunks[planned][(wanted > 0) & (table.numbers["revision"][planned] >= wanted)].tolist())


def _without_outdated(layers: Mapping[str, ChunkTable], plan: Plan) -> dict[str, ChunkTable]:
    """A base chunk that was refreshed takes the chunks of further layers with it that were made from the old one."""
    base = layers.get(plan.amended_base)
    if base is None:
        return dict(layers)
    behind = outdated_chunks(base, plan.revisions(plan.amended_base))
    kept: dict[str, ChunkTable] = {}
    for name, table in layers.items():
        outdated = outdated_chunks(table, plan.revisions(name)) if table is not base else behind[:0]
        outdated = outdated[~np.isin(outdated, behind)]
        kept[name] = table.without(outdated) if len(outdated) else table
    return kept


def _lists_other(table: ChunkTable, before: ChunkTable, made: list[ChunkRecord]) -> bool:
    """Whether a table lists chunks of this process that it did not list before."""
    return table is not before and any(
        listed_revision(before, record) < record.revision <= listed_revision(table, record) for record in made
    )


def listed_revision(table: ChunkTable, record: ChunkRecord) -> int:
    """The revision of a record's chunk that a table lists, -1 where it lists none."""
    at = table.position(record.chunk)
    return -1 if at is None else int(table.numbers["revision"][at])


def _with_unlisted(
    snapshot: Snapshot,
    layer: str,
    table: ChunkTable,
    made: Iterable[ChunkRecord],
    skipped: set[str],
    asked: Array,
    allowed: Callable[[ChunkRecord], bool] | None,
    finder: int,
) -> ChunkTable:
    """The table with what was made and what may be adopted, but for what the plan does not ask for any more."""
    own = [
        record
        for record in made
        if listed_revision(table, record) < record.revision
        and (record.chunk >= len(asked) or record.revision >= asked[record.chunk])
    ]
    there = _which_exist(snapshot.store, layer, own, len(asked))
    by_chunk = {
        record.chunk: record for record in sorted(own, key=lambda one: one.revision) if record.key(layer) in there
    }
    table = _with(table, list(by_chunk.values()))  # a chunk that two builders made is listed once
    if allowed is None:
        return table
    listed = set(table.chunks.tolist()) - set(outdated_chunks(table, asked).tolist())
    adopted = [
        _made_by(record, finder)
        for chunk, revision in snapshot.chunk_files(layer).items()
        if chunk not in listed and chunk < len(asked) and revision >= asked[chunk]
        for record in _adopted(snapshot.store, layer, chunk, revision, skipped, allowed)
    ]
    try:
        return _with(table, adopted)
    except _NOT_LISTABLE:
        return _with_each(table, layer, adopted, skipped)


def _which_exist(store: Store, layer: str, records: list[ChunkRecord], planned: int) -> set[str]:
    """Which files of some records are there, in as few requests as that takes: one for each, or one listing of all."""
    if len(records) > max(_FEW_FILES, planned // _LISTED_AT_ONCE):
        return {entry.key for entry in store.entries(layout.layer_folder(layer))}
    return {key for key in (record.key(layer) for record in records) if holds(store, key)}


def _with(table: ChunkTable, records: list[ChunkRecord]) -> ChunkTable:
    return table.with_records(records) if records else table


def _with_each(table: ChunkTable, layer: str, records: list[ChunkRecord], skipped: set[str]) -> ChunkTable:
    """The table with every chunk that it can list: one with a strange statistic must not stop the others."""
    for record in records:
        try:
            table = table.with_records([record])
        except _NOT_LISTABLE:
            skipped.add(record.key(layer))
    return table


def _adopted(
    store: Store, layer: str, chunk: int, revision: int, skipped: set[str], allowed: Callable[[ChunkRecord], bool]
) -> list[ChunkRecord]:
    record = sound_record(store, layer, chunk, revision)
    if record is None or not allowed(record):
        skipped.add(layout.chunk(layer, chunk, revision))
        return []
    return [record]


def _constants(store: Store, names: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = Pieces(store, layout.constants(name)).sha256.hex()
        except Missing:
            continue
    return found
