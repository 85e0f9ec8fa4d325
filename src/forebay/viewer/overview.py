"""The overview of a cache: its health, its generations, and why samples failed."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice

import msgspec

from forebay.cache.catalog import newest_generation, open_chunk, read_generation
from forebay.cache.reports import FailedSample
from forebay.cache.state import Index
from forebay.cache.status import cache_status, chunk_seconds
from forebay.errors import Damaged, ForebayError, message_of
from forebay.format import layout
from forebay.format.generation import Generation
from forebay.format.tensors import hmac_key
from forebay.preview.words import command_line
from forebay.records import Record, ranges
from forebay.viewer.chunk_map import is_here
from forebay.viewer.live_build import BuildMoment
from forebay.viewer.shown_cache import Query, ShownCache

SHOWN_RANGES, SHOWN_GENERATIONS, SHOWN_SAMPLES = 200, 40, 50
FETCHED_SAMPLES = 4  # of a cache on another machine, of which each may need a chunk


class GenerationPoint(Record, frozen=True, kw_only=True):
    """One generation."""

    number: int
    rows: int
    bytes: int
    digest: str
    written: float | None = None  # seconds since 1970, by the clock of the store; None: unknown
    problem: str = ""  # why it cannot be read


class Health(Record, frozen=True, kw_only=True):
    """Completeness and health of a cache, from listings and headers."""

    state: str  # complete, building, incomplete, damaged or empty
    chunks: dict[str, int]  # state -> chunks of all layers
    headers_checked: int
    published: int
    command: str  # that is next; empty where nothing is to be done


class Gap(Record, frozen=True, kw_only=True):
    """The chunks of a layer that are not made yet."""

    layer: str
    missing: tuple[tuple[int, int], ...]  # the first and the last chunk of each range, in the order of a build
    chunks: int
    bytes: int | None  # that they will take, estimated from those that are made
    seconds: float | None  # at the pace of running builders, or of the chunks that exist


class Overview(Record, frozen=True, kw_only=True):
    """The first page of the viewer, in addition to the summary of `forebay info`."""

    health: Health
    gaps: tuple[Gap, ...]
    generations: tuple[GenerationPoint, ...]
    failures: int
    reasons: dict[str, int]
    failed_samples: tuple[FailedSample, ...]  # the first few


def overview(shown: ShownCache, query: Query) -> Overview:
    moment = shown.watch.snapshot()
    written = {layout.parse_generation(entry.key): entry.written for entry in shown.store.entries(layout.GENERATIONS)}
    numbers = sorted(number for number in written if number is not None)
    newest = newest_generation(shown.store)
    tables = newest.layers.values() if newest else ()
    most = SHOWN_SAMPLES if is_here(shown.store) else FETCHED_SAMPLES
    return Overview(
        health=_health(shown, moment),
        gaps=tuple(_gaps(shown, moment)),
        generations=tuple(_point(shown, number, written[number]) for number in numbers[-SHOWN_GENERATIONS:]),
        failures=sum(int(table.numbers["failures"].sum()) for table in tables),
        reasons=dict(sum((Counter(table.reasons()) for table in tables), Counter()).most_common()),
        failed_samples=tuple(islice(_failed_samples(shown, newest), most)) if newest else (),
    )


def _health(shown: ShownCache, moment: BuildMoment) -> Health:
    chunks: Counter[str] = sum((Counter(layer.counts) for layer in moment.map.layers), Counter())
    if chunks["lost"] or chunks["bad"]:
        state, command = "damaged", command_line("repair", shown.root)
    elif moment.live.running:
        state, command = "building", ""
    elif not moment.map.layers or moment.map.generation is None:
        state, command = "empty", ""
    elif chunks["missing"] or chunks["abandoned"] or chunks["made"]:
        state, command = "incomplete", command_line("status", shown.root)
    else:
        state, command = "complete", ""
    return Health(
        state=state,
        chunks=dict(chunks),
        headers_checked=sum(layer.headers_checked for layer in moment.map.layers),
        published=sum(layer.published for layer in moment.map.layers),
        command=command,
    )


def _gaps(shown: ShownCache, moment: BuildMoment) -> Iterator[Gap]:
    """The gaps as `forebay status` has them; the time is that of running builders, if there are any."""
    try:
        index = Index.take(shown.store)
        layers = cache_status(index, None, 0, "index").layers
    except ForebayError:  # the banner and the map show the damage
        return
    waits = {one.layer: one.eta_seconds for one in moment.live.builders if one.state == "working"}
    for layer in layers:
        if layer.missing:
            written = [entry.written for entry in shown.store.entries(index.folder(layer.layer) or "") if entry.written]
            pace = chunk_seconds(written)
            yield Gap(
                layer=layer.layer,
                missing=ranges(layer.missing)[:SHOWN_RANGES],
                chunks=len(layer.missing),
                bytes=layer.missing_bytes,
                seconds=waits.get(layer.layer) or (None if pace is None else pace * len(layer.missing)),
            )


def _point(shown: ShownCache, number: int, written: float | None) -> GenerationPoint:
    try:
        return msgspec.structs.replace(_known_point(shown, number), written=written)
    except (ForebayError, OSError) as error:
        return GenerationPoint(number=number, rows=0, bytes=0, digest="", written=written, problem=message_of(error))


@lru_cache(maxsize=1024)
def _known_point(shown: ShownCache, number: int) -> GenerationPoint:
    """A generation never changes, so it is read once."""
    generation = read_generation(shown.store, number, hmac_key())
    return GenerationPoint(
        number=number,
        rows=int(generation.table(generation.base).rows.sum()),
        bytes=sum(int(table.numbers["size"].sum()) for table in generation.layers.values()),
        digest=generation.digest,
    )


def _failed_samples(shown: ShownCache, newest: Generation) -> Iterator[FailedSample]:
    for layer, table in newest.layers.items():
        for at in table.numbers["failures"].nonzero()[0].tolist():
            record = table.record(at)
            with suppress(Damaged, OSError):
                for one in open_chunk(shown.store, newest.folder(layer), record).failures():
                    yield FailedSample(
                        layer=layer, chunk=record.chunk, sample=one.sample, reason=one.reason, detail=one.detail
                    )
