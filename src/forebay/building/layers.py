"""Layers of a cache: bind a recipe to a layer name, and reopen the recipes and the source that a cache stores.

An untrusted cache may name any source: what is on another machine is contacted only if the caller allows it.
"""

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from forebay.building.listing import SourceListing
from forebay.building.trial import sample_heads
from forebay.cache.catalog import (
    check_layer_name,
    column_homes,
    has_sha256,
    layers_of,
    newest_generation,
    read_cache_document,
    read_recipe_document,
    unpublished,
)
from forebay.cache.plan import Plan
from forebay.cache.state import Index
from forebay.columns import Array, Column, Ragged
from forebay.errors import (
    Damaged,
    IndexCorrupt,
    LibraryMissing,
    RecipeInvalid,
    RecipeMismatch,
    SourceInvalid,
    SourceNotFound,
    SourceUnreadable,
    message_of,
    not_found,
    with_hint,
)
from forebay.format import layout
from forebay.format.layout import FORMAT_VERSION, decode_recipe_document
from forebay.format.tensors import hmac_key, seal
from forebay.kinds import remote_source, reopen_recipe, reopen_source
from forebay.read.opening import open_cache
from forebay.recipe import (
    AnyRecipe,
    RecipeDocument,
    canonical_json,
    check_recipe,
    differing_fields,
    document,
    hooks_of,
    input_names,
    is_same_recipe,
    reads_of,
    recipe_mismatch,
    same_document,
)
from forebay.source import Sample, Source
from forebay.store.base import Buffer, Store, holds, index_corrupt, key_refused

AnyR = TypeVar("AnyR", bound=AnyRecipe)
_CANNOT_OPEN = (LibraryMissing, SourceInvalid)


def bind_layer(store: Store, recipe: AnyRecipe, layer: str) -> RecipeDocument:
    """The recipe document of a layer, created now if there is none; another recipe is an error."""
    check_layer_name(layer)
    check_recipe(recipe)
    stored = read_recipe_document(store, layer)
    layers = layers_of(store) if stored is None or reads_of(recipe) else []
    inputs = _inputs(store, recipe, layer, layers)
    if stored is None:
        _check_names(store, recipe, layer, layers)
        _create_recipe(store, recipe, layer, inputs)
        stored = read_recipe_document(store, layer)
    if stored is None:
        raise RecipeInvalid(f"another build withdrew layer '{layer}', because another layer has one of its columns")
    if not is_same_recipe(stored, recipe, inputs):
        raise _mismatch(store, stored, recipe, inputs)
    if not same_document(stored, document(recipe, layer, FORMAT_VERSION, inputs, stored.dependencies), recipe):
        problem = "it declares other columns than its recipe, with the same fingerprint; raise the recipe's revision"
        raise index_corrupt(store.address, layout.recipe(layer), f"{problem} if `columns` or `reads` changed")
    restore_constants(store, recipe, stored)
    return stored


def _mismatch(store: Store, stored: RecipeDocument, recipe: AnyRecipe, inputs: Mapping[str, str]) -> RecipeMismatch:
    differing = differing_fields(stored, recipe, inputs)
    return recipe_mismatch(store.address, stored.layer, differing, not reads_of(recipe))


def _create_recipe(store: Store, recipe: AnyRecipe, layer: str, inputs: Mapping[str, str]) -> None:
    text = msgspec.json.format(msgspec.json.encode(document(recipe, layer, FORMAT_VERSION, inputs)))
    try:
        decode_recipe_document(text, layer, store.address, layout.recipe(layer))
    except IndexCorrupt as error:  # it could not be read back
        raise RecipeInvalid(
            f"the recipe '{recipe.kind}' of layer '{layer}' cannot be stored: {error.facts['problem']}"
        ) from error
    if store.create(layout.recipe(layer), [text + b"\n"]):
        try:
            # Again, now that others see it: a layer with the same column may have begun since the first check.
            _check_names(store, recipe, layer, layers_of(store))
        except RecipeInvalid:
            store.delete(layout.recipe(layer))
            raise


def sealed_constants(recipe: AnyRecipe, layer: str) -> Sequence[Buffer]:
    """The bytes of a layer's constants; none if its recipe has none."""
    constants = hooks_of(recipe).constants()
    metadata = {"format_version": FORMAT_VERSION, "type": "constants", "layer": layer}
    return seal(metadata, dict(sorted(constants.items()))) if constants else []


def restore_constants(store: Store, recipe: AnyRecipe, stored: RecipeDocument) -> None:
    """Create the constants of a layer; unlisted ones that its recipe did not make are replaced."""
    key = layout.constants(layout.document_folder(stored))
    constants = sealed_constants(recipe, stored.layer)
    sha256 = hashlib.sha256(b"".join(constants)).digest()
    if not constants or store.create(key, constants) or has_sha256(store, key, sha256):
        return
    newest = newest_generation(store)
    is_listed = newest is not None and stored.layer in newest.constants
    if is_listed and newest is not None and newest.recipe(stored.layer).fingerprint == stored.fingerprint:
        return  # for `verify` and `repair`
    store.replace(key, constants)


def _inputs(store: Store, recipe: AnyRecipe, layer: str, layers: Sequence[str]) -> dict[str, str]:
    """The further layers that a recipe reads here, as dependencies: none where it reads base columns only.

    The cache must exist, and its layers must have the columns that the layer reads.
    """
    if not reads_of(recipe):
        return {}
    base = read_cache_document(store).base
    homes = column_homes({layer: _columns(store, layer) for layer in layers}, base)
    inputs: dict[str, str] = {}
    if missing := [name for name in reads_of(recipe) if name not in homes]:
        columns = f"column{'s' if len(missing) > 1 else ''} " + ", ".join(f"'{name}'" for name in missing)
        raise RecipeInvalid(
            f"layer '{layer}' reads the {columns}, which no layer of '{store.address}' has; there are: "
            f"{', '.join(homes)}; build the layer that makes {'them' if len(missing) > 1 else 'it'} first"
        )
    for name in reads_of(recipe):
        if homes[name].layer != base:
            stored = read_recipe_document(store, homes[name].layer)
            assert stored is not None
            inputs[stored.layer] = stored.fingerprint
    return input_names(inputs)


def _check_names(store: Store, recipe: AnyRecipe, layer: str, layers: Sequence[str]) -> None:
    """Raise if two layers would have a column of one name: columns are read by name alone."""
    taken = {column.name: name for name in layers if name != layer for column in _columns(store, name)}
    for column in recipe.columns():
        if column.name in taken:
            raise RecipeInvalid(f"layer '{taken[column.name]}' has a column '{column.name}' already; choose another")
        if column.name == "present" and reads_of(recipe):
            raise RecipeInvalid("a layer's presence bits are called 'present'; choose another name for the column")


def _columns(store: Store, layer: str) -> tuple[Column, ...]:
    stored = read_recipe_document(store, layer)
    return stored.columns if stored else ()


@dataclass(frozen=True, slots=True)
class Survey:
    """Parts of the source that a recipe may read before it decides: a few samples, or the metadata of all."""

    listing: SourceListing | None
    store: Store | None = None

    def rows(self, names: Sequence[str], count: int) -> dict[str, Array | Ragged]:
        """The first rows of some columns of an existing cache, at most those of the first chunk that has all of them.

        Empty if no layer has such a column, which is an error later.
        """
        newest = newest_generation(self.store) if self.store is not None else None
        if self.store is None or newest is None:
            return {}
        homes = column_homes({layer: newest.recipe(layer).columns for layer in newest.recipes}, newest.base)
        if not all(name in homes for name in names):
            return {}
        layers = dict.fromkeys(homes[name].layer for name in names)
        cache = open_cache(self.store, generation=newest.number, layers=list(layers))
        first = int(cache.chunk_starts[1]) if len(cache.chunk_numbers) else 0
        return cache.read(range(min(count, first)), names)

    def __call__(self) -> Iterable[Sample]:
        return () if self.listing is None else sample_heads(self.listing.source, self.listing.files)

    def annotations(self) -> Iterable[Mapping[str, Any]]:
        """The metadata of all samples, in order; where the source cannot tell it apart, every sample is read."""
        return () if self.listing is None else self.listing.source.annotations(self.listing.files)


def resolve_recipe(
    store: Store | None, listing: SourceListing | None, recipe: AnyR, layer: str
) -> tuple[AnyR, tuple[str, ...]]:
    """The recipe with every choice made, and notes on the choices.

    An existing layer has them; a new one makes them from a few samples of the source.
    """
    stored = None
    if store is not None:
        check_layer_name(layer)
        stored = read_recipe_document(store, layer)
    if stored is None and listing is not None:
        hooks_of(recipe).check_source(listing.source, listing.files)
    return hooks_of(recipe).settled(stored.fields if stored else None, Survey(listing, store))


def begun_plan(store: Store) -> Plan:
    """The plan of a cache to continue with; raises if there is none."""
    plan = Index.take(store).plan
    if not plan.segments:
        raise unpublished(store)
    return plan


def check_tagged(store: Store) -> None:
    """With a key, raise if no tag covers the stored recipe and source: anyone may have put them there."""
    if hmac_key() is not None and newest_generation(store) is None:
        read_cache_document(store)
        problem = "nothing is published yet, so no tag covers it; name the source and the recipe again to build it"
        raise key_refused(store.address, layout.CACHE, problem)


def stored_recipe(store: Store, layer: str, verb: str, allow_network: bool) -> AnyRecipe:
    """The recipe that a layer keeps; `verb` is named in the error where something would have to be fetched for it."""
    stored = read_recipe_document(store, layer)
    if stored is None:
        raise not_found("layer", layer, store.address, [])
    file = constants_file(store, layout.document_folder(stored))
    return reopen_recipe(stored, file, root=store.address, verb=verb, allow_network=allow_network)


def constants_file(store: Store, folder: str) -> str | None:
    """A file with the constants of a layer; for a store without files, a copy that is removed when the process ends."""
    key = layout.constants(folder)
    path = store.local_path(key)
    if path is not None or not holds(store, key):
        return path
    folder = tempfile.mkdtemp(prefix="forebay-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copied = os.path.join(folder, os.path.basename(key))
    with open(copied, "wb") as file:
        file.write(store.view(key))
    return copied


@contextmanager
def released(recipe: AnyRecipe) -> Iterator[list[str]]:
    """Release what a recipe has loaded here when the work ends, however it ends; the list then holds its notes."""
    notes: list[str] = []
    try:
        yield notes
    finally:
        notes += hooks_of(recipe).release()


def source_for(store: Store, source: Source | None, allow_network: bool, plan: Plan, verb: str) -> Source:
    """The source that was passed, or the one in the plan if reading it is allowed."""
    if source is None and not allow_network and (remote := remote_source(plan.source)):
        raise SourceInvalid(
            f"the source of '{store.address}' is '{remote}'; forebay contacts no machine that only a cache names",
            hint=f"allow it with `forebay {verb} {store.address} --allow-network`",
        )
    return source or _described(plan.described, allow_network)  # which says what is in the way


def _described(description: Mapping[str, Any], allow_network: bool) -> Source:
    """A source that is recorded in the cache: its folders are walked only if that is allowed."""
    source = reopen_source(description)
    return source.without_gone() if allow_network else source.unwalked()


def stored_source(plan: Plan | None, allow_network: bool) -> Source | None:
    """Return the source that a plan describes; None if it cannot be opened here."""
    return reopened(allow_network, plan.source) if plan is not None and plan.segments else None


def reopened(allow_network: bool, description: Mapping[str, Any]) -> Source | None:
    """The source of a description; None if it cannot be opened, or is remote and not allowed."""
    try:
        if remote_source(description) and not allow_network:
            return None
        return _described(description, allow_network)
    except _CANNOT_OPEN:
        return None


def new_files(store: Store, plan: Plan | None, passed: Source | None, allow_network: bool) -> tuple[str, ...]:
    """Files that the source passed, or a pattern of the cache, names and no segment of the plan has, by name."""
    segments = plan.segments if plan is not None else ()
    if plan is None or not segments:
        return ()
    texts = dict.fromkeys(canonical_json(one.source) for one in segments if "patterns" in one.source)
    described = [reopened(allow_network, json.loads(text)) for text in texts]
    root = segments[0].source.get("root")
    named = [passed if root is None else passed.rebased(root)] if passed is not None else described
    paths: set[str] = set()
    for source in named:
        if source is not None and "patterns" in source.describe():
            with suppress(OSError, SourceNotFound, SourceUnreadable):  # what is planned is looked at by name
                paths |= {file.path for file in SourceListing(source, store).apart if file.size > 0}
    return tuple(sorted(paths - plan.files.keys()))


def why_unchecked(index: Index, passed: Source | None) -> str:
    """The reason why a source was not checked, and a hint."""
    store = index.store
    try:
        plan = index.plan
    except Damaged as error:
        return f"the source was not checked: {message_of(error)}"
    if not plan.segments and index.newest is None:
        return with_hint(unpublished(store))
    if not plan.segments:
        gone = f"'{layout.plan_segment(0)}' is gone; run `forebay repair {store.address}`"
        return f"the source was not checked: {gone}"
    if passed is None:
        try:
            if remote := remote_source(plan.source):
                return f"the source '{remote}' was not checked; pass --allow-network (allow_network=True) to contact it"
            reopen_source(plan.source)
        except _CANNOT_OPEN as error:
            return f"the source was not checked: {message_of(error)}"
    return "the source was not checked: it could not be reached, or the plan is damaged"
