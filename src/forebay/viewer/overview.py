"""The overview of a cache: its generations as a time line, why samples failed, and the commands to type next.

Two caches, or two generations of one: what differs in recipe, counts and figures.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from operator import itemgetter

import msgspec
import numpy as np

from forebay.api import gaps, status, summarize
from forebay.cache.catalog import load_generation, newest_generation, open_chunk, read_generation
from forebay.cache.plan import load_plan
from forebay.cache.records import FailedSample, LayerSummary, Record, Summary
from forebay.errors import Damaged, ForebayError
from forebay.format import layout
from forebay.format.generation import ChunkTable, Generation
from forebay.format.tensors import hmac_key
from forebay.preview.words import command_line
from forebay.store.base import Store
from forebay.viewer.live_build import ABANDONED, BAD, FAILED, LOST, MISSING, PUBLISHED, is_here
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache

SHOWN_GENERATIONS, SHOWN_SAMPLES, OPENED_CHUNKS, FETCHED_CHUNKS = 40, 50, 500, 4
CLOCK_SECONDS = 120  # that the clock of a store may be ahead of this one


class GenerationPoint(Record, frozen=True, kw_only=True):
    """One generation on the time line."""

    number: int
    rows: int
    bytes: int
    chunks: dict[str, int]  # layer -> listed chunks
    digest: str
    written: float | None = None  # seconds since 1970, by the clock of the store; None: unknown
    problem: str = ""  # why it cannot be read


class Command(Record, frozen=True, kw_only=True):
    command: str
    why: str


class Overview(Record, frozen=True, kw_only=True):
    """What the first page shows beside the summary of `forebay info`."""

    root: str
    generations: tuple[GenerationPoint, ...]
    generations_left_out: int
    failures: int
    reasons: dict[str, int]  # of the failures that were read
    failed_samples: tuple[FailedSample, ...]
    failures_read: int
    commands: tuple[Command, ...]


def overview(shown: ShownCache, query: Query) -> Overview:
    times = generation_times(shown.store)
    numbers = list(times)
    newest = newest_generation(shown.store)
    failed = _failed_samples(shown, newest) if newest else []
    failures = sum(int(table.numbers["failures"].sum()) for table in newest.layers.values()) if newest else 0
    return Overview(
        root=shown.root,
        generations=tuple(_point(shown, number, times[number]) for number in numbers[-SHOWN_GENERATIONS:]),
        generations_left_out=max(0, len(numbers) - SHOWN_GENERATIONS),
        failures=failures,
        reasons=dict(Counter(sample.reason for sample in failed).most_common()),
        failed_samples=tuple(failed[:SHOWN_SAMPLES]),
        failures_read=len(failed),
        commands=tuple(_commands(shown, newest)),
    )


def generation_times(store: Store) -> dict[int, float | None]:
    """When each generation was written, as the store says; None where it does not say, or cannot be right.

    Copies and archives may set any time: one that is ahead of this clock, or before that of an earlier generation, is
    not shown.
    """
    listed = ((layout.parse_generation(entry.key), entry.written) for entry in store.entries(layout.GENERATIONS))
    known = ((number, at) for number, at in listed if number is not None)
    return _plausible(sorted(known, key=itemgetter(0)), time.time())


def _plausible(times: Iterable[tuple[int, float | None]], now: float) -> dict[int, float | None]:
    """
    >>> _plausible([(0, 0.0), (1, 500.0), (2, 400.0), (3, None), (4, 500.0), (5, 2000.0)], now=1000)
    {0: None, 1: 500.0, 2: None, 3: None, 4: 500.0, 5: None}
    """
    latest, found = 0.0, {}
    for number, at in times:
        is_known = at is not None and at > 0 and latest <= at <= now + CLOCK_SECONDS
        found[number] = at if is_known else None
        latest = found[number] or latest
    return found


def _point(shown: ShownCache, number: int, written: float | None) -> GenerationPoint:
    try:
        return msgspec.structs.replace(_known_point(shown, number), written=written)
    except (ForebayError, OSError) as error:
        return GenerationPoint(
            number=number, rows=0, bytes=0, chunks={}, digest="", written=written, problem=str(error)
        )


@lru_cache(maxsize=1024)
def _known_point(shown: ShownCache, number: int) -> GenerationPoint:
    """A generation never changes, so it is read once."""
    found = read_generation(shown.store, number, hmac_key())
    return GenerationPoint(
        number=number,
        rows=int(found.table(found.base).rows.sum()),
        bytes=sum(int(table.numbers["size"].sum()) for table in found.layers.values()),
        chunks={layer: len(table) for layer, table in found.layers.items()},
        digest=found.digest,
    )


def _failed_samples(shown: ShownCache, newest: Generation) -> list[FailedSample]:
    """Failed samples of the first chunks that have any."""
    found: list[FailedSample] = []
    most = OPENED_CHUNKS if is_here(shown.store) else FETCHED_CHUNKS
    for layer, table in newest.layers.items():
        for at in islice((table.numbers["failures"] > 0).nonzero()[0].tolist(), most):
            record = table.record(at)
            try:
                failures = open_chunk(shown.store, layer, record).failures()
            except (Damaged, OSError):
                continue
            found += [
                FailedSample(layer=layer, chunk=record.chunk, sample=one.sample, reason=one.reason, detail=one.detail)
                for one in failures
            ]
    return found


def _commands(shown: ShownCache, newest: Generation | None) -> list[Command]:
    root, states = shown.root, "".join(layer.states for layer in shown.watch.snapshot().map.layers)
    found = []
    if BAD in states or LOST in states:
        found.append(Command(command=command_line("verify", root), why="list the damage byte by byte"))
        found.append(Command(command=command_line("repair", root), why="restore damaged and lost chunks"))
    if any(code in states for code in (MISSING, ABANDONED, FAILED)):
        found.append(Command(command=command_line("gaps", root), why="list missing chunks, with the command to build"))
    if newest is not None and PUBLISHED in states:
        found.append(Command(command=command_line("verify", root), why="check every published byte"))
        found.append(Command(command=command_line("peek", root), why="print rows in the terminal"))
        found.append(Command(command=f"fb.open_cache({root!r})", why="read rows in Python"))
    return list({one.command: one for one in reversed(found)}.values())[::-1]


def chunk_detail(shown: ShownCache, query: Query) -> "ChunkDetail":
    """One chunk: what was published of it, what it was made from, and its rows."""
    layer, chunk = query.text("layer"), query.whole("chunk")
    found = shown.watch.snapshot().map
    states = next((one.states for one in found.layers if one.layer == layer), "")
    if chunk >= len(states):
        raise IndexError(f"layer '{layer}' has no chunk {chunk}")
    newest = newest_generation(shown.store)
    table = newest.table(layer) if newest else None
    at = table.position(chunk) if table is not None else None
    record = table.record(at) if table is not None and at is not None else None
    claims = [claim for claim in found.claims if (claim.layer, claim.chunk) == (layer, chunk)]
    return ChunkDetail(
        layer=layer,
        chunk=chunk,
        state=states[chunk],
        first_row=_first_row(shown, chunk) if record else None,
        rows=record.rows if record else 0,
        samples=record.samples if record else 0,
        failures=record.failures if record else 0,
        bytes=record.size if record else 0,
        revision=record.revision if record else 0,
        sha256=record.sha256.hex() if record else "",
        statistics=dict(record.statistics) if record else {},
        claim=f"{claims[-1].host}, process {claims[-1].pid}, {claims[-1].state}" if claims else "",
        problem=(shown.heads.problem(layer, chunk, record.sha256) if record else "")
        or (claims[-1].reason if claims else ""),
        parts=_parts(shown, chunk),
    )


class SourcePart(Record, frozen=True, kw_only=True):
    path: str
    start: int
    stop: int


class ChunkDetail(Record, frozen=True, kw_only=True):
    layer: str
    chunk: int
    state: str
    first_row: int | None  # row number in the newest generation
    rows: int
    samples: int
    failures: int
    bytes: int
    revision: int
    sha256: str
    statistics: dict[str, object]
    claim: str
    problem: str
    parts: tuple[SourcePart, ...]


def _parts(shown: ShownCache, chunk: int) -> tuple[SourcePart, ...]:
    try:
        parts = load_plan(shown.store).parts(chunk)
    except (ForebayError, OSError):
        return ()
    return tuple(SourcePart(path=part.file.path, start=part.start, stop=part.stop) for part in parts[:100])


def _first_row(shown: ShownCache, chunk: int) -> int | None:
    cache = shown.at()
    at = cache.chunk_numbers.searchsorted(chunk)
    return int(cache.chunk_starts[at]) if at < len(cache.chunk_numbers) and cache.chunk_numbers[at] == chunk else None


def summary_record(shown: ShownCache, query: Query) -> object:
    """The record of `forebay info --json`."""
    return summarize(shown.store)


def status_record(shown: ShownCache, query: Query) -> object:
    """The record of `forebay status --json`; it opens every chunk."""
    return status(shown.store)


def gaps_record(shown: ShownCache, query: Query) -> object:
    """The records of `forebay gaps --json`."""
    return gaps(shown.store)


class Difference(Record, frozen=True, kw_only=True):
    """One fact of both sides; `same` is False where they differ."""

    group: str
    name: str
    a: object
    b: object
    same: bool


class ChunkDifference(Record, frozen=True, kw_only=True):
    layer: str
    same: int  # chunks with the same content
    differ: int
    only_a: int
    only_b: int


class Comparison(Record, frozen=True, kw_only=True):
    a: str
    b: str
    generation_a: int
    generation_b: int
    facts: tuple[Difference, ...]
    chunks: tuple[ChunkDifference, ...]


def compare(caches: Sequence[ShownCache], query: Query) -> Comparison:
    """The comparison of the caches with the numbers `a` and `b`, at `generation_a` and `generation_b`."""
    left, right = (_side(caches, query, name) for name in ("a", "b"))
    (a, old), (b, new) = left, right
    facts = [
        Difference(group=group, name=name, a=one, b=other, same=one == other)
        for group, name, one, other in _joined(
            *(_facts(summarize(each.store, generation=at.number)) for each, at in (left, right))
        )
    ]
    layers = sorted({*old.layers, *new.layers}, key=lambda name: (name != old.base, name))
    return Comparison(
        a=a.root,
        b=b.root,
        generation_a=old.number,
        generation_b=new.number,
        facts=tuple(facts),
        chunks=tuple(_chunks(layer, old.table(layer), new.table(layer)) for layer in layers),
    )


def _side(caches: Sequence[ShownCache], query: Query, name: str) -> tuple[ShownCache, Generation]:
    number = query.whole(name, 0 if name == "a" else min(1, len(caches) - 1))
    if number >= len(caches):
        raise BadQuery(f"'{name}' must be a cache from 0 to {len(caches) - 1} (got {number})")
    return caches[number], load_generation(caches[number].store, query.some(f"generation_{name}"))


Facts = dict[tuple[str, str], object]


def _facts(summary: Summary) -> Facts:
    found: Facts = {
        ("cache", "cache id"): summary.cache_id,
        ("cache", "generation"): summary.generation,
        ("cache", "rows"): summary.rows,
        ("cache", "bytes"): summary.bytes,
        ("cache", "digest"): summary.digest,
        ("cache", "source"): summary.source,
        ("cache", "versions"): list(summary.versions),
    }
    for layer in summary.layers:
        found |= {(f"layer {layer.layer}", name): value for name, value in _layer_facts(layer).items()}
    return found


def _layer_facts(layer: LayerSummary) -> dict[str, object]:
    sums = {name: value for name, value in layer.statistics.items() if not isinstance(value, list)}
    return {
        "kind": layer.kind,
        "fingerprint": layer.fingerprint,
        **{f"recipe: {name}": value for name, value in layer.fields.items()},
        "columns": list(layer.columns),
        "chunks": layer.chunks,
        "rows": layer.rows,
        "bytes": layer.bytes,
        "failures": layer.failures,
        **{f"sum: {name}": value for name, value in sums.items()},
        **{f"figure: {name}": value for name, value in layer.figures.items()},
    }


def _joined(left: Facts, right: Facts) -> list[tuple[str, str, object, object]]:
    keys = dict.fromkeys([*left, *right])
    return [(group, name, left.get((group, name)), right.get((group, name))) for group, name in keys]


def _chunks(layer: str, old: ChunkTable, new: ChunkTable) -> ChunkDifference:
    both, at_old, at_new = np.intersect1d(old.chunks, new.chunks, assume_unique=True, return_indices=True)
    alike = (old.digests["content"][at_old] == new.digests["content"][at_new]).all(axis=1)
    return ChunkDifference(
        layer=layer,
        same=int(alike.sum()),
        differ=len(both) - int(alike.sum()),
        only_a=len(old) - len(both),
        only_b=len(new) - len(both),
    )
