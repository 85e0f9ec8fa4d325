"""Mixtures described in a TOML file. Paths are relative to the file; an unknown or wrong field is an error.

seed = 0                      [[cache]]                      [[change]]
shuffle = "auto"              root = "caches/edu"            from_row = 480_000
                              weight = 0.7                   weights = [0.5, 0.5]
                              split = "train"
"""

import os
import tomllib
from typing import Literal

import msgspec

from forebay.errors import RecipeInvalid
from forebay.feeding.mixture import Ingredient, Mixture
from forebay.feeding.selection import By, Split
from forebay.read.opening import open_cache
from forebay.store.base import is_url


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[cache]]`."""

    root: str
    weight: float | None = None
    repeat: float | None = None
    layers: tuple[str, ...] = ()
    split: Literal["train", "validation"] | None = None
    fraction: float = 0.8
    split_seed: int = 0
    split_by: By = "auto"


_SPLIT_FIELDS = ("fraction", "split_seed", "split_by")
_DEFAULTS = CacheEntry(root="")


class ChangeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[change]]`: other weights from a row on."""

    from_row: int
    weights: tuple[float, ...]


class MixtureDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    cache: tuple[CacheEntry, ...]
    change: tuple[ChangeEntry, ...] = ()
    seed: int = 0
    shuffle: Literal["auto", "global", "window", "none"] = "auto"
    epoch_rows: int | None = None


def open_mixture(path: str | os.PathLike[str]) -> Mixture:
    """Open the caches of a TOML file, and return its mixture."""
    name = os.fspath(path)
    document = _document(name)
    folder = os.path.dirname(os.path.abspath(name))
    try:
        ingredients = [_ingredient(folder, entry) for entry in document.cache]
        return Mixture.of(
            ingredients,
            seed=document.seed,
            shuffle=None if document.shuffle == "none" else document.shuffle,
            epoch_rows=document.epoch_rows,
            changes=[(entry.from_row, entry.weights) for entry in document.change],
        )
    except ValueError as error:
        raise RecipeInvalid(f"{name}: {error}") from error


def _document(path: str) -> MixtureDocument:
    try:
        with open(path, "rb") as file:
            return msgspec.convert(tomllib.load(file), MixtureDocument)
    except OSError as error:
        raise RecipeInvalid(f"{path}: cannot be read: {error.strerror}", hint="check the path") from error
    except msgspec.ValidationError as error:
        raise RecipeInvalid(f"{path}: not a mixture: {error}", hint=_known_fields()) from error
    except (ValueError, RecursionError) as error:  # not TOML, a number of 5,000 digits, or 1,000 brackets
        raise RecipeInvalid(f"{path}: not valid TOML: {error}") from error


def _known_fields() -> str:
    tables = {"the file": MixtureDocument, "[[cache]]": CacheEntry, "[[change]]": ChangeEntry}
    return "; ".join(f"{table} has {', '.join(struct.__struct_fields__)}" for table, struct in tables.items())


def _ingredient(folder: str, entry: CacheEntry) -> Ingredient:
    set_fields = [name for name in _SPLIT_FIELDS if getattr(entry, name) != getattr(_DEFAULTS, name)]
    if set_fields and entry.split is None:
        raise ValueError(f"{', '.join(set_fields)} of '{entry.root}' without a split; add split = \"train\"")
    root = entry.root if is_url(entry.root) else os.path.join(folder, entry.root)
    rule = None if entry.split is None else Split(entry.split, entry.fraction, entry.split_seed, entry.split_by)
    return Ingredient(open_cache(root, layers=entry.layers), entry.weight, entry.repeat, rule)
