"""Which class stands behind a kind of recipe or source: the built-in ones here, others by entry point.

A package adds its own with an entry point in the group `forebay.recipes` or `forebay.sources`, named as the kind.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import msgspec

from forebay.errors import RecipeInvalid, RecipeNotContacted, SourceInvalid, UnknownKind
from forebay.recipe import AnyRecipe, RecipeDocument, differing_fields, fingerprint, hooks_of, inputs_in
from forebay.source import Source

# What a description that somebody else wrote may raise in the class that it is turned into.
WRONG = (KeyError, TypeError, ValueError, AttributeError, RecursionError, msgspec.ValidationError)
RECIPES = {
    "images": ("forebay.images", "ImageRecipe"),
    "imported": ("forebay.compat.pt_import", "ImportedRecipe"),
    "imported-rows": ("forebay.compat.pt_import", "ImportedRows"),
    "raw": ("forebay.raw", "RawRecipe"),
    "teacher": ("forebay.teachers", "TeacherRecipe"),
    "tokens": ("forebay.tokens", "TokenRecipe"),
}
SOURCES = {
    "files": ("forebay.sources", "FileSource"),
    "function": ("forebay.sources", "FunctionSource"),
    "hub": ("forebay.sources.hub_datasets", "HubSource"),
    "image_manifest": ("forebay.sources", "ImageManifestSource"),
    "images": ("forebay.sources", "ImageSource"),
    "jsonl": ("forebay.sources", "JsonlSource"),
    "lines": ("forebay.sources", "LineSource"),
    "old-cache": ("forebay.compat.pt_import", "OldCacheSource"),
    "parquet_images": ("forebay.sources.parquet_sources", "ParquetImageSource"),
    "parquet": ("forebay.sources.parquet_sources", "ParquetSource"),
    "text": ("forebay.sources", "TextSource"),
}


def recipe_class(kind: str) -> type[Any]:
    return _find("recipe", kind, RECIPES)


def source_class(kind: str) -> type[Source]:
    return _find("source", kind, SOURCES)


def reopen_recipe(
    kept: RecipeDocument,
    constants: str | None = None,
    *,
    root: str = "CACHE",
    verb: str = "repair",
    check_source: bool = False,
) -> AnyRecipe:
    """The recipe that a cache kept, ready to make chunks, once it is the same to the last dependency.

    Its hook `reopened` may take what it depends on from the file of its layer's constants. What `on_hub` then still
    names is fetched only with `check_source`: whoever made the cache chose its name. `root` and `verb` say in the error
    which command allows it.
    """
    kind = recipe_class(kept.kind)
    try:
        recipe: AnyRecipe = msgspec.convert(kept.fields, kind)
        if constants is not None:
            recipe = hooks_of(recipe).reopened(kept.dependencies, constants)
    except WRONG as error:
        raise RecipeInvalid(
            f"the recipe of layer '{kept.layer}' cannot be opened as one of kind '{kept.kind}': {_said(error)}; pass "
            "the recipe itself, or restore 'recipe.json' from a copy of the cache"
        ) from error
    on_hub = () if check_source else remote_inputs(recipe)
    if on_hub:
        raise RecipeNotContacted(root, kept.layer, on_hub[0], verb)
    if fingerprint(recipe, inputs_in(kept.dependencies)) != kept.fingerprint:
        changed = ", ".join(differing_fields(kept, recipe))
        raise RecipeInvalid(f"the recipe of layer '{kept.layer}' is not what it was (differs in: {changed})")
    return recipe


def remote_inputs(recipe: AnyRecipe) -> tuple[str, ...]:
    """What a recipe would fetch from the hub; nothing is contacted to find out."""
    return tuple(hooks_of(recipe).on_hub())


def reopen_source(description: Mapping[str, Any]) -> Source:
    """The source that a plan describes, once all that it says of itself has the right type."""
    kind = source_class(str(description.get("kind")))
    try:
        source: Source = kind.from_description(description)
        _check_fields(source)
    except WRONG as error:
        raise SourceInvalid(
            f"the plan describes its source of kind '{description.get('kind')}' in a way that it cannot be opened by: "
            f"{_said(error)}; pass the source itself"
        ) from error
    return source


def _check_fields(source: Source) -> None:
    """Refuse a source of ours with a field of another type than it declares: it would fail only where it is used."""
    if is_dataclass(source) and type(source).__module__.startswith("forebay."):
        values = {field.name: getattr(source, field.name) for field in fields(source)}
        msgspec.convert(values, type(source), from_attributes=True)


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{text} is missing" if isinstance(error, KeyError) else text


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
    return kind if source_class(kind).remote else ""


def _find(what: str, kind: str, built_in: Mapping[str, tuple[str, str]]) -> type[Any]:
    if kind in built_in:
        module, name = built_in[kind]
        found: type[Any] = getattr(import_module(module), name)
        return found
    for entry in entry_points(group=f"forebay.{what}s", name=kind):
        loaded: type[Any] = entry.load()
        return loaded
    raise UnknownKind(what, kind, sorted(built_in))
