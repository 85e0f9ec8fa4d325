"""The texts that a cache keeps as JSON, `cache.json` and `recipe.json`: from bytes of anyone to a checked document.

A generation keeps both texts as well. Whatever is wrong with one is an `IndexCorrupt` that names it.
"""

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from forebay.errors import ForebayError, FormatTooNew, IndexCorrupt
from forebay.format.layout import FORMAT_VERSION, LAYER_PATTERN
from forebay.recipe import RecipeDocument, input_layers
from forebay.source import MOST_LEVELS, is_shallow

LayerName = Annotated[str, msgspec.Meta(pattern=LAYER_PATTERN)]

MAX_COLUMNS = 1000
_Document = TypeVar("_Document")


class CacheDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`cache.json`: written once, when a cache begins."""

    format_version: int = FORMAT_VERSION
    cache_id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z_-]{1,64}\Z")]
    base: LayerName


def decode_cache_document(text: bytes | str, root: str, where: str) -> CacheDocument:
    return _decode(text, CacheDocument, root, where)


def decode_recipe_document(text: bytes | str, layer: str, root: str, where: str) -> RecipeDocument:
    """The recipe of one layer."""
    kept = _decode(text, RecipeDocument, root, where)
    problem = _recipe_problem(kept, layer)
    if problem is not None:
        raise IndexCorrupt(root, where, problem)
    return kept


def check_no_cycle(recipes: Mapping[str, RecipeDocument]) -> None:
    """Refuse layers that read each other in a circle."""
    below = {name: [one for one in input_layers(kept) if one in recipes] for name, kept in recipes.items()}
    while below:
        free = [name for name, others in below.items() if not any(other in below for other in others)]
        if not free:
            raise ValueError(f"the layers {', '.join(sorted(below))} read each other")
        below = {name: others for name, others in below.items() if name not in free}


def one_line(error: Exception) -> str:
    """What an error says, whatever is in it, as part of a sentence."""
    return " ".join(str(error).split())[:300]


def _decode(text: bytes | str, document: type[_Document], root: str, where: str) -> _Document:
    try:
        version = msgspec.json.decode(text, type=_Versioned).format_version
        if version > FORMAT_VERSION:
            raise FormatTooNew(f"{root}/{where}", version, FORMAT_VERSION)
        return msgspec.json.decode(text, type=document)
    except FormatTooNew:
        raise
    except RecursionError as error:
        raise IndexCorrupt(root, where, "its lists and objects are nested too deep") from error
    except (msgspec.MsgspecError, ValueError, ForebayError) as error:
        raise IndexCorrupt(root, where, f"it cannot be read: {one_line(error)}") from error


class _Versioned(msgspec.Struct, frozen=True):
    """What a document of any version says first."""

    format_version: Annotated[int, msgspec.Meta(ge=1)]


def _recipe_problem(kept: RecipeDocument, layer: str) -> str | None:
    names = [column.name for column in kept.columns]
    if kept.layer != layer:
        return f"it is the recipe of a layer {kept.layer[:80]!r}"
    if len(names) > MAX_COLUMNS or len(set(names)) != len(names):
        return f"it has two columns of one name, or more than {MAX_COLUMNS:,} columns"
    if kept.sample_ids and kept.sample_ids not in names:
        return f"its sample ids are a column {kept.sample_ids[:80]!r}, which it has not"
    if not is_shallow(kept.fields):
        return f"its fields are nested more than {MOST_LEVELS} deep"
    return None
