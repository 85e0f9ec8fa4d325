"""The recipe that the images of a cache were made by: given as it is, or taken from the cache."""

from typing import Protocol

import msgspec

from forebay.errors import RecipeInvalid
from forebay.images.recipe import ImageRecipe
from forebay.recipe import RecipeDocument, differing_fields, fingerprint


class KeepsRecipes(Protocol):
    """An open cache, as far as it matters here."""

    @property
    def layers(self) -> tuple[str, ...]: ...

    def recipe(self, layer: str) -> RecipeDocument: ...


def image_recipe(given: ImageRecipe | KeepsRecipes) -> ImageRecipe:
    """The recipe itself, or that of the layer of images in a cache."""
    if isinstance(given, ImageRecipe):
        return given
    if not hasattr(given, "layers"):
        raise TypeError(f"an ImageRecipe or an open cache of images is expected, not {type(given).__name__}")
    kept = _kept(given)
    recipe = msgspec.convert(kept.fields, ImageRecipe)
    if fingerprint(recipe) != kept.fingerprint:
        changed = ", ".join(differing_fields(kept, recipe))
        raise RecipeInvalid(f"the recipe of layer '{kept.layer}' is not what it was (differs in: {changed})")
    return recipe


def _kept(cache: KeepsRecipes) -> RecipeDocument:
    documents = [cache.recipe(layer) for layer in cache.layers]
    found = next((document for document in documents if document.kind == ImageRecipe.kind), None)
    if found is None:
        kinds = ", ".join(document.kind for document in documents)
        raise ValueError(f"{cache!r} holds no images but: {kinds}; pass a cache built by an ImageRecipe, or the recipe")
    return found
