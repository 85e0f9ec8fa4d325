"""Preprocess training data once into a verified cache, then train from it.

import forebay as fb

fb.build("caches/edu", "data/*.jsonl", fb.TokenRecipe(tokenizer="gpt2"))   # resumes; builds only missing chunks
cache = fb.open_cache("caches/edu")                                        # pins the newest generation
cache[17], cache.read([5, 3, 9], columns=["tokens"])
"""

import sys
from typing import TYPE_CHECKING

from forebay.exports import lazy_exports

__version__ = "0.1.0"  # the only place; pyproject.toml reads it here

if sys.platform not in ("linux", "darwin"):
    # Files are opened without following links, read at a position and published by linking: calls that only POSIX has.
    raise ImportError(f"forebay runs on Linux and macOS, not on '{sys.platform}'; on Windows, install it inside WSL 2")

# fmt: off
# isort: off
if TYPE_CHECKING:
    from forebay import (
        errors as errors, images as images, masks as masks, row_cache as row_cache, sources as sources,
        teachers as teachers, testing as testing,
    )
    from forebay.api import (
        build as build, build_layers as build_layers, clean as clean, copy as copy, drop as drop, dry_run as dry_run,
        estimate as estimate, info as info, repair as repair, status as status, update as update, verify as verify,
    )
    from forebay.cache.reports import Progress as Progress
    from forebay.chat import ChatRecipe as ChatRecipe, PreferenceRecipe as PreferenceRecipe
    from forebay.columns import Column as Column, Ragged as Ragged
    from forebay.feeding.tiers import estimate_remote as estimate_remote, warm_cache as warm_cache
    from forebay.images import ImageRecipe as ImageRecipe
    from forebay.installation import doctor as doctor
    from forebay.preview.peek import contact_sheet as contact_sheet, peek as peek
    from forebay.raw import RawRecipe as RawRecipe
    from forebay.read.cache import Cache as Cache
    from forebay.read.opening import open_cache as open_cache
    from forebay.read.origins import Origin as Origin, RowId as RowId
    from forebay.recipe import (
        ChunkTarget as ChunkTarget, LayerRecipe as LayerRecipe, Recipe as Recipe, RecipeHooks as RecipeHooks,
        Rows as Rows, fingerprint as fingerprint,
    )
    from forebay.row_cache import CachedImages as CachedImages
    from forebay.source import (
        Failure as Failure, Part as Part, Sample as Sample, Source as Source, SourceFile as SourceFile,
    )
    from forebay.store import LocalStore as LocalStore, MemoryStore as MemoryStore, Store as Store
    from forebay.teachers import TeacherRecipe as TeacherRecipe
    from forebay.tokens import TokenRecipe as TokenRecipe
    from forebay.viewer.bundle import view as view
# fmt: on
# isort: on

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
