"""Which class stands behind a kind of recipe or source: the built-in ones here, others by entry point.

A package adds its own with an entry point in the group `forebay.recipes` or `forebay.sources`, named as the kind.
"""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import msgspec

from forebay.errors import RecipeInvalid, UnknownKind
from forebay.recipe import AnyRecipe, RecipeDocument, differing_fields, fingerprint, inputs_in
from forebay.source import Source

RECIPES = {
    "images": ("forebay.images", "ImageRecipe"),
    "imported": ("forebay.torch.old_recipe", "ImportedRecipe"),
    "imported-rows": ("forebay.torch.old_recipe", "ImportedRows"),
    "raw": ("forebay.raw", "RawRecipe"),
    "teacher": ("forebay.teachers", "TeacherRecipe"),
    "tokens": ("forebay.tokens", "TokenRecipe"),
}
SOURCES = {
    "files": ("forebay.sources", "FileSource"),
    "function": ("forebay.sources", "FunctionSource"),
    "hub": ("forebay.sources.hub_shards", "HubSource"),
    "image_manifest": ("forebay.sources", "ImageManifestSource"),
    "images": ("forebay.sources", "ImageSource"),
    "jsonl": ("forebay.sources", "JsonlSource"),
    "lines": ("forebay.sources", "LineSource"),
    "old-cache": ("forebay.torch.old_recipe", "OldCacheSource"),
    "parquet_images": ("forebay.sources.parquet_pictures", "ParquetImageSource"),
    "parquet": ("forebay.sources.parquet_files", "ParquetSource"),
    "text": ("forebay.sources", "TextSource"),
}


def recipe_class(kind: str) -> type[Any]:
    return _find("recipe", kind, RECIPES)


def source_class(kind: str) -> type[Any]:
    return _find("source", kind, SOURCES)


def reopen_recipe(kept: RecipeDocument, constants: str | None = None) -> AnyRecipe:
    """The recipe that a cache kept, ready to make chunks, once it is the same to the last dependency.

    A recipe that has `reopened(dependencies, constants)` may take what it depends on from the file of its
    layer's constants.
    """
    recipe: AnyRecipe = msgspec.convert(kept.fields, recipe_class(kept.kind))
    if constants is not None and hasattr(recipe, "reopened"):
        recipe = recipe.reopened(kept.dependencies, constants)
    if fingerprint(recipe, inputs_in(kept.dependencies)) != kept.fingerprint:
        changed = ", ".join(differing_fields(kept, recipe))
        raise RecipeInvalid(f"the recipe of layer '{kept.layer}' is not what it was (differs in: {changed})")
    return recipe


def reopen_source(description: Mapping[str, Any]) -> Source:
    """The source that a plan describes."""
    source: Source = source_class(str(description["kind"])).from_description(description)
    return source


def remote_source(description: Mapping[str, Any]) -> str:
    """What a source on another machine is called; empty where a plan describes one on this machine.

    >>> remote_source({"kind": "hub", "name": "org/set", "endpoint": "https://mirror.example"})
    'hub:org/set at https://mirror.example'
    >>> remote_source({"kind": "lines", "root": "/data"})
    ''
    """
    kind = str(description.get("kind"))
    if kind == "hub":
        endpoint = description.get("endpoint")
        return f"hub:{description.get('name')}" + (f" at {endpoint}" if endpoint else "")
    return kind if getattr(source_class(kind), "remote", False) else ""


def _find(what: str, kind: str, built_in: Mapping[str, tuple[str, str]]) -> type[Any]:
    if kind in built_in:
        module, name = built_in[kind]
        found: type[Any] = getattr(import_module(module), name)
        return found
    for entry in entry_points(group=f"forebay.{what}s", name=kind):
        loaded: type[Any] = entry.load()
        return loaded
    raise UnknownKind(what, kind, sorted(built_in))
