"""Images: letterbox geometry, decoding, tags, the recipe. `geometry` and `tags` do not need Pillow."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forebay.errors import LibraryMissing
from forebay.images.geometry import Letterbox, fit, fit_many
from forebay.images.tags import Tags

if TYPE_CHECKING:
    from forebay.images.decode import Policy, letterbox, model_planes, paste
    from forebay.images.recipe import ImageRecipe, Prepared, prepare, prepared_row
    from forebay.images.recipe import KeepsRecipes as KeepsRecipes
    from forebay.images.recipe import image_recipe as image_recipe
    from forebay.images.sheets import Framed, contact_sheet, shaded
# Names that need Pillow are imported when they are first used. None may have the name of a module: importing the module
# would replace it.
_HOMES = {
    "Policy": "forebay.images.decode",
    **dict.fromkeys(("letterbox", "model_planes", "paste"), "forebay.images.decode"),
    **dict.fromkeys(
        ("ImageRecipe", "KeepsRecipes", "Prepared", "image_recipe", "prepare", "prepared_row"), "forebay.images.recipe"
    ),
    "shaded": "forebay.images.sheets",
    **dict.fromkeys(("Framed", "contact_sheet"), "forebay.images.sheets"),
}
__all__ = [
    "Framed", "ImageRecipe", "Letterbox", "Policy", "Prepared", "Tags", "contact_sheet", "fit", "fit_many", "letterbox",
    "model_planes", "paste", "prepare", "prepared_row", "shaded",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(_needing_pillow(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay.images' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


def _needing_pillow(module: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as missing:
        if missing.name != "PIL":
            raise
        raise LibraryMissing("pillow", "working with images", "images") from missing


def __dir__() -> list[str]:
    return list(__all__)
