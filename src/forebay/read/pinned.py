"""A pinned generation: whether it is the expected one, and the files of its chunks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import load_generation, open_chunk, published_record
from forebay.columns import Column
from forebay.errors import (
    ChunkMissing,
    NotFound,
    StateMismatch,
)
from forebay.format import layout
from forebay.format.chunk import ChunkRecord, chunk_corrupt
from forebay.format.chunk_file import ChunkFile
from forebay.format.generation import Generation
from forebay.store.base import Store, holds
from forebay.store.tiered import TieredStore


def load_pinned(
    store: Store,
    number: int | None,
    cache_id: str | None = None,
    min_generation: int | None = None,
    digest: str | None = None,
) -> Generation:
    """Return a generation, by default the newest; raise `StateMismatch` unless it is the one the caller expects."""
    generation = load_generation(store, number)
    if isinstance(store, TieredStore):  # which then need not read `cache.json`
        store.identify(generation.document.cache_id)
    _check_pins(store, generation, cache_id, min_generation, digest)
    return generation


def _check_pins(
    store: Store,
    generation: Generation,
    cache_id: str | None,
    min_generation: int | None,
    digest: str | None,
) -> None:
    found = generation.document.cache_id
    if cache_id is not None and found != cache_id:
        raise StateMismatch(
            f"the cache at '{store.address}' is not the pinned one: its cache_id is {found}, expected {cache_id}",
            hint=f"restore the expected cache, or change the pin (see `forebay info {store.address}`)",
        )
    if min_generation is not None and generation.number < min_generation:
        raise StateMismatch(
            f"the cache at '{store.address}' is not the pinned one: its generation is "
            f"{generation.number}, expected at least {min_generation}",
            hint=f"restore the expected cache, or change the pin (see `forebay info {store.address}`)",
        )
    if digest is not None and generation.digest != digest.lower():
        raise StateMismatch(
            f"the cache at '{store.address}' is not the pinned one: its digest is {generation.digest}, "
            f"expected {digest}",
            hint=f"restore the expected cache, or change the pin (see `forebay info {store.address}`)",
        )


def open_layer_chunk(
    store: Store, generation: Generation, chunks: NDArray[np.int64], layer: str, declared: tuple[Column, ...], at: int
) -> ChunkFile:
    """Open the chunk of a layer at a position and check it against the generation and the recipe."""
    record = record_at(store.address, generation, layer, int(chunks[at]))
    try:
        return open_chunk(store, generation.folder(layer), record, columns=declared, keyed=generation.tagged)
    except ChunkMissing as error:
        if holds(store, layout.generation(generation.number)):
            raise
        raise NotFound(
            f"chunk {record.chunk} of layer '{layer}' was removed together with generation {generation.number} of "
            f"'{store.address}'",
            hint="open the cache again, and keep generations in use (`forebay clean --keep-generations`)",
        ) from error


def record_at(root: str, generation: Generation, layer: str, chunk: int) -> ChunkRecord:
    record = published_record(generation, layer, chunk)
    if record is None:
        raise NotFound(
            f"layer '{layer}' of '{root}' has no chunk {chunk} in this generation",
            hint=f"finish its build, or open the cache with layers=['{layer}'] to see only the rows it has",
            layer=layer,
            chunk=chunk,
        )
    if layer != generation.base:
        below = published_record(generation, generation.base, chunk)
        if below is None or (below.ids, below.rows) != (record.base, record.rows):
            raise chunk_corrupt(root, layer, chunk, "it was built for other rows of the base layer")
    return record


def common_chunks(generation: Generation, layers: Sequence[str]) -> NDArray[np.int64]:
    base = generation.base
    chunks: NDArray[np.int64] = generation.table(base).chunks
    for layer in (name for name in layers if name != base):
        chunks = np.intersect1d(chunks, generation.table(layer).chunks, assume_unique=True)
    return chunks
