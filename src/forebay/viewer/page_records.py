"""Every record of the viewer by the name that its URL has, and how records become JSON.

/api/0/summary.json          what `forebay info --json` prints, of the first cache
/api/0/row.json?row=17       one row
/api/compare.json?a=0&b=1    two caches

The server and the static bundle read this one table.
"""

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from forebay.cache.records import Record
from forebay.errors import ChunkCorrupt, Damaged, ForebayError
from forebay.kinds import WRONG
from forebay.viewer.chunk_map import ChunkMap
from forebay.viewer.live_build import LiveBuild
from forebay.viewer.overview import chunk_detail, compare, gaps_record, overview, status_record, summary_record
from forebay.viewer.picture_rows import further_layers, image_page, one_image, taught_row
from forebay.viewer.row_search import find_source, peek_record, search_chunk
from forebay.viewer.shown_cache import BadQuery, Endpoint, Query, ShownCache, pages_lost
from forebay.viewer.token_rows import token_row
from forebay.viewer.training_order import job_statistics, remote_record, training_order

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


def as_json(record: object) -> bytes:
    """Records as JSON; names of files that are not UTF-8 have lone surrogates, which are escaped."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(record)).encode()
