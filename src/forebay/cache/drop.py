"""Dropping layers: a generation without them. Older generations, and readers that pinned one, keep them.

Their files stay until `clean` removes the generations that list them. A layer of the same name may be built again: its
chunks get higher revisions than those that were dropped, which never count again.
"""

from collections.abc import Collection

from forebay.cache.catalog import Snapshot, read_cache_document, read_recipe_document
from forebay.cache.publish import publish_without
from forebay.cache.records import DropReport
from forebay.errors import LayerNeeded, LayerNotFound
from forebay.format import layout
from forebay.recipe import input_layers
from forebay.store.base import Missing, Pieces, Store, holds


def drop_layers(store: Store, layers: Collection[str]) -> DropReport:
    """Publish a generation without some layers. If it is interrupted, run it again."""
    snapshot = Snapshot.take(store)
    _check_droppable(snapshot, layers)
    tables = [snapshot.table(layer) for layer in layers]
    for layer in sorted(layers):
        _set_aside(snapshot, layer)
    generation = publish_without(store, layers)
    return DropReport(
        root=store.address,
        layers=tuple(layers),
        chunks=sum(map(len, tables)),
        bytes=sum(int(table.numbers["size"].sum()) for table in tables),
        generation=generation.number if generation else None,
    )


def _check_droppable(snapshot: Snapshot, layers: Collection[str]) -> None:
    store = snapshot.store
    base = read_cache_document(store).base
    listed = dict(snapshot.newest.recipes) if snapshot.newest else {}
    known = sorted({*snapshot.layers(listed), *listed})
    for layer in layers:
        if layer not in known:
            raise LayerNotFound(store.address, layer, known)
        if layer == base:
            raise LayerNeeded(store.address, layer, [])
        others = [read_recipe_document(store, name) for name in known if name not in layers]
        readers = [kept.layer for kept in others if kept is not None and layer in input_layers(kept)]
        if readers:
            raise LayerNeeded(store.address, layer, readers)


def _set_aside(snapshot: Snapshot, layer: str) -> None:
    """Keep what older generations need of a layer, and remove what makes it a layer of the cache.

    Its files stop to count before its recipe is gone, so that no builder lists them under another recipe.
    """
    store, recipe = snapshot.store, layout.recipe(layer)
    revision = max(snapshot.chunk_files(layer).values(), default=0)
    text = snapshot.newest.recipes.get(layer, "") if snapshot.newest else ""
    store.create(layout.dropped(layer, revision), [text.encode() or store.read(recipe)])
    try:
        digest = Pieces(store, layout.constants(layer)).sha256.hex()
        store.create(layout.dropped_constants(layer, digest), [store.view(layout.constants(layer))])
    except Missing:
        pass  # it has none
    if holds(store, recipe):
        store.delete(recipe)
