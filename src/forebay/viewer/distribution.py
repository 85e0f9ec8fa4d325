"""Statistics of sampled rows: histograms of lengths and padding, and outliers.

Whole runs of rows are read from chunks at equal distances, until a time is over or enough rows are read: a cache of any
size is answered in about a second.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array
from forebay.errors import Damaged
from forebay.read.cache import Cache
from forebay.records import Record
from forebay.viewer.chunk_map import is_here
from forebay.viewer.shown_cache import Query, ShownCache

SAMPLE_SECONDS = 1.0
MOST_CHUNKS, FETCHED_CHUNKS = 64, 2  # chunks that are sampled, and of a cache on another machine
MOST_ROWS, MOST_BYTES = 20_000, 64 << 20
BARS, WORST = 24, 10
NGRAM = 4  # tokens or bytes of which a repetition consists, at least


class Histogram(Record, frozen=True, kw_only=True):
    name: str
    unit: str
    edges: list[float]
    counts: list[int]
    median: float
    most: float


class RankedRow(Record, frozen=True, kw_only=True):
    row: int
    value: float


class Ranking(Record, frozen=True, kw_only=True):
    """The rows with the largest values."""

    name: str
    unit: str
    rows: tuple[RankedRow, ...]


class ChunkFailures(Record, frozen=True, kw_only=True):
    layer: str
    chunk: int
    failures: int


class Distribution(Record, frozen=True, kw_only=True):
    rows: int
    sampled: int
    histograms: tuple[Histogram, ...]
    rankings: tuple[Ranking, ...]
    failures: tuple[ChunkFailures, ...]  # the chunks with most failed samples


def distribution(shown: ShownCache, query: Query) -> Distribution:
    cache = shown.at()
    rows, values = _sampled(cache, MOST_CHUNKS if is_here(shown.store) else FETCHED_CHUNKS)
    return Distribution(
        rows=len(cache),
        sampled=len(rows),
        histograms=tuple(_histogram(name, each) for name, each in values.items() if len(each)),
        rankings=tuple(one for name in values if name in UNITS and (one := _ranking(name, rows, values[name])).rows),
        failures=tuple(_failures(cache)),
    )


def _sampled(cache: Cache, most_chunks: int) -> tuple[Array, dict[str, NDArray[np.float64]]]:
    """The rows that were read, and their values by name."""
    columns = measured_columns(cache)
    count = len(cache.chunk_numbers) if columns else 0
    chosen = np.unique(np.linspace(0, max(0, count - 1), min(count, most_chunks)).astype(np.int64))
    step = max(1, min(MOST_ROWS, MOST_BYTES // max(1, cache.row_bytes(columns))) // max(1, len(chosen)))
    deadline = time.monotonic() + SAMPLE_SECONDS
    rows: list[Array] = [np.zeros(0, np.int64)]
    values: defaultdict[str, list[NDArray[np.float64]]] = defaultdict(list)
    for at in chosen.tolist():
        first, stop = int(cache.chunk_starts[at]), int(cache.chunk_starts[at + 1])
        numbers = np.arange(first, min(stop, first + step))
        if time.monotonic() > deadline:
            break
        with suppress(Damaged, OSError):  # the map and the banner show it
            measured = measures(cache, cache.read(numbers, columns))
            rows.append(numbers)
            for name, each in measured.items():
                values[name].append(each)
    return np.concatenate(rows), {name: np.concatenate(each) for name, each in values.items()}


def measured_columns(cache: Cache) -> list[str]:
    for names in (["tokens", "seq_lens"], ["prompt", "candidates", "candidate_lens"], ["box", "original_size"]):
        if set(names) <= set(cache.columns):
            return names
    declared = (cache.column(name) for name in cache.columns)
    return [one.name for one in declared if one.ragged and one.dtype == "uint8" and not one.shape][:1]


PADDING, REPETITION, SCALE, LENGTH = "padding", "repetition", "scale", "length"
# The measures that have one value per row, by which rows are ranked.
UNITS = {PADDING: "share", REPETITION: "share", SCALE: "times", LENGTH: "bytes"}
TITLES = {PADDING: "most padding", REPETITION: "most repetition", SCALE: "most enlarged", LENGTH: "longest"}


def measures(cache: Cache, read: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """The values of some rows by name; those in UNITS have one per row."""
    if "tokens" in read:
        width = read["tokens"].shape[1]
        lengths = [np.asarray(read["seq_lens"][at], np.float64) for at in range(len(read["tokens"]))]
        used = np.array([one.sum() for one in lengths])
        texts = (read["tokens"][at][: int(one)] for at, one in enumerate(used.tolist()))
        unit = "document" if cache.recipe(cache.generation.base).kind != "chat" else "conversation"
        return {
            f"tokens per {unit}": np.concatenate(lengths),
            PADDING: 1 - used / width,
            REPETITION: np.array([repetition(text) for text in texts]),
        }
    if "prompt" in read:
        prompts, pairs = read["prompt"], zip(_each(read["prompt"]), _each(read["candidates"]), strict=True)
        return {
            "tokens per prompt": np.diff(prompts.offsets).astype(np.float64),
            "tokens per candidate": read["candidate_lens"].values.astype(np.float64),
            REPETITION: np.array([repetition(np.concatenate(pair)) for pair in pairs]),
        }
    if "box" in read:
        box, original = (np.asarray(read[name], np.float64) for name in ("box", "original_size"))
        size = float(str(cache.recipe(cache.generation.base).fields.get("size", 0)) or 0)
        return {
            PADDING: 1 - box[:, 2] * box[:, 3] / max(1.0, size * size),
            SCALE: box[:, 2] / np.maximum(1, original[:, 0]),
            "width of the original": original[:, 0],
        }
    ((_, column),) = read.items()
    return {
        LENGTH: np.diff(column.offsets).astype(np.float64),
        REPETITION: np.array([repetition(one[:READ_MOST]) for one in _each(column)]),
    }


READ_MOST = 1 << 16  # bytes of a value that are searched for repetitions


def _each(ragged: Any) -> Iterator[Array]:
    return (np.asarray(ragged[at]) for at in range(len(ragged)))


def repetition(tokens: Array) -> float:
    """The share of four-token runs that occurred earlier in the text.

    >>> repetition(np.arange(100)), round(repetition(np.tile([1, 2, 3, 4, 5], 20)), 2)
    (0.0, 0.95)
    """
    if len(tokens) <= NGRAM:
        return 0.0
    factors = np.array([1, 0x9E3779B1, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5], np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), NGRAM) @ factors
    return 1 - len(np.unique(runs)) / len(runs)


def _histogram(name: str, values: NDArray[np.float64]) -> Histogram:
    high = float(np.quantile(values, 0.99)) or 1.0  # the last bar has all larger values
    counts, edges = np.histogram(np.minimum(values, high), bins=BARS, range=(0.0, high))
    return Histogram(
        name=name,
        unit=UNITS.get(name, ""),
        edges=edges.tolist(),
        counts=counts.tolist(),
        median=float(np.median(values)),
        most=float(values.max()),
    )


def _ranking(name: str, rows: Array, values: NDArray[np.float64]) -> Ranking:
    order = np.argsort(-values, kind="stable")[:WORST]
    least = 1.0 if name == SCALE else 0.0  # a smaller image is not enlarged
    ranked = (RankedRow(row=int(rows[at]), value=round(float(values[at]), 4)) for at in order if values[at] > least)
    return Ranking(name=TITLES[name], unit=UNITS[name], rows=tuple(ranked))


def _failures(cache: Cache) -> Iterator[ChunkFailures]:
    for layer, table in cache.generation.layers.items():
        failures = table.numbers["failures"]
        for at in np.argsort(-failures.astype(np.int64), kind="stable")[:WORST].tolist():
            if failures[at]:
                yield ChunkFailures(layer=layer, chunk=int(table.chunks[at]), failures=int(failures[at]))
