"""Transparent pictures are made opaque strip by strip, to the same pixels as in one go."""

import numpy as np
import pytest
from PIL import Image

from forebay.images import color
from forebay.images.color import as_rgb

PAD = (114, 20, 200)


def picture(mode: str) -> Image.Image:
    values = np.random.default_rng(7).integers(0, 256, (61, 97, 4), dtype=np.uint8)
    if mode in ("RGBA", "RGBa"):
        return Image.frombytes(mode, (97, 61), values.tobytes())
    if mode == "LA":
        return Image.frombytes("LA", (97, 61), values[:, :, :2].tobytes())
    found = Image.frombytes(mode, (97, 61), (values[:, :, 0] % 4).tobytes())
    if mode == "P":
        found.putpalette(values.tobytes()[:768])
    found.info["transparency"] = 1
    return found


@pytest.mark.parametrize("mode", ["RGBA", "RGBa", "LA", "P", "L"])
@pytest.mark.parametrize("alpha", ["composite", "drop"])
def test_a_picture_in_strips_has_the_pixels_of_the_whole(monkeypatch, mode, alpha):
    whole = as_rgb(picture(mode), alpha, PAD)
    monkeypatch.setattr(color, "_STRIP_PIXELS", 1000)
    assert as_rgb(picture(mode), alpha, PAD).tobytes() == whole.tobytes()
    if alpha == "composite":
        clear = picture(mode).convert("RGBA")
        over = Image.alpha_composite(Image.new("RGBA", clear.size, (*PAD, 255)), clear)
        assert whole.tobytes() == over.convert("RGB").tobytes()
