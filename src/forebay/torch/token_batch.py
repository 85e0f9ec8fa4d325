"""Batches for language models, of the columns `tokens` and `seq_lens`:

    tokens        int64 [rows, sequence_length]
    labels        int64, same shape: "shifted" is the next token, "unshifted" the token itself; -100 = no loss
    positions     int64, same shape, from 0 in every document
    document_ids  int32, same shape, from 0 in every row
    seq_lens      int32 [rows, max_documents], zero-padded
    cu_seqlens    int32 [documents + 1], over the whole batch laid end to end, with max_seqlen, an int
    num_label_tokens  int64 [], the labels that are not -100
    row_weight    float32 [rows], with drop_last=False: 0 for a row that only fills the last batch of a rank, else 1
    loss_weights  float32 [rows, sequence_length], for `train_on` with several weights: that of each label

The rows of a chat cache have spans: labels are -100 for tokens that `train_on` does not name. Another cache may have a
column with one number per token, `loss_mask`: labels are -100 where it is 0, and weights of floats are `loss_weights`.

With `max_documents` shapes do not depend on the documents: `seq_lens` has this width, and `cu_seqlens`
rows · (max_documents + 1) + 1 entries, the last one repeated; `max_seqlen` is then the length of a row.

    loader = Loader(cache, global_batch_size=8, collate=TokenBatch(cache, log_probs=["ref_logps"]))
    batch["ref_logps"]                  float32 [rows, sequence_length], NaN where there is none
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Columns, Ragged
from forebay.errors import choice_error
from forebay.feeding.stream import CHAT_COLUMNS, PACKED_COLUMNS, Stream, checked_names, checked_whole
from forebay.masks import label_mask
from forebay.masks.documents import (
    IGNORED_LABEL,
    LabelStyle,
    checked_label_style,
    fill_document_ids,
    fill_packed,
    whole_lengths,
)
from forebay.masks.train_on import Kind, TrainOn, label_weights, token_weights
from forebay.order.coins import Coins
from forebay.order.selected_rows import Selection
from forebay.read.cache import Cache
from forebay.read.rows import Table, Weights
from forebay.torch.batches import Batch, Buffers, wrap
from forebay.torch.collate import Collate, caches_of
from forebay.torch.log_probs import log_prob_columns, spread_log_probs

Derived = Literal["positions", "document_ids", "cu_seqlens", "num_label_tokens"]
Written = dict[str, Array]
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_WRITTEN = ("tokens", "seq_lens", "labels", "positions")


@dataclass(frozen=True, slots=True)
class PackedTargets:
    """The tensors of a packed-token batch other than `tokens` and `seq_lens`."""

    labels: LabelStyle | None = "shifted"
    derive: tuple[Derived, ...] = ("positions",)
    pad: int = 0  # the token of rows that only fill a batch
    train_on: TrainOn | None = None  # None: the loss counts all tokens, and rows have no spans
    loss_mask: str | None = None  # a column with one number per token
    max_documents: int | None = None
    as_stored: bool = False  # tokens keep their type, and nothing is derived: `derive_on_device` does it

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that batches are made of."""
        if self.loss_mask is not None:
            return (*PACKED_COLUMNS, self.loss_mask)
        return PACKED_COLUMNS if self.train_on is None else CHAT_COLUMNS

    @property
    def per_token(self) -> tuple[str, ...]:
        """The tensors of one int64 per token that are written together."""
        labels = () if self.labels is None else ("labels",)
        return ("tokens", *labels, *(("positions",) if "positions" in self.derive else ()))

    @property
    def needs_arrays(self) -> bool:
        """Whether something is made of the tensors that are written together."""
        return self.train_on is not None or self.loss_mask is not None or self.derives_more

    @property
    def derives_more(self) -> bool:
        """Whether something is derived that is not written together with the tokens."""
        return self.derive not in ((), ("positions",))

    def __post_init__(self) -> None:
        unknown = [name for name in self.derive if name not in get_args(Derived)]
        if unknown:
            raise choice_error("each name of derive", unknown[0], get_args(Derived))
        if self.labels is None and ("num_label_tokens" in self.derive or self.loss_mask is not None):
            needs = "derive=['num_label_tokens']" if self.loss_mask is None else f"loss_mask={self.loss_mask!r}"
            raise ValueError(f"{needs} needs labels (got labels=None); pass labels='shifted' or 'unshifted'")
        if self.max_documents is not None and checked_whole("max_documents", self.max_documents) < 1:
            raise ValueError(f"max_documents must be at least 1 (got {self.max_documents})")


Training = TrainOn | Sequence[Kind] | Mapping[Kind, float] | None


class TokenBatch(Collate):
    """The batches of a token or chat cache, or of a mixture of them.

    labels        "shifted" (the next token), "unshifted" (the token itself) or None
    derive        any of "positions", "document_ids", "cu_seqlens", "num_label_tokens"
    train_on      kinds of tokens of a chat cache that the loss counts, such as ("response", "stop"), with weights as a
                  dict; by default all that a model generates. `forebay.masks.TrainOn` also chooses the last turn only
    loss_mask     a column with one number per token: 0 for labels that the loss ignores
    log_probs     columns of `fb.teachers.LogProbs`, spread to the places of their labels
    max_documents documents of a row, so that `seq_lens` and `cu_seqlens` have fixed shapes
    on_device     tokens as they are stored, for `derive_on_device`
    """

    makes = PACKED_COLUMNS

    def __init__(
        self,
        source: Cache | Stream,
        *,
        labels: LabelStyle | None = "shifted",
        derive: Sequence[Derived] = ("positions",),
        train_on: Training = None,
        loss_mask: str | None = None,
        log_probs: Sequence[str] = (),
        max_documents: int | None = None,
        on_device: bool = False,
    ) -> None:
        caches, style = caches_of(source), checked_label_style("labels", labels)
        self._train_on, names = train_on, checked_names("derive", derive)
        policy = label_policy(caches, train_on, loss_mask)
        if on_device and (policy is not None or loss_mask is not None or log_probs):
            raise ValueError("on_device=True makes labels of whole documents; rows with spans need on_device=False")
        if log_probs and style is None:
            raise ValueError("labels must be 'shifted' or 'unshifted': log-probs are those of labels (got None)")
        pad = pad_token(caches[0])
        self._targets = PackedTargets(
            None if on_device else style,
            () if on_device else names,
            pad,
            policy,
            loss_mask,
            max_documents,
            as_stored=on_device,
        )
        self._log_probs = log_prob_columns(caches[0], log_probs)
        self.columns = (*self._targets.columns, *self._log_probs.columns)
        self.by_row = not on_device and not {"cu_seqlens", "num_label_tokens"} & set(names)

    def check(self, caches: Sequence[Cache], selections: Sequence[Selection | None]) -> None:
        label_policy(caches, self._train_on, self._targets.loss_mask)
        for cache in caches:
            for name in self.columns:
                cache.column(name)  # raises where there is none

    def facts(self) -> dict[str, Any]:
        targets = self._targets
        derive = "device" if targets.as_stored else sorted(targets.derive)
        train_on = None if targets.train_on is None else str(targets.train_on)
        facts = {"labels": targets.labels, "derive": derive, "max_documents": targets.max_documents}
        return facts | {"train_on": train_on, "loss_mask": targets.loss_mask}

    def collate(self, table: Table, coins: Coins, buffers: Buffers) -> Batch:
        batch = training_batch(table, self._targets, buffers, table.weights)
        if self._log_probs.columns:
            assert self._targets.labels is not None
            width = table["tokens"].shape[1]
            mask = label_mask(padded_lengths(table["seq_lens"]), width, self._targets.labels)
            for name, values in self._log_probs.read(table).items():
                batch[name] = wrap(buffers.as_pinned(spread_log_probs(name, values, mask)))
        return batch


def label_policy(
    caches: Sequence[Cache],
    train_on: Training,
    loss_mask: str | None,
) -> TrainOn | None:
    """Return which tokens of conversations are trained; None where they are all, or a checked `loss_mask` says it."""
    if loss_mask is None:
        return spans_policy(caches, train_on)
    if train_on is not None:
        raise ValueError("pass train_on or loss_mask, not both: each says which labels the loss counts")
    if loss_mask in PACKED_COLUMNS:
        raise ValueError(f"loss_mask is '{loss_mask}', which has no weights; name a column with one number per token")
    for cache in caches:
        column, shape = cache.column(loss_mask), cache.column("tokens").shape
        if column.ragged or column.shape != shape:
            found = "ragged" if column.ragged else f"of shape {column.shape}"
            raise ValueError(f"rows of '{loss_mask}' are {found}; a loss_mask has one number per token, {shape}")
    return None


def spans_policy(caches: Sequence[Cache], train_on: Training) -> TrainOn | None:
    """Return which tokens of conversations are trained: by default all that a model generates."""
    with_spans = [set(CHAT_COLUMNS) <= set(cache.columns) for cache in caches]
    if all(with_spans):
        return TrainOn() if train_on is None else TrainOn.of(train_on)
    if train_on is not None or any(with_spans):
        without = caches[with_spans.index(False)]
        raise ValueError(
            f"'{without.root}' has no spans, so nothing says which of its tokens are responses; "
            "build it with `forebay build chat`, or load chat caches and others apart"
        )
    return None


def pad_token(cache: Cache) -> int:
    """Return the token that the recipe pads with; 0 if it names none."""
    pad = cache.recipe(cache.generation.base).fields.get("pad", 0)
    return pad if isinstance(pad, int) else 0


def training_batch(read: Columns, training: PackedTargets, buffers: Buffers, weights: Weights | None = None) -> Batch:
    """Return the tensors that a language model is trained on; a row of weight 0 becomes a row of padding."""
    tokens, lengths = read["tokens"], read["seq_lens"]
    assert not isinstance(tokens, Ragged)
    assert isinstance(lengths, Ragged)
    documents = seq_lens = padded_lengths(lengths, training.max_documents)
    if weights is not None and not weights.all():
        tokens, lengths = _emptied(tokens, lengths, weights == 0, training.pad)
        seq_lens = padded_lengths(lengths, training.max_documents)
    if training.as_stored:
        written: Written = {"tokens": buffers.as_pinned(tokens)}
    else:
        arrays = buffers.several(len(training.per_token), tokens.shape, _INT64)
        written = dict(zip(training.per_token, arrays, strict=True))
        fill_packed(
            tokens,
            seq_lens if training.labels or training.derive else np.zeros((len(tokens), 1), np.int32),
            training.labels or "shifted",
            wide=written["tokens"],
            labels=written.get("labels"),
            positions=written.get("positions"),
        )
    written["seq_lens"] = buffers.as_pinned(seq_lens)
    return _completed(written, read, training, buffers, documents)


def _completed(
    written: Written, read: Columns, training: PackedTargets, buffers: Buffers, documents: Array | None = None
) -> Batch:
    """Return the batch; `documents` are the lengths of all rows, if some of those only fill the batch."""
    batch: Batch = {name: wrap(written[name]) for name in _WRITTEN if name in written}
    if training.needs_arrays:
        seq_lens = written["seq_lens"]
        batch |= _further(written, seq_lens, seq_lens if documents is None else documents, read, training, buffers)
    return batch


def _further(
    written: Written, seq_lens: Array, documents: Array, read: Columns, training: PackedTargets, buffers: Buffers
) -> Batch:
    found: Written = {}
    shape = written["tokens"].shape
    if "labels" in written and (weights := _weights(written["labels"], documents, read, training)) is not None:
        found["loss_weights"] = buffers.as_pinned(weights)
    if "num_label_tokens" in training.derive:
        found["num_label_tokens"] = buffers.as_pinned(np.asarray(np.count_nonzero(written["labels"] != IGNORED_LABEL)))
    whole = _whole_lengths(written["tokens"], seq_lens, training)
    if "document_ids" in training.derive:
        found["document_ids"] = buffers.empty(shape, _INT32)
        fill_document_ids(found["document_ids"], whole)
    if "cu_seqlens" in training.derive:
        found["cu_seqlens"] = buffers.as_pinned(_boundaries(whole, training.max_documents))
    batch: Batch = {name: wrap(values) for name, values in found.items()}
    if "cu_seqlens" in training.derive:
        batch["max_seqlen"] = int(whole.max(initial=0)) if training.max_documents is None else shape[1]
    return batch


def _weights(labels: Array, documents: Array, read: Columns, training: PackedTargets) -> Array | None:
    """Set labels that the loss does not count to -100, and return the weights of the others; None if all are equal."""
    assert training.labels is not None
    if training.loss_mask is not None:
        column = read[training.loss_mask]
        weights = label_weights(labels, _token_numbers(column, labels.shape, training.loss_mask), training.labels)
        return weights if np.asarray(column).dtype.kind not in "biu" else None
    if training.train_on is None:
        return None
    spans, last_turn = read["spans"], read["last_turn"]
    assert isinstance(spans, Ragged)
    assert isinstance(last_turn, Ragged)
    counted = token_weights(
        spans.values, spans.offsets, documents, last_turn.values, labels.shape[1], training.train_on
    )
    weights = label_weights(labels, counted, training.labels)
    return weights if training.train_on.is_weighted else None


def _token_numbers(values: Array | Ragged, shape: tuple[int, ...], column: str) -> NDArray[np.float32]:
    """Return the numbers of a `loss_mask` column."""
    if isinstance(values, Ragged) or values.shape != shape:
        found = "ragged" if isinstance(values, Ragged) else f"of shape {values.shape[1:]}"
        raise ValueError(f"rows of '{column}' are {found}; a loss_mask has one number per token, {shape[1:]}")
    return values.astype(np.float32)


def _emptied(tokens: Array, lengths: Ragged, empty: NDArray[np.bool_], pad: int) -> tuple[Array, Ragged]:
    """Replace the `empty` rows by padding without documents: labels are -100, and padding sees only padding."""
    filled = np.where(empty[:, None], np.asarray(pad, tokens.dtype), tokens)
    counts = np.where(empty, 0, lengths.lengths)
    values = lengths.values[np.repeat(~empty, lengths.lengths)]
    return filled, Ragged(values, np.concatenate([[0], np.cumsum(counts)]))


def padded_lengths(lengths: Ragged, max_documents: int | None = None) -> Array:
    """Return the document lengths of each row, int32 `[rows, max_documents]`, zero-padded.

    Without `max_documents`, the row with the most documents decides.

    >>> padded_lengths(Ragged(np.array([3, 2, 7]), np.array([0, 2, 3]))).tolist()
    [[3, 2], [7, 0]]
    """
    counts = lengths.lengths
    padded = np.zeros((len(lengths), _width(int(counts.max(initial=0)), max_documents)), np.int32)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = lengths.values
    return padded


def _width(most: int, max_documents: int | None) -> int:
    """Return the width of `seq_lens`, for rows of at most `most` documents."""
    if max_documents is not None and most > max_documents:
        raise ValueError(f"a row has {most} documents, more than max_documents={max_documents}; raise it")
    return max_documents or max(1, most)


def _boundaries(whole: Array, max_documents: int | None) -> NDArray[np.int32]:
    """Return where documents and padding begin and end in the rows laid end to end.

    With `max_documents`, further segments of length 0 fill it up to a fixed size.

    >>> _boundaries(np.array([[3, 2], [5, 0]]), max_documents=2).tolist()
    [0, 3, 5, 10, 10, 10, 10]
    """
    ends = np.cumsum(whole[whole > 0])
    count = len(ends) if max_documents is None else len(whole) * (max_documents + 1)
    found = np.full(count + 1, whole.sum(), np.int32)
    found[0], found[1 : len(ends) + 1] = 0, ends
    return found


def _whole_lengths(tokens: Array, seq_lens: Array, training: PackedTargets) -> NDArray[np.int32]:
    """Return lengths that fill each row; where nothing is derived of them, they need not be those of documents."""
    if not len(tokens) or (training.labels is None and not training.derive):
        return np.full((len(tokens), 1), tokens.shape[1], np.int32)
    return whole_lengths(seq_lens, tokens.shape[1])
