"""The columns of located rows, batch by batch, from one cache or from several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.cache.place import cut_batches
from forebay.cache.reader import Cache
from forebay.columns import Array, Ragged
from forebay.order.bijection import Numbers
from forebay.torch.batch import Read
from forebay.torch.stream import Located


def gather_batches(
    caches: Sequence[Cache], located: Located, size: int, columns: Sequence[str] | None
) -> Iterator[Read]:
    """So many of the located rows at a time."""
    if located.sources is None:
        return caches[0].read_batches(located.rows, size, columns)
    return _from_many(caches, located.rows, located.sources, size, columns)


@dataclass(frozen=True, slots=True, eq=False)
class RowViews:
    """The rows of a ragged column, to be gone through as often as needed: views of the cache, checked as they come."""

    caches: Sequence[Cache]
    located: Located
    column: str

    def __len__(self) -> int:
        return len(self.located.rows)

    def __iter__(self) -> Iterator[Array]:
        rows, sources = self.located.rows, self.located.sources
        if sources is None:
            return self.caches[0].views(rows, self.column)
        views = {
            source: self.caches[source].views(rows[sources == source], self.column)
            for source in np.unique(sources).tolist()
        }
        return (next(views[source]) for source in sources.tolist())


def view_rows(caches: Sequence[Cache], located: Located, columns: Sequence[str]) -> dict[str, Array | RowViews]:
    """All located rows: of fixed columns an array, of ragged ones row by row."""
    fixed = [name for name in columns if not caches[0].column(name).ragged]
    (read,) = gather_batches(caches, located, max(1, len(located.rows)), fixed) if fixed else ({},)
    arrays = {name: values for name, values in read.items() if not isinstance(values, Ragged)}
    return arrays | {name: RowViews(caches, located, name) for name in columns if name not in fixed}


def _from_many(
    caches: Sequence[Cache], rows: Numbers, sources: Numbers, size: int, columns: Sequence[str] | None
) -> Iterator[Read]:
    present = np.unique(sources).tolist() or [0]
    read = [caches[source].read(rows[sources == source], columns) for source in present]
    at = np.argsort(np.argsort(sources, kind="stable"), kind="stable")  # where each row stands in what was read
    names = [name for name in read[0] if all(name in one for one in read)]
    dtypes = {name: np.result_type(*(cache.column(name).array_dtype for cache in caches)) for name in names}
    merged = {name: _merged([one[name] for one in read], at, dtypes[name]) for name in names}
    batches = [cut_batches(values, size) for values in merged.values()]
    yield from (dict(zip(merged, batch, strict=True)) for batch in zip(*batches, strict=True))


def _merged(pieces: list[Array | Ragged], at: Numbers, dtype: np.dtype[Any]) -> Array | Ragged:
    """Pieces one after the other, then in the order of the batch, of the type that holds the values of any cache."""
    if isinstance(pieces[0], Ragged):
        rows = [piece[row] for piece in pieces if isinstance(piece, Ragged) for row in range(len(piece))]
        return Ragged.of([rows[index] for index in at.tolist()], dtype, pieces[0].values.shape[1:])
    return np.concatenate([piece for piece in pieces if not isinstance(piece, Ragged)], dtype=dtype)[at]
