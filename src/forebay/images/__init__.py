"""Images: letterbox geometry, decoding, tags, the recipe. `geometry` and `tags` do not need Pillow."""

from typing import TYPE_CHECKING, Any

from forebay.errors import LibraryMissing
from forebay.exports import lazy_exports

# fmt: off
# isort: off
if TYPE_CHECKING:
    from forebay.images.decode import Policy as Policy
    from forebay.images.geometry import Letterbox as Letterbox, fit as fit, fit_many as fit_many
    from forebay.images.inference import Prepared as Prepared, prepare as prepare, prepared_row as prepared_row
    from forebay.images.recipe import ImageRecipe as ImageRecipe
    from forebay.images.resize import letterbox as letterbox, model_planes as model_planes, paste as paste
    from forebay.images.tags import Tags as Tags
# fmt: on
# isort: on

_exported, __dir__, __all__ = lazy_exports(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _exported(name)
    except ModuleNotFoundError as missing:
        if missing.name != "PIL":
            raise
        raise LibraryMissing(
            "working with images needs 'pillow', which is not installed",
            hint="pip install 'forebay[images]'",
            extra="images",
        ) from missing
