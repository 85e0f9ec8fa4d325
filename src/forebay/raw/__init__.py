"""Samples kept as they are."""

from forebay.raw.recipe import RawRecipe

__all__ = ["RawRecipe"]
