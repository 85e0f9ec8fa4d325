"""Images: letterbox geometry, decoding, tags, the recipe. `geometry` and `tags` do not need Pillow."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forebay.errors import LibraryMissing
from forebay.images.geometry import Letterbox, fit, fit_many
from forebay.images.tags import Tags

if TYPE_CHECKING:
    from forebay.images.decode import Policy
    from forebay.images.inference import Prepared, prepare, prepared_row
    from forebay.images.recipe import ImageRecipe
    from forebay.images.recipe import KeepsRecipes as KeepsRecipes
    from forebay.images.recipe import image_recipe as image_recipe
    from forebay.images.resize import letterbox, model_planes, paste
# Names that need Pillow are imported when they are first used. None may have the name of a module: importing the module
# would replace it.
_HOMES = {
    "Policy": "decode",
    **dict.fromkeys(("letterbox", "model_planes", "paste"), "resize"),
    **dict.fromkeys(("ImageRecipe", "KeepsRecipes", "image_recipe"), "recipe"),
    **dict.fromkeys(("Prepared", "prepare", "prepared_row"), "inference"),
}
__all__ = [
    "ImageRecipe", "Letterbox", "Policy", "Prepared", "Tags", "fit", "fit_many", "letterbox", "model_planes", "paste",
    "prepare", "prepared_row",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(_needing_pillow(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay.images' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


def _needing_pillow(module: str) -> ModuleType:
    try:
        return import_module(f"forebay.images.{module}")
    except ModuleNotFoundError as missing:
        if missing.name != "PIL":
            raise
        raise LibraryMissing(
            "working with images needs 'pillow', which is not installed",
            hint="pip install 'forebay[images]'",
            extra="images",
        ) from missing


def __dir__() -> list[str]:
    return list(__all__)
