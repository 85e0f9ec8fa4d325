"""Which class stands behind a kind of recipe or source: entry points, of forebay itself and of other packages.

A package adds its own in the group `forebay.recipes` or `forebay.sources`, named as the kind. It cannot replace one of
forebay's own.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

import msgspec

from forebay.errors import LibraryMissing, RecipeInvalid, SourceInvalid
from forebay.recipe import AnyRecipe, RecipeDocument, differing_fields, hooks_of, is_same_recipe
from forebay.source import Source
from forebay.store.base import is_url

# What a description that somebody else wrote may raise in the class that it is turned into.
WRONG = (KeyError, TypeError, ValueError, AttributeError, RecursionError, msgspec.ValidationError)
RECIPES, SOURCES = "forebay.recipes", "forebay.sources"  # groups of entry points; an entry is named as its kind
# forebay's own entry points are read from here in a source tree, where installed metadata is missing or older than the
# code: an editable install records them once. An installed package has no such file, and is asked for its metadata.
_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


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
    on_hub = () if allow_network else remote_inputs(recipe)
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


def remote_inputs(recipe: AnyRecipe) -> tuple[str, ...]:
    """The files that a recipe would fetch from the hub, without any request."""
    return tuple(hooks_of(recipe).on_hub())


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


@cache
def own_kinds(group: str) -> dict[str, EntryPoint]:
    """forebay's own kinds of recipes or of sources."""
    if Path(__file__).parents[1].name == "src" and _PYPROJECT.is_file():
        project = tomllib.loads(_PYPROJECT.read_text("utf-8")).get("project", {})
        if project.get("name") == "forebay":
            return {kind: EntryPoint(kind, value, group) for kind, value in project["entry-points"][group].items()}
    try:
        own = distribution("forebay").entry_points
    except PackageNotFoundError as error:
        hint = "install forebay again, or allow more open files (`ulimit -n`)"
        raise LibraryMissing("the metadata of the package 'forebay' cannot be read", hint=hint) from error
    return {entry.name: entry for entry in own.select(group=group)}


def known_kinds() -> list[str]:
    """The kinds of recipes that are installed: forebay's own, then those of other packages."""
    return [*dict.fromkeys([*own_kinds(RECIPES), *sorted(entry.name for entry in _of_others(RECIPES))])]


def _of_others(group: str, name: str | None = None) -> list[EntryPoint]:
    """The entry points of other packages: the metadata of an editable install of forebay may be older than its code."""
    entries = entry_points(group=group) if name is None else entry_points(group=group, name=name)
    return [entry for entry in entries if entry.dist is None or entry.dist.name != "forebay"]


def _find(what: str, kind: str, group: str) -> type[Any]:
    own = own_kinds(group)
    for entry in (own[kind],) if kind in own else _of_others(group, name=kind):
        loaded: type[Any] = entry.load()
        return loaded
    raise LibraryMissing(
        f"no {what} of kind '{kind}' is installed (known: {', '.join(sorted(own))})",
        hint=f"install the package that provides it, or pass the {what} itself",
    )
