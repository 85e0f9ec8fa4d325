"""One chunk: its published record, its source parts, and its rows."""

from forebay.cache.catalog import newest_generation
from forebay.cache.plan import load_plan
from forebay.errors import ForebayError
from forebay.read.cache import Cache
from forebay.records import Record
from forebay.viewer.shown_cache import Query, ShownCache

SHOWN_PARTS = 100


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
    sha256: str
    statistics: dict[str, object]
    claim: str
    problem: str
    parts: tuple[SourcePart, ...]


def chunk_detail(shown: ShownCache, query: Query) -> ChunkDetail:
    layer, chunk = query.text("layer"), query.whole("chunk")
    chunks = shown.watch.snapshot().map
    states = next((one.states for one in chunks.layers if one.layer == layer), "")
    if chunk >= len(states):
        raise IndexError(f"layer '{layer}' has no chunk {chunk}")
    newest = newest_generation(shown.store)
    table = newest.table(layer) if newest else None
    at = table.position(chunk) if table is not None else None
    record = table.record(at) if table is not None and at is not None else None
    claims = [claim for claim in chunks.claims if (claim.layer, claim.chunk) == (layer, chunk)]
    return ChunkDetail(
        layer=layer,
        chunk=chunk,
        state=states[chunk],
        first_row=_first_row(shown.at(), chunk) if record else None,
        rows=record.rows if record else 0,
        samples=record.samples if record else 0,
        failures=record.failures if record else 0,
        bytes=record.size if record else 0,
        sha256=record.sha256.hex() if record else "",
        statistics=dict(record.statistics) if record else {},
        claim=f"{claims[-1].host}, process {claims[-1].pid}, {claims[-1].state}" if claims else "",
        problem=shown.heads.bad.get((layer, chunk, record.sha256), "") if record else "",
        parts=chunk_parts(shown, chunk),
    )


def chunk_parts(shown: ShownCache, chunk: int) -> tuple[SourcePart, ...]:
    """The parts of source files that a chunk was made from; empty where the plan cannot be read."""
    try:
        parts = load_plan(shown.store).parts(chunk)
    except (ForebayError, OSError):
        return ()
    return tuple(SourcePart(path=part.file.path, start=part.start, stop=part.stop) for part in parts[:SHOWN_PARTS])


def _first_row(cache: Cache, chunk: int) -> int | None:
    at = cache.chunk_numbers.searchsorted(chunk)
    return int(cache.chunk_starts[at]) if at < len(cache.chunk_numbers) and cache.chunk_numbers[at] == chunk else None
