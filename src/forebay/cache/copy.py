"""Copying: a verified copy of what the newest generation lists, for backup; it can be interrupted and run again."""

import hashlib
import os
import time

from forebay.cache.catalog import Snapshot, check_index, load_generation
from forebay.cache.plan import Plan
from forebay.cache.records import CopyReport, OnProgress, Progress
from forebay.cache.verify import identity_problems
from forebay.errors import ChunkCorrupt, ChunkMissing, DiskFull, ForebayError, IndexCorrupt, is_url
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.store.base import Missing, Pieces, Store, holds, is_full, load_index, read_document


def copy_cache(store: Store, destination: Store, on_progress: OnProgress) -> CopyReport:
    """Copy chunk by chunk, each checked on the way; the generation goes last, so that half a copy cannot be opened."""
    try:
        return _copied(store, destination, on_progress)
    except OSError as error:
        if not is_full(error):
            raise
        sizes = (int(table.numbers["size"].sum()) for table in load_generation(store).layers.values())
        raise DiskFull(destination.address, sum(sizes), destination.free_bytes() or 0) from error


def _copied(store: Store, destination: Store, on_progress: OnProgress) -> CopyReport:
    started = time.monotonic()
    generation = load_generation(store)
    _check_destination(store, destination, generation)
    snapshot = Snapshot(store, generation)
    check_index(snapshot)
    for key in [
        *_index_keys(generation),
        *_identity_keys(snapshot.plan, store, generation),
    ]:  # the id first: it refuses another cache
        _create_same(destination, key, load_index(store, key))
    if holds(store, layout.DATASET):
        destination.replace(layout.DATASET, [read_document(store, layout.DATASET)], durable=False)
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
    _create_same(destination, key, load_index(store, key))
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


def _identity_keys(plan: Plan, store: Store, generation: Generation) -> list[str]:
    for problem in identity_problems(store, generation, plan):
        raise IndexCorrupt(store.address, problem.key, problem.problem)
    segments = plan.segments[: len(generation.plan)]
    return [layout.identities(segment.number, segment.identities) for segment in segments if segment.identities]


def _copy_chunk(store: Store, destination: Store, layer: str, record: ChunkRecord) -> int:
    """The bytes that had to be copied; 0 where the destination has the chunk."""
    key = record.key(layer)
    try:
        if Pieces(destination, key).sha256 == record.sha256:
            return 0
    except Missing:
        pass
    try:
        value = read_published(store, key, record)
    except Missing as error:
        raise ChunkMissing(store.address, layer, record.chunk) from error
    if value is None:
        raise ChunkCorrupt(store.address, layer, record.chunk, "its size or its SHA-256 is not the published one")
    destination.replace(key, [value])
    _check_written(destination, key, record.sha256)
    return record.size


def read_published(store: Store, key: str, record: ChunkRecord) -> bytes | None:
    """The bytes of a published chunk, None where they are others. No more is read than was published."""
    value = store.read(key, 0, record.size + 1)
    return value if len(value) == record.size and hashlib.sha256(value).digest() == record.sha256 else None


def _create_same(destination: Store, key: str, value: memoryview) -> None:
    sha256 = hashlib.sha256(value).digest()
    if destination.create(key, [value]):
        _check_written(destination, key, sha256)
    elif Pieces(destination, key).sha256 != sha256:
        raise ForebayError(f"'{destination.address}' holds another cache ('{key}' differs); copy to a new place")


def _check_written(destination: Store, key: str, sha256: bytes) -> None:
    if Pieces(destination, key).sha256 != sha256:
        raise ForebayError(f"'{key}' reads back from '{destination.address}' with other bytes than were written there")


def _check_destination(store: Store, destination: Store, generation: Generation) -> None:
    """Refuse a copy of a cache onto or into itself, and into a folder with files that are not of a cache."""
    if is_within(destination, store):
        place = "is the cache itself" if is_within(store, destination) else f"lies in the cache at '{store.address}'"
        raise ForebayError(f"'{destination.address}' {place}; copy to a place outside it")
    layers = set(generation.recipes)
    for entry in destination.entries(""):
        if not layout.is_known(entry.key, layers):
            raise ForebayError(
                f"'{destination.address}' holds '{entry.key}', which is not of a copy of '{store.address}'; copy to a "
                f"new or an empty folder"
            )


def is_within(inner: Store, outer: Store) -> bool:
    """Whether a store lies in the folder of another, or is the same."""
    if is_url(inner.address) and is_url(outer.address):
        return f"{inner.address}/".startswith(f"{outer.address}/")
    inside, around = _real_path(inner), _real_path(outer)
    return inside is not None and around is not None and f"{inside}{os.sep}".startswith(f"{around}{os.sep}")


def _real_path(store: Store) -> str | None:
    folder = store.local_path("")
    return None if folder is None else os.path.realpath(folder)
