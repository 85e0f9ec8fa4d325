"""What teachers said of some rows, drawn over timesteps."""

from importlib import import_module
from typing import Any

import numpy as np

from forebay.cache.presence import presence_name
from forebay.cache.reader import Cache
from forebay.cli.records import TaughtSheet
from forebay.columns import Array
from forebay.teachers import SOL_STATS, Features
from forebay.teachers.recipe import T_BUCKETS


def timed_layers(cache: Cache) -> tuple[str, ...]:
    """The layers that hold features at timesteps."""
    return tuple(layer for layer in cache.generation.recipes if T_BUCKETS in cache.constants(layer))


def draw_taught(cache: Cache, rows: list[int], layers: tuple[str, ...], path: str) -> TaughtSheet:
    """Every column of the layers, row by row, in a PNG."""
    picture: Any = import_module("forebay.teachers.picture")  # which needs pillow
    taught = [_Taught(cache, layer, rows) for layer in layers]
    parts = [
        picture.Part(f"row {row:,} · {column}", values, layer.features.buckets, layer.names(column))
        for at, row in enumerate(rows)
        for layer in taught
        for column, values in layer.columns(at).items()
    ]
    picture.taught_picture(parts).save(path)
    return TaughtSheet(
        root=cache.root,
        generation=cache.generation.number,
        rows=len(cache),
        path=path,
        layers=layers,
        drawn=tuple(rows),
        absent={layer.features.layer: layer.absent(rows) for layer in taught},
    )


class _Taught:
    """Some rows of a timed layer, whole."""

    def __init__(self, cache: Cache, layer: str, rows: list[int]) -> None:
        self.features = Features(cache, layer)
        self._constants = cache.constants(layer)
        self._bits = presence_name(layer)
        stored = [column.name for column in cache.recipe(layer).columns]
        self._read = cache.read(np.array(rows, np.int64), [*stored, self._bits])

    def columns(self, at: int) -> dict[str, Array | None]:
        is_present = bool(self._read[self._bits][at])
        return {name: self._values(name, at) if is_present else None for name in self.features.columns}

    def names(self, column: str) -> tuple[str, ...]:
        """Of the numbers in a column, where they have names: Sol's statistics."""
        return SOL_STATS if column.endswith("_stats") and self.features.shape(column) == (len(SOL_STATS),) else ()

    def absent(self, rows: list[int]) -> tuple[int, ...]:
        return tuple(
            row for row, is_present in zip(rows, np.asarray(self._read[self._bits]), strict=True) if not is_present
        )

    def _values(self, name: str, at: int) -> Array:
        return self._read[name][at] if name in self._read else self._constants[name]
