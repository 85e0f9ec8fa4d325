"""The calls that tie the rooms together: `build`, `grow`, `repair`, `estimate` and their kin.

Everything here takes the root of a cache (a folder's path or a store) and answers with a record.
"""

import os
import socket
from collections.abc import Callable
from typing import Literal, cast

from forebay.cache.build import Terms
from forebay.cache.claim import LEASE_SECONDS
from forebay.cache.crew import Engine
from forebay.cache.making import Workplace, base_workplace, build_chunks, in_order, layer_workplace
from forebay.cache.prepare import prepare_base, prepare_layer
from forebay.cache.publish import builder_versions
from forebay.cache.records import BuildReport, Progress
from forebay.engine import InlineEngine, LocalEngine
from forebay.errors import RecipeInvalid
from forebay.recipe import AnyRecipe, LayerRecipe, Recipe, reads_of, versions_of
from forebay.source import Source
from forebay.store import Store, open_store
from forebay.store.opening import Root

OnProgress = Callable[[Progress], None]
Mode = Literal["forward", "inverse"]


def build(
    root: Root,
    source: Source | None,
    recipe: AnyRecipe,
    *,
    layer: str | None = None,
    workers: int | None = None,
    mode: Mode = "forward",
    start_chunk: int | None = None,
    end_chunk: int | None = None,
    memory_limit: int | None = None,
    max_failures: int | float | None = None,
    lease_seconds: float = LEASE_SECONDS,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Compute what is missing of a layer, and nothing else.

    A recipe that `reads` base columns adds a layer on the rows that are there; it needs no source. `workers=0` makes
    chunks in this process. `mode="inverse"` first checks every chunk that is there, then fills gaps from the far end.
    """
    store = open_store(root)
    name = layer or recipe.kind
    terms = _terms(recipe, workers, memory_limit, max_failures, lease_seconds, on_progress)
    place = _workplace(store, source, recipe, name, terms)
    engine = _engine(workers)
    wanted = in_order(place.chunks, mode, start_chunk, end_chunk)
    return build_chunks(place, wanted, engine, terms)


def _workplace(store: Store, source: Source | None, recipe: AnyRecipe, layer: str, terms: Terms) -> Workplace:
    if reads_of(recipe):
        prepare_layer(store, recipe, layer)
        return layer_workplace(store, cast(LayerRecipe, recipe), layer)
    if source is None:
        raise RecipeInvalid(f"the recipe '{recipe.kind}' makes base rows and needs a source")

    def on_file(done: int, total: int) -> None:
        terms.on_progress(Progress(phase="planning", done=done, total=total, unit="files"))

    base = cast(Recipe, recipe)
    plan = prepare_base(store, source, base, layer, on_file)
    return base_workplace(store, source, base, layer, plan)


def _terms(
    recipe: AnyRecipe,
    workers: int | None,
    memory_limit: int | None,
    max_failures: int | float | None,
    lease_seconds: float,
    on_progress: OnProgress | None,
) -> Terms:
    return Terms(
        workers=_worker_count(workers),
        host=socket.gethostname(),
        versions=builder_versions(versions_of(recipe)),
        memory_limit=memory_limit,
        max_failures=max_failures,
        lease_seconds=lease_seconds,
        on_progress=on_progress or (lambda progress: None),
    )


def _worker_count(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, workers)


def _engine(workers: int | None) -> Engine:
    return InlineEngine() if workers == 0 else LocalEngine()
