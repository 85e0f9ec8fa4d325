"""What notebooks show of batches: numbers of ours, and the text of others as text."""

import numpy as np
import torch
from tests.cache.test_records import NASTY, Cells

from forebay.torch import show_batch


def text_of(html: str) -> list[str]:
    cells = Cells(html)
    assert cells.tags <= {"table", "caption", "tr", "th", "td", "br"}
    return cells.text


def test_a_batch_is_shown_as_its_names_types_and_shapes():
    batch = {"tokens": torch.zeros(2, 6, dtype=torch.int64), "seq_lens": torch.zeros(2, 2, dtype=torch.int32)}
    shown = show_batch(batch)
    assert repr(shown).splitlines() == ["tokens    int64 [2, 6]", "seq_lens  int32 [2, 2]"]
    assert {"int64 [2, 6]", "int32 [2, 2]"} <= set(text_of(shown._repr_html_()))


def test_names_and_values_of_a_batch_are_only_text():
    class Odd:
        pass

    Odd.__name__ = NASTY
    html = show_batch({NASTY: torch.zeros(2), "other": Odd(), "array": np.zeros((1, 2), np.uint8)})._repr_html_()
    assert text_of(html).count(NASTY) == 2
    assert "uint8 [1, 2]" in text_of(html)
    assert repr(show_batch({})) == "an empty batch"
    text_of(show_batch({})._repr_html_())
