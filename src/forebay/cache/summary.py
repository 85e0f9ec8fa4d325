"""What a cache is: its recipes, its source, its counts."""

from forebay.cache.plan import load_plan
from forebay.cache.presence import layer_columns
from forebay.cache.publish import generation_numbers, load_generation
from forebay.cache.records import LayerSummary, Summary
from forebay.columns import Column
from forebay.format.generation import Generation
from forebay.store.base import Store


def summarize_cache(store: Store) -> Summary:
    generation, plan = load_generation(store), load_plan(store)
    layers = tuple(_layer_summary(generation, layer) for layer in generation.recipes)
    return Summary(
        root=store.address,
        cache_id=generation.document.cache_id,
        base=generation.base,
        generation=generation.number,
        generations=len(generation_numbers(store)),
        digest=generation.digest,
        planned_chunks=len(plan),
        rows=int(generation.table(generation.base).rows.sum()),
        bytes=sum(layer.bytes for layer in layers),
        source=dict(plan.source) if plan.segments else {},
        source_files=len(plan.files),
        layers=layers,
        versions=tuple(dict(version) for version in generation.versions),
        tagged=generation.tagged,
    )


def _layer_summary(generation: Generation, layer: str) -> LayerSummary:
    recipe, table = generation.recipe(layer), generation.table(layer)
    return LayerSummary(
        layer=layer,
        kind=recipe.kind,
        fingerprint=recipe.fingerprint,
        fields=recipe.fields,
        columns=tuple(map(describe_column, layer_columns(recipe.columns, layer == generation.base))),
        chunks=len(table),
        rows=int(table.rows.sum()),
        bytes=int(table.numbers["size"].sum()),
        failures=int(table.numbers["failures"].sum()),
        statistics=table.totals(),
    )


def describe_column(column: Column) -> str:
    """
    >>> describe_column(Column(name="tokens", dtype="uint16", shape=(512,), codec="zstd"))
    'tokens: uint16 [512] zstd'
    """
    shape = f" {list(column.shape)}" if column.shape else ""
    ragged = " ragged" if column.ragged else ""
    codec = "" if column.codec == "none" else f" {column.codec}"
    return f"{column.name}: {column.dtype}{shape}{ragged}{codec}"
