"""How far features read between two buckets are from what the teacher returns there.

buckets    .05     .15     .25           stored
middles        .10     .20               held out: the teacher is run there, and compared with the interpolation

With noise drawn for each bucket, the teacher gets a new draw at a middle: the error includes what draws change.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from forebay.cache.records import Record
from forebay.columns import Array
from forebay.read.cache import Cache
from forebay.teachers.recipe import TeacherRecipe

SAMPLED_CHUNKS = 4  # chunks from which rows are recomputed


class InterpolationError(Record, frozen=True, kw_only=True):
    """The relative error |interpolated − computed| / |computed| of one column, halfway between buckets."""

    layer: str
    column: str
    rows: int  # on which it was measured
    error: float  # over all middles
    worst: float  # at one of them
    worst_t: float

    def __str__(self) -> str:
        return (
            f"interpolation error of '{self.column}' halfway between buckets: {self.error:.1%}, at most "
            f"{self.worst:.1%} at t = {self.worst_t:g} ({self.rows:,} rows)"
        )


def sampled_rows(cache: Cache, most: int) -> Iterator[range]:
    """Yield the first rows of a few chunks spread over the cache; first rows hold the shared values of later ones."""
    chunks = len(cache.chunk_numbers)
    chosen = sorted({round(at) for at in np.linspace(0, chunks - 1, min(chunks, most, SAMPLED_CHUNKS))})
    for turn, position in enumerate(chosen):
        share = (most * (turn + 1)) // len(chosen) - (most * turn) // len(chosen)
        start, stop = cache.chunk_starts[position : position + 2].tolist()
        yield range(start, min(stop, start + share))


def interpolation_errors(
    layer: str, recipe: TeacherRecipe, cache: Cache, most_rows: int
) -> tuple[InterpolationError, ...]:
    """Run a timed teacher on some rows of a cache, at its buckets and halfway between them, and compare."""
    if not recipe.model.timed or recipe.model.depends_on == "nothing" or len(recipe.buckets) < 2:
        return ()
    middles = tuple((low + high) / 2 for low, high in pairwise(recipe.buckets))
    # Chunk by chunk: values that are stored once for equal prompts are at rows of their chunk.
    given = (cache.read(rows, recipe.reads) for rows in sampled_rows(cache, most_rows))
    made = _joined(recipe.run_at((*recipe.buckets, *middles), rows) for rows in given)
    return tuple(_errors(layer, made, np.array(middles), len(recipe.buckets)))


def _joined(parts: Iterable[dict[str, Array]]) -> dict[str, Array]:
    found = [part for part in parts if part]
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]} if found else {}


def _errors(layer: str, made: dict[str, Array], middles: Array, buckets: int) -> Iterator[InterpolationError]:
    for column, values in made.items():
        wide = values.astype(np.float64).reshape(len(values), buckets + len(middles), -1)
        nodes, computed = wide[:, :buckets], wide[:, buckets:]
        apart = np.square((nodes[:, :-1] + nodes[:, 1:]) / 2 - computed).sum(axis=(0, 2))
        size = np.square(computed).sum(axis=(0, 2))
        if not len(values) or not size.all():
            continue
        each = np.sqrt(apart / size)
        yield InterpolationError(
            layer=layer,
            column=column,
            rows=len(values),
            error=float(np.sqrt(apart.sum() / size.sum())),
            worst=float(each.max()),
            worst_t=float(middles[each.argmax()]),
        )
