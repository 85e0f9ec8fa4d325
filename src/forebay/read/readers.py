"""The readers of all columns of a cache, and the maps of their files: made on first use, anew in a forked process."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Column
from forebay.errors import ForebayError
from forebay.format import layout
from forebay.format.codecs import MAX_BLOCK_BYTES
from forebay.read.blocks import BlockCache, Checks
from forebay.read.columns import ColumnReader, DictionaryReader, column_reader
from forebay.read.maps import MAX_MAPS, Maps
from forebay.read.pinned import LayerFiles
from forebay.store.base import Fetching, index_corrupt, is_url

DEFAULT_MEMORY = 256 * 1024 * 1024
IN_MEMORY_BYTES = 1 << 30  # of chunks of a layer, where their store has no files
Homes = Mapping[str, tuple[str, Column]]  # by column name: its layer, its declaration


@dataclass(frozen=True, slots=True)
class Options:
    """Options of reading; they do not change results."""

    memory: int = DEFAULT_MEMORY
    max_maps: int = MAX_MAPS
    max_block_bytes: int = MAX_BLOCK_BYTES


class ColumnReaders:
    """The readers of columns by name; `rows` has the number of rows of each chunk."""

    def __init__(
        self, homes: Homes, files: Mapping[str, LayerFiles], rows: NDArray[np.int64], options: Options
    ) -> None:
        self._homes, self._files, self._rows, self._options = homes, files, rows, options
        self.blocks = BlockCache(options.memory)
        self._maps: dict[str, Maps] = {}
        self._readers: dict[str, ColumnReader] = {}

    def reader(self, name: str) -> ColumnReader:
        reader = self._readers.get(name)
        if reader is None:
            layer, column = self._homes[name]
            files, maps, rows = self._files[layer], self.maps_of(layer), self._rows
            files.check_block_counts(column, rows)
            checks = Checks(column, rows, maps, (files.store.address, layer))
            reader = column_reader(column, maps, checks, self.blocks, self._options.max_block_bytes)
            if column.index:
                reader = DictionaryReader(column, reader, self._index_reader(name), checks, rows)
            reader = self._readers.setdefault(name, reader)
        return reader

    def maps_of(self, layer: str) -> Maps:
        if layer not in self._maps:
            files = self._files[layer]
            has_files = isinstance(files.store, Fetching)  # without a tier, chunks are in memory
            is_remote = has_files or is_url(files.store.address)
            is_passing = files.has_no_file if is_remote else None
            maps = Maps(len(self._rows), files.open, self._options.max_maps, is_passing=is_passing)
            if not has_files:
                maps.passing_bytes = IN_MEMORY_BYTES
            self._maps.setdefault(layer, maps)
        return self._maps[layer]

    def close_changed(self) -> None:
        """Close the maps of files that were cut short or removed."""
        for layer, maps in list(self._maps.items()):
            for position, file in maps.opened():
                is_same = False
                with suppress(ForebayError):  # something else is in its place
                    is_same = self._files[layer].has_size(position, len(file.view))
                if not is_same:
                    maps.close(position)

    def _index_reader(self, name: str) -> ColumnReader:
        layer, column = self._homes[name]
        home, index = self._homes.get(column.index, (None, None))
        if index is None or (home, index.dtype, index.shape, index.has_offsets) != (layer, "uint32", (), False):
            problem = f"the index '{column.index}' of column '{name}' is not a uint32 column of the same layer"
            raise index_corrupt(self._files[layer].store.address, layout.recipe(layer), problem)
        return self.reader(column.index)
