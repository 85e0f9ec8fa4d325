"""The rows of a few blocks of chunks that are far away: heads and blocks are fetched, the rest of a chunk is not.

    chunk     │ head │ block 0 │ block 1 │ block 2 │ … │ block 63 │
    fetched    ██████           █████████                               what was not fetched is zero, takes no memory
                                                                        and does not match its checksum

A first batch takes its rows from many chunks. It need not wait until all of them have arrived.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import checked_chunk, expected
from forebay.columns import Column
from forebay.errors import ForebayError
from forebay.format.chunk import ChunkRecord
from forebay.format.chunk_decode import ChunkFile
from forebay.read.cache import Cache
from forebay.read.chunk_maps import by_position, opening
from forebay.store.base import Missing, Store
from forebay.store.tiered import TieredStore

LEAST_BYTES = 8 << 20  # of chunks; fewer arrive as soon
MOST_BYTES = 8 << 30  # of chunks, as a generation says: so much address space is reserved
MOST_SHARE = 1 / 8  # of their bytes: so much is fetched, and takes memory
THREADS = 32
_NEAR_BYTES = 64 << 10  # between two ranges that are fetched as one


class _Wanted(NamedTuple):
    """A chunk that is not here, and what is wanted of it."""

    layer: str
    position: int
    record: ChunkRecord
    blocks: list[tuple[Column, list[int]]]

    @property
    def estimated_bytes(self) -> int:
        shares = [len(blocks) * column.block_rows / max(1, self.record.rows) for column, blocks in self.blocks]
        return self.record.head_size + int(max(shares) * self.record.size)

    def ranges(self, file: ChunkFile) -> list[tuple[int, int]]:
        """The ranges of the wanted blocks; those near each other are one."""
        spans: list[tuple[int, int]] = []
        for column, blocks in self.blocks:
            bounds = file.block_bounds(column.name)
            spans += [(int(bounds[block]), int(bounds[block + 1])) for block in blocks]
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if merged and start - merged[-1][1] <= _NEAR_BYTES:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return merged


class _Sparse:
    """A chunk in memory of which some ranges are there."""

    def __init__(self, store: Store, wanted: _Wanted) -> None:
        self._store, self.wanted = store, wanted
        self._memory = np.zeros(wanted.record.size, np.uint8)

    def fetch(self, span: tuple[int, int]) -> None:
        piece = np.frombuffer(self._store.read(self.wanted.record.key(self.wanted.layer), *span), np.uint8)
        self._memory[span[0] : span[0] + len(piece)] = piece

    def opened(self, cache: Cache) -> ChunkFile:
        """The chunk, once its head was fetched."""
        layer, view = self.wanted.layer, self._memory.data.toreadonly()
        return checked_chunk(view, cache.root, layer, self.wanted.record, columns=cache.declared(layer))


def sparse_cache(cache: Cache, rows: NDArray[np.int64], columns: Sequence[str]) -> Cache | None:
    """The same cache, to read these rows and columns of it without fetching whole chunks; None if that is not faster.

    Blocks are checked as everywhere. A chunk of which a range is bad, and rows that were not asked for, are read
    from the whole chunk.
    """
    wanted = _wanted(cache, rows, columns)
    total = sum(each.record.size for each in wanted)
    most = int(MOST_SHARE * total)
    if not LEAST_BYTES <= total <= MOST_BYTES or sum(each.estimated_bytes for each in wanted) > most:
        return None
    try:
        with opening():
            files = _fetched(cache, wanted, most)
            return None if files is None else cache.with_files(files)
    except (ForebayError, Missing, OSError):
        return None  # whoever reads the whole chunk meets the error, or does not


def _fetched(cache: Cache, wanted: list[_Wanted], most: int) -> dict[tuple[str, int], ChunkFile] | None:
    """Chunks with their heads and wanted blocks, in two round trips; None where these have more than `most` bytes."""
    chunks = [_Sparse(cache.store, each) for each in wanted]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda chunk: chunk.fetch((0, chunk.wanted.record.head_size)), chunks))
        files = [chunk.opened(cache) for chunk in chunks]
        ranges = [
            (chunk, each) for chunk, file in zip(chunks, files, strict=True) for each in chunk.wanted.ranges(file)
        ]
        if sum(stop - start for _, (start, stop) in ranges) > most:
            return None
        list(pool.map(lambda each: each[0].fetch(each[1]), ranges))
    return {(each.layer, each.position): file for each, file in zip(wanted, files, strict=True)}


def _wanted(cache: Cache, rows: NDArray[np.int64], columns: Sequence[str]) -> list[_Wanted]:
    """The chunks of some rows that are not on this machine; none where a key asks for the whole of a chunk."""
    if not cache.is_remote or cache.generation.tagged:
        return []
    positions, found = cache.chunk_positions(rows), []
    for layer, read in cache.columns_by_layer(columns).items():
        for position, here in by_position(positions):
            record, places = cache.record(layer, position), rows[here] - cache.chunk_starts[position]
            if record.head_size <= record.size and not _is_here(cache.store, record):
                blocks = [(column, np.unique(places // column.block_rows).tolist()) for column in read]
                found.append(_Wanted(layer, position, record, blocks))
    return found


def _is_here(store: Store, record: ChunkRecord) -> bool:
    return isinstance(store, TieredStore) and store.has_copy(expected(record))
