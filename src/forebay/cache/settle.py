"""Deciding what a recipe left open, once, before anything is planned; holding it to that ever after."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from forebay.cache.cut import sample_heads
from forebay.cache.presence import column_homes
from forebay.cache.publish import newest_generation, read_recipe_document
from forebay.cache.reader import open_cache
from forebay.columns import Array, Ragged
from forebay.recipe import AnyRecipe
from forebay.source import Annotated, Part, Sample, Source
from forebay.store.base import Store

AnyR = TypeVar("AnyR", bound=AnyRecipe)

WHOLE = 1 << 62  # a file in one part


@dataclass(frozen=True, slots=True)
class Survey:
    """What a recipe may ask about the source before it decides: a few samples, or what is said of every one."""

    source: Source | None
    store: Store | None = None

    def rows(self, names: Sequence[str], count: int) -> dict[str, Array | Ragged]:
        """The first rows of some columns of a cache that is there, of the first chunk that has them all at most.

        None where no layer has such a column: whoever prepares the layer says so.
        """
        newest = newest_generation(self.store) if self.store is not None else None
        if self.store is None or newest is None:
            return {}
        homes = column_homes({layer: newest.recipe(layer).columns for layer in newest.recipes}, newest.base)
        if not all(name in homes for name in names):
            return {}
        layers = dict.fromkeys(homes[name].layer for name in names)
        cache = open_cache(self.store, generation=newest.number, layers=list(layers))
        first = int(cache.chunk_starts[1]) if len(cache.chunk_numbers) else 0
        return cache.read(range(min(count, first)), names)

    def __call__(self) -> Iterable[Sample]:
        return () if self.source is None else sample_heads(self.source, self.source.files())

    def annotations(self) -> Iterable[Mapping[str, Any]]:
        """The metadata of all samples, in order; where the source cannot tell it apart, every sample is read."""
        if self.source is None:
            return
        if hasattr(self.source, "annotations"):
            yield from self.source.annotations()
            return
        for file in self.source.files():
            start = 0
            for stop in self.source.cuts(file, 0, WHOLE, WHOLE):
                samples = self.source.read(Part(self.source.scanned(file), start, stop))
                yield from (one.data.metadata for one in samples if isinstance(one, Sample) and _is_annotated(one))
                start = stop


def settle(store: Store | None, source: Source | None, recipe: AnyR, layer: str) -> tuple[AnyR, tuple[str, ...]]:
    """The recipe with every choice made, and what there is to say about the choices.

    A layer that is there has made them; a new one makes them by a few samples of the source.
    """
    decide = getattr(recipe, "settled", None)
    if decide is None:
        return recipe, ()
    kept = read_recipe_document(store, layer) if store is not None else None
    settled: tuple[AnyR, tuple[str, ...]] = decide(kept.fields if kept else None, Survey(source, store))
    return settled


def _is_annotated(sample: Sample) -> bool:
    return isinstance(sample.data, Annotated)
