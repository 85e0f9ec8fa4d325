"""Deciding what a recipe left open, once, before anything is planned; holding it to that ever after."""

from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from forebay.cache.cut import sample_heads
from forebay.cache.publish import read_recipe_document
from forebay.recipe import AnyRecipe
from forebay.source import Sample, Source
from forebay.store.base import Store

AnyR = TypeVar("AnyR", bound=AnyRecipe)


def settle(store: Store | None, source: Source | None, recipe: AnyR, layer: str) -> tuple[AnyR, tuple[str, ...]]:
    """The recipe with every choice made, and what there is to say about the choices.

    A layer that is there has made them; a new one makes them by a few samples of the source.
    """
    decide = getattr(recipe, "settled", None)
    if decide is None:
        return recipe, ()
    kept = read_recipe_document(store, layer) if store is not None else None
    settled: tuple[AnyR, tuple[str, ...]] = decide(kept.fields if kept else None, partial(_samples, source))
    return settled


def _samples(source: Source | None) -> Iterable[Sample]:
    return () if source is None else sample_heads(source, source.files())
