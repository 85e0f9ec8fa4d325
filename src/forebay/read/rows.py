"""Located rows as a table of columns: the only code that reads rows of several caches.

    RowReader(caches, ["tokens", Dequantized("latents", "latents_int8", "scale"), "row_id"]).read(located, coins)

    located ──by cache──▶ Cache.read ──▶ View.make, one after the other ──▶ merged in the order of `located`

A row that its cache or layer does not have is absent: floats are NaN, ragged rows are empty, and `<layer>.present` is
False. Integers and bools have no such value, so reading an absent one raises, unless `Filled` names a value.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import presence_name
from forebay.columns import Array, Columns, Ragged
from forebay.errors import ForebayError, not_found
from forebay.order.coins import Coins, row_keys, sample_keys
from forebay.order.selected_rows import Selection, sample_names
from forebay.order.shuffle import Numbers, Words, key_of
from forebay.read.cache import Cache
from forebay.read.columns import merged_rows
from forebay.read.views import Plan, View

Weights = NDArray[np.float32]
ROW_NAMES = ("row", "row_id")


class Located(NamedTuple):
    """Rows by cache and row number, with further per-row values of a batch."""

    rows: Numbers
    sources: Numbers | None = None  # index into the caches; None if there is one cache
    tags: Mapping[str, Numbers] = {}  # further entries of the batch, one number per row: dataset_id, local_index
    epochs: Numbers | None = None  # pass number of the row's own cache; None if it is the epoch
    weights: Weights | None = None  # 0 for a row that only fills a rank's batch; None if batches are never filled

    def part(self, some: slice | Numbers) -> "Located":
        """Return some of the rows."""
        sources = None if self.sources is None else self.sources[some]
        tags = {name: values[some] for name, values in self.tags.items()}
        epochs = None if self.epochs is None else self.epochs[some]
        return Located(self.rows[some], sources, tags, epochs, None if self.weights is None else self.weights[some])


@dataclass(frozen=True, slots=True, eq=False)
class RowViews:
    """The rows of a ragged column, iterable repeatedly: views of the cache, checked as they are read."""

    caches: Sequence[Cache]
    located: Located
    column: str

    def __len__(self) -> int:
        return len(self.located.rows)

    def __iter__(self) -> Iterator[Array]:
        rows, sources = self.located.rows, self.located.sources
        if sources is None:
            return self.caches[0].views(rows, self.column)
        views = {source: self.caches[source].views(rows[at], self.column) for source, at in by_source(self.located)}
        return (next(views[source]) for source in sources.tolist())


class Table(dict[str, Any]):
    """Rows of some columns: arrays, `Ragged`, or for columns read in place an iterable of views of the cache."""

    def __init__(self, columns: Mapping[str, Any], located: Located | None = None) -> None:
        super().__init__(columns)
        self.located = located

    @property
    def weights(self) -> Weights | None:
        """0 for a row that only fills a batch, else 1; None if batches are never filled."""
        return None if self.located is None else self.located.weights

    def part(self, start: int, stop: int) -> "Table":
        """Return some of the rows, without copying them."""
        assert self.located is not None
        located = self.located.part(slice(start, stop))
        return Table({name: _cut(values, start, stop, located) for name, values in self.items()}, located)


def _cut(values: Array | Ragged | RowViews, start: int, stop: int, located: Located) -> Array | Ragged | RowViews:
    if isinstance(values, RowViews):
        return RowViews(values.caches, located, values.column)
    if isinstance(values, Ragged):
        offsets = values.offsets[start : stop + 1]
        return Ragged(values.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
    return values[start:stop]


@dataclass(slots=True, eq=False)
class RowReader:
    """Reads columns of located rows: stored ones, views, and `row` and `row_id`, which name the rows.

    `viewed` columns are not copied: a table iterates over their rows in place.
    """

    caches: Sequence[Cache]
    columns: Sequence[str | View]
    viewed: Sequence[str] = ()
    like: Mapping[str, Array | Ragged] = field(init=False)  # every column without rows: its type
    _sources: list["_Source"] = field(init=False)

    def __post_init__(self) -> None:
        nothing, no_rows = Coins(0, 0, np.empty(0, np.uint64)), np.empty(0, np.int64)
        self._sources = [_Source.of(cache, self.columns) for cache in self.caches]
        empty = []
        for source in self._sources:
            plans = source.plans(nothing)
            empty.append(source.columns(no_rows, plans, source.cache.read(no_rows, source.names(plans))))
        for each in self.columns:
            if not any(source.has(each) for source in self._sources):
                raise _nowhere(each, self.caches[0])
        names = dict.fromkeys(name for columns in empty for name in columns)
        self.like = {name: _common(name, self.caches, empty) for name in names}
        for source, columns in zip(self._sources, empty, strict=True):
            self._check_lacking(source.cache, columns.keys() | source.lacking(nothing, self.like).keys())

    @property
    def stored(self) -> list[str]:
        """The stored columns that are read."""
        return list(dict.fromkeys(name for source in self._sources for name in (*source.requested, *source.inputs())))

    def read(self, located: Located, coins: Coins) -> Table:
        """Return rows as a table; `coins` are those of the rows."""
        viewed = {name: RowViews(self.caches, located, name) for name in self.viewed}
        pieces = []
        for number, at in by_source(located):
            source, rows, some = self._sources[number], located.rows, coins
            if len(self.caches) > 1:
                rows, some = rows[at], coins.part(at)
            plans = source.plans(some)
            columns = source.columns(rows, plans, source.cache.read(rows, source.names(plans)))
            if len(self.caches) == 1:
                return Table(columns | viewed, located)
            pieces.append((at, columns | source.lacking(some, self.like)))
        merged = {
            name: merged_rows([(at, part[name]) for at, part in pieces if name in part], len(located.rows), like)
            for name, like in self.like.items()
        }
        return Table(merged | viewed, located)

    def check(self, selections: Sequence[Selection | None]) -> None:
        """Raise where a selected row has no value for a column of integers; the rows of remote caches are not read."""
        for source, selection in zip(self._sources, selections, strict=True):
            cache, names = source.cache, source.integers
            if cache.is_remote or not names:
                continue
            for start, stop in pairwise(cache.chunk_starts.tolist()):
                rows = np.arange(start, stop)
                if selection is not None:
                    rows = rows[selection.mask(start, stop)]
                bits = cache.read(rows, [presence_name(cache.layer_of(name)) for name in names])
                _check_present(cache, names, rows, bits)

    def _check_lacking(self, cache: Cache, known: Set[str]) -> None:
        for name, like in ((name, like) for name, like in self.like.items() if name not in known):
            if not isinstance(like, Ragged) and like.dtype.kind in "biu" and not name.endswith(".present"):
                raise _no_integer(f"'{cache.root}' has no column '{name}'", name, like.dtype, "")


class _Source(NamedTuple):
    """The readers of one cache, looked up once, because a read takes about ten microseconds."""

    cache: Cache
    requested: list[str]  # stored columns that come as they are
    integers: list[str]  # of these, columns of layers whose rows must all be present
    views: list[View]
    lacking_views: list[View]  # of columns that the cache does not have
    named: list[str]  # of ROW_NAMES

    @classmethod
    def of(cls, cache: Cache, columns: Sequence[str | View]) -> "_Source":
        known, views, lacking = {*cache.columns}, list[View](), list[View]()
        for view in (each for each in columns if isinstance(each, View)):
            if known.issuperset(view.reads_of(cache)):
                views.append(view)
                known.add(view.name)  # later views may read what this one makes
            else:
                lacking.append(view)
        requested = [each for each in columns if isinstance(each, str) and each in cache.columns]
        plain = [name for name in requested if name not in {view.name for view in (*views, *lacking)}]
        layered = [name for name in plain if cache.layer_of(name) != cache.generation.base]
        integers = [name for name in layered if _is_integer(cache, name)]
        return cls(cache, requested, integers, views, lacking, [name for name in ROW_NAMES if name in columns])

    def has(self, column: str | View) -> bool:
        return column in self.views or column in self.cache.columns or column in ROW_NAMES

    def inputs(self) -> list[str]:
        """Return the stored columns that views read."""
        return [name for view in self.views for name in view.reads_of(self.cache) if name in self.cache.columns]

    def plans(self, coins: Coins) -> list[tuple[View, Plan]]:
        return [(view, view.plan(self.cache, coins)) for view in self.views]

    def names(self, plans: Sequence[tuple[View, Plan]]) -> list[str]:
        """Return the columns that are read whole."""
        reads = ((name, plan) for view, plan in plans for name in view.reads_of(self.cache))
        inputs = (name for name, plan in reads if name not in plan.slices and name in self.cache.columns)
        return [*self.requested, *inputs]

    def columns(
        self, rows: Numbers, plans: Sequence[tuple[View, Plan]], stored: dict[str, Array | Ragged]
    ) -> dict[str, Array | Ragged]:
        """Return the requested columns, with presence bits, and those of views."""
        cache = self.cache
        _check_present(cache, self.integers, rows, stored)
        read = {name: values for name, values in stored.items() if name in self.requested or name.endswith(".present")}
        for view, plan in plans:
            sliced = cache.read(rows, list(plan.slices), plan.slices) if plan.slices else {}
            read |= {name: values for name, values in sliced.items() if name.endswith(".present")}
            read |= view.make(cache, {**stored, **read, **sliced}, plan)
        return read | {name: _row_names(name, cache, rows) for name in self.named}

    def lacking(self, coins: Coins, like: Columns) -> dict[str, Array | Ragged]:
        """Return the views' values for rows of caches that lack their columns."""
        return {name: values for view in self.lacking_views for name, values in view.lacking(coins, like).items()}


def by_source(located: Located) -> list[tuple[int, Numbers]]:
    """Return each cache that rows come from, and the places of its rows."""
    if located.sources is None:
        return [(0, np.arange(len(located.rows)))]
    return [(source, np.flatnonzero(located.sources == source)) for source in np.unique(located.sources).tolist()]


def _nowhere(column: str | View, cache: Cache) -> ForebayError:
    names = (column,) if isinstance(column, str) else column.reads_of(cache)
    return not_found("column", next(name for name in names if name not in cache.columns), cache.root, cache.columns)


def _is_integer(cache: Cache, name: str) -> bool:
    column = cache.column(name)
    return not column.ragged and column.array_dtype.kind in "biu" and not name.endswith(".present")


def _row_names(name: str, cache: Cache, rows: Numbers) -> Numbers:
    """Return the numbers of rows, or their permanent names: (chunk, row in the chunk)."""
    if name == "row":
        return rows.copy()
    position = cache.chunk_positions(rows)
    return np.stack([cache.chunk_numbers[position], rows - cache.chunk_starts[position]], axis=1)


def _check_present(cache: Cache, names: Sequence[str], rows: Numbers, columns: Columns) -> None:
    for name in names:
        layer = cache.layer_of(name)
        present = np.asarray(columns[presence_name(layer)])
        if not present.all():
            absent = f"row {rows[~present][0]:,} of '{cache.root}' is absent from layer '{layer}'"
            raise _no_integer(absent, name, cache.column(name).array_dtype, f"selection=Present('{layer}'), or ")


def _no_integer(problem: str, name: str, dtype: np.dtype[Any], other: str) -> ValueError:
    return ValueError(
        f"{problem}, and '{name}' ({dtype}) has no value for absent rows; pass {other}Filled('{name}', value) in "
        "columns"
    )


def _common(name: str, caches: Sequence[Cache], empty: Sequence[Columns]) -> Array | Ragged:
    """Return a column without rows of the type that all caches' rows fit in."""
    pairs = [(cache, columns[name]) for cache, columns in zip(caches, empty, strict=True) if name in columns]
    first, *_ = arrays = [values.values if isinstance(values, Ragged) else values for _, values in pairs]
    for (cache, values), other in zip(pairs, arrays, strict=True):
        if other.shape != first.shape or isinstance(values, Ragged) != isinstance(pairs[0][1], Ragged):
            raise ValueError(
                f"rows of '{name}' are {first.dtype} {first.shape[1:]} in '{pairs[0][0].root}' and {other.dtype} "
                f"{other.shape[1:]} in '{cache.root}'; build the layer with the same options in both caches"
            )
    values = np.empty(first.shape, np.result_type(*arrays))
    return Ragged(values, np.zeros(1, np.int64)) if isinstance(pairs[0][1], Ragged) else values


def row_coins(caches: Sequence[Cache], seed: int, epoch: int, located: Located) -> Coins:
    """Return the coins of rows; the epoch of a mixture's row is the pass number of its cache."""
    epochs = epoch if located.epochs is None else located.epochs
    return Coins(seed, epochs, partial(_coin_names, caches, located), len(located.rows))


def _coin_names(caches: Sequence[Cache], located: Located) -> Words:
    """Return a permanent number per row; rows with the same name in two caches of a mixture have different ones."""
    names = np.empty(len(located.rows), np.uint64)
    for source, at in by_source(located):
        names[at] = row_hashes(caches[source], located.rows[at]) ^ np.uint64(key_of("source", source) if source else 0)
    return names


def row_hashes(cache: Cache, rows: Numbers) -> Words:
    """Return a number per row from its sample id, or from the row if the recipe names no column of sample ids."""
    column = cache.recipe(cache.generation.base).sample_ids
    if not column:
        chunks = cache.chunk_positions(rows)
        return row_keys(cache.chunk_numbers[chunks], rows - cache.chunk_starts[chunks])
    return sample_keys(sample_names(cache.read(rows, [column])[column]))
