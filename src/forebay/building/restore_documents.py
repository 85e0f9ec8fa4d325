"""Restore the documents of a cache: `cache.json`, recipes and constants.

A document that contradicts its own fingerprint or digest is damaged, whatever a generation lists.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from forebay.building.layers import sealed_constants
from forebay.building.repair_run import RepairRun
from forebay.cache.catalog import has_sha256, layers_of, read_cache_document, readable_recipe
from forebay.cache.publish import without_layers
from forebay.cache.soundness import constants_problem, document_problems, sound_records
from forebay.cache.state import Index
from forebay.errors import CacheNotFound, Damaged, ForebayError, FormatTooNew
from forebay.format import layout
from forebay.format.generation import ChunkTable, Generation
from forebay.kinds import recipe_class
from forebay.recipe import RecipeDocument, document_fingerprint, hooks_of
from forebay.store.base import Buffer, Pieces, Store, holds, load_index, read_document


def restore_documents(run: RepairRun, united: Generation) -> None:
    """Put back documents that differ from the generation. `cache.json` with another id is left alone."""
    for key in document_problems(Index(run.store, united)):
        if key == layout.CACHE:
            if readable_id(run.store) in (None, united.document.cache_id):
                run.write(key, lambda: [united.cache.encode()])
        elif layer := layout.parse_recipe(key):
            run.write(key, lambda text: [text.encode()], united.recipes[layer])
        else:
            run.write(key, _published_constants, run, united, layout.layer_of(key))


def readable_id(store: Store) -> str | None:
    """The cache id in `cache.json`; None if it cannot be read."""
    try:
        return read_cache_document(store).cache_id
    except FormatTooNew:
        raise
    except (Damaged, CacheNotFound):
        return None


def check_versions(store: Store) -> None:
    """Raise if a newer forebay wrote a document, before anything is written."""
    readable_id(store)
    layers_of(store)


def with_bound_layers(run: RepairRun, united: Generation) -> Generation:
    """Add layers that have a recipe and chunks here, and that only a lost generation listed with this recipe."""
    names = [layer for entry in run.store.entries(layout.RECIPES) if (layer := layout.parse_recipe(entry.key))]
    for layer in names:
        bound, is_listed = readable_recipe(run.store, layer), layer in united.recipes
        if is_listed and (bound is None or bound.fingerprint == united.recipe(layer).fingerprint):
            continue
        problem = unlisted_problem(run, layer, united.recipes)
        if bound is None or problem or (is_listed and not any(sound_records(run.store, bound))):
            if not is_listed:
                run.log.failed[layout.recipe(layer)] = problem
            continue
        constants, united = _unlisted_constants(run, bound), without_layers(united, {layer})
        if constants is not None:  # else the layer stays unlisted: the listed recipe must not replace a sound one
            united = replace(
                united,
                recipes={**united.recipes, layer: read_document(run.store, layout.recipe(layer)).decode()},
                layers={**united.layers, layer: ChunkTable.of([])},
                constants={**united.constants, **constants},
            )
    return united


def unlisted_problem(run: RepairRun, layer: str, recipes: Mapping[str, str]) -> str:
    """Why the recipe of a layer that no generation lists cannot be used; empty if it can."""
    bound = readable_recipe(run.store, layer)
    if bound is None:
        return "is gone" if not holds(run.store, layout.recipe(layer)) else "cannot be read"
    if problem := recipe_problem(bound):
        return problem
    own = layout.document_folder(bound)
    folders = {parsed[0] for entry in run.store.entries(layout.LAYERS) if (parsed := layout.parse_chunk(entry.key))}
    others = [folder for folder in folders if layout.layer_of(folder) == layer and folder != own]
    if own not in folders and others and layer not in recipes:
        return f"contradicts the chunks of the layer, which are in '{min(others)}'"
    return ""


def recipe_problem(document: RecipeDocument) -> str:
    """Why a recipe document contradicts its own fingerprint; empty if it does not, or its kind is not installed."""
    try:
        kind = recipe_class(document.kind)
    except ForebayError:
        return ""
    if isinstance(hooks_of(kind).located, property):  # by its fields: the document alone does not tell
        return ""
    if document_fingerprint(document, kind) == document.fingerprint:
        return ""
    return "contradicts its own fingerprint"


def _unlisted_constants(run: RepairRun, document: RecipeDocument) -> dict[str, str] | None:
    """The constants of a layer that no generation lists, made by its recipe if it can be opened; None: unknown."""
    store, key = run.store, layout.constants(layout.document_folder(document))
    is_sound = not constants_problem(store, key)
    value, reason = _remade_constants(run, document, is_sound)
    if value is None and not is_sound:
        run.log.failed[key] = f"it cannot be read, and the recipe cannot be opened to make it again: {reason}"
        return None
    if value is None:
        return {document.layer: Pieces(store, key).sha256.hex()}
    if not value:
        return {}
    sha256 = hashlib.sha256(b"".join(value))
    if not has_sha256(store, key, sha256.digest()):
        run.write(key, lambda: value)
    return {document.layer: sha256.hexdigest()}


def _remade_constants(run: RepairRun, document: RecipeDocument, is_sound: bool) -> tuple[Sequence[Buffer] | None, str]:
    """The bytes of a layer's constants by its recipe; None, and why, if the recipe cannot be opened."""
    reason = ""
    for with_constants in (False, True) if is_sound else (False,):
        try:
            return sealed_constants(run.recipe_of(document, with_constants), document.layer), ""
        except ForebayError as error:
            reason = f"{error.message}; {error.hint}" if error.hint else error.message
    return None, reason


def _published_constants(run: RepairRun, united: Generation, layer: str) -> Sequence[Buffer]:
    """Constants with the published digest, from the copy or made by the recipe."""
    key, sha256 = layout.constants(united.folder(layer)), bytes.fromhex(united.constants[layer])
    if run.copy is not None and has_sha256(run.copy, key, sha256):
        return [load_index(run.copy, key)]
    value, reason = _remade_constants(run, united.recipe(layer), is_sound=False)
    if value and hashlib.sha256(b"".join(value)).digest() == sha256:
        return value
    raise Damaged(f"it cannot be made again: {reason or 'the recipe gives other constants now'}")
