"""A column of a cache that looks like the tensor the document held in memory: a shape, a type, and indexing."""

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forebay.cache.reader import Cache
from forebay.columns import Ragged
from forebay.teachers.prompt_columns import SharedColumn
from forebay.teachers.samples import HOLDER
from forebay.torch.arrays import to_array, to_tensor


class StoredColumn:
    """Rows are read when they are asked for: `column[rows]`, or `column[rows, buckets]` of a timed one."""

    def __init__(self, cache: Cache, name: str) -> None:
        self._cache, self._name = cache, name

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._cache), *self._cache.column(self._name).shape))

    def __len__(self) -> int:
        return len(self._cache)

    def __getitem__(self, index: object) -> Tensor:
        if isinstance(index, tuple):
            rows, buckets = index
            read = self._cache.read_slices(to_array(rows), [self._name], to_array(buckets), 1)
            return to_tensor(np.asarray(read[self._name])[:, 0])
        return self.read(index)  # type: ignore[arg-type]  # what it is not, numpy says

    def read(self, rows: Tensor | ArrayLike) -> Tensor:
        """Some rows, each with its own values, also where equal ones are stored once; absent rows are NaN."""
        numbers = to_array(rows)
        holder = f"{self._name}{HOLDER}"
        is_shared = holder in self._cache.columns
        read = self._cache.read(numbers, [holder if is_shared else self._name])
        found = SharedColumn(self._cache, self._name).read(numbers) if is_shared else read[self._name]
        if isinstance(found, Ragged):
            raise TypeError(f"'{self._name}' is ragged; its rows are no tensor")
        values = to_tensor(found)
        for name, bits in read.items():
            if name not in (holder, self._name) and values.is_floating_point():  # the presence bits of the layer
                values[~torch.from_numpy(np.asarray(bits))] = torch.nan
        return values
