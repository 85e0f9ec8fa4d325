"""The kinds of data that `build` and `estimate` know. A further kind is one file here and one line below."""

from forebay.cli.kinds.base import Kind
from forebay.cli.kinds.images import IMAGES
from forebay.cli.kinds.raw import RAW
from forebay.cli.kinds.tokens import TOKENS

__all__ = ["KINDS", "Kind"]

KINDS: dict[str, Kind] = {kind.name: kind for kind in (TOKENS, IMAGES, RAW)}
