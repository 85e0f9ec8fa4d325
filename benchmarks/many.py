"""A generation of 100,000 chunks: `make` writes one, `open` times opening it in a fresh process.

The chunks themselves are not written: opening a cache reads the generation alone.
"""

import hashlib
import sys
import time

import psutil

import forebay as fb
from benchmarks.numbers import NoiseRecipe, NumberSource
from forebay.cache.catalog import load_generation
from forebay.engine.base import peak_bytes
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable
from forebay.store import LocalStore

CHUNKS = 100_000


def make(root: str) -> None:
    fb.build(root, NumberSource(8), NoiseRecipe(width=8, chunk_rows=8), workers=0)
    store = LocalStore(root)
    newest = load_generation(store)
    table = ChunkTable.of(_record(chunk) for chunk in range(CHUNKS))
    grown = type(newest)(
        number=1,
        cache=newest.cache,
        recipes=newest.recipes,
        constants=newest.constants,
        plan=newest.plan,
        versions=newest.versions,
        layers={"noise": table},
    )
    store.create(layout.generation(1), grown.encode(None))


def open_it(root: str) -> None:
    fb.open_cache  # noqa: B018 — the import is not what is measured
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    cache = fb.open_cache(root)
    rows = len(cache)
    seconds = time.perf_counter() - started
    peak = peak_bytes() / 2**20
    verdict = "met" if seconds < 1 and peak < 150 else "MISSED"
    print(
        f"open a generation of {CHUNKS:,} chunks, {rows:,} rows: {seconds:.3f} s, peak RSS {peak:.0f} MB "
        f"({before / 2**20:.0f} MB before)  goal < 1 s, < 150 MB  {verdict}"
    )


def _record(chunk: int) -> ChunkRecord:
    digest = hashlib.sha256(chunk.to_bytes(8, "little")).digest()
    half = digest[:16]
    return ChunkRecord(
        chunk=chunk, rows=8000, samples=9000, failures=0, size=8_200_000, head_size=8192, head=half, sha256=digest,
        content=half, ids=half, base=bytes(16), statistics={"tokens": 4_000_000, "padding": 12_000},
    )  # fmt: skip


if __name__ == "__main__":
    {"make": make, "open": open_it}[sys.argv[1]](sys.argv[2])
