"""The pictures of the guide are what its script draws now."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.helpers import guide_pictures

KEPT = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    guide_pictures.main(str(folder))
    return folder


@pytest.mark.parametrize("name", ["image-sheet.png", "image-flip.png", "image-guess.png"])
def test_the_guide_shows_what_is_drawn(drawn: Path, name: str):
    ours, theirs = (np.asarray(Image.open(folder / name), np.int16) for folder in (KEPT, drawn))
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).mean() < 1  # letters and JPEGs may differ a little between versions of Pillow
