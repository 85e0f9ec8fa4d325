"""Estimating: what a build will take, judged by a small sample of the source, before anything is written."""

from math import ceil

from forebay.cache.cut import SAMPLE_WEIGHT, chunk_weight, try_recipe
from forebay.cache.records import Estimate
from forebay.errors import SourceNotFound
from forebay.recipe import Recipe
from forebay.source import Source
from forebay.store.base import Store

SAMPLED_SHARE = 0.04


def estimate_build(source: Source, recipe: Recipe, store: Store | None, workers: int) -> Estimate:
    """Sample at most 4 % of the source, and scale."""
    files = source.files()
    if not files:
        raise SourceNotFound(str(source.describe()))
    total = sum(map(source.weight, files))
    budget = max(1, min(SAMPLE_WEIGHT[source.unit], int(total * SAMPLED_SHARE)))
    trial = try_recipe(source, files, recipe, budget)
    chunks = max(1, ceil(total / chunk_weight(recipe.chunk_target(), trial, source.unit)))
    stored = round(trial.stored_bytes * total + chunks * trial.head_bytes)
    free = store.free_bytes() if store else None
    return Estimate(
        files=len(files),
        source_weight=total,
        unit=source.unit,
        sampled_weight=trial.weight,
        chunks=chunks,
        rows=round(trial.rows * total),
        raw_bytes=round(trial.raw_bytes * total),
        stored_bytes=stored,
        seconds=trial.seconds * total / workers,
        workers=workers,
        failures=round(trial.failures * total),
        free_bytes=free,
        fits=free is None or stored <= free,
    )
