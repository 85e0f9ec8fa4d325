"""Image recipes for worker processes: with the compiled resize, and with Pillow alone."""

import forebay as fb
from forebay.images import resize


class CompiledRecipe(fb.ImageRecipe, frozen=True, kw_only=True):
    """An image recipe, imported from this module as the other one is."""


class PillowRecipe(fb.ImageRecipe, frozen=True, kw_only=True):
    """An image recipe whose workers resize with Pillow."""

    def placed(self, worker: int) -> "PillowRecipe":
        super().placed(worker)
        resize.compiled = None
        return self
