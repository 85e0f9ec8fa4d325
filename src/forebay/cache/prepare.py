"""The beginning of a build: the cache, the layer's recipe, the plan — created once, checked ever after."""

from collections.abc import Callable

import msgspec

from forebay.cache.cut import chunk_weight, cut_source, try_recipe
from forebay.cache.plan import Plan, Segment, load_plan
from forebay.cache.publish import begin_cache, layers_of, read_recipe_document
from forebay.columns import Column
from forebay.errors import RecipeInvalid, RecipeMismatch, SourceNotFound
from forebay.format import layout
from forebay.format.layout import FORMAT_VERSION
from forebay.format.sealed import seal
from forebay.recipe import AnyRecipe, Recipe, constants_of, differing_fields, document, fingerprint, reads_of
from forebay.source import Part, Source
from forebay.store.base import Store

OnFile = Callable[[int, int], None]


def prepare_base(store: Store, source: Source, recipe: Recipe, layer: str, on_file: OnFile) -> Plan:
    """The plan of a cache whose base layer this recipe makes."""
    cache = begin_cache(store, layer)
    if cache.base != layer:
        raise RecipeInvalid(
            f"the cache at '{store.address}' has the base layer '{cache.base}'; a further layer's recipe must declare "
            f"the base columns it reads"
        )
    prepare_layer(store, recipe, layer)
    plan = load_plan(store)
    if plan.segments:
        return plan
    files = source.files()
    if not files:
        raise SourceNotFound(str(source.describe()))
    weight = chunk_weight(recipe.chunk_target(), try_recipe(source, files, recipe))
    append_segment(store, plan, source, cut_source(source, files, weight, {}, on_file), weight)
    return load_plan(store)


def append_segment(store: Store, plan: Plan, source: Source, chunks: list[list[Part]], weight: int) -> bool:
    """Add a segment to the plan; False where another builder added one first."""
    segment = Segment.of(
        chunks, number=len(plan.segments), first_chunk=len(plan), source=source.describe(), weight=weight
    )
    return store.create(layout.plan_segment(segment.number), segment.encode())


def prepare_layer(store: Store, recipe: AnyRecipe, layer: str) -> None:
    """Keep the recipe of a layer, or hold it against the one that is kept."""
    if not layout.is_layer_name(layer):
        raise RecipeInvalid(f"'{layer}' is no name for a layer; use letters, digits, - and _")
    kept = read_recipe_document(store, layer)
    if kept is None:
        _check_names(store, recipe, layer)
        constants = constants_of(recipe)
        if constants:
            metadata = {"format_version": FORMAT_VERSION, "type": "constants", "layer": layer}
            store.create(layout.constants(layer), seal(metadata, dict(sorted(constants.items()))))
        text = msgspec.json.format(msgspec.json.encode(document(recipe, layer, FORMAT_VERSION)))
        store.create(layout.recipe(layer), [text + b"\n"])
        kept = read_recipe_document(store, layer)
    assert kept is not None
    if kept.fingerprint != fingerprint(recipe):
        raise RecipeMismatch(store.address, layer, differing_fields(kept, recipe))


def _check_names(store: Store, recipe: AnyRecipe, layer: str) -> None:
    """A column is asked for by its name alone, so no two layers may share one."""
    taken = {column.name: name for name in layers_of(store) for column in _columns(store, name)}
    for column in recipe.columns():
        if column.name in taken and taken[column.name] != layer:
            raise RecipeInvalid(f"layer '{taken[column.name]}' has a column '{column.name}' already; choose another")
        if column.name == "present" and reads_of(recipe):
            raise RecipeInvalid("a layer's presence bits are called 'present'; choose another name for the column")


def _columns(store: Store, layer: str) -> tuple[Column, ...]:
    kept = read_recipe_document(store, layer)
    return kept.columns if kept else ()
