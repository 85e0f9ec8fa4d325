"""Mixtures: several caches as one stream, each with its share of every batch.

    position ──shares──▶ (cache, position in its own endless stream) ──▶ (pass number, position in the pass, row)

Every cache has its own passes, each in its own order; a small cache has more of them. The row at a position depends
only on the seed, the weights and the position.

A mixture whose caches have grown, at the end of an epoch or before it was restored, finishes the current pass of each
cache, then adds its new rows: the passes before and after that are spans of the cache's stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np

from forebay.columns import Column
from forebay.feeding.choose_order import Shuffle, choose_ordering
from forebay.feeding.shares import ChangingShares, Phase
from forebay.feeding.stream import (
    PACKED_COLUMNS,
    CacheState,
    CacheStream,
    SelectionRule,
    check_fields,
    checked_cache,
    checked_rule,
    state_mismatch,
)
from forebay.fields import checked_number, checked_whole
from forebay.order.shuffle import Numbers, key_of
from forebay.order.window import Window
from forebay.read.cache import Cache
from forebay.read.rows import Located
from forebay.recipe import inputs_in


@dataclass(frozen=True, slots=True, eq=False)
class Ingredient:
    """A cache in a mixture, with either `weight`, its share of the rows, or `repeat`, its passes per epoch."""

    cache: Cache
    weight: float | None = None
    repeat: float | None = None
    selection: SelectionRule | None = None


class SpanState(CacheState, frozen=True):
    """The state of one span."""

    start: int
    first_pass: int


class SpansState(msgspec.Struct, frozen=True):
    """The state of the spans of one cache."""

    spans: Annotated[list[SpanState], msgspec.Meta(min_length=1)]


class MixtureState(msgspec.Struct, frozen=True):
    """The state of a mixture."""

    mixture: list[SpansState]
    seed: int
    asked: dict[str, Any]
    epoch_rows: Annotated[int, msgspec.Meta(ge=1)]
    phases: Annotated[list[tuple[int, list[float]]], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True, eq=False)
class StreamSpan:
    """Passes through one stream of a cache, from place `start` of its endless sequence on, with their first number."""

    start: int
    first_pass: int
    stream: CacheStream

    def state(self) -> dict[str, Any]:
        return {"start": self.start, "first_pass": self.first_pass, **self.stream.state()}

    def following(self, index: int, newer: CacheStream) -> "StreamSpan":
        """Return the span of a newer stream, which begins where the pass that contains `index` ends."""
        passes = -(-(index - self.start) // self.stream.size(0))
        return StreamSpan(self.start + passes * self.stream.size(0), self.first_pass + passes, newer)


class Mixture:
    """A stream over several caches for a `Loader`, whose batches also have `dataset_id` and `local_index`.

        mixture = Mixture.of([Ingredient(edu, weight=0.7), Ingredient(code, weight=0.3)], seed=0)
        loader = Loader(mixture, global_batch_size=48)

    Up to any position, every cache has had its share to within two rows. `dataset_id` is the index of the ingredient,
    `local_index` the row number in its cache.
    """

    def __init__(
        self,
        spans: Sequence[tuple[StreamSpan, ...]],
        phases: Sequence[Phase],
        epoch_rows: int,
        seed: int,
        asked: Mapping[str, Any],
    ) -> None:
        self.epoch_rows, self.seed = epoch_rows, seed
        self.phases = tuple(phases)  # the weights, each with the row from which they apply
        self._spans = tuple(spans)  # per cache; the last span has its newest rows
        self._asked = dict(asked)  # the arguments, which growth of a cache does not change: the mixture's identity
        self._shares = ChangingShares(phases)
        self.streams = tuple(each[-1].stream for each in spans)
        self.caches = tuple(stream.cache for stream in self.streams)
        self.selections = tuple(selection for stream in self.streams for selection in stream.selections)

    @classmethod
    def of(
        cls,
        ingredients: Sequence[Ingredient],
        *,
        seed: int = 0,
        shuffle: Shuffle | None = "auto",
        window: Window | None = None,
        epoch_rows: int | None = None,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> "Mixture":
        """Make a mixture.

        An epoch has `epoch_rows` rows; by default, with repeats, the sum of all repeated rows, and with weights, as
        many rows as all caches have. `changes` sets new weights from a row of the mixture on:
        `[(480_000, [0.5, 0.5])]`.
        """
        if not all(isinstance(each, Ingredient) for each in ingredients):
            raise TypeError("pass a list of ingredients: [Ingredient(cache, weight=0.7), …]")
        _check_alike([checked_cache(each.cache) for each in ingredients])
        seed = checked_whole("seed", seed)
        streams = [
            _stream(each, shuffle, key_of("mixture", seed, number), window) for number, each in enumerate(ingredients)
        ]
        sizes = [stream.size(0) for stream in streams]
        if 0 in sizes:
            raise ValueError(f"'{ingredients[sizes.index(0)].cache.root}' has no rows; leave it out of the mixture")
        weights, rows = _weights(ingredients, sizes)
        changes = [(checked_whole("a row of changes", row), changed) for row, changed in changes]
        phases = [Phase(0, weights), *(Phase(row, _plain(changed)) for row, changed in changes)]
        epoch_rows = None if epoch_rows is None else checked_whole("epoch_rows", epoch_rows, 1)
        asked = _asked(ingredients, changes, epoch_rows)
        spans = [(StreamSpan(0, 0, stream),) for stream in streams]
        return cls(spans, phases, rows if epoch_rows is None else epoch_rows, seed, asked)

    def __repr__(self) -> str:
        pairs = zip(self.phases[-1].weights, self.caches, strict=True)
        shares = ", ".join(f"{weight:g} × '{cache.root}'" for weight, cache in pairs)
        return f"<Mixture of {shares}; {self.epoch_rows:,} rows in an epoch, seed {self.seed}>"

    def size(self, epoch: int) -> int:
        return self.epoch_rows

    def locate(self, epoch: int, positions: Numbers) -> Located:
        sources, indices = self._shares.locate(positions + epoch * self.epoch_rows)
        rows, epochs = np.empty_like(indices), np.empty_like(indices)
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            starts = [span.start for span in self._spans[source]]
            numbers = np.searchsorted(starts, indices[here], side="right") - 1
            for number in np.unique(numbers).tolist():
                chosen, span = here[numbers == number], self._spans[source][number]
                own, within = np.divmod(indices[chosen] - span.start, span.stream.size(0))
                epochs[chosen] = own + span.first_pass
                for each in np.unique(own).tolist():
                    now = own == each
                    rows[chosen[now]] = span.stream.locate(each + span.first_pass, within[now]).rows
        return Located(rows, sources, {"dataset_id": sources, "local_index": rows}, epochs)

    def with_weights(self, weights: Sequence[float], epoch: int, position: int) -> "Mixture":
        """Return the mixture with other weights from a position on; every cache continues where it is."""
        if len(weights) != len(self.streams):
            raise ValueError(
                f"pass one weight per cache: {len(self.streams)} (got {len(weights)}); 0 leaves a cache out"
            )
        start = epoch * self.epoch_rows + position
        earlier = [phase for phase in self.phases if phase.start < start]
        return Mixture(self._spans, [*earlier, Phase(start, _plain(weights))], self.epoch_rows, self.seed, self._asked)

    def state(self) -> dict[str, Any]:
        return {
            "mixture": [{"spans": [span.state() for span in spans]} for spans in self._spans],
            "seed": self.seed,
            "asked": self._asked,
            "epoch_rows": self.epoch_rows,
            "phases": [[phase.start, list(phase.weights)] for phase in self.phases],
        }

    def restored(self, state: Mapping[str, Any], epoch: int, position: int) -> "Mixture":
        """Return the mixture with the weights and epoch length of a state; each cache first finishes its pass."""
        if "mixture" not in state:
            raise state_mismatch(self._roots, {"what is read": ("one cache", f"a mixture of {len(self.streams)}")})
        check_fields("'stream' of the state", state, MixtureState)
        self._refuse_other(state)
        phases = [Phase(start, tuple(weights)) for start, weights in state["phases"]]
        indices = ChangingShares(phases).counts(epoch * state["epoch_rows"] + position).tolist()
        spans = [
            _resumed_spans(stream, then["spans"], index)
            for stream, then, index in zip(self.streams, state["mixture"], indices, strict=True)
        ]
        return Mixture(spans, phases, state["epoch_rows"], self.seed, self._asked)

    def grown(self, generations: Sequence[int], epoch: int) -> "Mixture":
        """Return the mixture from an epoch on, with these generations; each cache first finishes its pass."""
        newest = [stream.on_newest_rows(number) for stream, number in zip(self.streams, generations, strict=True)]
        spans = [(StreamSpan(0, 0, stream),) for stream in newest]
        return Mixture(spans, self.phases, self.epoch_rows, self.seed, self._asked).restored(self.state(), epoch, 0)

    def _refuse_other(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatch where the number of caches, the seed or an argument of `of` differs from the state."""
        mine = {"mixture": f"{len(self.streams)} caches", "seed": self.seed, **self._asked}
        count = len(state.get("mixture", ()))
        theirs = {"mixture": f"{count} caches", "seed": state.get("seed"), **state.get("asked", {})}
        differs = {name: (theirs.get(name), mine[name]) for name in mine if theirs.get(name) != mine[name]}
        if differs:
            raise state_mismatch(self._roots, differs)

    @property
    def _roots(self) -> str:
        return ", ".join(dict.fromkeys(cache.root for cache in self.caches))


def _resumed_spans(newest: CacheStream, states: Sequence[Mapping[str, Any]], index: int) -> tuple[StreamSpan, ...]:
    """Return the spans of one cache from a place on, then a span of the rows that the cache has now."""
    begun = [state for state in states if state["start"] <= index]
    planned = [state for state in states if state["start"] > index]
    spans = []
    for state in (begun[-1], *planned):
        start, first = state["start"], state["first_pass"]
        spans.append(StreamSpan(start, first, newest.restored(state, first, int(start < index))))
    if spans[-1].stream.generations == (newest.cache.generation.number,):
        return tuple(spans)
    following = spans[0].following(index, newest.on_newest_rows())
    return (following,) if following.start == spans[0].start else (spans[0], following)


def _stream(each: Ingredient, shuffle: Shuffle | None, seed: int, window: Window | None) -> CacheStream:
    trains = set(PACKED_COLUMNS) <= set(each.cache.columns)
    columns = PACKED_COLUMNS if trains else each.cache.default_columns
    choose = partial(choose_ordering, columns=columns, shuffle=shuffle, seed=seed, window=window)
    return CacheStream(each.cache, choose, checked_rule(each.selection))


def _weights(ingredients: Sequence[Ingredient], sizes: Sequence[int]) -> tuple[tuple[float, ...], int]:
    """Return the weights, and the number of rows of an epoch."""
    pairs = [(each.weight, each.repeat) for each in ingredients]
    weights = [weight for weight, repeat in pairs if weight is not None and repeat is None]
    repeats = [repeat for weight, repeat in pairs if repeat is not None and weight is None]
    if pairs and len(weights) == len(pairs):
        return _plain(weights), sum(sizes)
    if pairs and len(repeats) == len(pairs):
        for repeat in repeats:
            checked_number("repeat", repeat, least=0)
        rows = [round(Fraction(str(repeat)) * size) for repeat, size in zip(repeats, sizes, strict=True)]
        return tuple(rows), sum(rows)
    if not pairs:
        raise ValueError("a mixture needs at least one cache: Mixture.of([Ingredient(cache, weight=1.0)])")
    raise ValueError(f"pass caches that all have a weight, or all a repeat; (weight, repeat) are {pairs}")


def _asked(
    ingredients: Sequence[Ingredient], changes: Sequence[tuple[int, Sequence[float]]], epoch_rows: int | None
) -> dict[str, Any]:
    """Return the arguments of a mixture as JSON has them, without row counts, which change with growth."""
    return {
        "weights": [None if each.weight is None else _plain([each.weight])[0] for each in ingredients],
        "repeats": [None if each.repeat is None else _plain([each.repeat])[0] for each in ingredients],
        "changes": [[row, list(_plain(weights))] for row, weights in changes],
        "epoch_rows": epoch_rows,
    }


def _plain(weights: Sequence[float]) -> tuple[float, ...]:
    """Return numbers of any type, numpy's too, as JSON has them."""
    return tuple(weight if isinstance(weight, int) else float(weight) for weight in weights)


def _check_alike(caches: Sequence[Cache]) -> None:
    """Raise where rows of the caches differ in shape, type or meaning, since they share batches.

    The type of tokens may differ, as they are widened anyway; the tokenizer may not. Layers beyond the base are
    compared where both caches have them.
    """
    for other in caches[1:]:
        first = caches[0]
        further = [(layer, layer) for layer in first.layers[1:] if layer in other.layers]
        for one, another in [(first.generation.base, other.generation.base), *further]:
            then, now = _facts(first, one), _facts(other, another)
            for name in dict.fromkeys([*then, *now]):
                mine, theirs = then.get(name, "absent"), now.get(name, "absent")
                if mine != theirs:
                    raise ValueError(
                        f"{name} is {_shown(mine, theirs)} in '{first.root}' but {_shown(theirs, mine)} in "
                        f"'{other.root}'; mix only caches that agree in this"
                    )


def _facts(cache: Cache, layer: str) -> dict[str, object]:
    """Return the properties that caches of a mixture must share, under the names used in errors."""
    recipe = cache.recipe(layer)
    files = {name: recipe.dependencies[name] for name in recipe.dependencies.keys() - inputs_in(recipe.dependencies)}
    tags = {"the vocabulary of tags": recipe.fields["tags"]} if "tags" in recipe.fields else {}
    return {
        "the kind of recipe": recipe.kind,
        **{f"the SHA-256 of '{name}'": files[name] for name in sorted(files)},
        **tags,
        **{f"column '{column.name}'": _kind(column) for column in recipe.columns},
    }


def _shown(fact: object, other: object) -> str:
    """Return a fact as text; a list as its length and its first entry that is not in the other list."""
    if not isinstance(fact, list | tuple) or not isinstance(other, list | tuple):
        return str(fact)
    differs = [own for own in fact if own not in set(other)]
    return f"{len(fact)} entries" + (f" (with {differs[0]!r})" if differs else "")


def _kind(column: Column) -> str:
    ragged = "ragged rows" if column.ragged else "rows"
    return f"{ragged} of shape {column.shape}" + ("" if column.name == "tokens" else f" and type {column.dtype}")
