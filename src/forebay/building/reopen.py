"""Open the recipes and the source of a cache again, by what it keeps of them.

Whoever made a cache chose the names in it: what is on another machine is contacted only where the caller allows it.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, cast

from forebay.building.begin import prepare_layer, resolve_recipe
from forebay.building.build_options import released
from forebay.building.planning import SourceListing
from forebay.cache.catalog import (
    Snapshot,
    generation_numbers,
    layers_of,
    newest_generation,
    read_cache_document,
    read_recipe_document,
)
from forebay.cache.plan import Plan
from forebay.errors import (
    Damaged,
    KeyRefused,
    LayerNotFound,
    LibraryMissing,
    SourceInvalid,
    SourceNeeded,
    SourceNotContacted,
    SourceNotFound,
    SourceUnreadable,
    UnknownKind,
)
from forebay.format import layout
from forebay.format.tensors import hmac_key
from forebay.kinds import recipe_class, remote_source, reopen_recipe, reopen_source
from forebay.recipe import AnyRecipe, canonical_json, hooks_of
from forebay.source import Source
from forebay.store import Store
from forebay.store.base import holds

_CANNOT_OPEN = (UnknownKind, LibraryMissing, SourceInvalid, SourceNeeded)


def check_kept_texts(store: Store) -> None:
    """With a key, refuse to build by what a cache keeps before a tag covers it: anyone may have put it there."""
    if hmac_key() is not None and newest_generation(store) is None:
        read_cache_document(store)
        problem = "nothing is published yet, so no tag covers it; name the source and the recipe again to build it"
        raise KeyRefused(store.address, layout.CACHE, problem)


def kept_recipe(store: Store, layer: str, verb: str, check_source: bool) -> AnyRecipe:
    """The recipe that a layer keeps; `verb` is named in the error where something would have to be fetched for it."""
    kept = read_recipe_document(store, layer)
    if kept is None:
        raise LayerNotFound(store.address, layer, [])
    return reopen_recipe(kept, constants_file(store, layer), root=store.address, verb=verb, check_source=check_source)


def constants_file(store: Store, layer: str) -> str | None:
    """A file with the constants of a layer; for a store without files, a copy that is removed when the process ends."""
    key = layout.constants(layer)
    path = store.local_path(key)
    if path is not None or not holds(store, key):
        return path
    folder = tempfile.mkdtemp(prefix="forebay-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copied = os.path.join(folder, os.path.basename(key))
    with open(copied, "wb") as file:
        file.write(store.view(key))
    return copied


def recipe_until(
    ending: ExitStack, store: Store, passed: AnyRecipe | None, kept: Callable[[str], AnyRecipe], layer: str
) -> AnyRecipe:
    """A layer's recipe: the one passed where it is of that kind, else the kept one; released at the end."""
    recipe = _matching(store, passed, layer) or kept(layer)
    ending.enter_context(released(recipe))
    return recipe


def _matching(store: Store, passed: AnyRecipe | None, layer: str) -> AnyRecipe | None:
    kept = read_recipe_document(store, layer)
    if passed is None or kept is None or kept.kind != passed.kind:
        return None
    settled, _ = resolve_recipe(store, None, passed, layer)
    prepare_layer(store, settled, layer)
    return settled


def kept_workers(store: Store) -> int | None:
    """How many processes the recipes of a cache ask for: none beside this one where one of them loads a model."""
    kept = [read_recipe_document(store, layer) for layer in layers_of(store)]
    asked = [_asked_workers(one.kind) for one in kept if one is not None]
    return min((number for number in asked if number is not None), default=None)


def _asked_workers(kind: str) -> int | None:
    try:
        asked: object = hooks_of(recipe_class(kind)).workers
        return 0 if isinstance(asked, property) else cast(int | None, asked)  # by its fields: this process will do
    except UnknownKind:
        return None


def source_for(store: Store, source: Source | None, check_source: bool, plan: Plan, verb: str) -> Source:
    """The source that was passed, or the one that the plan names where it may be asked."""
    if source is None and not check_source and (remote := remote_source(plan.source)):
        raise SourceNotContacted(store.address, remote, verb)
    return source or _kept(plan.described, check_source)  # which says what is in the way


def _kept(description: Mapping[str, Any], check_source: bool) -> Source:
    """A source that nobody but the cache names: only where that is allowed are its folders walked."""
    source = reopen_source(description)
    return source.without_gone() if check_source else source.unwalked()


def kept_source(plan: Plan | None, check_source: bool) -> Source | None:
    """The source that a plan describes, None where there is none that can be opened here."""
    return reopened(check_source, plan.source) if plan is not None and plan.segments else None


def reopened(check_source: bool, description: Mapping[str, Any]) -> Source | None:
    """The source that a description names, None where it cannot be opened, or is remote and may not be asked."""
    try:
        if remote_source(description) and not check_source:
            return None
        return _kept(description, check_source)
    except _CANNOT_OPEN:
        return None


def new_files(store: Store, plan: Plan | None, asked: Source | None, check_source: bool) -> tuple[str, ...]:
    """Files that the source passed, or a pattern of the cache, names and no segment of the plan has, by name."""
    segments = [segment for segment in plan.segments if not segment.amends] if plan is not None else []
    if plan is None or not segments:
        return ()
    texts = dict.fromkeys(canonical_json(one.source) for one in segments if "patterns" in one.source)
    kept = [reopened(check_source, json.loads(text)) for text in texts]
    root = segments[0].source.get("root")
    named = [asked if root is None else asked.rebased(root)] if asked is not None else kept
    found: set[str] = set()
    for source in named:
        if source is not None and "patterns" in source.describe():
            with suppress(OSError, SourceNotFound, SourceUnreadable):  # what is planned is looked at by name
                found |= {file.path for file in SourceListing(source, store).apart if file.size > 0}
    return tuple(sorted(found - plan.files.keys()))


def why_unchecked(snapshot: Snapshot, asked: Source | None) -> str:
    """Why a source was not checked, and what to do about it."""
    store = snapshot.store
    try:
        plan = snapshot.plan
    except Damaged as error:
        return f"the source was not checked: {error}"
    if not plan.segments:
        gone = f"'{layout.plan_segment(0)}' is gone; run `forebay repair {store.address}`"
        return f"the source was not checked: {gone if generation_numbers(store) else 'nothing is planned yet'}"
    if asked is None:
        try:
            if remote := remote_source(plan.source):
                return f"the source '{remote}' was not checked; pass --check-source (check_source=True) to contact it"
            reopen_source(plan.source)
        except _CANNOT_OPEN as error:
            return f"the source was not checked: {error}"
    return "the source was not checked: it could not be reached, or the plan is damaged"
