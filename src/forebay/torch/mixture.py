"""Several caches as one stream, each with its share of every batch.

    position ──shares──▶ (cache, position in its own endless stream) ──▶ (how often gone through, position, row)

Every cache goes through its own epochs, each in its own order: a small one more often. Which row stands where depends
on the seed, the weights and the position alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from forebay.cache.reader import Cache
from forebay.columns import Column
from forebay.errors import StateMismatch
from forebay.order.bijection import Numbers, key_of
from forebay.order.shares import ChangingShares, Phase
from forebay.order.window import Window
from forebay.torch.batch import TRAINED_ON
from forebay.torch.cache_stream import CacheStream
from forebay.torch.given import checked_cache, checked_rule
from forebay.torch.loader import Loader
from forebay.torch.shuffle import Shuffle, choose_ordering
from forebay.torch.stream import Located, Rule


@dataclass(frozen=True, slots=True, eq=False)
class Ingredient:
    """A cache in a mixture: with a weight, its share of the rows; or with a repeat, how often an epoch has each row."""

    cache: Cache
    weight: float | None = None
    repeat: float | None = None
    selection: Rule | None = None


class Mixture:
    """A stream over several caches, for a `Loader`; its batches also have `dataset_id` and `local_index`.

        mixture = Mixture.of([Ingredient(edu, weight=0.7), Ingredient(code, weight=0.3)], seed=0)
        loader = Loader(mixture, global_batch_size=48)

    At any position every cache has had its share to less than two rows. The id of a dataset is its place among the
    ingredients; a local index is a row number of its cache.
    """

    def __init__(
        self,
        streams: Sequence[CacheStream],
        phases: Sequence[Phase],
        epoch_rows: int,
        seed: int,
        asked: Mapping[str, Any],
    ) -> None:
        if epoch_rows < 1:
            raise ValueError(f"epoch_rows is {epoch_rows}; an epoch has at least one row")
        self.streams, self.epoch_rows, self._seed = tuple(streams), epoch_rows, seed
        self._asked = dict(asked)  # the identity of a mixture: holds no number that a growing cache changes
        self._sizes = [stream.size(0) for stream in streams]
        self._shares = ChangingShares(phases)

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
        """An epoch has `epoch_rows` rows: by default what repeats ask for, or with weights what the caches have.

        `changes` are other weights from a row of the mixture on: `[(480_000, [0.5, 0.5])]`.
        """
        if not all(isinstance(each, Ingredient) for each in ingredients):
            raise TypeError("a mixture is made of ingredients: [Ingredient(cache, weight=0.7), …]")
        _check_columns([checked_cache(each.cache) for each in ingredients])
        streams = [
            _stream(each, shuffle, key_of("mixture", seed, number), window) for number, each in enumerate(ingredients)
        ]
        sizes = [stream.size(0) for stream in streams]
        if 0 in sizes:
            raise ValueError(f"'{ingredients[sizes.index(0)].cache.root}' has no rows; leave it out of the mixture")
        weights, rows = _weights(ingredients, sizes)
        phases = [Phase(0, weights), *(Phase(row, _plain(changed)) for row, changed in changes)]
        asked = _asked(ingredients, changes, epoch_rows)
        return cls(streams, phases, rows if epoch_rows is None else epoch_rows, seed, asked)

    def __repr__(self) -> str:
        pairs = zip(self.phases[-1].weights, self.caches, strict=True)
        shares = ", ".join(f"{weight:g} × '{cache.root}'" for weight, cache in pairs)
        return f"<Mixture of {shares}; {self.epoch_rows:,} rows in an epoch, seed {self.seed}>"

    @property
    def caches(self) -> tuple[Cache, ...]:
        return tuple(stream.cache for stream in self.streams)

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def phases(self) -> tuple[Phase, ...]:
        """From which row on which weights."""
        return self._shares.phases

    def size(self, epoch: int) -> int:
        return self.epoch_rows

    def locate(self, epoch: int, positions: Numbers) -> Located:
        sources, places = self._shares.locate(positions + epoch * self.epoch_rows)
        rows, epochs = np.empty_like(places), np.empty_like(places)
        for source in np.unique(sources).tolist():
            here = np.flatnonzero(sources == source)
            epochs[here], within = np.divmod(places[here], self._sizes[source])
            for own in np.unique(epochs[here]).tolist():
                now = epochs[here] == own
                rows[here[now]] = self.streams[source].locate(own, within[now]).rows
        return Located(rows, sources, {"dataset_id": sources, "local_index": rows}, epochs)

    def with_weights(self, weights: Sequence[float], epoch: int, position: int) -> "Mixture":
        """The same mixture with other weights from a position on; every cache goes on where it is."""
        if len(weights) != len(self.streams):
            raise ValueError(f"{len(weights)} weights for {len(self.streams)} caches; a cache left out has weight 0")
        start = epoch * self.epoch_rows + position
        kept = [phase for phase in self.phases if phase.start < start]
        return Mixture(self.streams, [*kept, Phase(start, _plain(weights))], self.epoch_rows, self.seed, self._asked)

    def state(self) -> dict[str, Any]:
        return {
            "mixture": [stream.state() for stream in self.streams],
            "seed": self.seed,
            "asked": self._asked,
            "epoch_rows": self.epoch_rows,
            "phases": [[phase.start, list(phase.weights)] for phase in self.phases],
        }

    def resumed(self, state: Mapping[str, Any]) -> "Mixture":
        """With the weights and epochs of the state, whatever changed since, on the generations it was taken on."""
        if "mixture" not in state:
            raise StateMismatch(self._roots, {"what is read": ("one cache", f"a mixture of {len(self.streams)}")})
        self._refuse_other(state)
        streams = [stream.resumed(then) for stream, then in zip(self.streams, state["mixture"], strict=True)]
        phases = [Phase(start, tuple(weights)) for start, weights in state["phases"]]
        return Mixture(streams, phases, state["epoch_rows"], self.seed, self._asked)

    def _refuse_other(self, state: Mapping[str, Any]) -> None:
        """Another number of caches or seed; weights, changes or a length of epochs that were not asked for then."""
        mine = {"mixture": f"{len(self.streams)} caches", "seed": self.seed, **self._asked}
        count = len(state.get("mixture", ()))
        theirs = {"mixture": f"{count} caches", "seed": state.get("seed"), **state.get("asked", {})}
        differs = {name: (theirs.get(name), mine[name]) for name in mine if theirs.get(name) != mine[name]}
        if differs:
            raise StateMismatch(self._roots, differs)

    @property
    def _roots(self) -> str:
        return ", ".join(dict.fromkeys(cache.root for cache in self.caches))


def change_weights(loader: Loader, weights: Sequence[float]) -> None:
    """Other weights from the loader's next batch on; its state keeps them. Iterate anew to go on."""
    if not isinstance(loader.stream, Mixture):
        raise TypeError(f"weights belong to a mixture; the loader reads a {type(loader.stream).__name__}")
    state = loader.state_dict()
    loader.stream = loader.stream.with_weights(weights, loader.epoch, loader.position)
    loader.load_state_dict({**state, "stream": loader.stream.state()})


def _stream(each: Ingredient, shuffle: Shuffle | None, seed: int, window: Window | None) -> CacheStream:
    trains = set(TRAINED_ON) <= set(each.cache.columns)
    columns = TRAINED_ON if trains else each.cache.default_columns
    choose = partial(choose_ordering, columns=columns, shuffle=shuffle, seed=seed, window=window)
    return CacheStream(each.cache, choose, checked_rule(each.selection))


def _weights(ingredients: Sequence[Ingredient], sizes: Sequence[int]) -> tuple[tuple[float, ...], int]:
    """The weights, and how many rows an epoch has."""
    given = [(each.weight, each.repeat) for each in ingredients]
    weights = [weight for weight, repeat in given if weight is not None and repeat is None]
    repeats = [repeat for weight, repeat in given if repeat is not None and weight is None]
    if given and len(weights) == len(given):
        return _plain(weights), sum(sizes)
    if given and len(repeats) == len(given):
        rows = [round(Fraction(str(repeat)) * size) for repeat, size in zip(repeats, sizes, strict=True)]
        return tuple(rows), sum(rows)
    raise ValueError(f"(weight, repeat) are {given}; give one or more caches, all with a weight or all with a repeat")


def _asked(
    ingredients: Sequence[Ingredient], changes: Sequence[tuple[int, Sequence[float]]], epoch_rows: int | None
) -> dict[str, Any]:
    """What a mixture was made of, before the rows of its caches were counted, as JSON gives it back."""
    return {
        "weights": [None if each.weight is None else _plain([each.weight])[0] for each in ingredients],
        "repeats": [None if each.repeat is None else _plain([each.repeat])[0] for each in ingredients],
        "changes": [[row, list(_plain(weights))] for row, weights in changes],
        "epoch_rows": epoch_rows,
    }


def _plain(weights: Sequence[float]) -> tuple[float, ...]:
    """As JSON gives them back, whichever kind of number they were."""
    return tuple(weight if isinstance(weight, int) else float(weight) for weight in weights)


def _check_columns(caches: Sequence[Cache]) -> None:
    """Rows of different caches stand in one batch, so a column of theirs has one shape and type.

    Tokens are widened in any case, and their type says how large a vocabulary is.
    """
    first: dict[str, tuple[str, str]] = {}
    for cache in caches:
        for name in cache.default_columns:
            kind = _kind(cache.column(name))
            expected, root = first.setdefault(name, (kind, cache.root))
            if kind != expected:
                raise ValueError(
                    f"column '{name}' has {expected} in '{root}' but {kind} in '{cache.root}'; "
                    "caches of a mixture are built alike"
                )


def _kind(column: Column) -> str:
    ragged = "ragged rows" if column.ragged else "rows"
    return f"{ragged} of shape {column.shape}" + ("" if column.name == "tokens" else f" and type {column.dtype}")
