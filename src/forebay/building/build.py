"""Build a layer: plan a new cache or bind a recipe, then make missing chunks."""

from collections.abc import Mapping
from typing import cast

from forebay.building.chunk_maker import ChunkJob, input_incomplete
from forebay.building.layers import bind_layer, released, resolve_recipe
from forebay.building.listing import SourceListing
from forebay.building.make import make
from forebay.building.options import BuildOptions
from forebay.building.queue import in_order
from forebay.building.reuse import begin_reusing
from forebay.building.segments import Planner, check_kind, is_unsigned
from forebay.building.update import append_new_files, check_unsigned, named_alike
from forebay.building.writer import CacheWriter
from forebay.cache.catalog import check_layer_name, read_recipe_document
from forebay.cache.clean import drop_layers
from forebay.cache.reports import BuildReport
from forebay.cache.state import Index, numbers
from forebay.errors import NotFound, RecipeInvalid
from forebay.fields import checked_whole
from forebay.recipe import (
    AnyRecipe,
    LayerRecipe,
    Recipe,
    RecipeDocument,
    check_recipe,
    dependencies_of,
    input_layers,
    is_same_recipe,
    reads_of,
)
from forebay.source import Source
from forebay.store.base import Store, naming_full_disk


def build(
    store: Store,
    source: Source | None,
    recipe: AnyRecipe,
    layer: str,
    options: BuildOptions,
    *,
    start_chunk: int | None = None,
    end_chunk: int | None = None,
    mode: str = "forward",
    reuse: Store | None = None,
    copy: bool = False,
) -> BuildReport:
    """Make the missing chunks of a layer in an inclusive range; plan it first if it is new."""
    check_range(start_chunk, end_chunk)
    check_layer_name(layer)
    check_recipe(recipe)
    with CacheWriter(store, options.suited_to(recipe, source)) as cache, released(recipe):
        if reads_of(recipe):
            job = _layer_job(cache, cast(LayerRecipe, recipe), layer)
        elif source is None:
            raise RecipeInvalid(f"the recipe '{recipe.kind}' makes base rows and needs a source")
        else:
            old = None if reuse is None else Index.take(reuse)
            source = source if old is None else named_alike(source, old.plan)
            planner = _planner(cache, source, cast(Recipe, recipe), layer, bool(start_chunk or end_chunk))
            walked = planner.listing.walked if cache.index.plan.segments else ()
            _plan(cache, planner, layer, mode, start_chunk, old, copy)
            job = cache.base_job(planner, layer, walked)
        planned = numbers(cache.index.state(layer).planned)
        check_start(cache.store, start_chunk, max(planned, default=-1) + 1)
        wanted = in_order(planned, mode, start_chunk, end_chunk)
        if job.source is None:
            _check_inputs(cache, layer, start_chunk, end_chunk)
        return make(cache, job, wanted)


def _planner(cache: CacheWriter, source: Source, recipe: Recipe, layer: str, is_part: bool) -> Planner:
    """The source, listed, and the recipe with every choice made."""
    if cache.index.newest is None:
        cache.check_destination()
        dependencies_of(recipe)  # a missing tokenizer is an error before another builder's plan is waited for
    return cache.planner(SourceListing(source, cache.store), recipe, layer, is_part)


def _plan(
    cache: CacheWriter,
    planner: Planner,
    layer: str,
    mode: str,
    start_chunk: int | None,
    old: Index | None,
    copy: bool,
) -> None:
    """Plan a new cache, or compare the recipe and the source with the one that exists."""
    if cache.index.plan.segments and mode == "forward" and old is None and not is_unsigned(cache.index):
        _bind_base(cache, planner, layer)
        return
    with naming_full_disk(cache.store, planner.listing.weight), cache.planning() as index:
        if old is not None and len(index.plan.segments) <= len(old.plan.segments):
            begin_reusing(cache, planner, layer, old, copy)
        elif not index.plan.segments:
            draft = planner.first()
            check_start(cache.store, start_chunk, len(draft.segment))
            cache.begin(layer, planner.recipe, draft)
        else:
            _bind_base(cache, planner, layer)
            if mode == "inverse":
                append_new_files(cache, planner)
            else:
                check_unsigned(cache, planner)


def _bind_base(cache: CacheWriter, planner: Planner, layer: str) -> None:
    cache.check_base(cache.index.base, layer)
    check_kind(cache.store, planner.source, cache.index.plan)
    bind_layer(cache.store, planner.recipe, layer)


def _layer_job(cache: CacheWriter, recipe: LayerRecipe, layer: str) -> ChunkJob:
    resolved, notes = resolve_recipe(cache.store, None, recipe, layer)
    cache.notes += notes
    bind_layer(cache.store, resolved, layer)
    cache.refresh()
    _ = cache.index.published  # raises if nothing is
    return cache.job(resolved, layer)


def _check_inputs(cache: CacheWriter, layer: str, start: int | None, end: int | None) -> None:
    """Raise if an input layer lacks chunks of the wanted range that the base has."""
    index = cache.index
    recipe = index.recipe(layer)
    base = index.state(index.base).listed
    for name in input_layers(recipe) if recipe is not None else ():
        lacking = in_order(numbers(base & ~index.state(name).listed), "forward", start, end)
        if lacking:
            raise input_incomplete(cache.store.address, layer, name, lacking)


def check_range(start: int | None, end: int | None) -> None:
    for name, chunk in (("start_chunk", start), ("end_chunk", end)):
        if chunk is not None:
            checked_whole(name, chunk)
    if start is not None and end is not None and start > end:
        raise ValueError(f"start_chunk must be at most end_chunk (got {start} and {end})")


def check_start(store: Store, start_chunk: int | None, planned: int) -> None:
    """Raise if a range of chunks begins beyond the plan."""
    if start_chunk and start_chunk >= planned:
        raise NotFound(
            f"start_chunk {start_chunk} is beyond the plan: '{store.address}' has {planned:,} chunks, numbered from 0"
        )


def check_is_recipe(recipe: object) -> None:
    if isinstance(recipe, type) or not isinstance(recipe, Recipe | LayerRecipe):
        got = f"the class {recipe.__name__}" if isinstance(recipe, type) else type(recipe).__name__
        raise TypeError(f"a recipe is needed, for instance fb.ImageRecipe(size=224), not {got}")


def replace_layers(store: Store, recipes: Mapping[str, AnyRecipe]) -> tuple[str, ...]:
    """Drop those layers that other recipes made, or that were made from a layer that is dropped."""
    stored = {layer: one for layer in recipes if (one := read_recipe_document(store, layer)) is not None}
    others = {layer for layer in stored if _is_other(store, stored[layer], recipes[layer])}
    changed = True
    while changed:
        above = {layer for layer in stored if others & input_layers(stored[layer]).keys()}
        changed, others = not above <= others, others | above
    if others:
        drop_layers(store, sorted(others))
    return tuple(sorted(others))


def _is_other(store: Store, stored: RecipeDocument, recipe: AnyRecipe) -> bool:
    resolved, _ = resolve_recipe(store, None, recipe, stored.layer)
    return not is_same_recipe(stored, resolved)
