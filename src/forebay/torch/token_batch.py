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
from typing import Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Ragged
from forebay.errors import choice_error
from forebay.feeding.stream import CHAT_COLUMNS, PACKED_COLUMNS, Stream, checked_names
from forebay.fields import check_flags, checked_whole
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
from forebay.read.rows import Table
from forebay.torch.batches import Batch, Buffers, wrap
from forebay.torch.collate import Collate, caches_of
from forebay.torch.log_probs import log_prob_columns, spread_log_probs

Derived = Literal["positions", "document_ids", "cu_seqlens", "num_label_tokens"]
Training = TrainOn | Sequence[Kind] | Mapping[Kind, float] | None
_INT64 = np.dtype(np.int64)


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
        self._train_on, self._loss_mask, self._max_documents = train_on, loss_mask, max_documents
        self._policy = label_policy(caches, train_on, loss_mask)
        check_flags(on_device=on_device)
        if on_device and (self._policy is not None or loss_mask is not None or log_probs):
            raise ValueError("on_device=True makes labels of whole documents; rows with spans need on_device=False")
        if on_device and (style != "shifted" or tuple(derive) != ("positions",)):
            raise ValueError("labels and derive have no effect with on_device=True; derive_on_device takes labels")
        self._on_device = on_device
        self._style = None if on_device else style
        self._derive = () if on_device else _checked_derive(derive)
        self._document_names = {"document_ids", "cu_seqlens"} & set(self._derive)
        wide = {"tokens": True, "labels": style is not None, "positions": "positions" in self._derive}
        self._written = [name for name, is_written in wide.items() if is_written]  # one int64 per token each
        _check_labels(style, self._derive, loss_mask, log_probs)
        if max_documents is not None:
            checked_whole("max_documents", max_documents, 1)
        self._pad = pad_token(caches[0])
        self._log_probs = log_prob_columns(caches[0], log_probs)
        packed = PACKED_COLUMNS if self._policy is None else CHAT_COLUMNS
        self.columns = (*packed, *([] if loss_mask is None else [loss_mask]), *self._log_probs.columns)
        self.by_row = not on_device and not {"cu_seqlens", "num_label_tokens"} & set(self._derive)

    def check(self, caches: Sequence[Cache], selections: Sequence[Selection | None]) -> None:
        label_policy(caches, self._train_on, self._loss_mask)
        for cache in caches:
            for name in self.columns:
                cache.column(name)  # raises where there is none

    def facts(self) -> dict[str, Any]:
        derive = "device" if self._on_device else sorted(self._derive)
        train_on = None if self._policy is None else str(self._policy)
        facts = {"labels": self._style, "derive": derive, "max_documents": self._max_documents}
        return facts | {"train_on": train_on, "loss_mask": self._loss_mask}

    def collate(self, table: Table, coins: Coins, buffers: Buffers) -> Batch:
        tokens, lengths = cast(Array, table["tokens"]), cast(Ragged, table["seq_lens"])
        documents = seq_lens = padded_lengths(lengths, self._max_documents)
        if table.weights is not None and not table.weights.all():  # rows of weight 0 become padding
            tokens, lengths = _emptied(tokens, lengths, table.weights == 0, self._pad)
            seq_lens = padded_lengths(lengths, self._max_documents)
        if self._on_device:
            return {"tokens": wrap(buffers.as_pinned(tokens)), "seq_lens": wrap(buffers.as_pinned(seq_lens))}
        wide = {name: buffers.empty(tokens.shape, _INT64) for name in self._written}
        # Lengths that nothing is derived from need not add up to a row.
        edges = seq_lens if self._style or self._derive else np.zeros((len(tokens), 1), np.int32)
        fill_packed(tokens, edges, self._style or "shifted", **wide)
        batch: Batch = {name: wrap(values) for name, values in wide.items()}
        batch["seq_lens"] = wrap(buffers.as_pinned(seq_lens))
        if self._style is not None:
            batch |= self._label_tensors(wide["labels"], documents, table, buffers)
        if self._document_names:
            batch |= self._document_tensors(edges, tokens.shape, buffers)
        return batch

    def _label_tensors(self, labels: Array, documents: Array, table: Table, buffers: Buffers) -> Batch:
        """Set labels that the loss does not count to -100; return the weights, counts and log-probs of the others."""
        assert self._style is not None
        batch: Batch = {}
        counted = self._counted(labels.shape[1], documents, table)
        if counted is not None:
            weights = label_weights(labels, counted, self._style)
            if self._has_weights(table):
                batch["loss_weights"] = wrap(buffers.as_pinned(weights))
        if "num_label_tokens" in self._derive:
            count = np.asarray(np.count_nonzero(labels != IGNORED_LABEL))
            batch["num_label_tokens"] = wrap(buffers.as_pinned(count))
        if self._log_probs.columns:
            mask = label_mask(documents, labels.shape[1], self._style)
            for name, values in self._log_probs.read(table).items():
                batch[name] = wrap(buffers.as_pinned(spread_log_probs(name, values, mask)))
        return batch

    def _counted(self, width: int, documents: Array, table: Table) -> NDArray[np.float32] | None:
        """Return the weight of every token in the loss; None if all count the same."""
        if self._loss_mask is not None:
            return np.asarray(table[self._loss_mask]).astype(np.float32)
        if self._policy is None:
            return None
        spans, last_turn = cast(Ragged, table["spans"]), cast(Ragged, table["last_turn"])
        return token_weights(spans.values, spans.offsets, documents, last_turn.values, width, self._policy)

    def _has_weights(self, table: Table) -> bool:
        if self._loss_mask is not None:
            return np.asarray(table[self._loss_mask]).dtype.kind not in "biu"
        return self._policy is not None and self._policy.is_weighted

    def _document_tensors(self, seq_lens: Array, shape: tuple[int, ...], buffers: Buffers) -> Batch:
        batch: Batch = {}
        whole = whole_lengths(seq_lens, shape[1]) if len(seq_lens) else np.zeros((0, 1), np.int32)
        if "document_ids" in self._derive:
            ids = buffers.empty(shape, np.dtype(np.int32))
            fill_document_ids(ids, whole)
            batch["document_ids"] = wrap(ids)
        if "cu_seqlens" in self._derive:
            batch["cu_seqlens"] = wrap(buffers.as_pinned(_boundaries(whole, self._max_documents)))
            batch["max_seqlen"] = int(whole.max(initial=0)) if self._max_documents is None else shape[1]
        return batch


def _checked_derive(derive: Sequence[Derived]) -> tuple[str, ...]:
    names = checked_names("derive", derive)
    for name in names:
        if name not in get_args(Derived):
            raise choice_error("each name of derive", name, get_args(Derived))
    return names


def _check_labels(
    style: LabelStyle | None, derive: Sequence[str], loss_mask: str | None, log_probs: Sequence[str]
) -> None:
    """Raise for what belongs to labels, without labels."""
    needs = {
        "derive=['num_label_tokens']": "num_label_tokens" in derive,
        f"loss_mask={loss_mask!r}": loss_mask is not None,
        f"log_probs={list(log_probs)}": bool(log_probs),
    }
    for argument, is_passed in needs.items():
        if is_passed and style is None:
            raise ValueError(f"{argument} needs labels (got labels=None); pass labels='shifted' or 'unshifted'")


def label_policy(caches: Sequence[Cache], train_on: Training, loss_mask: str | None) -> TrainOn | None:
    """Return the tokens of conversations to train on; None for all of them, or if a `loss_mask` decides."""
    if loss_mask is not None:
        _check_loss_mask(caches, train_on, loss_mask)
        return None
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


def _check_loss_mask(caches: Sequence[Cache], train_on: Training, loss_mask: str) -> None:
    if train_on is not None:
        raise ValueError("pass train_on or loss_mask, not both: each says which labels the loss counts")
    if loss_mask in PACKED_COLUMNS:
        raise ValueError(f"loss_mask is '{loss_mask}', which has no weights; name a column with one number per token")
    for cache in caches:
        column, shape = cache.column(loss_mask), cache.column("tokens").shape
        if column.ragged or column.shape != shape:
            rows = "ragged" if column.ragged else f"of shape {column.shape}"
            raise ValueError(f"rows of '{loss_mask}' are {rows}; a loss_mask has one number per token, {shape}")


def pad_token(cache: Cache) -> int:
    """Return the token that the recipe pads with; 0 if it names none."""
    pad = cache.recipe(cache.generation.base).fields.get("pad", 0)
    return pad if isinstance(pad, int) else 0


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
    most = max(counts.tolist(), default=0)
    if max_documents is not None and most > max_documents:
        raise ValueError(f"a row has {most} documents, more than max_documents={max_documents}; raise it")
    padded = np.zeros((len(counts), max_documents or max(1, most)), np.int32)
    padded[np.arange(padded.shape[1]) < counts[:, None]] = lengths.values
    return padded


def _boundaries(whole: Array, max_documents: int | None) -> NDArray[np.int32]:
    """Return where documents and padding begin and end in the rows laid end to end.

    With `max_documents`, further segments of length 0 fill it up to a fixed size.

    >>> _boundaries(np.array([[3, 2], [5, 0]]), max_documents=2).tolist()
    [0, 3, 5, 10, 10, 10, 10]
    """
    ends = np.cumsum(whole[whole > 0])
    count = len(ends) if max_documents is None else len(whole) * (max_documents + 1)
    boundaries = np.full(count + 1, whole.sum(), np.int32)
    boundaries[0], boundaries[1 : len(ends) + 1] = 0, ends
    return boundaries
