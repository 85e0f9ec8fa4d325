"""Copying: a verified copy of what the newest generation lists, for backup; it can be interrupted and run again."""

import hashlib
import time
from collections.abc import Callable

from forebay.cache.plan import load_plan
from forebay.cache.publish import load_generation
from forebay.cache.records import CopyReport, Progress
from forebay.cache.verify import check_index, identity_problems
from forebay.errors import ChunkCorrupt, ChunkMissing, ForebayError, IndexCorrupt
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.store.base import Missing, Store

OnProgress = Callable[[Progress], None]


def copy_cache(store: Store, destination: Store, on_progress: OnProgress) -> CopyReport:
    """Copy chunk by chunk, each checked on the way; the generation goes last, so that half a copy is no cache yet."""
    started = time.monotonic()
    generation = load_generation(store)
    check_index(store, generation)
    for key in [*_identity_keys(store, generation), *_index_keys(generation)]:
        _create_same(destination, key, store.map(key))
    listed = [(layer, record) for layer, table in generation.layers.items() for record in table.records()]
    copied, copied_bytes = 0, 0
    for done, (layer, record) in enumerate(listed):
        size = _copy_chunk(store, destination, layer, record)
        copied += size > 0
        copied_bytes += size
        seconds = time.monotonic() - started
        on_progress(
            Progress(phase="copying", done=done + 1, total=len(listed), written_bytes=copied_bytes, seconds=seconds)
        )
    key = layout.generation(generation.number)
    _create_same(destination, key, store.map(key))
    return CopyReport(
        root=store.address,
        destination=destination.address,
        copied=copied,
        present=len(listed) - copied,
        copied_bytes=copied_bytes,
        generation=generation.number,
        seconds=time.monotonic() - started,
    )


def _index_keys(generation: Generation) -> list[str]:
    keys = [layout.CACHE, *map(layout.recipe, generation.recipes), *map(layout.constants, generation.constants)]
    return [*keys, *map(layout.plan_segment, range(len(generation.plan)))]


def _identity_keys(store: Store, generation: Generation) -> list[str]:
    for problem in identity_problems(store, generation):
        raise IndexCorrupt(store.address, problem.key, problem.problem)
    segments = load_plan(store).segments[: len(generation.plan)]
    return [layout.identities(segment.number, segment.identities) for segment in segments if segment.identities]


def _copy_chunk(store: Store, destination: Store, layer: str, record: ChunkRecord) -> int:
    """The bytes that had to be copied; 0 where the destination has the chunk."""
    key = layout.chunk(layer, record.chunk, record.revision)
    try:
        if hashlib.sha256(destination.map(key)).digest() == record.sha256:
            return 0
    except Missing:
        pass
    try:
        view = store.map(key)
    except Missing as error:
        raise ChunkMissing(store.address, layer, record.chunk) from error
    if hashlib.sha256(view).digest() != record.sha256:
        raise ChunkCorrupt(store.address, layer, record.chunk, "its SHA-256 is not the published one")
    destination.replace(key, [view])
    return record.size


def _create_same(destination: Store, key: str, value: memoryview) -> None:
    if not destination.create(key, [value]) and destination.map(key) != value:
        raise ForebayError(f"'{destination.address}' holds another cache ('{key}' differs); copy to a new place")
