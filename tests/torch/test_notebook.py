"""What notebooks show of batches: numbers of ours, and the text of others as text."""

import numpy as np
import torch
from tests.cache.test_records import NASTY, Cells

from forebay.torch import show_batch


def text_of(html: str) -> list[str]:
    cells = Cells(html)
    assert cells.tags <= {"table", "caption", "tr", "th", "td", "br"}
    return cells.text


def test_a_batch_is_shown_as_names_types_and_shapes_which_are_only_text():
    shown = show_batch({"tokens": torch.zeros(2, 6, dtype=torch.int64), "lens": torch.zeros(2, 2, dtype=torch.int32)})
    assert repr(shown).splitlines() == ["tokens  int64 [2, 6]", "lens    int32 [2, 2]"]
    odd = type(NASTY, (), {})()
    cells = text_of(
        show_batch({NASTY: torch.zeros(2), "other": odd, "array": np.zeros((1, 2), np.uint8)})._repr_html_()
    )
    assert cells.count(NASTY) == 2
    assert "uint8 [1, 2]" in cells
    assert repr(show_batch({})) == "an empty batch"
    text_of(show_batch({})._repr_html_())
