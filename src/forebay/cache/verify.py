"""Verify a cache: compare every published byte with its digest.

SHA-256 says whether a file is bad; the sums in it then say which blocks. `full` also decodes everything, and hashes the
source again.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice

import numpy as np

from forebay.cache.catalog import (
    Snapshot,
    generation_numbers,
    head_problem,
    index_problems,
    load_generation,
    outdated_chunks,
    problem_of,
    read_cache_document,
    segment_problem,
    shared_column,
)
from forebay.cache.plan import Plan, Segment, decode_segment, load_identities
from forebay.cache.records import OnProgress, Problem, Progress, VerifyReport
from forebay.cache.source_check import check_content, check_freshness, stale_files
from forebay.errors import (
    Damaged,
    ForebayError,
    FormatTooNew,
    HubNotFound,
    HubUnreachable,
    IndexCorrupt,
    KeyRefused,
    LayersShareColumn,
    NothingPublished,
)
from forebay.format import layout
from forebay.format.chunk import MAX_BLOCK_BYTES, ChunkFile, ChunkRecord
from forebay.format.chunk import check_content as check_chunk_content
from forebay.format.generation import Generation
from forebay.format.tensors import VARIABLE, hmac_key, is_whole
from forebay.recipe import input_layers
from forebay.source import Source, SourceFile
from forebay.store.base import Missing, Pieces, Store, View, load_index

TELLING = 16  # chunks that tell whether a generation is of the cache it lies in
Listed = tuple[str, ChunkRecord]  # layer, record


def verify_generation(
    snapshot: Snapshot,
    bad: list[Problem],
    source: Source | None,
    full: bool,
    on_progress: OnProgress,
    max_block_bytes: int = MAX_BLOCK_BYTES,
) -> VerifyReport:
    """Check all that a generation lists, beside what is known to be bad; the snapshot lists all keys."""
    started = time.monotonic()
    store, generation, plan = snapshot.store, snapshot.published, snapshot.sound_plan
    bad = [*bad, *index_problems(store, generation, plan), *identity_problems(store, generation, plan)]
    bad += outdated_layers(generation)
    listed = [(layer, record) for layer in generation.layers for record in generation.layers[layer].records()]
    found, checked_bytes = _check_all(
        listed, partial(check_chunk, store, full=full, limit=max_block_bytes), on_progress
    )
    gone = [(layer, record.chunk) for (layer, record), problems in zip(listed, found, strict=True) if problems is None]
    bad += [problem for problems in found if problems for problem in problems]
    bad += orphan_problems(generation)
    bad += shared_columns(store.address, generation)
    stale = stale_sources(snapshot, source, full) if source and not _plan_is_bad(bad) else None
    return VerifyReport(
        root=store.address,
        generation=generation.number,
        cache_id=generation.document.cache_id,
        digest=generation.digest,
        chunks=len(listed),
        checked_bytes=checked_bytes,
        seconds=time.monotonic() - started,
        bad=tuple(bad),
        missing={layer: tuple(c for name, c in gone if name == layer) for layer in dict(gone)},
        gaps={} if _plan_is_bad(bad) else _gap_counts(snapshot.plan, generation),
        foreign=foreign_files(snapshot),
        stale=stale or {},
        source_checked=stale is not None,
        source_root=str(plan.source.get("root", "")) if plan is not None and plan.segments else "",
        refreshable=not stale or not snapshot.plan.deduplicates,
    )


def newest_sound(store: Store, *, past_refused: bool = False) -> tuple[Generation, list[Problem]]:
    """Return the newest sound generation, and the problems of others.

    One that the key refuses is an error where it is the newest: its content is unknown, and nothing older may stand in
    for it, unless the caller asks to go past it, as `repair` does. Below one that the key accepts, it is just bad.
    """
    sound: Generation | None = None
    refused: KeyRefused | None = None
    bad: list[Problem] = []
    for number in reversed(generation_numbers(store)):
        key = layout.generation(number)
        try:
            generation = load_generation(store, number)
            problem = _is_not_of(store, generation, sound)
        except KeyRefused as error:
            if sound is None and not past_refused:
                raise
            refused, problem = refused or error, error.problem
        except Damaged as error:
            if isinstance(error, FormatTooNew) and is_whole(load_index(store, key)):
                raise  # it is sound, and of a newer forebay: only that can check it
            problem = problem_of(error)
        if problem:
            bad.append(Problem(key=key, problem=problem))
        else:
            sound = sound or generation
    if sound is None:
        if refused is not None:
            root = store.address
            problem = (
                f"no generation has a tag of the key in {VARIABLE}; `forebay repair {root} --from COPY` takes a tagged "
                f"copy, and `forebay rekey {root}` signs a cache that never had a key, if you trust the folder"
            )
            raise KeyRefused(root, refused.key, problem)
        if bad:
            raise IndexCorrupt(store.address, bad[0].key, f"no generation can be read; the newest: {bad[0].problem}")
        read_cache_document(store)
        raise NothingPublished(store.address)
    return sound, bad


def _is_not_of(store: Store, generation: Generation, newer: Generation | None) -> str:
    """Return why a generation belongs to another cache, or ''.

    Beside a newer one, the ids tell. Of the newest itself the files tell: it is another cache's where `cache.json` has
    not its id, and neither the plan nor most of the first chunks are what it lists.
    """
    id_here = generation.document.cache_id
    if newer is not None:
        return "" if newer.document.cache_id == id_here else f"it is of another cache (id {id_here})"
    try:
        own = read_cache_document(store).cache_id
    except ForebayError:
        own = "nothing that can be read"
    if own == id_here or any(segment_problem(store, n, digest) is None for n, digest in enumerate(generation.plan)):
        return ""
    listed = islice(((layer, one) for layer, table in generation.layers.items() for one in table.records()), TELLING)
    right = [_head_is_right(store, layer, record) for layer, record in listed]
    if 2 * sum(right) > len(right):
        return ""
    return f"it is of another cache (id {id_here}; '{layout.CACHE}' says {own})"


def _head_is_right(store: Store, layer: str, record: ChunkRecord) -> bool:
    try:
        return head_problem(Pieces(store, record.key(layer)), record) is None
    except (Missing, Damaged, OSError):
        return False


def identity_problems(store: Store, generation: Generation, plan: Plan | None = None) -> list[Problem]:
    """What is wrong with the identities that the sound segments of the plan name. Only growing needs them."""
    found = []
    for segment in _sound_segments(store, generation, plan):
        try:
            if segment.identities:
                load_identities(store, segment)
        except Damaged as error:
            key = layout.identities(segment.number, segment.identities)
            found.append(Problem(key=key, problem=problem_of(error)))
    return found


def _sound_segments(store: Store, generation: Generation, plan: Plan | None) -> Iterator[Segment]:
    """The segments that a generation lists, but for those that are not what was published."""
    for number, digest in enumerate(generation.plan):
        key = layout.plan_segment(number)
        if plan is not None and plan.digests[number : number + 1] == (digest,):
            yield plan.segments[number]
            continue
        with suppress(Missing, Damaged):
            segment, found = decode_segment(load_index(store, key), store.address, key)
            if found == digest:
                yield segment


def outdated_layers(generation: Generation) -> list[Problem]:
    """Layers that were made from a layer which another recipe has made since."""
    found = []
    for name in generation.recipes:
        for below, mark in input_layers(generation.recipe(name)).items():
            if below not in generation.recipes or generation.recipe(below).fingerprint != mark:
                problem = f"it was made from a layer '{below}' of another recipe; build it again under another name"
                found.append(Problem(key=layout.recipe(name), problem=problem, layer=name))
    return found


def published_plan(snapshot: Snapshot) -> Plan:
    """The segments that the newest generation lists, once they are what was published."""
    listed, plan = snapshot.published.plan, snapshot.sound_plan
    for number, digest in enumerate(listed):
        if plan is None or plan.digests[number : number + 1] != (digest,):
            problem = segment_problem(snapshot.store, number, digest)
            if problem is not None:
                raise IndexCorrupt(snapshot.store.address, problem.key, problem.problem)
    return snapshot.plan.first(len(listed))


def orphans(generation: Generation) -> list[tuple[str, ChunkRecord]]:
    """(layer, record) of chunks that were made for other rows than the base layer now has under their number."""
    base = generation.table(generation.base)
    found: list[tuple[str, ChunkRecord]] = []
    for layer, table in generation.layers.items():
        if layer == generation.base or not len(base):
            continue
        at = np.minimum(np.searchsorted(base.chunks, table.chunks), len(base) - 1)
        same = (base.chunks[at] == table.chunks) & (base.rows[at] == table.rows)
        same &= (base.digests["ids"][at] == table.digests["base"]).all(axis=1)
        found += [(layer, table.record(position)) for position in np.flatnonzero(~same).tolist()]
    return found


def orphan_problems(generation: Generation) -> list[Problem]:
    return [
        Problem(
            key=record.key(layer),
            problem="it was made for other rows of the base layer",
            layer=layer,
            chunk=record.chunk,
        )
        for layer, record in orphans(generation)
    ]


def shared_columns(root: str, generation: Generation) -> list[Problem]:
    """Layers of one column name, which no reader opens."""
    shared = shared_column({layer: generation.recipe(layer).columns for layer in generation.recipes}, generation.base)
    if shared is None:
        return []
    return [Problem(key=layout.recipe(shared[2]), problem=str(LayersShareColumn(root, *shared)), layer=shared[2])]


def stale_sources(snapshot: Snapshot, source: Source, full: bool) -> dict[str, str] | None:
    """How source files differ from what was planned; None where the source cannot be asked."""
    store, generation = snapshot.store, snapshot.published
    plan, base = snapshot.plan if hmac_key() is None else published_plan(snapshot), generation.base
    table = generation.table(base)

    def stale(plan: Plan) -> Mapping[str, str]:
        if full:
            return check_content(store, source, plan, base, table)
        return check_freshness(store, source, plan, base, table, SourceFile.same_look).stale

    try:
        return stale_files(source, plan, base, table, stale)
    except (HubUnreachable, HubNotFound):
        return None


def foreign_files(snapshot: Snapshot) -> tuple[str, ...]:
    """Keys that no part of forebay would have written: other names, and chunks that are neither planned nor listed.

    The snapshot lists all keys.
    """
    recipes = snapshot.newest.recipes if snapshot.newest else {}
    plan = snapshot.sound_plan
    layers = {*snapshot.layers(recipes), *recipes, *(plan.dropped if plan else ())}
    strange = [key for key in snapshot.keys if not layout.is_known(key, layers)]
    planned = _planned_count(snapshot.sound_plan)
    unplanned = list(_beyond(snapshot, layers, planned)) if planned is not None else []
    if unplanned:  # read again, after the keys: whoever makes chunks has planned them before
        planned = _planned_count(Snapshot(snapshot.store, None).sound_plan)
        unplanned = list(_beyond(snapshot, layers, planned)) if planned is not None else []
    return tuple(sorted([*strange, *unplanned]))


def _beyond(snapshot: Snapshot, layers: set[str], planned: int) -> Iterator[str]:
    """Chunk files that the newest generation does not list, with a number that is not planned."""
    for key in snapshot.keys:
        parsed = layout.parse_chunk(key) if layout.is_known(key, layers) else None
        if parsed is None or parsed[0] < planned:
            continue
        if snapshot.table(key.split("/")[1]).position(parsed[0]) is None:
            yield key


def _planned_count(plan: Plan | None) -> int | None:
    """How many chunks are planned, None where the plan cannot be read."""
    return len(plan) if plan is not None and plan.segments else None


def check_chunk(
    store: Store, layer: str, record: ChunkRecord, full: bool, limit: int = MAX_BLOCK_BYTES
) -> list[Problem] | None:
    """What is wrong with one chunk; None where its file is gone."""
    key = record.key(layer)
    try:
        pieces = Pieces(store, key)
        if len(pieces) == record.size and pieces.sha256 == record.sha256:
            return _content_problem(pieces, key, layer, record, limit) if full else []
        return _locate(pieces, key, layer, record)
    except Missing:
        return None
    except Damaged as error:
        return [Problem(key=key, problem=problem_of(error), layer=layer, chunk=record.chunk)]
    except OSError as error:  # a bad sector, or a file that shrinks
        return [Problem(key=key, problem=f"it cannot be read: {error}", layer=layer, chunk=record.chunk)]


def _check_all(
    listed: list[Listed], check: Callable[[str, ChunkRecord], list[Problem] | None], on_progress: OnProgress
) -> tuple[list[list[Problem] | None], int]:
    total = sum(record.size for _, record in listed)
    found: list[list[Problem] | None] = []
    started, read = time.monotonic(), 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for (_, record), problems in zip(listed, pool.map(lambda one: check(*one), listed), strict=True):
            found.append(problems)
            read += record.size
            on_progress(
                Progress(
                    phase="verifying",
                    done=len(found),
                    total=len(listed),
                    read_bytes=read,
                    seconds=time.monotonic() - started,
                )
            )
    return found, total


def _locate(view: View, key: str, layer: str, record: ChunkRecord) -> list[Problem]:
    """Where in a bad file the damage is, as closely as its own sums can tell."""
    chunk = record.chunk
    problem = head_problem(view, record)
    if problem is not None:
        sizes = sorted((len(view), record.size))
        start, stop = sizes if len(view) != record.size else (0, record.head_size)
        return [Problem(key=key, problem=problem, layer=layer, chunk=chunk, start=start, stop=stop)]
    try:
        file = ChunkFile(view, key)
    except ForebayError as error:
        return [Problem(key=key, problem=problem_of(error), layer=layer, chunk=chunk)]
    bad = [
        Problem(
            key=key,
            problem="its bytes do not match their checksum",
            layer=layer,
            chunk=chunk,
            column=name,
            block=block,
            start=start,
            stop=stop,
        )
        for name in file.columns
        for block, (start, stop) in file.bad_blocks(name)
    ]
    tail = file.tensors[".failures"]
    rest = Problem(
        key=key, problem="its list of failures changed", layer=layer, chunk=chunk, start=tail.start, stop=tail.stop
    )
    return bad or [rest]


def _content_problem(view: View, key: str, layer: str, record: ChunkRecord, limit: int) -> list[Problem]:
    try:
        check_chunk_content(ChunkFile(view, key), limit)
    except ForebayError as error:
        return [Problem(key=key, problem=problem_of(error), layer=layer, chunk=record.chunk)]
    return []


def _plan_is_bad(bad: list[Problem]) -> bool:
    return any(problem.key.startswith(layout.PLAN) for problem in bad)


def _gap_counts(plan: Plan, generation: Generation) -> dict[str, int]:
    counts = {
        layer: len(plan) - len(table) + len(outdated_chunks(table, plan.revisions(layer)))
        for layer, table in generation.layers.items()
    }
    return {layer: count for layer, count in counts.items() if count > 0}
