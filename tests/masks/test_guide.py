"""Every block of the guide runs, in order, and draws the pictures that the guide shows."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from forebay.torch.attention.packed_attention import _kernel

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = DOCS / "guide-masks.md"

# torch warns itself while it loads its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    """The folder in which all blocks ran, one after the other."""
    folder = tmp_path_factory.mktemp("guide")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert len(blocks) > 5
    names: dict[str, object] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # Traced, without the C++ compiler, which takes half a minute for a first kernel: tests/torch has one.
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        _kernel.cache_clear()
        for block in blocks:
            exec(compile(block, str(GUIDE), "exec"), names)
    _kernel.cache_clear()
    return folder


@pytest.mark.slow
def test_the_guide_shows_what_its_blocks_draw(drawn: Path):
    shown = re.findall(r"\(pictures/([\w-]+\.png)\)", GUIDE.read_text())
    assert sorted(shown) == sorted(path.name for path in drawn.glob("*.png"))
    for name in shown:
        assert np.array_equal(Image.open(DOCS / "pictures" / name), Image.open(drawn / name)), name
