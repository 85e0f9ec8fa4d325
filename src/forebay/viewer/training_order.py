"""The order of an epoch made visible: the rows of a batch, how well they are shuffled, and what each node reads."""

import json
from functools import partial
from typing import cast

import numpy as np

from forebay.cache.records import Record
from forebay.columns import Array
from forebay.feeding.chunk_ahead import estimate_remote
from forebay.feeding.stream import PACKED_COLUMNS, CacheStream, Shuffle, choose_ordering
from forebay.order.orders import GlobalOrder, shuffle_quality
from forebay.read.cache import Cache
from forebay.store.base import MAX_DOCUMENT_BYTES
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache

SHOWN_BATCHES, SHOWN_POINTS, MOST_POSITIONS = 8, 1500, 4_000_000
MOST_BATCH, MOST_WORLD = 65_536, 4096


class BatchRows(Record, frozen=True, kw_only=True):
    batch: int
    rows: list[int]  # in the order of positions; rank r has every n-th from r
    chunks: int  # that they come from


class Quality(Record, frozen=True, kw_only=True):
    """Against a global shuffle, which is 1."""

    chunks: float
    units: float
    travel: float


class NodeBytes(Record, frozen=True, kw_only=True):
    """What one rank reads in an epoch, in whole chunks."""

    rank: int
    chunks: int
    bytes: int  # each chunk once: with a tier that keeps all of them


class TierBytes(Record, frozen=True, kw_only=True):
    """What a node of one rank fetches in an epoch after the first, with window shuffle."""

    share: float  # of the bytes that the node needs, which its tier holds
    bytes_per_node: int


class TrainingOrder(Record, frozen=True, kw_only=True):
    rows: int
    generation: int
    kind: str
    seed: int
    epoch: int
    world_size: int
    global_batch_size: int
    batches: int
    leftover_rows: int  # that fill no batch
    shown: tuple[BatchRows, ...]
    quality: Quality
    global_quality: Quality  # of a global shuffle of the same rows, measured in the same way
    positions: list[int]
    order: list[int]  # the rows at these positions
    global_order: list[int]
    nodes: tuple[NodeBytes, ...]
    tiers: tuple[TierBytes, ...]
    cache_bytes: int
    note: str = ""


def training_order(shown: ShownCache, query: Query) -> TrainingOrder:
    cache = shown.at(query.some("generation"))
    seed, epoch = query.whole("seed", 0), query.whole("epoch", 0)
    world = query.whole("world", 1, MOST_WORLD)
    size = query.whole("batch", min(48, max(1, len(cache))), MOST_BATCH)
    if world < 1 or size < 1 or size % world:
        raise BadQuery(f"'batch' must be a multiple of 'world', and both at least 1 (got {size} and {world})")
    if not len(cache):
        raise IndexError(f"'{cache.root}' has no rows")
    stream = _stream(cache, query.text("shuffle", "auto"), seed)
    total, counts = stream.size(epoch), np.diff(cache.chunk_starts)
    first = query.whole("at", 0)
    batches = [
        _batch(cache, stream, epoch, number, size) for number in range(first, min(first + SHOWN_BATCHES, total // size))
    ]
    measured = stream.quality(epoch, size)
    whole = GlobalOrder(len(cache), seed)
    ideal = shuffle_quality(whole, counts, stream.ordering.window.unit if stream.ordering.window else 1, size, epoch)
    positions = np.unique(np.linspace(0, total - 1, min(SHOWN_POINTS, total)).astype(np.int64))
    nodes, note = _downloads(cache, stream, epoch, world)
    return TrainingOrder(
        rows=total,
        generation=cache.generation.number,
        kind=stream.ordering.kind,
        seed=seed,
        epoch=epoch,
        world_size=world,
        global_batch_size=size,
        batches=total // size,
        leftover_rows=total % size,
        shown=tuple(batches),
        quality=Quality(chunks=measured.chunks, units=measured.units, travel=measured.travel),
        global_quality=Quality(chunks=ideal.chunks, units=ideal.units, travel=ideal.travel),
        positions=positions.tolist(),
        order=stream.locate(epoch, positions).rows.tolist(),
        global_order=whole.rows_at(epoch, positions).tolist(),
        nodes=nodes[:64],
        tiers=_tiers(cache, world, seed, size),
        cache_bytes=int(_chunk_bytes(cache).sum()),
        note=note,
    )


def _stream(cache: Cache, shuffle: str, seed: int) -> CacheStream:
    if shuffle not in ("auto", "global", "window", "sequential"):
        raise BadQuery(f"'shuffle' must be auto, global, window or sequential (got {shuffle[:40]!r})")
    columns = PACKED_COLUMNS if set(PACKED_COLUMNS) <= set(cache.columns) else cache.default_columns
    wanted = cast("Shuffle | None", None if shuffle == "sequential" else shuffle)
    return CacheStream(cache, lambda pinned: choose_ordering(pinned, columns, wanted, seed, None))


def _batch(cache: Cache, stream: CacheStream, epoch: int, number: int, size: int) -> BatchRows:
    rows = stream.locate(epoch, np.arange(number * size, (number + 1) * size)).rows
    return BatchRows(batch=number, rows=rows.tolist(), chunks=len(np.unique(_chunk_of(cache, rows))))


def _chunk_of(cache: Cache, rows: Array) -> Array:
    return np.searchsorted(cache.chunk_starts, rows, side="right") - 1


def _chunk_bytes(cache: Cache) -> Array:
    table = cache.generation.table(cache.generation.base)
    sizes: Array = table.numbers["size"][np.searchsorted(table.chunks, cache.chunk_numbers)]
    return sizes


def _downloads(cache: Cache, stream: CacheStream, epoch: int, world: int) -> tuple[tuple[NodeBytes, ...], str]:
    """Return the chunks that ranks read, from the order; only for the first positions if an epoch is very long."""
    total = stream.size(epoch)
    counted = min(total, MOST_POSITIONS)
    chunks = _chunk_of(cache, stream.locate(epoch, np.arange(counted)).rows)
    sizes = _chunk_bytes(cache)
    nodes = []
    for rank in range(min(world, 64)):
        used = np.unique(chunks[rank::world])
        nodes.append(NodeBytes(rank=rank, chunks=len(used), bytes=int(sizes[used].sum())))
    note = f"counted over the first {counted:,} of {total:,} positions" if counted < total else ""
    return tuple(nodes), note


def _tiers(cache: Cache, world: int, seed: int, size: int) -> tuple[TierBytes, ...]:
    """The estimate of `forebay estimate --remote` for tiers of several sizes."""
    estimate = partial(estimate_remote, cache, nodes=world, batch_size=size, seed=seed)
    whole = estimate().node_bytes
    found = [(share, estimate(tier_bytes=int(share * whole))) for share in (0.1, 0.25, 0.5, 0.75, 1.0)]
    return tuple(TierBytes(share=share, bytes_per_node=one.later_epoch_bytes) for share, one in found)


def remote_record(shown: ShownCache, query: Query) -> object:
    """The record of `forebay estimate --remote --json`: what a node fetches if the cache is in a bucket."""
    cache, world = shown.at(query.some("generation")), query.whole("world", 1, MOST_WORLD)
    size = query.whole("batch", min(48, max(1, len(cache))), MOST_BATCH)
    if world < 1 or size < 1 or not len(cache):
        raise BadQuery(f"'world' and 'batch' must be at least 1 (got {world} and {size})")
    return estimate_remote(
        cache, nodes=world, tier_bytes=query.some("tier"), batch_size=size, seed=query.whole("seed", 0)
    )


class JobStatistics(Record, frozen=True, kw_only=True):
    """What a running Loader wrote to its statistics file, as it wrote it."""

    path: str
    statistics: dict[str, object]
    problem: str = ""


def job_statistics(shown: ShownCache, query: Query) -> list[JobStatistics]:
    return [_read_statistics(path) for path in shown.statistics]


def _read_statistics(path: str) -> JobStatistics:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(MAX_DOCUMENT_BYTES))
        return JobStatistics(path=path, statistics=found if isinstance(found, dict) else {"value": found})
    except (OSError, ValueError, RecursionError) as error:
        return JobStatistics(path=path, statistics={}, problem=str(error))
