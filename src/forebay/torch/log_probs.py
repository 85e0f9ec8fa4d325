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

from forebay.columns import Array, Column, Ragged
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

    def read(self, rows: Mapping[str, Any]) -> dict[str, Ragged]:
        """Return the values of every row, one or `k` per label."""
        return {
            name: rows[name] if counts is None else padded_choices(rows[name], rows[counts])
            for name, counts in self.counted_by.items()
        }


def log_prob_columns(cache: Cache, names: Sequence[str]) -> LogProbColumns:
    """Return the columns to read for some columns of `fb.teachers.LogProbs`; raise for others."""
    counted_by: dict[str, str | None] = {}
    for name in checked_names("log_probs", names):
        column = cache.column(name)
        if not column.ragged:
            raise ValueError(
                f"'{name}' has one value per row; log_probs must name columns of fb.teachers.LogProbs, "
                "which have one per label"
            )
        layer, is_choice, _ = name.rpartition("_top_")
        counts = f"{layer}_top_counts"
        counted_by[name] = counts if is_choice and not column.shape and name != counts else None
        if counted_by[name] is not None and not _counts_labels(cache.column(counts)):
            raise ValueError(f"'{counts}' does not count the values of labels; run `forebay verify` on the cache")
    return LogProbColumns(counted_by)


def _counts_labels(column: Column) -> bool:
    return column.ragged and not column.shape and column.array_dtype.kind in "iu"


def padded_choices(values: Ragged, counts: Ragged) -> Ragged:
    """Return values as `[labels, k]` for each row, where `k` is the most of any label; the rest is NaN or −1.

    >>> values = Ragged(np.array([0.5, 0.25, 1.0]), np.array([0, 3]))
    >>> padded_choices(values, Ragged(np.array([2, 1]), np.array([0, 2]))).values
    array([[0.5 , 0.25],
           [1.  ,  nan]], dtype=float32)
    """
    stored, numbers = _stored(values), _stored(counts).astype(np.int64)
    offsets = (counts.offsets - counts.offsets[0]).astype(np.int64)
    if (
        not 0 <= numbers.min(initial=0) <= numbers.max(initial=0) <= len(stored)
        or (np.diff(np.concatenate([[0], np.cumsum(numbers)])[offsets]) != values.lengths).any()
    ):
        raise ValueError("a row has other log-probs than their counts; run `forebay verify` on the cache")
    most = int(numbers.max(initial=1))
    padded = _missing((len(numbers), most), values.values.dtype)
    padded[np.arange(most) < numbers[:, None]] = stored
    return Ragged(padded, offsets)


def spread_log_probs(name: str, rows: Ragged, mask: NDArray[np.bool_]) -> Array:
    """Return the values of rows at the places where `mask` is set, and NaN or −1 elsewhere: `[rows, width, …]`."""
    counts, lengths = mask.sum(axis=1), rows.lengths
    is_present = lengths > 0  # of the layer
    for row in np.flatnonzero(is_present & (lengths != counts)).tolist():
        raise ValueError(
            f"row {row} of the batch has {counts[row]:,} labels, but {lengths[row]:,} values of '{name}'; "
            "run `forebay verify` on the cache"
        )
    spread = _missing((*mask.shape, *rows.values.shape[1:]), rows.values.dtype)
    spread[mask & is_present[:, None]] = _stored(rows)
    return spread


def missing_as_nan(values: Array, count: int) -> Array:
    """Return values as float32, or ids as int64; for none at all, `count` times NaN or −1."""
    missing = _missing((0 if len(values) else count, *values.shape[1:]), values.dtype)
    return values.astype(missing.dtype) if len(values) else missing


def _stored(rows: Ragged) -> Array:
    return rows.values[int(rows.offsets[0]) : int(rows.offsets[-1])]


def _missing(shape: tuple[int, ...], stored: np.dtype[Any]) -> Array:
    """Return NaN as float32, or −1 as int64 for ids.

    Raises for a batch that is far larger than what is stored: many values at one label make all others as wide.
    """
    if prod(shape) > MOST_VALUES:
        raise ValueError(
            f"the log-probs of a batch would have {prod(shape):,} values, more than {MOST_VALUES:,}: choose a smaller "
            "global_batch_size or micro_batches, or run `forebay verify` if the cache is not yours"
        )
    is_float = stored.kind not in "iu"
    return np.full(shape, np.nan if is_float else -1, np.float32 if is_float else np.int64)
