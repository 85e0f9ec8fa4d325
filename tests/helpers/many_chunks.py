"""A cache with an index of very many chunks, made in a second: a few real chunks, then a plan and a generation that
list as many more. Their files, if any, are links to one real chunk."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.helpers.cache_files import segment_of

import forebay as fb
from forebay.cache.catalog import load_generation
from forebay.cache.plan import load_plan
from forebay.format import layout
from forebay.format.generation import ChunkTable
from forebay.source import Part
from forebay.store import LocalStore

REAL = 40


def many_chunks(folder: Path, chunks: int, listed: int, files: int = 0) -> Path:
    """A cache with `chunks` planned and `listed` published; the first `files` have a file of the published size."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lines.txt").write_text("".join(f"line {number:06d}\n" for number in range(REAL)))
    root = folder / "cache"
    fb.build(root, fb.sources.lines(folder / "lines.txt"), fb.RawRecipe(chunk_bytes=12), workers=0)
    store = LocalStore(str(root))
    plan, newest = load_plan(store), load_generation(store)
    real, part = len(plan), plan.parts(0)[0]
    parts = [[Part(part.file, part.start, part.stop)]] * (chunks - real)
    more = segment_of(parts, number=1, first_chunk=real, source=plan.source, weight=12, previous=plan.last_digest)
    store.create(layout.plan_segment(1), more.encode())
    table = newest.table("raw")
    wide = ChunkTable(
        {name: _repeated(values, listed) for name, values in table.numbers.items()} | {"chunk": np.arange(listed)},
        {name: _repeated(values, listed) for name, values in table.digests.items()},
        {name: _repeated(values, listed) for name, values in table.statistics.items()},
    )
    published = load_plan(store).digests
    grown = replace(newest, number=newest.number + 1, layers={"raw": wide}, plan=published)
    store.create(layout.generation(grown.number), grown.encode(None))
    layer = newest.folder("raw")
    for number in range(real, files):
        os.link(root / layout.chunk(layer, number % real), root / layout.chunk(layer, number))
    return root


def _repeated(values: np.ndarray, count: int) -> np.ndarray:
    return np.resize(values, (count, *values.shape[1:]))
