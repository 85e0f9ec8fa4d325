"""Batches of preference caches: each prompt with a preferred and a rejected candidate.

    concatenated   tokens [2 · pairs, width]         all preferred ones, then all rejected ones: for DPO
    padded         tokens [pairs, 2, width]          preferred and rejected side by side
    packed         tokens [rows, row_tokens]         several pairs per row, best fit; a pair is never split

All have `labels`, −100 where nothing is trained, `positions` and `seq_lens`. Packed ones have `pair_ids`
[rows, max_documents]: 2 · pair for the preferred document, 2 · pair + 1 for the rejected one, −1 for none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Ragged
from forebay.errors import choice_error
from forebay.feeding.stream import Stream
from forebay.fields import checked_whole
from forebay.masks import candidate_weights, labels, positions
from forebay.masks.documents import LabelStyle, checked_label_style
from forebay.masks.train_on import TrainOn, label_weights
from forebay.order.coins import Coins
from forebay.order.selected_rows import Selection
from forebay.read.cache import Cache
from forebay.read.rows import Table
from forebay.tokens.packing import pack_best_fit
from forebay.torch.batches import Batch, Buffers, wrap
from forebay.torch.collate import Collate, caches_of
from forebay.torch.log_probs import log_prob_columns, missing_as_nan, spread_log_probs
from forebay.torch.token_batch import Training, pad_token

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


class PreferenceBatch(Collate):
    """A collate for preference caches; a `Loader` uses it by default.

    layout      "concatenated", "padded" or "packed"
    pairs       "ends": the best and the worst candidate; "random": two candidates, drawn for each row and epoch
    train_on    kinds of tokens of candidates that the loss counts, as in a `Loader`
    log_probs   columns of `fb.teachers.LogProbs(over="preferences")`, spread to the places of their labels
    row_tokens  tokens of a packed row; by default twice the recipe's sequence_length, so that every pair fits
    multiple_of the width of rows that are not packed is rounded up to it
    """

    makes = ("tokens", "labels", "positions", "seq_lens")

    def __init__(
        self,
        source: Cache | Stream,
        *,
        layout: Layout = "concatenated",
        pairs: Pairs = "ends",
        train_on: Training = None,
        labels: LabelStyle = "shifted",
        log_probs: Sequence[str] = (),
        row_tokens: int | None = None,
        multiple_of: int = 8,
    ) -> None:
        for name, value, allowed in (("layout", layout, get_args(Layout)), ("pairs", pairs, get_args(Pairs))):
            if value not in allowed:
                raise choice_error(name, value, allowed)
        for name, number in (("multiple_of", multiple_of), ("row_tokens", row_tokens)):
            if number is not None and checked_whole(name, number) < 1:
                raise ValueError(f"{name} must be at least 1 (got {number})")
        style = checked_label_style("labels", labels)
        if style is None:
            raise ValueError("labels must be 'shifted' or 'unshifted' (got None)")
        self.check(caches := caches_of(source), ())
        cache = caches[0]
        self._log_probs = log_prob_columns(cache, log_probs)
        longest = int(cache.recipe(cache.generation.base).fields["sequence_length"])
        self._row_tokens = _PAIR * longest if row_tokens is None else row_tokens
        self._layout, self._pairs, self._style, self._multiple = layout, pairs, style, multiple_of
        self._train_on = TrainOn() if train_on is None else TrainOn.of(train_on)
        self._pad = pad_token(cache)
        self.columns = (*_COLUMNS, *self._log_probs.columns)

    def check(self, caches: Sequence[Cache], selections: Sequence[Selection | None]) -> None:
        for cache in caches:
            if (kind := cache.recipe(cache.generation.base).kind) != "preferences":
                raise ValueError(f"'{cache.root}' is a cache of {kind}; PreferenceBatch reads caches of preferences")

    def collate(self, rows: Table, coins: Coins, buffers: Buffers) -> Batch:
        preferred, rejected = self._documents(rows, coins)
        if self._layout == "packed":
            return self._packed(preferred, rejected, buffers)
        batch = self._laid_out([[each] for each in (*preferred, *rejected)], self._width(preferred, rejected), buffers)
        if self._layout == "concatenated":
            return batch
        return {name: each.reshape(_PAIR, -1, *each.shape[1:]).transpose(0, 1) for name, each in batch.items()}

    def _documents(self, rows: Table, coins: Coins) -> tuple[list[_Candidate], list[_Candidate]]:
        """Return the preferred and the rejected documents."""
        sides: tuple[list[_Candidate], list[_Candidate]] = ([], [])
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
            for side, one in zip(sides, chosen, strict=True):
                whole = np.concatenate([prompt, tokens[one]])
                untrained = np.zeros(len(prompt), np.float32)
                mine = {name: values[one] for name, values in named.items()}
                side.append(_Candidate(whole, np.concatenate([untrained, weights[one]]), len(prompt), mine))
        return sides

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
        arrays: dict[str, Array] = {
            "seq_lens": seq_lens,
            "tokens": tokens,
            "labels": targets,
            "positions": positions(seq_lens, width).astype(np.int64),
        }
        if self._train_on.is_weighted:
            arrays["loss_weights"] = counted
        if self._style == "shifted":
            generated[:, :-1], generated[:, -1] = generated[:, 1:].copy(), False
        for name in self._log_probs.counted_by:
            values = [np.concatenate([_present(each, name) for each in documents]) for documents in rows]
            arrays[name] = spread_log_probs(name, Ragged.of(values, values[0].dtype), generated)
        return {name: wrap(buffers.as_pinned(values)) for name, values in arrays.items()}

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
