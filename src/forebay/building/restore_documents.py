"""Restore the documents of a cache: `cache.json`, recipes and constants.

A document that contradicts its own fingerprint or digest is damaged, whatever a generation lists.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from forebay.building.layers import sealed_constants
from forebay.building.repair_run import RepairRun, are_sound_constants, has_digest, is_unreadable
from forebay.cache.catalog import examine_chunk, read_cache_document
from forebay.cache.publish import without_layers
from forebay.cache.state import chunk_numbers
from forebay.errors import CacheNotFound, Damaged, ForebayError, FormatTooNew
from forebay.format import layout
from forebay.format.generation import ChunkTable, Generation
from forebay.format.layout import decode_recipe_document
from forebay.format.tensors import hmac_key
from forebay.kinds import recipe_class
from forebay.recipe import RecipeDocument, document_fingerprint, hooks_of
from forebay.store.base import Buffer, Missing, Pieces, Store, holds, load_index, read_document


def restore_documents(run: RepairRun, united: Generation, is_lost: bool) -> Generation:
    """Put back documents that differ from the generation; add layers that only a lost generation listed."""
    store = run.store
    trusts_files = is_lost and hmac_key() is None
    if _is_other_text(store, united):
        run.write(layout.CACHE, lambda: [united.cache.encode()])
    for layer in list(united.recipes):
        united = _restore_recipe(run, united, layer, trusts_files)
    if trusts_files:
        united = _with_unlisted_layers(run, united)
    for layer, digest in united.constants.items():
        key, document = layout.constants(united.folder(layer)), united.recipe(layer)
        if not has_digest(store, key, digest):
            run.write(key, _published_constants, run, document, key, digest)
    return united


def _is_other_text(store: Store, united: Generation) -> bool:
    """True if `cache.json` is missing, cannot be read, or has the id of the generation in another text."""
    try:
        text = read_document(store, layout.CACHE)
        return text != united.cache.encode() and read_cache_document(store).cache_id == united.document.cache_id
    except FormatTooNew:
        raise
    except (Damaged, Missing, CacheNotFound):
        return True


def _restore_recipe(run: RepairRun, united: Generation, layer: str, trusts_files: bool) -> Generation:
    """Put back the recipe that is listed, unless another one binds the layer and has chunks of a lost generation."""
    text, bound = united.recipes[layer], _bound(run.store, layer)
    if bound is not None and bound[0] == text:
        return united
    is_other = bound is not None and bound[1].fingerprint != united.recipe(layer).fingerprint
    is_usable = trusts_files and is_other and not unlisted_problem(run, layer, united.recipes)
    if bound is not None and is_usable and _has_sound_chunk(run.store, bound[1]):
        return without_layers(united, {layer})
    run.write(layout.recipe(layer), lambda: [text.encode()])
    return united


def _bound(store: Store, layer: str) -> tuple[str, RecipeDocument] | None:
    """The recipe file of a layer; None if it cannot be read."""
    key = layout.recipe(layer)
    try:
        text = read_document(store, key).decode()
        return text, decode_recipe_document(text, layer, store.address, key)
    except FormatTooNew:
        raise
    except (Damaged, Missing, UnicodeDecodeError):
        return None


def _has_sound_chunk(store: Store, document: RecipeDocument) -> bool:
    folder = layout.document_folder(document)
    numbers = chunk_numbers((entry.key for entry in store.entries(folder)), folder).tolist()
    return any(not is_unreadable(examine_chunk, store, document, number) for number in numbers)


def _with_unlisted_layers(run: RepairRun, united: Generation) -> Generation:
    """Add layers that have a recipe and chunks here, and that no readable generation lists."""
    names = [layer for entry in run.store.entries(layout.RECIPES) if (layer := layout.parse_recipe(entry.key))]
    for layer in [name for name in names if name not in united.recipes]:
        problem, bound = unlisted_problem(run, layer, united.recipes), _bound(run.store, layer)
        if problem or bound is None:
            run.log.failed[layout.recipe(layer)] = problem
            continue
        constants = _unlisted_constants(run, bound[1])
        if constants is not None:
            united = replace(
                united,
                recipes={**united.recipes, layer: bound[0]},
                layers={**united.layers, layer: ChunkTable.of([])},
                constants={**united.constants, **constants},
            )
    return united


def unlisted_problem(run: RepairRun, layer: str, recipes: Mapping[str, str]) -> str:
    """Why the recipe of a layer that no generation lists cannot be used; empty if it can."""
    bound = _bound(run.store, layer)
    if bound is None:
        return "is gone" if not holds(run.store, layout.recipe(layer)) else "cannot be read"
    if problem := recipe_problem(bound[1]):
        return problem
    own = layout.document_folder(bound[1])
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
    is_sound = are_sound_constants(store, key)
    value, reason = _remade_constants(run, document, is_sound)
    if value is None and not is_sound:
        run.log.failed[key] = f"it cannot be read, and the recipe cannot be opened to make it again: {reason}"
        return None
    if value is None:
        return {document.layer: Pieces(store, key).sha256.hex()}
    if not value:
        return {}
    digest = _digest(value)
    if not has_digest(store, key, digest):
        run.write(key, lambda: value)
    return {document.layer: digest}


def _remade_constants(run: RepairRun, document: RecipeDocument, is_sound: bool) -> tuple[Sequence[Buffer] | None, str]:
    """The bytes of a layer's constants by its recipe; None, and why, if the recipe cannot be opened."""
    reason = ""
    for with_constants in (False, True) if is_sound else (False,):
        try:
            return sealed_constants(run.recipe_of(document, with_constants), document.layer), ""
        except ForebayError as error:
            reason = f"{error.message}; {error.hint}" if error.hint else error.message
    return None, reason


def _published_constants(run: RepairRun, document: RecipeDocument, key: str, digest: str) -> Sequence[Buffer]:
    """Constants with the published digest, from the copy or made by the recipe."""
    if run.copy is not None and has_digest(run.copy, key, digest):
        return [load_index(run.copy, key)]
    value, reason = _remade_constants(run, document, False)
    if value and _digest(value) == digest:
        return value
    raise Damaged(f"it cannot be made again: {reason or 'the recipe gives other constants now'}")


def _digest(value: Sequence[Buffer]) -> str:
    return hashlib.sha256(b"".join(value)).hexdigest()
