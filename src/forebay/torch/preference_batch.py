"""Batches of preference caches: each prompt with a preferred and a rejected candidate.

    concatenated   tokens [2 · pairs, width]         all preferred ones, then all rejected ones: for DPO
    padded         tokens [pairs, 2, width]          preferred and rejected side by side
    packed         tokens [rows, row_tokens]         several pairs per row, best fit; a pair is never split

All have `labels`, −100 where nothing is trained, `positions` and `seq_lens`. Packed ones have `pair_ids`
[rows, max_documents]: 2 · pair for the preferred document, 2 · pair + 1 for the rejected one, −1 for none.

Batches of any packed cache that have the log-probs of a reference model or a teacher beside their labels:

    loader = Loader(cache, global_batch_size=8, collate=PackedBatch(cache, log_probs=["ref_logps"]))
    batch["ref_logps"]                  float32 [rows, sequence_length], NaN where there is none

A layer of log-probs has one value per label: one for every token of a document but its first. It is spread to the
places of the labels. What was not computed, of whole rows too, is NaN, and −1 for ids: it never reads as a log-prob.
Of a layer with `top_p`, labels have different numbers of tokens: the last axis is as long as the most in the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Column, Ragged
from forebay.errors import choice_error
from forebay.feeding.prefetch import batch_bytes
from forebay.feeding.stream import checked_names
from forebay.masks import candidate_weights, label_mask, labels, positions
from forebay.masks.documents import LabelStyle, checked_label_style
from forebay.masks.train_on import Kind, TrainOn, label_weights
from forebay.order.orders import Coins
from forebay.read.cache import Cache
from forebay.tokens.packing import pack_best_fit
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


Layout = Literal["concatenated", "padded", "packed"]
Pairs = Literal["ends", "random"]
_COLUMNS = ("prompt", "candidates", "candidate_lens", "spans")
_PAIR = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A prompt with one candidate."""

    tokens: Array
    weights: NDArray[np.float32]
    prompt: int
    log_probs: dict[str, Array]  # one value per token of the candidate, or none


class PreferenceBatch:
    """A collate for preference caches; a `Loader` uses it by default.

    layout      "concatenated", "padded" or "packed"
    pairs       "ends": the best and the worst candidate; "random": two candidates, drawn for each row and epoch
    train_on    kinds of tokens of candidates that the loss counts, as in a `Loader`
    log_probs   columns of `fb.teachers.LogProbs(over="preferences")`, spread to the places of their labels
    row_tokens  tokens of a packed row; by default twice the recipe's sequence_length, so that every pair fits
    multiple_of the width of rows that are not packed is rounded up to it
    """

    def __init__(
        self,
        cache: Cache,
        *,
        layout: Layout = "concatenated",
        pairs: Pairs = "ends",
        train_on: TrainOn | Sequence[Kind] | Mapping[Kind, float] | None = None,
        labels: LabelStyle = "shifted",
        log_probs: Sequence[str] = (),
        row_tokens: int | None = None,
        multiple_of: int = 8,
    ) -> None:
        for name, value, allowed in (("layout", layout, get_args(Layout)), ("pairs", pairs, get_args(Pairs))):
            if value not in allowed:
                raise choice_error(name, value, allowed)
        if multiple_of < 1:
            raise ValueError(f"multiple_of must be at least 1 (got {multiple_of})")
        style = checked_label_style("labels", labels)
        if style is None:
            raise ValueError("labels must be 'shifted' or 'unshifted' (got None)")
        self.check_cache(cache)
        self._log_probs = log_prob_columns(cache, log_probs)
        longest = int(cache.recipe(cache.generation.base).fields["sequence_length"])
        self._row_tokens = _PAIR * longest if row_tokens is None else row_tokens
        self._layout, self._pairs, self._style, self._multiple = layout, pairs, style, multiple_of
        self._train_on = TrainOn() if train_on is None else TrainOn.of(train_on)
        self._pad = pad_token(cache)
        self.columns = (*_COLUMNS, *self._log_probs.columns)
        self.row_bytes = _PAIR * longest * 8 * 3

    def check_cache(self, cache: Cache) -> None:
        if (kind := cache.recipe(cache.generation.base).kind) != "preferences":
            raise ValueError(f"'{cache.root}' is a cache of {kind}; PreferenceBatch reads caches of preferences")

    def collate(self, rows: Rows, coins: Coins, buffers: Buffers) -> Batch:
        preferred, rejected = self._documents(rows, coins)
        if self._layout == "packed":
            return self._packed(preferred, rejected, buffers)
        batch = self._laid_out([[each] for each in (*preferred, *rejected)], self._width(preferred, rejected), buffers)
        if self._layout == "concatenated":
            return batch
        return {name: each.reshape(_PAIR, -1, *each.shape[1:]).transpose(0, 1) for name, each in batch.items()}

    def _documents(self, rows: Rows, coins: Coins) -> tuple[list[_Candidate], list[_Candidate]]:
        """Return the preferred and the rejected documents."""
        found: tuple[list[_Candidate], list[_Candidate]] = ([], [])
        draws = coins.uniform("candidates", (_PAIR,)) if self._pairs == "random" else None
        log_probs = self._log_probs.read(rows)
        columns = [rows[name] for name in _COLUMNS]
        for at, (prompt, candidates, lens, spans) in enumerate(zip(*columns, strict=True)):
            if len(lens) < _PAIR or int(lens.sum()) != len(candidates):
                raise ValueError("a row has other candidates than `candidate_lens`; run `forebay verify` on the cache")
            weights = candidate_weights(spans, len(prompt), lens, self._train_on)
            edges = np.cumsum(lens)[:-1].astype(np.int64)
            tokens = np.split(candidates, edges)
            named = {
                name: np.split(values[at], edges) if len(values[at]) else [values[at]] * len(lens)
                for name, values in log_probs.items()
            }
            chosen = (0, len(lens) - 1) if draws is None else _drawn(len(lens), draws[at])
            for side, one in zip(found, chosen, strict=True):
                whole = np.concatenate([prompt, tokens[one]])
                untrained = np.zeros(len(prompt), np.float32)
                mine = {name: values[one] for name, values in named.items()}
                side.append(_Candidate(whole, np.concatenate([untrained, weights[one]]), len(prompt), mine))
        return found

    def _packed(self, preferred: list[_Candidate], rejected: list[_Candidate], buffers: Buffers) -> Batch:
        lengths = np.array([len(a.tokens) + len(b.tokens) for a, b in zip(preferred, rejected, strict=True)], np.int64)
        if int(lengths.max(initial=0)) > self._row_tokens:
            raise ValueError(
                f"a pair has {int(lengths.max()):,} tokens, and a packed row {self._row_tokens:,}; raise row_tokens"
            )
        bins = pack_best_fit(lengths, self._row_tokens)
        rows: list[list[_Candidate]] = [[] for _ in range(int(bins.max(initial=-1)) + 1)]
        ids: list[list[int]] = [[] for _ in rows]
        for pair, row in enumerate(bins.tolist()):
            rows[row] += [preferred[pair], rejected[pair]]
            ids[row] += [_PAIR * pair, _PAIR * pair + 1]
        batch = self._laid_out(rows, self._row_tokens, buffers)
        pair_ids = np.full((len(rows), max(map(len, ids), default=0)), -1, np.int32)
        for row, each in enumerate(ids):
            pair_ids[row, : len(each)] = each
        return batch | {"pair_ids": wrap(buffers.as_pinned(pair_ids))}

    def _laid_out(self, rows: list[list[_Candidate]], width: int, buffers: Buffers) -> Batch:
        """Lay the documents of every row one behind the other."""
        tokens = np.full((len(rows), width), self._pad, np.int64)
        weights = np.zeros((len(rows), width), np.float32)
        seq_lens = np.zeros((len(rows), max(map(len, rows), default=1)), np.int32)
        generated = np.zeros((len(rows), width), np.bool_)  # the tokens of candidates
        for row, documents in enumerate(rows):
            at = 0
            for number, each in enumerate(documents):
                stop = at + len(each.tokens)
                tokens[row, at:stop], weights[row, at:stop] = each.tokens, each.weights
                generated[row, at + each.prompt : stop] = True
                seq_lens[row, number], at = len(each.tokens), stop
        targets = labels(tokens, seq_lens, self._style)
        counted = label_weights(targets, weights, self._style)
        made: dict[str, Array] = {
            "seq_lens": seq_lens,
            "tokens": tokens,
            "labels": targets,
            "positions": positions(seq_lens, width).astype(np.int64),
        }
        if self._train_on.is_weighted:
            made["loss_weights"] = counted
        if self._style == "shifted":
            generated[:, :-1], generated[:, -1] = generated[:, 1:].copy(), False
        for name in self._log_probs.counted_by:
            flat = [np.concatenate([_present(each, name) for each in documents]) for documents in rows]
            made[name] = spread_log_probs(name, flat, generated)
        return {name: wrap(buffers.as_pinned(values)) for name, values in made.items()}

    def _width(self, *sides: list[_Candidate]) -> int:
        longest = max((len(each.tokens) for side in sides for each in side), default=1)
        return -(-longest // self._multiple) * self._multiple


def _present(document: _Candidate, name: str) -> Array:
    """The log-probs of a document; those that were not computed are NaN or −1."""
    return missing_as_nan(document.log_probs[name], len(document.tokens) - document.prompt)


def _drawn(count: int, draws: NDArray[np.float64]) -> tuple[int, int]:
    """Two different candidates, the better one first."""
    one = int(draws[0] * count)
    other = (one + 1 + int(draws[1] * (count - 1))) % count
    return min(one, other), max(one, other)
