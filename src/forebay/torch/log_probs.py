"""Log-probs of a reference model or a teacher, at the places of the labels they belong to.

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

from forebay.columns import Array, Column
from forebay.feeding.stream import checked_names
from forebay.read.cache import Cache

MOST_VALUES = 1 << 27  # of one column of log-probs in a batch: 512 MiB


@dataclass(frozen=True, slots=True)
class LogProbColumns:
    """Columns of log-probs or ids, each with the column that counts the values of every label, if there is one."""

    counted_by: dict[str, str | None]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.counted_by, *filter(None, self.counted_by.values())]))

    def read(self, rows: Mapping[str, Any]) -> dict[str, list[Array]]:
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
