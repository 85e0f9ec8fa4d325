"""Verify a cache: compare every published byte with its digest.

SHA-256 tells whether a file is bad; the checksums in it then tell which blocks. `full` also decodes everything and
hashes the source again.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from forebay.cache.catalog import (
    head_problem,
    layers_share_column,
    problem_of,
    shared_column,
)
from forebay.cache.plan import load_plan
from forebay.cache.reports import OnProgress, Problem, Progress, VerifyReport
from forebay.cache.soundness import check_generations, index_problems
from forebay.cache.source_check import Freshness, SourceCheck
from forebay.cache.state import Index, chunk_numbers
from forebay.errors import Damaged, ForebayError, SourceNotFound, StoreUnavailable, message_of
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.chunk_file import ChunkFile
from forebay.format.chunk_file import check_content as check_chunk_content
from forebay.format.codecs import MAX_BLOCK_BYTES
from forebay.format.generation import Generation
from forebay.format.tensors import hmac_key
from forebay.recipe import input_layers
from forebay.source import Source
from forebay.store.base import Missing, Pieces, Store, View

BATCH_BYTES = 1 << 20  # of chunks that one thread checks in a row: a task for each would cost more than a small chunk
Listed = tuple[str, ChunkRecord]  # folder, record


def verify_cache(
    store: Store,
    source_of: Callable[[Index], Source | None],
    full: bool,
    on_progress: OnProgress,
    max_block_bytes: int = MAX_BLOCK_BYTES,
) -> tuple[VerifyReport, Index]:
    """Check all that the newest sound generation lists, the index files, and the source."""
    started = time.monotonic()
    generations = check_generations(store)
    generation, bad = generations.published(store)
    index = Index(store, generation)
    bad += listed_problems(index)
    listed = list(generation.chunks())
    check = partial(check_chunk, store, full=full, limit=max_block_bytes)
    checked, checked_bytes = check_all(listed, check, on_progress)
    gone = [one for one, problems in zip(listed, checked, strict=True) if problems is None]
    bad += [problem for problems in checked if problems for problem in problems]
    fresh = compare_source(index, source_of(index), full=full)
    plan = index.sound_plan
    report = VerifyReport(
        root=store.address,
        generation=generation.number,
        cache_id=generation.document.cache_id,
        digest=generation.digest,
        chunks=len(listed),
        checked_bytes=checked_bytes,
        seconds=time.monotonic() - started,
        bad=tuple(bad),
        missing=_by_layer(gone),
        gaps=_gap_counts(index),
        foreign=tuple(sorted({*generations.harmless, *foreign_files(index)})),
        stale=fresh.stale if fresh is not None else {},
        source_checked=fresh is not None,
        source_root=str(plan.source.get("root", "")) if plan is not None and plan.segments else "",
        reusable=plan is None or not plan.deduplicates,
    )
    return report, index


def _by_layer(gone: list[Listed]) -> dict[str, tuple[int, ...]]:
    layers = dict.fromkeys(layout.layer_of(folder) for folder, _ in gone)
    return {
        layer: tuple(record.chunk for folder, record in gone if layout.layer_of(folder) == layer) for layer in layers
    }


def listed_problems(index: Index) -> list[Problem]:
    """Problems of everything except chunk files and generations."""
    generation = index.published
    inner = [
        *outdated_layers(generation),
        *orphan_problems(generation),
        *shared_columns(index.store.address, generation),
    ]
    problems = index_problems(index)
    damaged = {problem.key for problem in problems}
    return [*problems, *(problem for problem in inner if problem.key not in damaged)]


def outdated_layers(generation: Generation) -> list[Problem]:
    """Layers that were made from a layer which another recipe has made since."""
    problems = []
    for name in generation.recipes:
        for below, mark in input_layers(generation.recipe(name)).items():
            if below not in generation.recipes or generation.recipe(below).fingerprint != mark:
                problem = f"it was made from a layer '{below}' of another recipe; build it again under another name"
                problems.append(Problem(key=layout.recipe(name), problem=problem, layer=name))
    return problems


def orphan_problems(generation: Generation) -> list[Problem]:
    """Listed chunks made for other rows than the base layer has under their number."""
    base = generation.table(generation.base)
    problems: list[Problem] = []
    for layer, table in generation.layers.items():
        if layer == generation.base or not len(base):
            continue
        at = np.minimum(np.searchsorted(base.chunks, table.chunks), len(base) - 1)
        same = (base.chunks[at] == table.chunks) & (base.rows[at] == table.rows)
        same &= (base.digests["ids"][at] == table.digests["base"]).all(axis=1)
        for position in np.flatnonzero(~same).tolist():
            record, problem = table.record(position), "it was made for other rows of the base layer"
            key = record.key(generation.folder(layer))
            problems.append(Problem(key=key, problem=problem, layer=layer, chunk=record.chunk))
    return problems


def shared_columns(root: str, generation: Generation) -> list[Problem]:
    """Layers with one column name, which no reader opens."""
    shared = shared_column({layer: generation.recipe(layer).columns for layer in generation.recipes}, generation.base)
    if shared is None:
        return []
    return [Problem(key=layout.recipe(shared[2]), problem=str(layers_share_column(root, *shared)), layer=shared[2])]


def compare_source(index: Index, source: Source | None, *, full: bool = False) -> Freshness | None:
    """The state of the planned source files; None if the source or the plan cannot be read.

    With a key, segments that no tagged generation covers are left out.
    """
    plan = index.sound_plan
    if source is None or plan is None or not plan.segments:
        return None
    if hmac_key() is not None:
        plan = plan.first(len(index.newest.plan) if index.newest is not None else 0)
    try:
        return SourceCheck.of(index, source, plan).freshness(full=full)
    except (StoreUnavailable, SourceNotFound):
        return None


def foreign_files(index: Index) -> tuple[str, ...]:
    """Keys that no part of forebay would have written: other names, and chunks that are neither planned nor listed.

    The plan is read after the keys: a builder plans chunks before it makes them.
    """
    store = index.store
    keys = [entry.key for entry in store.entries("")]
    strange = [key for key in keys if not layout.is_known(key)]
    try:
        planned = len(load_plan(store, known=index.sound_plan))
    except Damaged:
        return tuple(sorted(strange))
    for layer in index.layers if planned else ():
        folder = index.folder(layer)
        numbers = chunk_numbers((key for key in keys if folder and key.startswith(folder)), folder or "")
        beyond = numbers[(numbers >= planned) & ~np.isin(numbers, index.table(layer).chunks)]
        strange += [layout.chunk(folder or "", number) for number in beyond.tolist()]
    return tuple(sorted(strange))


def _gap_counts(index: Index) -> dict[str, int]:
    """layer -> how many planned chunks are not listed; empty if the plan is damaged."""
    if index.sound_plan is None:
        return {}
    counts = {layer: int(index.state(layer).todo.sum()) for layer in index.layers}
    return {layer: count for layer, count in counts.items() if count}


def check_chunk(
    store: Store, folder: str, record: ChunkRecord, full: bool, limit: int = MAX_BLOCK_BYTES
) -> list[Problem] | None:
    """Problems of one chunk; None if its file is gone."""
    key, layer = record.key(folder), layout.layer_of(folder)
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
        return [Problem(key=key, problem=f"it cannot be read: {message_of(error)}", layer=layer, chunk=record.chunk)]


def check_all(
    listed: list[Listed], check: Callable[[str, ChunkRecord], list[Problem] | None], on_progress: OnProgress
) -> tuple[list[list[Problem] | None], int]:
    """Return problems of each chunk, checked in threads, and the number of checked bytes."""
    checked: list[list[Problem] | None] = []
    started, read = time.monotonic(), 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        batches = _batches(listed)
        for batch, problems in zip(batches, pool.map(lambda some: [check(*one) for one in some], batches), strict=True):
            checked += problems
            read += sum(record.size for _, record in batch)
            on_progress(
                Progress(
                    phase="verifying",
                    done=len(checked),
                    total=len(listed),
                    read_bytes=read,
                    seconds=time.monotonic() - started,
                )
            )
    return checked, read


def _batches(listed: list[Listed]) -> list[list[Listed]]:
    batches: list[list[Listed]] = []
    left = 0
    for one in listed:
        if left <= 0:
            batches.append([])
            left = BATCH_BYTES
        batches[-1].append(one)
        left -= one[1].size
    return batches


def _locate(view: View, key: str, layer: str, record: ChunkRecord) -> list[Problem]:
    """Locate the damage in a bad file as closely as its checksums allow."""
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
