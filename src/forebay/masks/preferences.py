"""Which tokens of preference rows are trained: the prompt once, then every candidate. numpy only.

tokens    ┌ prompt ────────┬ candidate 0 (best) ─┬ candidate 1 ───┬ … ┐
spans     │ header prompt… │ response stop       │ response stop  │   │     counted from the start of the prompt
"""

import numpy as np
from numpy.typing import NDArray

from forebay.masks.conversations import KINDS, Array, TrainOn, check_spans

_STOP = KINDS.index("stop")


def candidate_weights(spans: Array, prompt: int, candidate_lens: Array, train_on: TrainOn) -> list[NDArray[np.float32]]:
    """Return the weight of every token of each candidate of a row in the loss: 0 where it is not trained.

    `prompt` is the number of tokens of the prompt, which is never trained.

    >>> spans = np.array([[0, 2, 2, 0, 0], [2, 4, 3, 1, 1], [4, 5, 3, 6, 1], [5, 6, 3, 1, 1], [6, 7, 3, 6, 1]])
    >>> [each.tolist() for each in candidate_weights(spans, 2, np.array([3, 2]), TrainOn.of(["response"]))]
    [[1.0, 1.0, 0.0], [1.0, 0.0]]
    """
    ends = prompt + np.cumsum(candidate_lens, dtype=np.int64)
    check_spans(spans, np.array([0, len(spans)]), np.array([int(ends[-1]) if len(ends) else prompt]))
    weights = train_on.table[spans[:, 3]]
    if train_on.turns == "last":
        owner = np.searchsorted(ends, spans[:, 0], side="right")
        last = np.zeros(len(ends) + 1, np.int64)
        stops = (spans[:, 3] == _STOP) & (spans[:, 0] >= prompt)
        np.maximum.at(last, owner[stops], spans[stops, 4].astype(np.int64))
        weights = np.where(spans[:, 4] == last[owner], weights, np.float32(0))
    each = np.repeat(weights, (spans[:, 1] - spans[:, 0]).astype(np.int64))
    return np.split(each[prompt:], ends[:-1] - prompt)
