"""Streams: the rows that a loader reads, in an order that is a function of the position.

    position of the epoch ──locate──▶ (which cache, row number there, tags)

A loader over one cache and a loader over a mixture differ only in their stream. The epoch of one cache has segments:

    segment 0    the rows, all or selected, of the generation that the epoch began with
    segment 1    the rows of chunks that a newer generation added, with growth="within"
    …

All segments are read through one cache, whose generation has the chunks of all of them.

`Ranks` is the part of every global batch that a rank takes. Last, the argument checks that a loader, a data set and a
mixture share.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from forebay.cache.catalog import generation_numbers
from forebay.errors import CacheNotFound, StateMismatch
from forebay.fields import checked_whole
from forebay.order.selected_rows import Selection
from forebay.order.shuffle import Numbers
from forebay.order.window import Ordering, ShuffleQuality, shuffle_quality
from forebay.read.cache import Cache
from forebay.read.opening import open_cache
from forebay.read.rows import Located


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `rank` of `world_size` takes the positions p with p % world_size == rank, for any batch size."""

    rank: int
    world_size: int
    known_by: Literal["arguments", "environment", "group"] = "arguments"
    members: tuple[int, ...] = ()  # their ranks in the whole world, where they are only a part of it
    timeout: float = 600.0  # seconds that they wait for each other; another rank may still be loading a model

    def __post_init__(self) -> None:
        checked_whole("world_size", self.world_size, 1)
        if checked_whole("rank", self.rank) >= self.world_size:
            raise ValueError(
                f"rank must be from 0 to {self.world_size - 1} with world_size {self.world_size} (got {self.rank})"
            )

    @property
    def can_agree(self) -> bool:
        return self.known_by == "group" or self.world_size == 1


@runtime_checkable
class Stream(Protocol):
    """Epochs of rows. Immutable: growth and new weights return another stream."""

    @property
    def caches(self) -> Sequence[Cache]:
        """The caches that rows come from; all have the columns that are read."""
        ...

    @property
    def selections(self) -> Sequence[Selection | None]:
        """The selected rows of each cache when an epoch begins; None where all rows are selected."""
        ...

    @property
    def seed(self) -> int: ...

    def size(self, epoch: int) -> int:
        """Return the number of positions of an epoch."""
        ...

    def locate(self, epoch: int, positions: Numbers) -> Located:
        """Return the rows at some positions of an epoch."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the identity of the row sequence: a few hundred bytes of JSON."""
        ...

    def restored(self, state: Mapping[str, Any], epoch: int, position: int) -> "Stream":
        """Return the stream that a state was taken from, on the caches of this one, at a position.

        Raises StateMismatch where the caches cannot give the same rows.
        """
        ...


@runtime_checkable
class SelectionRule(Protocol):
    """Selects rows of any generation of a cache, such as a split. A selected row stays selected as the cache grows."""

    @property
    def digest(self) -> str:
        """Identifies the rule; the same for every generation."""
        ...

    def select(self, cache: Cache) -> Selection:
        """Return the selected rows of the generation that this cache pins."""
        ...


class EpochSegment:
    """The rows of one generation in an epoch, less those of the `older` one; read through the newer cache `reading`.

    `counts` has the number of selected rows per chunk of `pinned`; `rows` finds their row numbers in `reading`.
    """

    def __init__(self, pinned: Cache, older: Cache | None, reading: Cache, rule: SelectionRule | None) -> None:
        self.pinned = pinned
        self.selection = None if rule is None else rule.select(pinned)
        starts = pinned.chunk_starts
        self._selected_starts = starts if self.selection is None else self.selection.before(starts)
        self.counts = np.diff(self._selected_starts)
        if older is not None:
            self.counts[np.isin(pinned.chunk_numbers, older.chunk_numbers)] = 0
        self._firsts = np.concatenate([[0], np.cumsum(self.counts)])
        self._whole = older is None
        self._reading = reading

    @cached_property
    def selected(self) -> str | None:
        """A digest of the selected rows, since a rule's own digest may be just a name; None where all are selected."""
        return None if self.selection is None else self.selection.digest

    @cached_property
    def _shifts(self) -> Numbers | None:
        """The shift of each chunk's row numbers in the newer generation, after gaps were filled."""
        if self._reading is self.pinned:
            return None
        at = np.searchsorted(self._reading.chunk_numbers, self.pinned.chunk_numbers)
        shifts: Numbers = self._reading.chunk_starts[at] - self.pinned.chunk_starts[:-1]
        return shifts

    def rows(self, indices: Numbers) -> Numbers:
        """Return row numbers of the cache that is read."""
        if not self._whole:
            chunk = np.searchsorted(self._firsts, indices, side="right") - 1
            indices = indices - self._firsts[chunk] + self._selected_starts[chunk]
        rows = indices if self.selection is None else self.selection.rows(indices)
        if self._shifts is None:
            return rows
        return rows + self._shifts[np.searchsorted(self.pinned.chunk_starts, rows, side="right") - 1]


Policy = Literal["pinned", "epoch", "within"]


@dataclass(frozen=True, slots=True)
class Growth:
    """How the rows of an epoch grew.

    >>> print(Growth(3, 5, 352_217, 472_240))
    352,217 → 472,240 rows (generation 3 → 5)
    """

    old_generation: int
    new_generation: int
    old_rows: int
    new_rows: int

    def __str__(self) -> str:
        return f"{self.old_rows:,} → {self.new_rows:,} rows (generation {self.old_generation} → {self.new_generation})"


PACKED_COLUMNS = ("tokens", "seq_lens")  # the columns that a training batch is made of
CHAT_COLUMNS = (*PACKED_COLUMNS, "spans", "last_turn")  # those of a batch of conversations


def check_fields(what: str, state: Mapping[str, Any], fields: type[msgspec.Struct]) -> None:
    """Raise ValueError where a state, or a stream's part of it, lacks a field or has one of another type."""
    try:
        msgspec.convert(dict(state), fields)
    except msgspec.ValidationError as error:
        raise ValueError(f"{what} is not what state_dict() returned: {error}") from error


Choose = Callable[[Cache], Ordering]


class CacheState(msgspec.Struct, frozen=True):
    """The state of the stream of one cache."""

    cache_id: str
    layers: list[str]
    generations: Annotated[list[int], msgspec.Meta(min_length=1)]
    chunks: list[str]
    rows: list[int]
    selection: str | None
    selected: list[str | None]
    shuffle: Literal["global", "window", "sequential"]
    seed: int
    window: dict[str, int] | None
    automatic: bool


class CacheStream:
    """The rows of an epoch's `generations`, read through `cache`, which pins the newest of them or a newer one.

    `choose` returns the ordering of a cache's rows, used where no `ordering` is passed.
    """

    def __init__(
        self,
        cache: Cache,
        choose: Choose,
        rule: SelectionRule | None = None,
        generations: Sequence[int] = (),
        ordering: Ordering | None = None,
    ) -> None:
        self.cache = cache
        self._choose, self._rule = choose, rule
        pinned = [generation_of(cache, number) for number in generations or (cache.generation.number,)]
        self.ordering = ordering or choose(pinned[0])
        self._segments = [
            EpochSegment(one, older, cache, rule) for one, older in zip(pinned, [None, *pinned], strict=False)
        ]
        self._orders = [self.ordering.of(segment.counts, number) for number, segment in enumerate(self._segments)]
        self._starts = np.cumsum([0, *(order.size for order in self._orders)])
        self.caches, self.seed = (cache,), self.ordering.seed
        self.selections = (self._segments[0].selection,)  # of the epoch's first generation
        self.generations = tuple(one.generation.number for one in pinned)  # the first, and those added to the epoch

    def __repr__(self) -> str:
        share = self.size(0) / max(1, len(self.cache))
        which = "" if self._rule is None else f" ({share:.1%} of the rows: {self._rule.digest})"
        return f"{self.size(0):,} rows{which} of {self.cache!r}, {self.ordering.kind} order, seed {self.seed}"

    def size(self, epoch: int) -> int:
        return int(self._starts[-1])

    def locate(self, epoch: int, positions: Numbers) -> Located:
        rows = np.empty_like(positions)
        number = np.searchsorted(self._starts, positions, side="right") - 1
        for segment in np.unique(number).tolist():
            here = number == segment
            indices = self._orders[segment].rows_at(epoch, positions[here] - self._starts[segment])
            rows[here] = self._segments[segment].rows(indices)
        return Located(rows)

    def state(self) -> dict[str, Any]:
        return {
            "cache_id": self.cache.generation.document.cache_id,
            "layers": list(self.cache.layers),
            "generations": list(self.generations),
            "chunks": [segment.pinned.content_digest for segment in self._segments],
            "rows": [order.size for order in self._orders],
            "selection": None if self._rule is None else self._rule.digest,
            "selected": [segment.selected for segment in self._segments],
            **self.ordering.state(),
        }

    def restored(self, state: Mapping[str, Any], epoch: int, position: int) -> "CacheStream":
        """Return the stream of the epoch that the state was taken in, whatever was published since."""
        if "mixture" in state:
            raise state_mismatch(self.cache.root, {"what is read": ("a mixture", "one cache")})
        check_fields("'stream' of the state", state, CacheState)
        mine, pinned = self.state(), self.cache.generation.number
        asked = () if state.get("automatic") and self.ordering.automatic else ("shuffle",)
        self._refuse_other(state, mine, ("layers", "seed", "selection", *asked))
        generations = state["generations"]
        if state.get("cache_id") != mine["cache_id"]:
            generations = self._equal_generations(state)
        if max(generations) > pinned:
            raise state_mismatch(self.cache.root, {"generation": (max(generations), pinned)})
        then = self._with(self.cache, generations, Ordering.of_state(state))
        self._refuse_other(state, then.state(), ("chunks", "rows", "selected"))
        return then

    def on_newest_rows(self, generation: int | None = None) -> "CacheStream":
        """Return all rows of one generation, by default the one that the cache pins, as one segment."""
        cache = self.cache if generation is None else generation_of(self.cache, generation)
        return self._with(cache, (), None)

    def with_added_rows(self) -> "CacheStream":
        """Return this epoch, followed by the rows that the generation of the cache adds."""
        return self._with(self.cache, (*self.generations, self.cache.generation.number), self.ordering)

    def read_through(self, generation: int) -> "CacheStream":
        """Return the same rows in the same order, read through a newer generation."""
        return self._with(generation_of(self.cache, generation), self.generations, self.ordering)

    def newest(self) -> int:
        """Return the newest published generation."""
        return max(generation_numbers(self.cache.store))

    def growth(self) -> Growth | None:
        """Return the growth from this epoch to the generation of the cache; None if they are the same generation."""
        now = self.cache.generation.number
        if now == self.generations[-1]:
            return None
        return Growth(self.generations[-1], now, self.size(0), self.on_newest_rows().size(0))

    def quality(self, epoch: int, batch_size: int) -> ShuffleQuality:
        """Measure how close the order is to a global shuffle."""
        unit = self.ordering.window.unit if self.ordering.window else 1
        return shuffle_quality(self._orders[0], self._segments[0].counts, unit, batch_size, epoch)

    def _with(self, cache: Cache, generations: Sequence[int], ordering: Ordering | None) -> "CacheStream":
        return CacheStream(cache, self._choose, self._rule, generations, ordering)

    def _equal_generations(self, state: Mapping[str, Any]) -> list[int]:
        """Find the generations whose chunks equal those of the state, for a cache that was built again."""
        generations: dict[str, int] = {}
        numbers = [number for number in generation_numbers(self.cache.store) if number <= self.cache.generation.number]
        for number in sorted(numbers, reverse=True):
            if generations.keys() >= set(state["chunks"]):
                break
            generations.setdefault(generation_of(self.cache, number).content_digest, number)
        if not generations.keys() >= set(state["chunks"]):
            then_and_now = {name: (state.get(name), self.state()[name]) for name in ("cache_id", "chunks")}
            raise state_mismatch(self.cache.root, then_and_now)
        return [generations[digest] for digest in state["chunks"]]

    def _refuse_other(self, state: Mapping[str, Any], mine: Mapping[str, Any], names: Sequence[str]) -> None:
        differs = {name: (state.get(name), mine[name]) for name in names if state.get(name) != mine[name]}
        if differs:
            raise state_mismatch(self.cache.root, differs)


def generation_of(cache: Cache, generation: int) -> Cache:
    try:
        return cache.at_generation(generation)
    except CacheNotFound as error:
        raise StateMismatch(
            f"the state was taken on generation {generation} of '{cache.root}', which no longer exists",
            hint="restore it from a copy, or start without the state",
            generation=generation,
        ) from error


Name = TypeVar("Name")


def checked_cache(cache: Cache) -> Cache:
    if not isinstance(cache, Cache):
        root = repr(os.fspath(cache)) if isinstance(cache, str | os.PathLike) else "root"
        raise TypeError(f"expected a cache, not a {type(cache).__name__}: open one with fb.open_cache({root})")
    return cache


def checked_source(source: Cache | Stream | str | os.PathLike[str]) -> Cache | Stream:
    """Return a cache, opened if it is a path, or another stream."""
    if isinstance(source, str | os.PathLike):
        return open_cache(source)
    if not isinstance(source, Cache | Stream):
        raise TypeError(f"a Loader reads a cache or a Mixture, not a {type(source).__name__}")
    return source


def checked_rule(selection: SelectionRule | None) -> SelectionRule | None:
    if selection is not None and not isinstance(selection, SelectionRule):
        raise TypeError(f"selection is {selection!r}; pass a rule: Split('train'), Split('validation') or Where(…)")
    return selection


def checked_names(option: str, names: Sequence[Name]) -> tuple[Name, ...]:
    """Return a list of names as a tuple; a single string, which is also a sequence, is an error."""
    if isinstance(names, str):
        raise TypeError(f"{option} is {names!r}; pass a list of names: [{names!r}]")
    return tuple(names)


def checked_batch_size(size: int, world_size: int, micro_batches: int = 1) -> int:
    """Return a global batch size that micro-batches and ranks can share evenly."""
    size = checked_whole("global_batch_size", size, 1)
    if size % world_size:
        raise ValueError(
            f"global_batch_size must be a multiple of the world size {world_size} (got {size}), so that all ranks take "
            "equal shares"
        )
    if size % (world_size * checked_whole("micro_batches", micro_batches, 1)):
        raise ValueError(
            f"micro_batches must divide the rows of a rank, {size // world_size} of global_batch_size={size} "
            f"(got {micro_batches})"
        )
    return size


class LoaderState(msgspec.Struct, frozen=True):
    """The state of a loader."""

    version: int
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    position: Annotated[int, msgspec.Meta(ge=0)]
    stream: dict[str, Any]


def checked_state(state: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    """Return a state that has all fields of this version, or that is of another version, which the caller rejects."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state is a {type(state).__name__}; pass the dict that state_dict() returned, from JSON: "
            "json.loads(text)"
        )
    if isinstance(other := state.get("version"), bool) or not isinstance(other, int) or other == version:
        check_fields("the state", state, LoaderState)
    return state


def state_mismatch(root: str, differs: Mapping[str, tuple[object, object]], advice: str = "") -> StateMismatch:
    """The error about a state of another loader; `differs` maps a name to its value then and now."""
    shown = "; ".join(f"{name}: {then} then, {now} now" for name, (then, now) in differs.items())
    hint = advice or "create the loader with the old arguments, or start without the state"
    return StateMismatch(f"the state does not belong to this loader over '{root}': {shown}", hint=hint, root=root)
