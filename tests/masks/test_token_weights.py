"""Weights of tokens by the spans of a row: kinds, turns, and spans that do not fit."""

import numpy as np
import pytest

from forebay.masks import TrainOn, token_weights


@pytest.mark.parametrize(
    "spans",
    [
        [[0, 3, 3, 1, 0]],
        [[0, 3, 3, 1, 0], [4, 5, 3, 1, 0]],
        [[1, 5, 3, 1, 0]],
        [[0, 5, 3, 9, 0]],
        [[0, 5, 7, 1, 0]],
        [[0, 6, 3, 1, 0]],
        [[0, 5, 3, 1, 0], [5, 5, 3, 1, 0]],
    ],
)
def test_spans_of_a_forged_cache_that_do_not_cover_a_row_are_refused(spans: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"spans of a row do not cover|unknown role or kind"):
        token_weights(
            np.array(spans, np.uint32), np.array([0, len(spans)]), np.array([[5]]), np.array([0]), 8, TrainOn()
        )


def test_weights_of_spans_in_words() -> None:
    """Two documents of two messages each; the second has its last turn in message 3."""
    spans = np.array([[0, 2, 2, 0, 0], [2, 3, 3, 1, 1], [3, 4, 2, 0, 2], [4, 5, 3, 1, 3], [5, 6, 3, 6, 3]], np.uint32)
    arguments = spans, np.array([0, 5]), np.array([[3, 3]]), np.array([1, 3]), 8
    assert token_weights(*arguments, TrainOn()).tolist() == [[0, 0, 1, 0, 1, 1, 0, 0]]
    assert token_weights(*arguments, TrainOn.of(["stop"], turns="last")).tolist() == [[0, 0, 0, 0, 0, 1, 0, 0]]
    early = np.array([0, 1])
    assert token_weights(*arguments[:3], early, 8, TrainOn(turns="last")).tolist() == [[0] * 8]
