"""Every record of the viewer by the name that its URL has, how records become JSON, and the search for rows.

/api/0/summary.json          what `forebay info --json` prints, of the first cache
/api/0/row.json?row=17       one row
/api/compare.json?a=0&b=1    two caches

The server and the static bundle read this one table.

A search goes from a text, a source file or a line to the rows that have it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec
import numpy as np

from forebay.building.grow_cache import named_alike
from forebay.cache.plan import Plan, load_plan
from forebay.cache.records import Record
from forebay.columns import Array
from forebay.errors import ChunkCorrupt, Damaged, ForebayError
from forebay.kinds import WRONG
from forebay.preview.peek import PieceNames, peek
from forebay.read.cache import Cache
from forebay.source import Part, Sample
from forebay.tokens.vocabulary import in_time, reference_tokenizer
from forebay.viewer.live_build import ChunkMap, LiveBuild
from forebay.viewer.overview import chunk_detail, compare, gaps_record, overview, status_record, summary_record
from forebay.viewer.picture_rows import further_layers, image_page, one_image, taught_row
from forebay.viewer.shown_cache import BadQuery, Endpoint, Query, ShownCache, pages_lost
from forebay.viewer.token_rows import NO_TEXT, token_row, vocabulary_of
from forebay.viewer.training_order import job_statistics, remote_record, training_order

MOST_HITS, MOST_SEARCHED, MOST_ROWS = 200, 8_000_000, 50  # hits of a search, tokens that it decodes, peeked rows
DECODED_AT_ONCE = 1 << 18  # tokens of a search that are in memory
MOST_READ = 256 << 20  # bytes of a source file that a line is looked for in


class Hit(Record, frozen=True, kw_only=True):
    row: int
    row_in_chunk: int
    before: str
    match: str
    after: str


class SearchResult(Record, frozen=True, kw_only=True):
    chunk: int
    text: str
    hits: tuple[Hit, ...]
    rows_searched: int
    rows_in_chunk: int
    note: str = ""


class SourceRows(Record, frozen=True, kw_only=True):
    """Rows that were made from a source file."""

    path: str
    chunk: int
    start: int
    stop: int
    first_row: int | None
    exact: bool = False  # the row of the named sample itself


def search_chunk(shown: ShownCache, query: Query) -> SearchResult:
    """Rows of a chunk whose text has some words, whatever their case."""
    cache, chunk, wanted = shown.at(query.some("generation")), query.whole("chunk"), query.text("text")[:200]
    at = int(cache.chunk_numbers.searchsorted(chunk))
    if at >= len(cache.chunk_numbers) or cache.chunk_numbers[at] != chunk:
        raise IndexError(f"no row is of chunk {chunk}")
    first, last = int(cache.chunk_starts[at]), int(cache.chunk_starts[at + 1])
    width = int(cache.recipe(cache.generation.base).fields["sequence_length"])
    last_searched = min(last, first + max(1, MOST_SEARCHED // max(1, width)))
    try:
        texts = enumerate(_texts(cache, first, last_searched, max(1, DECODED_AT_ONCE // max(1, width))))
        hits = [hit for number, text in texts for hit in _hits(text, wanted, first + number, number)]
    except NO_TEXT as error:
        return SearchResult(
            chunk=chunk, text=wanted, hits=(), rows_searched=0, rows_in_chunk=last - first, note=str(error)
        )
    return SearchResult(
        chunk=chunk,
        text=wanted,
        hits=tuple(hits[:MOST_HITS]),
        rows_searched=last_searched - first,
        rows_in_chunk=last - first,
        note=f"the first {MOST_HITS} of {len(hits):,} hits" if len(hits) > MOST_HITS else "",
    )


def _texts(cache: Cache, first: int, last: int, step: int) -> Iterator[str]:
    """The texts of rows, `step` rows in memory at a time."""
    vocabulary = vocabulary_of(cache)
    tokenizer = reference_tokenizer(vocabulary)
    for start in range(first, last, step):
        used = _used_tokens(cache, np.arange(start, min(last, start + step)))
        decode = partial(tokenizer.decode_batch, used)
        yield from in_time(vocabulary.name, "decode", sum(map(len, used)), decode)


def _used_tokens(cache: Cache, rows: Array) -> list[list[int]]:
    """The tokens of rows without padding; of a preference, the prompt and all candidates."""
    names = ["tokens", "seq_lens"] if "tokens" in cache.columns else ["prompt", "candidates"]
    read = cache.read(rows, names)
    pairs = zip(_each(read[names[0]]), _each(read[names[1]]), strict=True)
    if names[0] == "tokens":
        return [row[: int(lengths.sum())].tolist() for row, lengths in pairs]
    return [[*prompt.tolist(), *candidates.tolist()] for prompt, candidates in pairs]


def _each(ragged: Any) -> Sequence[Array]:
    return [ragged[at] for at in range(len(ragged))]


def _hits(text: str, wanted: str, row: int, row_in_chunk: int) -> list[Hit]:
    """The first place in a row."""
    at = text.lower().find(wanted.lower()) if wanted else -1
    if at < 0:
        return []
    stop = at + len(wanted)
    return [
        Hit(
            row=row,
            row_in_chunk=row_in_chunk,
            before=text[max(0, at - 40) : at],
            match=text[at:stop],
            after=text[stop : stop + 40],
        )
    ]


def find_source(shown: ShownCache, query: Query) -> list[SourceRows]:
    """Where the rows of a source file are: `path`, `path@offset` as ids of samples are, or `path:line`.

    A line is found by reading the source, if the user passed it.
    """
    cache = shown.at(query.some("generation"))
    plan = load_plan(shown.store).first(len(cache.generation.plan))
    name, sign, number = _parsed(query.text("path"), plan.files)
    places = [
        SourceRows(path=name, chunk=chunk, start=start, stop=stop, first_row=_row_of(cache, chunk))
        for chunk, _, start, stop in plan.places_of(name)
    ]
    offset = number if sign == "@" else _offset_of_line(shown, plan, name, number) if sign == ":" else None
    if offset is not None:
        places = [place for place in places if place.start <= offset < place.stop]
    exact = _exact_row(cache, shown, [f"{name}@{offset}", name], places) if places else None
    return [exact] if exact and offset is not None else [*([exact] if exact else []), *places[:100]]


_NUMBERED = re.compile(r"(.+)([@:])(\d{1,15})")


def _parsed(wanted: str, known: Mapping[str, object]) -> tuple[str, str, int]:
    """The name of a planned file, and what follows it: a sign and a number."""
    if wanted in known:
        return wanted, "", 0
    found = _NUMBERED.fullmatch(wanted)
    path = found[1] if found else wanted
    name = path if path in known else next((one for one in known if path and one.endswith(path)), "")
    return (name, found[2], int(found[3])) if found else (name, "", 0)


def _offset_of_line(shown: ShownCache, plan: Plan, name: str, line: int) -> int | None:
    """Where a line of a file begins, counted in its samples; None where the source was not passed or is another."""
    if shown.source is None or line < 1:
        return None
    try:
        source, file = named_alike(shown.source, plan), plan.files[name]
        samples = source.read(Part(file, 0, min(file.size, MOST_READ)))
        sample = next(islice(samples, line - 1, None), None)
    except (ForebayError, OSError, KeyError):
        return None
    place = sample.id.rpartition("@")[2] if isinstance(sample, Sample) else ""
    return int(place) if place.isdecimal() else None


def _row_of(cache: Cache, chunk: int) -> int | None:
    at = int(cache.chunk_numbers.searchsorted(chunk))
    listed = at < len(cache.chunk_numbers) and cache.chunk_numbers[at] == chunk
    return int(cache.chunk_starts[at]) if listed else None


def _exact_row(cache: Cache, shown: ShownCache, names: list[str], places: list[SourceRows]) -> SourceRows | None:
    """The row of a named sample: by the ids that the cache keeps, or by the source that the user passed."""
    column = cache.recipe(cache.generation.base).sample_ids
    for place in places[:20]:
        if place.first_row is None:
            continue
        at = int(cache.chunk_numbers.searchsorted(place.chunk))
        rows = np.arange(cache.chunk_starts[at], cache.chunk_starts[at + 1])
        found = _by_id(cache, column, rows, names) if column else _by_document(cache, shown, place.chunk, rows, names)
        if found is not None:
            return msgspec.structs.replace(place, first_row=found, exact=True)
    return None


def _by_id(cache: Cache, column: str, rows: Array, names: list[str]) -> int | None:
    wanted = {name.encode("utf-8", "surrogateescape") for name in names}
    ids = cache.read(rows, [column])[column]
    return next((int(row) for row, one in zip(rows, _each(ids), strict=True) if one.tobytes() in wanted), None)


def _by_document(cache: Cache, shown: ShownCache, chunk: int, rows: Array, names: list[str]) -> int | None:
    if shown.source is None:
        return None
    documents = _each(cache.read(rows, ["documents"])["documents"])
    numbers = sorted({int(one) for each in documents for one in each[:, 0]})
    ids = PieceNames(cache, shown.source).of(chunk, numbers)
    wanted = {number for number, name in ids.items() if name in names}
    return next(
        (int(row) for row, each in zip(rows, documents, strict=True) if wanted & set(each[:, 0].tolist())), None
    )


def peek_record(shown: ShownCache, query: Query) -> object:
    """The record of `forebay peek --json`, with `row` repeated, or the first `rows`."""
    chosen = query.wholes("row")[:MOST_ROWS]
    return peek(shown.at(query.some("generation")), chosen or query.whole("rows", 3, MOST_ROWS), source=shown.source)


Made = TypeVar("Made")


class RecordProblem(Record, frozen=True, kw_only=True):
    """Why a record cannot be made: damaged data is a fact to show, not a failure of the server."""

    error: str
    kind: str
    damaged: bool
    layer: str = ""
    chunk: int = -1


class CacheName(Record, frozen=True, kw_only=True):
    index: int
    root: str
    kind: str  # of the base layer; empty where nothing is published
    layers: dict[str, str]  # layer -> kind
    rows: int
    chunks: int
    generations: tuple[int, ...] = ()
    taught: tuple[str, ...] = ()  # layers above the base, those over timesteps first
    problem: str = ""


def chunks_record(shown: ShownCache, query: Query) -> ChunkMap:
    return shown.watch.snapshot().map


def live_record(shown: ShownCache, query: Query) -> LiveBuild:
    return shown.watch.snapshot().live


ENDPOINTS: dict[str, Endpoint] = {
    "summary": summary_record,
    "status": status_record,
    "gaps": gaps_record,
    "peek": peek_record,
    "overview": overview,
    "chunks": chunks_record,
    "chunk": chunk_detail,
    "build": live_record,
    "row": token_row,
    "search": search_chunk,
    "find": find_source,
    "images": image_page,
    "image": one_image,
    "teacher": taught_row,
    "training": training_order,
    "remote": remote_record,
    "statistics": job_statistics,
}


def answer(shown: ShownCache, name: str, query: Query) -> object:
    """A record, or the problem that is in its way; raises `BadQuery` and `IndexError` for what does not exist."""
    return guarded(shown, lambda: ENDPOINTS[name](shown, query))


def compared(caches: Sequence[ShownCache], query: Query) -> object:
    return guarded(caches[0], lambda: compare(caches, query))


def guarded(shown: ShownCache, make: Callable[[], Made]) -> Made | RecordProblem:
    """What `make` returns, or the problem that is in its way."""
    lost = pages_lost()
    made = _attempted(shown, make)
    if lost == pages_lost() or isinstance(made, RecordProblem):
        return made
    cut = f"a file of '{shown.root}' was cut short while it was read; run `forebay verify`, then `forebay repair`"
    return RecordProblem(error=cut, kind="Damaged", damaged=True)


def _attempted(shown: ShownCache, make: Callable[[], Made]) -> Made | RecordProblem:
    try:
        return make()
    except (BadQuery, IndexError):
        raise
    except ForebayError as error:
        _remember(shown, error)
        return problem_of(error)
    except (OSError, *WRONG) as error:  # WRONG: a stranger's cache, whose values are not what its recipe says
        return problem_of(error)


def problem_of(error: Exception) -> RecordProblem:
    return RecordProblem(
        error=str(error) or type(error).__name__,
        kind=type(error).__name__,
        damaged=isinstance(error, Damaged),
        layer=error.layer if isinstance(error, ChunkCorrupt) else "",
        chunk=error.chunk if isinstance(error, ChunkCorrupt) else -1,
    )


def _remember(shown: ShownCache, error: ForebayError) -> None:
    """A chunk with a damaged block is bad on the map from now on."""
    if not isinstance(error, ChunkCorrupt):
        return
    try:
        table = shown.at().generation.table(error.layer)
    except (ForebayError, OSError):
        return
    at = table.position(error.chunk)
    if at is not None:
        shown.heads.report(error.layer, error.chunk, table.digests["sha256"][at].tobytes(), str(error))


def cache_names(caches: Sequence[ShownCache]) -> list[CacheName]:
    return [_named(index, shown) for index, shown in enumerate(caches)]


def _named(index: int, shown: ShownCache) -> CacheName:
    try:
        cache = shown.at()
        recipes = {layer: cache.recipe(layer).kind for layer in cache.generation.recipes}
        return CacheName(
            index=index,
            root=shown.root,
            kind=recipes[cache.generation.base],
            layers=recipes,
            rows=len(cache),
            chunks=len(cache.chunk_numbers),
            generations=tuple(shown.generations()),
            taught=further_layers(cache),
        )
    except (ForebayError, OSError, *WRONG) as error:
        return CacheName(index=index, root=shown.root, kind="", layers={}, rows=0, chunks=0, problem=str(error))
