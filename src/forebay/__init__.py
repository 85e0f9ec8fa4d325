"""Turn raw training data once into a verified cache, then feed training from it at memory speed.

import forebay as fb

source = fb.sources.lines("data/*.jsonl")
fb.build("caches/raw", source, fb.RawRecipe(), workers=2)    # idempotent: computes what is missing
cache = fb.open_cache("caches/raw")                          # pins the newest generation
cache[17], cache.read([5, 3, 9], columns=["data"])
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # the only place; pyproject.toml reads it here

if sys.platform not in ("linux", "darwin"):
    # Files are opened without following links, read at a position and published by linking: calls that only POSIX has.
    raise ImportError(f"forebay runs on Linux and macOS, not on '{sys.platform}'; on Windows, install it inside WSL 2")

if TYPE_CHECKING:
    from forebay import errors, images, masks, sources, teachers, testing, tiers
    from forebay.api import (
        build,
        build_layers,
        clean,
        copy,
        drop,
        dry_run,
        estimate,
        estimate_remote,
        gaps,
        grow,
        refresh,
        rekey,
        repair,
        status,
        summarize,
        verify,
        warm_cache,
    )
    from forebay.cache.records import Progress
    from forebay.chat import ChatRecipe, PreferenceRecipe
    from forebay.columns import Column, Ragged
    from forebay.images import ImageRecipe
    from forebay.installation import doctor
    from forebay.preview.peek import contact_sheet, peek
    from forebay.raw import RawRecipe
    from forebay.read.cache import Cache, Origin, RowId, open_cache
    from forebay.recipe import ChunkTarget, LayerRecipe, Recipe, RecipeHooks, Rows, fingerprint
    from forebay.source import Failure, Part, Sample, Source, SourceFile
    from forebay.store import LocalStore, MemoryStore, Store
    from forebay.teachers.recipe import TeacherRecipe
    from forebay.tiers import CachedImages
    from forebay.tokens import TokenRecipe
    from forebay.viewer.bundle import view

# Where each public name lives. A name is imported when it is first used.
_HOMES = {
    **dict.fromkeys(
        (
            "build",
            "build_layers",
            "clean",
            "copy",
            "drop",
            "dry_run",
            "estimate",
            "estimate_remote",
            "gaps",
            "grow",
            "masks",
            "refresh",
            "rekey",
            "repair",
            "status",
            "summarize",
            "verify",
            "warm_cache",
        ),
        "forebay.api",
    ),
    **dict.fromkeys(("Cache", "Origin", "RowId", "open_cache"), "forebay.read.cache"),
    **dict.fromkeys(("contact_sheet", "peek"), "forebay.preview.peek"),
    **dict.fromkeys(("Column", "Ragged"), "forebay.columns"),
    **dict.fromkeys(("ChunkTarget", "LayerRecipe", "Recipe", "RecipeHooks", "Rows", "fingerprint"), "forebay.recipe"),
    **dict.fromkeys(("Failure", "Part", "Sample", "Source", "SourceFile"), "forebay.source"),
    **dict.fromkeys(("LocalStore", "MemoryStore", "Store"), "forebay.store"),
    "CachedImages": "forebay.tiers",
    **dict.fromkeys(("ChatRecipe", "PreferenceRecipe"), "forebay.chat"),
    "ImageRecipe": "forebay.images",
    "Progress": "forebay.cache.records",
    "doctor": "forebay.installation",
    "RawRecipe": "forebay.raw",
    "TeacherRecipe": "forebay.teachers",
    "TokenRecipe": "forebay.tokens",
    "view": "forebay.viewer.bundle",
}
_MODULES = ("errors", "images", "masks", "sources", "teachers", "testing", "tiers")

__all__ = [
    "Cache", "CachedImages", "ChatRecipe", "ChunkTarget", "Column", "Failure", "ImageRecipe", "LayerRecipe",
    "LocalStore", "MemoryStore", "Origin", "Part", "PreferenceRecipe", "Progress", "Ragged", "RawRecipe", "Recipe",
    "RecipeHooks", "RowId", "Rows", "Sample", "Source", "SourceFile", "Store", "TeacherRecipe", "TokenRecipe", "build",
    "build_layers", "clean", "contact_sheet", "copy", "doctor", "drop", "dry_run", "errors", "estimate",
    "estimate_remote", "fingerprint", "gaps", "grow", "images", "masks", "open_cache", "peek", "refresh", "rekey",
    "repair", "sources", "status", "summarize", "teachers", "testing", "tiers", "verify", "view", "warm_cache",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"forebay.{name}")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
