"""A column of a cache that looks like the tensor the document held in memory: a shape, a type, and indexing."""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forebay.cache.reader import Cache
from forebay.columns import Array, Columns, Ragged
from forebay.teachers.prompt_columns import SharedColumn
from forebay.teachers.samples import HOLDER
from forebay.torch.arrays import to_array, to_tensor

Index = Tensor | ArrayLike | slice


class StoredColumn:
    """Rows are read when they are asked for: `column[rows]`, or `column[rows, buckets]` of a timed one.

    Rows are a tensor or list of numbers, one number, or a slice. Absent rows are NaN.
    """

    def __init__(self, cache: Cache, name: str) -> None:
        self._cache, self._name = cache, name

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._cache), *self._cache.column(self._name).shape))

    @property
    def dtype(self) -> torch.dtype:
        return to_tensor(np.empty(0, self._cache.column(self._name).array_dtype)).dtype

    def __len__(self) -> int:
        return len(self._cache)

    def __getitem__(self, index: Index | tuple[Index, Tensor | ArrayLike]) -> Tensor:
        rows, buckets = index if isinstance(index, tuple) else (index, None)
        numbers = np.arange(len(self))[rows] if isinstance(rows, slice) else to_array(rows)
        if numbers.ndim == 0:
            return self[(numbers[None], buckets)][0]
        return self.read(numbers) if buckets is None else self._at(numbers, to_array(buckets))

    def _at(self, rows: Array, buckets: Array) -> Tensor:
        starts = np.broadcast_to(buckets, rows.shape).astype(np.int64)
        read = self._cache.read_slices(rows, [self._name], starts, 1)
        return self._marked(to_tensor(np.asarray(read.pop(self._name))[:, 0]), read)

    def read(self, rows: Tensor | ArrayLike) -> Tensor:
        """Some rows, each with its own values, also where equal ones are stored once."""
        numbers = to_array(rows)
        holder = f"{self._name}{HOLDER}"
        is_shared = holder in self._cache.columns
        read = self._cache.read(numbers, [holder if is_shared else self._name])
        found = SharedColumn(self._cache, self._name).read(numbers) if is_shared else read[self._name]
        if isinstance(found, Ragged):
            raise TypeError(f"'{self._name}' is ragged; its rows are no tensor")
        return self._marked(to_tensor(found), {name: read[name] for name in read.keys() - {holder, self._name}})

    def _marked(self, values: Tensor, bits: Columns) -> Tensor:
        """Floats, with NaN where the presence bits of the layer say that a row is absent."""
        if values.is_floating_point():
            for present in bits.values():
                values[~torch.from_numpy(np.asarray(present))] = torch.nan
        return values
