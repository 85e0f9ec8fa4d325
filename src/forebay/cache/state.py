"""Present and missing parts of a cache: one index per verb, one table per layer. Every verb reads these.

chunk      0  1  2  3  4  5
planned    ■  ■  ■  ■  ■  ■     in the plan (layers above the base: listed in the base and in all input layers)
listed     ■  ■  ■  ·  ·  ·     in the newest generation
file       ■  ■  ·  ■  ·  ·     a file with its name exists
                 │  └──┴──┴──── todo: a builder adopts the file of 3, and makes 4 and 5
                 └───────────── lost: `repair`
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from forebay.cache.catalog import load_generation, newest_generation, read_cache_document, readable_recipe
from forebay.cache.plan import Plan, load_plan
from forebay.columns import Array
from forebay.errors import Damaged, FormatTooNew
from forebay.format import layout
from forebay.format.generation import ChunkTable, Generation
from forebay.recipe import RecipeDocument, input_layers
from forebay.store.base import Store, index_corrupt


@dataclass(frozen=True, slots=True, eq=False)
class LayerState:
    """One row per planned chunk, as columns of len(plan)."""

    planned: Array  # bool; base: not withdrawn; layers above: listed in the base and in all input layers
    listed: Array  # bool; in the newest generation, under the fingerprint that recipes/<layer>.json has now
    file: Array  # bool; a file with this name exists

    @property
    def todo(self) -> Array:
        """Planned and not listed."""
        return self.planned & ~self.listed

    @property
    def lost(self) -> Array:
        """Listed, and the file is gone: for `repair`; `build` reports it and exits 1."""
        return self.listed & ~self.file

    @property
    def unlisted(self) -> Array:
        """Not listed, and a file exists: left by a stale builder, being made, or foreign."""
        return self.todo & self.file


def numbers(flags: Array) -> list[int]:
    """The chunks that are True in a column of a table.

    >>> numbers(np.array([True, False, True]))
    [0, 2]
    """
    chosen: list[int] = np.flatnonzero(flags).tolist()
    return chosen


class Index:
    """The index of a cache at one moment: its newest generation, then its plan, then its chunk files.

    Each is read once, when first asked for, and never before the generation: whatever a generation lists existed
    before it was published.
    """

    def __init__(self, store: Store, newest: Generation | None, plan: Plan | None = None) -> None:
        self.store, self.newest = store, newest
        self._plan = plan
        self._files: dict[str, Array] = {}
        self._recipes: dict[str, RecipeDocument | None] = {}

    @classmethod
    def take(cls, store: Store, before: "Index | None" = None) -> "Index":
        """The index as it is now; what an index from `before` has is not read again."""
        newest = newest_generation(store, None if before is None else before.newest)
        known = None if before is None else before._plan
        return cls(store, newest, None if known is None else load_plan(store, _withdrawn(newest), known))

    @property
    def published(self) -> Generation:
        """The newest generation; raises if nothing is published."""
        return self.newest if self.newest is not None else load_generation(self.store)

    @cached_property
    def plan(self) -> Plan:
        """The plan on disk, which must begin with the segments that the newest generation lists."""
        if self._plan is None:
            self._plan = load_plan(self.store, _withdrawn(self.newest))
        check_listed_plan(self.store, self._plan, self.newest)
        return self._plan

    @property
    def sound_plan(self) -> Plan | None:
        """The plan, None if it is damaged or does not begin with the listed segments."""
        try:
            return self.plan
        except FormatTooNew:
            raise
        except Damaged:
            return None

    @cached_property
    def base(self) -> str:
        return self.newest.base if self.newest is not None else read_cache_document(self.store).base

    @cached_property
    def layers(self) -> list[str]:
        """Every layer: those with a recipe that can be read, and those that the newest generation lists."""
        bound = [layer for entry in self.store.entries(layout.RECIPES) if (layer := layout.parse_recipe(entry.key))]
        readable = {layer for layer in bound if self.recipe(layer) is not None}
        listed = set(self.newest.recipes) if self.newest is not None else set()
        return sorted(readable | listed, key=lambda layer: (layer != self.base, layer))

    def recipe(self, layer: str) -> RecipeDocument | None:
        """The recipe that binds a layer now; None if there is none that can be read.

        If the file agrees with the generation on the fingerprint, or cannot be read, the generation's text is used: a
        file that rotted stays out of later generations.
        """
        if layer not in self._recipes:
            published = self.newest.recipe(layer) if self.newest is not None and layer in self.newest.recipes else None
            bound = readable_recipe(self.store, layer)
            is_same = bound is None or (published is not None and bound.fingerprint == published.fingerprint)
            self._recipes[layer] = published if is_same else bound
        return self._recipes[layer]

    def table(self, layer: str) -> ChunkTable:
        """The listed chunks of a layer, if they were made by the recipe that binds it now."""
        if self.newest is None or layer not in self.newest.layers:
            return ChunkTable.of([])
        recipe = self.recipe(layer)
        is_bound = recipe is not None and recipe.fingerprint == self.newest.recipe(layer).fingerprint
        return self.newest.table(layer) if is_bound else ChunkTable.of([])

    def folder(self, layer: str) -> str | None:
        """The folder of a layer's chunks; None if it has no readable recipe."""
        recipe = self.recipe(layer)
        return None if recipe is None else layout.document_folder(recipe)

    def state(self, layer: str) -> LayerState:
        """The table of a layer: one row per planned chunk."""
        plan, folder = self.plan, self.folder(layer)
        if layer == self.base:
            planned = plan.planned
        else:
            recipe = self.recipe(layer)
            below = [self.base, *(input_layers(recipe) if recipe is not None else ())]
            planned = np.logical_and.reduce([plan.planned, *(self._listed(name) for name in below)])
        return LayerState(planned, self._listed(layer), self.files(folder) if folder else np.zeros(len(plan), np.bool_))

    def files(self, folder: str) -> Array:
        """Per planned chunk, True if a file with its name exists; one listing of the folder."""
        if folder not in self._files:
            keys = (entry.key for entry in self.store.entries(folder))
            self._files[folder] = _flags(chunk_numbers(keys, folder), len(self.plan))
        return self._files[folder]

    def _listed(self, layer: str) -> Array:
        return _flags(self.table(layer).chunks, len(self.plan))

    def height(self, layer: str) -> int:
        """How many layers lie between a layer and the samples: the base has 0."""
        recipe = self.recipe(layer)
        if layer == self.base or recipe is None:
            return 0
        return 1 + max((self.height(name) for name in input_layers(recipe) if name != layer), default=0)


def check_listed_plan(store: Store, plan: Plan, newest: Generation | None) -> None:
    """Raise unless a plan begins with the segments that a generation lists, and the others were planned here."""
    listed = newest.plan if newest is not None else ()
    for number, digest in enumerate(listed):
        if number >= len(plan.segments):
            raise index_corrupt(store.address, layout.plan_segment(number), "it is gone")
        if plan.segments[number].digest != digest:
            raise index_corrupt(store.address, layout.plan_segment(number), "it is not the segment that was published")
    unlisted = plan.segments[len(listed) :]
    cache_id = (newest.document if newest is not None else read_cache_document(store)).cache_id if unlisted else ""
    for segment in unlisted:
        if segment.cache_id != cache_id:
            raise index_corrupt(store.address, layout.plan_segment(segment.number), "it is of another cache")


def chunk_numbers(keys: Iterable[str], folder: str) -> Array:
    """The chunk numbers of keys in a layer folder; other names are ignored. A million keys take half a second."""
    start, end = len(folder), -len(layout.SUFFIX)
    names = (key[start:end] for key in keys if key.startswith(folder) and key.endswith(layout.SUFFIX))
    return np.fromiter((int(name) for name in names if _is_number(name)), np.int64)


def _is_number(name: str) -> bool:
    """True for a number as keys have it: six ASCII digits, or more without a leading zero."""
    has_form = len(name) == 6 or (6 < len(name) < 16 and name[0] != "0")
    return has_form and name.isascii() and name.isdecimal()


def _flags(chunks: Array, length: int) -> Array:
    flags = np.zeros(length, np.bool_)
    flags[chunks[chunks < length]] = True
    return flags


def _withdrawn(newest: Generation | None) -> Collection[int]:
    return newest.withdrawn if newest is not None else ()
