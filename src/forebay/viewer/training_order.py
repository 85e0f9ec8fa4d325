"""The order of an epoch made visible: the rows of each batch, and how well they are shuffled."""

import json
from typing import cast

import numpy as np

from forebay.feeding.choose_order import Shuffle, choose_ordering
from forebay.feeding.stream import PACKED_COLUMNS, CacheStream
from forebay.order.shuffle import GlobalOrder
from forebay.read.cache import Cache
from forebay.records import Record
from forebay.store.base import MAX_DOCUMENT_BYTES
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache

SHOWN_BATCHES, SHOWN_POINTS = 8, 1500
MOST_BATCH, MOST_WORLD = 65_536, 4096


class BatchRows(Record, frozen=True, kw_only=True):
    batch: int
    rows: list[int]  # in the order of positions; rank r has every n-th from r
    chunks: int  # that they come from


class Mixing(Record, frozen=True, kw_only=True):
    """Compared with a random order of all rows, which has 1."""

    chunks: float  # that a batch draws from
    distance: float  # between rows that follow each other


class TrainingOrder(Record, frozen=True, kw_only=True):
    rows: int
    kind: str
    seed: int
    epoch: int
    world_size: int
    global_batch_size: int
    batches: int
    leftover_rows: int  # that fill no batch
    shown: tuple[BatchRows, ...]
    mixing: Mixing
    positions: list[int]
    order: list[int]  # the rows at these positions
    random_order: list[int]  # a random order of all rows, to compare


def training_order(shown: ShownCache, query: Query) -> TrainingOrder:
    cache = shown.at()
    seed, epoch = query.whole("seed", 0), query.whole("epoch", 0)
    world = query.whole("world", 1, MOST_WORLD)
    size = query.whole("batch", min(48, max(1, len(cache))), MOST_BATCH)
    if world < 1 or size < 1 or size % world:
        raise BadQuery(f"'batch' must be a multiple of 'world', and both at least 1 (got {size} and {world})")
    if not len(cache):
        raise IndexError(f"'{cache.root}' has no rows")
    stream = _stream(cache, query.text("shuffle", "auto"), seed)
    total = stream.size(epoch)
    first = query.whole("at", 0)
    numbers = range(first, min(first + SHOWN_BATCHES, total // size))
    batches = {at: stream.locate(epoch, np.arange(at * size, (at + 1) * size)).rows for at in numbers}
    measured = stream.quality(epoch, size)
    positions = np.unique(np.linspace(0, total - 1, min(SHOWN_POINTS, total)).astype(np.int64))
    return TrainingOrder(
        rows=total,
        kind=stream.ordering.kind,
        seed=seed,
        epoch=epoch,
        world_size=world,
        global_batch_size=size,
        batches=total // size,
        leftover_rows=total % size,
        shown=tuple(
            BatchRows(batch=at, rows=rows.tolist(), chunks=len(np.unique(cache.chunk_positions(rows))))
            for at, rows in batches.items()
        ),
        mixing=Mixing(chunks=measured.chunks, distance=measured.travel),
        positions=positions.tolist(),
        order=stream.locate(epoch, positions).rows.tolist(),
        random_order=GlobalOrder(len(cache), seed).rows_at(epoch, positions).tolist(),
    )


def _stream(cache: Cache, shuffle: str, seed: int) -> CacheStream:
    if shuffle not in ("auto", "global", "window", "sequential"):
        raise BadQuery(f"'shuffle' must be auto, global, window or sequential (got {shuffle[:40]!r})")
    columns = PACKED_COLUMNS if set(PACKED_COLUMNS) <= set(cache.columns) else cache.default_columns
    wanted = cast("Shuffle | None", None if shuffle == "sequential" else shuffle)
    return CacheStream(cache, lambda pinned: choose_ordering(pinned, columns, wanted, seed, None))


class JobStatistics(Record, frozen=True, kw_only=True):
    """The contents of a running loader's statistics file."""

    path: str
    statistics: dict[str, object]
    problem: str = ""


def job_statistics(shown: ShownCache, query: Query) -> list[JobStatistics]:
    return [_read_statistics(path) for path in shown.statistics]


def _read_statistics(path: str) -> JobStatistics:
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(MAX_DOCUMENT_BYTES))
        return JobStatistics(path=path, statistics=document if isinstance(document, dict) else {"value": document})
    except (OSError, ValueError, RecursionError) as error:
        return JobStatistics(path=path, statistics={}, problem=str(error))
