"""Every record of the viewer by the name in its URL, and how records become JSON of limited size.

/api/0/summary.json          what `forebay info --json` prints, for the first cache
/api/0/row.json?row=17       one row
/api/compare.json?a=0&b=1    two caches

The server and the static page read this one table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from forebay.api import info
from forebay.errors import ChunkCorrupt, Damaged, ForebayError, message_of
from forebay.kinds import WRONG
from forebay.preview.peek import peek
from forebay.records import Record, as_json
from forebay.viewer.chunk_detail import chunk_detail
from forebay.viewer.comparison import compare
from forebay.viewer.distribution import distribution
from forebay.viewer.image_rows import image_page, one_image
from forebay.viewer.overview import overview
from forebay.viewer.row_search import search_rows
from forebay.viewer.shown_cache import BadQuery, Endpoint, Query, ShownCache
from forebay.viewer.taught_rows import further_layers, taught_row
from forebay.viewer.token_rows import token_row
from forebay.viewer.training_order import job_statistics, training_order

MOST_PEEKED, MOST_TEXT = 2_000_000, 65_536  # characters of a peek, and of one text in it; a number counts as 8


def peek_record(shown: ShownCache, query: Query) -> object:
    """The record of `forebay peek --json` for one row; long values are cut."""
    return bounded(peek(shown.at(), [query.whole("row", 0)], source=shown.source))


@dataclass
class _Budget:
    left: int


def bounded(record: object, most: int = MOST_PEEKED) -> object:
    """Return a record as JSON values of limited size; `truncated` lists the cut values by path."""
    cut: list[str] = []
    plain = _bounded(msgspec.json.decode(as_json(record)), "", _Budget(most), cut)
    return {**plain, "truncated": cut} if isinstance(plain, dict) else plain


def _bounded(value: Any, name: str, budget: _Budget, cut: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _bounded(one, f"{name}.{key}" if name else key, budget, cut) for key, one in value.items()}
    if isinstance(value, list):
        return _bounded_list(value, name, budget, cut)
    if isinstance(value, str) and len(value) > min(MOST_TEXT, budget.left):
        length = min(MOST_TEXT, max(0, budget.left))
        budget.left -= length
        cut.append(f"{name}: the first {length:,} of {len(value):,} characters")
        return f"{value[:length]}… ({len(value) - length:,} more characters)"
    budget.left -= len(value) if isinstance(value, str) else 8
    return value


def _bounded_list(values: Sequence[Any], name: str, budget: _Budget, cut: list[str]) -> list[Any]:
    shown: list[Any] = []
    for at, one in enumerate(values):
        if budget.left <= 0 and at:
            cut.append(f"{name}: the first {at:,} of {len(values):,} values")
            break
        shown.append(_bounded(one, f"{name}[{at}]", budget, cut))
    return shown


Answer = TypeVar("Answer")


class RecordProblem(Record, frozen=True, kw_only=True):
    """Why a record cannot be made: damaged data is a fact to show, not a failure of the server."""

    error: str
    kind: str
    damaged: bool


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


ENDPOINTS: dict[str, Endpoint] = {
    "summary": lambda shown, query: info(shown.store),
    "peek": peek_record,
    "overview": overview,
    "chunks": lambda shown, query: shown.watch.snapshot().map,
    "chunk": chunk_detail,
    "build": lambda shown, query: shown.watch.snapshot().live,
    "row": token_row,
    "search": search_rows,
    "distribution": distribution,
    "images": image_page,
    "image": one_image,
    "teacher": taught_row,
    "training": training_order,
    "statistics": job_statistics,
}


def answer(shown: ShownCache, name: str, query: Query) -> object:
    """A record, or the problem that prevents it; raises `BadQuery` or `IndexError` if it does not exist."""
    return guarded(shown, lambda: ENDPOINTS[name](shown, query))


def compared(caches: Sequence[ShownCache], query: Query) -> object:
    return guarded(caches[0], lambda: compare(caches, query))


def guarded(shown: ShownCache, make: Callable[[], Answer]) -> Answer | RecordProblem:
    """Return the result of `make`, or a record of the problem."""
    try:
        return make()
    except (BadQuery, IndexError):
        raise
    except ForebayError as error:
        _remember(shown, error)
        return problem_of(error)
    except (OSError, *WRONG) as error:  # WRONG: an untrusted cache, whose values do not fit its recipe
        return problem_of(error)


def problem_of(error: Exception) -> RecordProblem:
    return RecordProblem(
        error=str(error) or type(error).__name__, kind=type(error).__name__, damaged=isinstance(error, Damaged)
    )


def _remember(shown: ShownCache, error: ForebayError) -> None:
    """A chunk with a damaged block is bad on the map from now on."""
    if not isinstance(error, ChunkCorrupt):
        return
    layer, chunk = error.facts["layer"], error.facts["chunk"]
    try:
        table = shown.at().generation.table(layer)
    except (ForebayError, OSError):
        return
    at = table.position(chunk)
    if at is not None:
        shown.heads.bad[layer, chunk, table.digests["sha256"][at].tobytes()] = error.message


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
        return CacheName(index=index, root=shown.root, kind="", layers={}, rows=0, chunks=0, problem=message_of(error))
