"""Which tokens of a conversation a model is trained on, derived from the spans of a chat cache. numpy only.

A span is `start, stop, role, kind, message`: tokens of a row that have one role and one kind.

    text    <|im_start|>user⏎ Hi <|im_end|>⏎<|im_start|>assistant⏎ Hello <|im_end|> ⏎
    kind    header            prompt header                        response stop     header
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from forebay.errors import choice_error
from forebay.masks.documents import IGNORED_LABEL

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
KINDS: Final = ("prompt", "response", "thinking", "tool_call", "tool_result", "header", "stop")
GENERATED: Final = ("response", "thinking", "tool_call", "stop")  # what a model writes
SPAN_FIELDS: Final = 5  # start, stop, role, kind, message
Kind = Literal["prompt", "response", "thinking", "tool_call", "tool_result", "header", "stop"]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class TrainOn:
    """The kinds of tokens that the loss counts, each with its weight, in all assistant turns or in the last one.

    >>> TrainOn.of(("response", "stop")).weights
    (('response', 1.0), ('stop', 1.0))
    """

    weights: tuple[tuple[Kind, float], ...] = tuple((kind, 1.0) for kind in GENERATED)
    turns: Literal["all", "last"] = "all"

    def __post_init__(self) -> None:
        unknown = [kind for kind, _ in self.weights if kind not in KINDS]
        if unknown:
            raise choice_error("each kind of train_on", unknown[0], KINDS)
        if self.turns not in ("all", "last"):
            raise choice_error("turns", self.turns, ("all", "last"))
        if any(not 0 <= weight < np.inf for _, weight in self.weights):
            raise ValueError(f"weights of train_on must be finite and at least 0 (got {dict(self.weights)})")
        if not any(weight for _, weight in self.weights):
            raise ValueError("train_on leaves nothing to train on; name at least one kind with a weight above 0")

    @classmethod
    def of(
        cls, kinds: "TrainOn | Sequence[Kind] | Mapping[Kind, float]", turns: Literal["all", "last"] = "all"
    ) -> "TrainOn":
        """Return the policy of a list of kinds, or of kinds with weights."""
        if isinstance(kinds, TrainOn):
            return kinds
        if isinstance(kinds, str):
            raise TypeError(f"train_on is {kinds!r}; pass a list of kinds: [{kinds!r}]")
        named = kinds if isinstance(kinds, Mapping) else dict.fromkeys(kinds, 1.0)
        return cls(tuple((kind, float(weight)) for kind, weight in named.items()), turns)

    @property
    def is_weighted(self) -> bool:
        """Whether some trained token has another weight than 1."""
        return any(weight not in (0, 1) for _, weight in self.weights)

    @property
    def table(self) -> NDArray[np.float32]:
        """The weight of every kind, by its number."""
        named = dict(self.weights)
        return np.array([named.get(kind, 0.0) for kind in KINDS], np.float32)


def check_spans(spans: Array, offsets: Array, used: Array) -> None:
    """Raise where the spans of rows do not cover exactly their first `used` tokens, each once and in order."""
    offsets = offsets.astype(np.int64)
    counts = np.diff(offsets)
    row = np.repeat(np.arange(len(counts)), counts)
    start, stop = spans[:, 0].astype(np.int64), spans[:, 1].astype(np.int64)
    first = np.zeros(len(spans), np.bool_)
    first[offsets[:-1][counts > 0]] = True
    before = np.where(first, 0, np.concatenate([[0], stop[:-1]]))[: len(spans)]
    lengths = np.bincount(row, weights=stop - start, minlength=len(counts)).astype(np.int64)
    in_order = bool((start == before).all() and (stop > start).all())
    if not in_order or not np.array_equal(lengths, used):
        raise ValueError("the spans of a row do not cover its documents; run `forebay verify` on the cache")
    check_roles_and_kinds(spans)


def check_roles_and_kinds(spans: Array) -> None:
    if len(spans) and (int(spans[:, 2].max()) >= len(ROLES) or int(spans[:, 3].max()) >= len(KINDS)):
        raise ValueError("a span has an unknown role or kind; a newer forebay may have written the cache")


def token_weights(
    spans: Array, offsets: Array, seq_lens: Array, last_turn: Array, sequence_length: int, train_on: TrainOn
) -> NDArray[np.float32]:
    """Return the weight of every token in the loss, float32 `[rows, sequence_length]`: 0 where it is not trained.

    `spans` are the flat spans of all rows with their `offsets`; `seq_lens` are zero-padded, `[rows, max_documents]`;
    `last_turn` is flat, one number per document.
    """
    used = seq_lens.sum(axis=1, dtype=np.int64)
    check_spans(spans, offsets, used)
    weights = train_on.table[spans[:, 3]]
    if train_on.turns == "last":
        weights = np.where(spans[:, 4] == _last_turn(spans, offsets, seq_lens, last_turn), weights, np.float32(0))
    by_token = np.zeros((len(used), sequence_length), np.float32)
    lengths: Array = (spans[:, 1] - spans[:, 0]).astype(np.int64)
    by_token[np.arange(sequence_length) < used[:, None]] = np.repeat(weights, lengths)
    return by_token


def label_weights(labels: NDArray[np.int64], weights: NDArray[np.float32], style: str) -> NDArray[np.float32]:
    """Return the weight of every label, and set labels without a weight to -100, in place.

    `weights` are those of tokens: a shifted label is the next token, and has its weight.
    """
    of_labels = weights
    if style == "shifted":
        of_labels = np.zeros_like(weights)
        of_labels[:, :-1] = weights[:, 1:]
    of_labels[labels == IGNORED_LABEL] = 0
    labels[of_labels == 0] = IGNORED_LABEL
    return of_labels


def _last_turn(spans: Array, offsets: Array, seq_lens: Array, last_turn: Array) -> Array:
    """Return the last assistant turn of the document that each span is in."""
    counts: Array = np.diff(offsets.astype(np.int64))
    row = np.repeat(np.arange(len(seq_lens)), counts)
    stops = np.cumsum(seq_lens, axis=1, dtype=np.int64)
    within = (spans[:, :1].astype(np.int64) >= np.where(seq_lens > 0, stops, np.iinfo(np.int64).max)[row]).sum(axis=1)
    documents = (seq_lens > 0).sum(axis=1)
    document: Array = (np.cumsum(documents) - documents)[row] + within
    if len(last_turn) != documents.sum():
        raise ValueError(
            "a row has other documents in `last_turn` than in `seq_lens`; run `forebay verify` on the cache"
        )
    return last_turn[document]


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
