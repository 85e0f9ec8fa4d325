"""Batches that have the log-probs of a reference model or a teacher beside their labels.

    loader = Loader(cache, global_batch_size=8, collate=PackedBatch(cache, log_probs=["ref_logps"]))
    batch["ref_logps"]                  float32 [rows, sequence_length], NaN where there is none

A layer of log-probs has one value per label: one for every token of a document but its first. It is spread to the
places of the labels. What was not computed, of whole rows too, is NaN, and −1 for ids: it never reads as a log-prob.
Of a layer with `top_p`, labels have different numbers of tokens: the last axis is as long as the most in the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Column, Ragged
from forebay.feeding.arguments import checked_names
from forebay.feeding.prefetch import batch_bytes
from forebay.masks import label_mask
from forebay.masks.documents import LabelStyle, checked_label_style
from forebay.masks.train_on import Kind, TrainOn
from forebay.order.orders import Coins
from forebay.read.cache import Cache
from forebay.torch.assemble import Rows, pad_token, spans_policy
from forebay.torch.batches import Batch, Buffers, wrap
from forebay.torch.packed_batch import Derived, PackedTargets, padded_lengths, training_batch

MOST_VALUES = 1 << 27  # of one column of log-probs in a batch: 512 MiB


class PackedBatch:
    """A collate that makes the batches of a token or chat cache, with the log-probs of some columns of its layers.

    The other arguments are those of a `Loader`.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        log_probs: Sequence[str] = (),
        labels: LabelStyle = "shifted",
        derive: Sequence[Derived] = ("positions",),
        train_on: TrainOn | Sequence[Kind] | Mapping[Kind, float] | None = None,
    ) -> None:
        style = checked_label_style("labels", labels)
        if style is None:
            raise ValueError("labels must be 'shifted' or 'unshifted': log-probs are those of labels (got None)")
        policy = spans_policy([cache], train_on)
        self._targets = PackedTargets(style, checked_names("derive", derive), pad_token(cache), policy)
        self._log_probs = log_prob_columns(cache, log_probs)
        self._style = style
        self.columns = (*self._targets.columns, *self._log_probs.columns)
        self.row_bytes = batch_bytes(cache, ("tokens",), 1, derived=2 + len(self._targets.derive))

    def collate(self, rows: Rows, coins: Coins, buffers: Buffers) -> Batch:
        read: dict[str, Any] = {}
        for name in self._targets.columns:
            values = rows[name]
            read[name] = values if isinstance(values, np.ndarray) else _joined(list(values))
        batch = training_batch(read, self._targets, buffers)
        mask = label_mask(padded_lengths(read["seq_lens"]), read["tokens"].shape[1], self._style)
        for name, values in self._log_probs.read(rows).items():
            batch[name] = wrap(buffers.as_pinned(spread_log_probs(name, values, mask)))
        return batch


@dataclass(frozen=True, slots=True)
class LogProbColumns:
    """Columns of log-probs or ids, each with the column that counts the values of every label, if there is one."""

    counted_by: dict[str, str | None]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.counted_by, *filter(None, self.counted_by.values())]))

    def read(self, rows: Rows) -> dict[str, list[Array]]:
        """Return the values of every row, one or `k` per label."""
        return {
            name: list(rows[name]) if counts is None else padded_choices(list(rows[name]), list(rows[counts]))
            for name, counts in self.counted_by.items()
        }


def log_prob_columns(cache: Cache, names: Sequence[str]) -> LogProbColumns:
    """Return the columns to read for some columns of `fb.teachers.LogProbs`; raise for others."""
    found: dict[str, str | None] = {}
    for name in checked_names("log_probs", names):
        column = cache.column(name)
        if not column.ragged:
            raise ValueError(
                f"'{name}' has one value per row; log_probs must name columns of fb.teachers.LogProbs, "
                "which have one per label"
            )
        layer, is_choice, _ = name.rpartition("_top_")
        counts = f"{layer}_top_counts"
        found[name] = counts if is_choice and not column.shape and name != counts else None
        if found[name] is not None and not _counts_labels(cache.column(counts)):
            raise ValueError(f"'{counts}' does not count the values of labels; run `forebay verify` on the cache")
    return LogProbColumns(found)


def _counts_labels(column: Column) -> bool:
    return column.ragged and not column.shape and column.array_dtype.kind in "iu"


def padded_choices(rows: Sequence[Array], counts: Sequence[Array]) -> list[Array]:
    """Return values as `[labels, k]` for each row, where `k` is the most of any; the rest is NaN or −1.

    >>> padded_choices([np.array([0.5, 0.25, 1.0])], [np.array([2, 1])])[0].tolist()
    [[0.5, 0.25], [1.0, nan]]
    """
    counts = [count.astype(np.int64) for count in counts]
    for values, count in zip(rows, counts, strict=True):
        if count.min(initial=0) < 0 or count.max(initial=0) > len(values) or int(count.sum()) != len(values):
            raise ValueError("a row has other log-probs than their counts; run `forebay verify` on the cache")
    most = max((int(each.max()) for each in counts if len(each)), default=1)
    _check_size(sum(map(len, counts)) * most)
    found = []
    for values, count in zip(rows, counts, strict=True):
        laid = missing_as_nan(values[:0].reshape(0, 1).repeat(most, axis=1), len(count))
        laid[np.arange(most) < count[:, None]] = values
        found.append(laid)
    return found


def spread_log_probs(name: str, rows: Sequence[Array], mask: NDArray[np.bool_]) -> Array:
    """Return the values of rows at the places where `mask` is set, and NaN or −1 elsewhere: `[rows, width, …]`."""
    counts = mask.sum(axis=1)
    for row, (values, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
        if len(values) not in (0, count):  # none: the row is absent from the layer
            raise ValueError(
                f"row {row} of the batch has {count:,} labels, but {len(values):,} values of '{name}'; "
                "run `forebay verify` on the cache"
            )
    _check_size(mask.size * (prod(rows[0].shape[1:]) if len(rows) else 1))
    each = [missing_as_nan(values, count) for values, count in zip(rows, counts.tolist(), strict=True)]
    if not each:
        return np.full(mask.shape, np.nan, np.float32)
    found = np.full((*mask.shape, *each[0].shape[1:]), np.nan if each[0].dtype.kind == "f" else -1, each[0].dtype)
    found[mask] = np.concatenate(each)
    return found


def _check_size(values: int) -> None:
    """Raise for a batch that is far larger than what is stored: few values in one place make all others as wide."""
    if values > MOST_VALUES:
        raise ValueError(
            f"the log-probs of a batch would have {values:,} values, more than {MOST_VALUES:,}: choose a smaller "
            "global_batch_size or micro_batches, or run `forebay verify` if the cache is not yours"
        )


def missing_as_nan(values: Array, count: int) -> Array:
    """Return values as float32, or ids as int64; for none at all, `count` times NaN or −1."""
    is_float = values.dtype.kind not in "iu"
    dtype = np.dtype(np.float32) if is_float else np.dtype(np.int64)
    if len(values) or not count:
        return values.astype(dtype)
    _check_size(count * prod(values.shape[1:]))
    return np.full((count, *values.shape[1:]), np.nan if is_float else -1, dtype)


def _joined(rows: list[Array]) -> Ragged:
    first = rows[0] if rows else np.zeros(0, np.uint32)
    return Ragged.of(rows, first.dtype, first.shape[1:])
