"""Which class stands behind a kind of recipe or source: a table of forebay's own, and entry points of other packages.

A package adds its own in the group `forebay.recipes` or `forebay.sources`, named as the kind. It cannot replace one of
forebay's own.
"""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any

import msgspec

from forebay.errors import LibraryMissing, RecipeInvalid, SourceInvalid
from forebay.recipe import AnyRecipe, RecipeDocument, differing_fields, hooks_of, is_same_recipe
from forebay.source import Source
from forebay.store.base import is_url

# What a description that somebody else wrote may raise in the class that it is turned into.
WRONG = (KeyError, TypeError, ValueError, AttributeError, RecursionError, msgspec.ValidationError)
RECIPES = {  # named, not imported: most need an optional library
    "chat": "forebay.chat:ChatRecipe",
    "images": "forebay.images:ImageRecipe",
    "imported": "forebay.compat.pt_import:ImportedRecipe",
    "preferences": "forebay.chat:PreferenceRecipe",
    "raw": "forebay.raw:RawRecipe",
    "teacher": "forebay.teachers:TeacherRecipe",
    "tokens": "forebay.tokens:TokenRecipe",
}
SOURCES = {
    "chat-cache": "forebay.chat:ChatCacheSource",
    "files": "forebay.sources:FileSource",
    "function": "forebay.sources:FunctionSource",
    "hub": "forebay.sources.hub_datasets:HubSource",
    "image_manifest": "forebay.sources:ImageManifestSource",
    "images": "forebay.sources:ImageSource",
    "jsonl": "forebay.sources:JsonlSource",
    "lines": "forebay.sources:LineSource",
    "old-cache": "forebay.compat.pt_import:OldCacheSource",
    "parquet": "forebay.sources.parquet_sources:ParquetSource",
    "parquet_images": "forebay.sources.parquet_sources:ParquetImageSource",
    "text": "forebay.sources:TextSource",
}


def recipe_class(kind: str) -> type[Any]:
    return _find("recipe", kind, RECIPES)


def source_class(kind: str) -> type[Source]:
    return _find("source", kind, SOURCES)


def reopen_recipe(
    stored: RecipeDocument,
    constants: str | None = None,
    *,
    root: str = "CACHE",
    verb: str = "repair",
    allow_network: bool = False,
) -> AnyRecipe:
    """The stored recipe of a layer, ready to make chunks; an error if any dependency differs.

    Its hook `reopened` may take what it depends on from the file of its layer's constants. What `on_hub` then still
    lists is fetched only with `allow_network`, because the author of the cache chose its name. `root` and `verb` give
    the error's hint.
    """
    kind = recipe_class(stored.kind)
    try:
        recipe: AnyRecipe = msgspec.convert(stored.fields, kind)
        if constants is not None:
            recipe = hooks_of(recipe).reopened(stored.dependencies, constants)
    except WRONG as error:
        raise RecipeInvalid(
            f"the recipe of layer '{stored.layer}' cannot be opened as one of kind '{stored.kind}': {_one_line(error)}",
            hint="pass the recipe itself, or restore 'recipe.json' from a copy of the cache",
        ) from error
    on_hub = () if allow_network else hooks_of(recipe).on_hub()  # without any request
    if on_hub:
        raise SourceInvalid(
            f"layer '{stored.layer}' of '{root}' needs '{on_hub[0]}' from the hub; forebay does not "
            "contact a machine that only a cache names",
            hint=f"allow it with `forebay {verb} {root} --allow-network`",
            repository=on_hub[0],
        )
    if not is_same_recipe(stored, recipe):
        changed = ", ".join(differing_fields(stored, recipe))
        raise RecipeInvalid(f"the recipe of layer '{stored.layer}' is not what it was (differs in: {changed})")
    return recipe


def reopen_source(description: Mapping[str, Any]) -> Source:
    """The source that a plan describes, once every field of the description has the right type."""
    kind = source_class(str(description.get("kind")))
    try:
        return kind.from_description(description)
    except WRONG as error:
        raise SourceInvalid(
            f"the source in the plan (kind '{description.get('kind')}') cannot be opened: {_one_line(error)}",
            hint="pass the source itself",
        ) from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{text} is missing" if isinstance(error, KeyError) else text


def remote_source(description: Mapping[str, Any]) -> str:
    """The name of a source on another machine; empty for one on this machine.

    >>> remote_source({"kind": "hub", "name": "org/set", "endpoint": "https://mirror.example"})
    'hub:org/set at https://mirror.example'
    >>> remote_source({"kind": "lines", "root": "/data"})
    ''
    """
    kind = str(description.get("kind"))
    if kind == "hub":
        endpoint = description.get("endpoint")
        return f"hub:{description.get('name')}" + (f" at {endpoint}" if endpoint else "")
    root = str(description.get("root", ""))
    return root if is_url(root) else kind if source_class(kind).remote else ""


def known_kinds() -> list[str]:
    """The kinds of recipes that are installed: forebay's own, then those of other packages."""
    return [*dict.fromkeys([*RECIPES, *sorted(entry.name for entry in entry_points(group="forebay.recipes"))])]


def _find(what: str, kind: str, own: Mapping[str, str]) -> type[Any]:
    names = [own[kind]] if kind in own else [each.value for each in entry_points(group=f"forebay.{what}s", name=kind)]
    if names:
        named: type[Any] = resolve_name(names[0])
        return named
    raise LibraryMissing(
        f"no {what} of kind '{kind}' is installed (known: {', '.join(sorted(own))})",
        hint=f"install the package that provides it, or pass the {what} itself",
    )
