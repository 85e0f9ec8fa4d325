"""Streams: the rows that a loader reads, in an order that is a function of the position.

    position of the epoch ──locate──▶ (which cache, row number there, tags)

A loader over one cache and a loader over a mixture differ only in their stream. The epoch of one cache has segments:

    segment 0    the rows, all or selected, of the generation that the epoch began with
    segment 1    the rows of chunks that a newer generation added, with growth="within"
    …

All segments are read through one cache, whose generation has the chunks of all of them.

What a loader does with rows that were published after it started, or after its state was taken.

pinned   stay on the generation of the cache it was made with; a state of an older one finishes its epoch first
epoch    move to the newest generation at the end of each epoch; each cache of a mixture first finishes its pass
within   also append added rows, shuffled among themselves, to the end of the running epoch

`choose_ordering` chooses the shuffle that suits a cache; `Ranks` is the part of every global batch that a rank takes.

global   rows are copied from the mapped file, or all of them fit decoded in memory
window   blocks must be decoded, and more of them than stay decoded at a time; or chunks must be fetched

Last, the argument checks that Loader, CacheDataset and Mixture share.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from operator import index
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar, get_args, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import generation_numbers
from forebay.columns import Array, Ragged
from forebay.errors import GenerationGone, NothingPublished, StateMismatch, WindowTooLarge, choice_error
from forebay.order.orders import (
    LANES,
    Numbers,
    Ordering,
    ShuffleQuality,
    Window,
    WindowOrder,
    lanes_of,
    shuffle_quality,
)
from forebay.order.selected_rows import Selection
from forebay.read.cache import DEFAULT_MEMORY, Cache
from forebay.store.base import is_url


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `rank` of `world_size` takes the positions p with p % world_size == rank, whatever the batch size."""

    rank: int
    world_size: int
    known_by: Literal["arguments", "environment", "group"] = "arguments"
    members: tuple[int, ...] = ()  # their ranks in the whole world, where they are only a part of it

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank must be from 0 to {self.world_size - 1} with world_size {self.world_size} (got {self.rank})"
            )

    @property
    def can_agree(self) -> bool:
        return self.known_by == "group" or self.world_size == 1


Shuffle = Literal["auto", "global", "window"]
REMOTE_CHUNKS = 2  # chunks of a lane that are mixed: all that a batch needs must be fetched first
WINDOW_BYTES = 96 * 1024 * 1024  # decoded rows that all lanes together mix at a time, unless a window is passed


def choose_ordering(
    cache: Cache, columns: Sequence[str], shuffle: Shuffle | None, seed: int, window: Window | None
) -> Ordering:
    """Return the ordering that `shuffle` names; "auto" decides by where and how the cache is stored.

    All default columns of the cache count beside `columns`, so that runs that read different columns of a cache see
    its rows in the same order.
    """
    if shuffle not in (None, *get_args(Shuffle)):
        raise choice_error("shuffle", shuffle, (*get_args(Shuffle), None))
    if window is not None and not isinstance(window, Window):
        raise TypeError(f"window is {window!r}; pass forebay.torch.Window(rows=…)")
    if window is not None and shuffle in (None, "global"):
        raise ValueError(f"window needs shuffle='window' (got {shuffle!r})")
    if shuffle is None:
        return Ordering("sequential", seed)
    decoded = decoded_columns(cache, list(dict.fromkeys([*cache.default_columns, *columns])))
    if shuffle == "window" or window is not None:
        return Ordering("window", seed, window or suitable_window(cache, decoded or cache.default_columns))
    if shuffle == "auto" and is_url(cache.root):
        return Ordering("window", seed, suitable_window(cache, decoded or cache.default_columns), automatic=True)
    if shuffle == "global" or not decoded or len(cache) * cache.row_bytes(decoded) <= WINDOW_BYTES:
        return Ordering("global", seed, automatic=shuffle == "auto")
    return Ordering("window", seed, suitable_window(cache, decoded), automatic=True)


def suitable_window(cache: Cache, columns: Sequence[str], lanes: int = LANES) -> Window:
    """Return a window whose units cut no block of these columns, with as many rows as fit in `WINDOW_BYTES`.

    Its lanes are a power of two, as ranks most often are: ranks share lanes unless their number divides them.
    """
    unit = lcm(*(cache.column(name).block_rows for name in decoded_columns(cache, columns)))
    row_bytes = max(1, cache.row_bytes(columns))
    if 2 * lanes * unit * row_bytes > DEFAULT_MEMORY:  # the blocks of these units would not stay decoded
        lanes = 1 << max(1, WINDOW_BYTES // (unit * row_bytes)).bit_length() - 1
    rows = WINDOW_BYTES // (lanes * row_bytes)
    if is_url(cache.root):
        return Window(rows=max(unit, rows), unit=unit, chunks=REMOTE_CHUNKS, lanes=lanes)
    return Window(rows=max(unit, rows), unit=unit, lanes=lanes)


def decoded_columns(cache: Cache, columns: Sequence[str]) -> list[str]:
    """Return the columns that are stored compressed."""
    return [name for name in columns if cache.column(name).codec != "none"]


def refuse_decoding_again(cache: Cache, columns: Sequence[str], ordering: Ordering, ranks: Ranks) -> None:
    """Raise WindowTooLarge where the blocks being mixed do not all stay decoded, and would be decoded repeatedly."""
    if ordering.window is None and not ordering.automatic:
        return
    lanes = 1 if ordering.window is None else len(lanes_of(ranks.rank, ranks.world_size, ordering.window.lanes))
    window_rows = len(cache) if ordering.window is None else ordering.window.rows
    rows = min(2 * lanes * window_rows, len(cache))
    needed = rows * cache.row_bytes(decoded_columns(cache, columns))
    limit = cache.statistics().limit_bytes
    if needed > limit:
        raise WindowTooLarge(cache.root, window_rows, lanes, needed, limit)


Weights = NDArray[np.float32]


class Located(NamedTuple):
    """Rows by cache and row number, and what else the batch says about each."""

    rows: Numbers
    sources: Numbers | None = None  # index into `Stream.caches`; None if there is one cache
    tags: Mapping[str, Numbers] = {}  # further entries of the batch, one number per row: dataset_id, local_index
    epochs: Numbers | None = None  # pass number of the row's own cache; None if it is the epoch
    weights: Weights | None = None  # 0 for a row that only fills a rank's batch; None if batches are never filled

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to say about a row but where it is."""
        return not self.tags and self.weights is None

    def part(self, some: slice | Numbers) -> "Located":
        """Return some of the rows."""
        tags = {name: values[some] for name, values in self.tags.items()}
        sources, epochs = (None if each is None else each[some] for each in (self.sources, self.epochs))
        weights = None if self.weights is None else self.weights[some]
        return Located(self.rows[some], sources, tags, epochs, weights)


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
        """Return what identifies the sequence of rows: a few hundred bytes of JSON."""
        ...

    def restored(self, state: Mapping[str, Any], epoch: int, position: int) -> "Stream":
        """Return the stream that a state was taken from, on the caches of this one, at a position.

        Raises StateMismatch where the caches cannot give the same rows.
        """
        ...


class RowSource(Protocol):
    """What a batch is made from, once its rows are located."""

    @property
    def caches(self) -> Sequence[Cache]: ...

    @property
    def seed(self) -> int: ...


class ReadThrough(NamedTuple):
    """The caches of a stream, or others that have the same rows."""

    caches: Sequence[Cache]
    seed: int


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
        self._places = starts if self.selection is None else self.selection.before(starts)
        self.counts = np.diff(self._places)
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
        """How far the rows of each chunk moved in the newer generation, where gaps were filled."""
        if self._reading is self.pinned:
            return None
        at = np.searchsorted(self._reading.chunk_numbers, self.pinned.chunk_numbers)
        shifts: Numbers = self._reading.chunk_starts[at] - self.pinned.chunk_starts[:-1]
        return shifts

    @cached_property
    def replaced(self) -> "Replaced":
        """The chunks that differ in the generation they are read through."""
        return Replaced.between(self.pinned, self._reading)

    def rows(self, indices: Numbers) -> Numbers:
        """Return row numbers of the cache that is read."""
        if not self._whole:
            chunk = np.searchsorted(self._firsts, indices, side="right") - 1
            indices = indices - self._firsts[chunk] + self._places[chunk]
        rows = indices if self.selection is None else self.selection.rows(indices)
        if self._shifts is None:
            return rows
        return rows + self._shifts[np.searchsorted(self.pinned.chunk_starts, rows, side="right") - 1]


class Replaced(NamedTuple):
    """The numbers of chunks that were repaired or refreshed after a generation was published."""

    rows: Numbers  # with another number of rows, or gone
    content: Numbers  # with as many rows of other content

    @classmethod
    def between(cls, pinned: Cache, reading: Cache) -> "Replaced":
        if reading is pinned:
            return cls(*(np.empty(0, np.int64),) * 2)
        chunks = pinned.chunk_numbers
        at = np.searchsorted(reading.chunk_numbers, chunks)
        there = np.append(reading.chunk_numbers, -1)[at] == chunks
        alike = there.copy()
        alike[there] = np.diff(reading.chunk_starts)[at[there]] == np.diff(pinned.chunk_starts)[there]
        same = alike.copy()
        for layer in pinned.layers:
            digests = [cache.content_digests(layer, chunks[alike]) for cache in (pinned, reading)]
            same[alike] &= (digests[0] == digests[1]).all(axis=1)
        return cls(chunks[~alike], chunks[alike & ~same])


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


Read = Mapping[str, Array | Ragged]
PACKED_COLUMNS = ("tokens", "seq_lens")  # the columns that a training batch is made of
CHAT_COLUMNS = (*PACKED_COLUMNS, "spans", "last_turn")  # those of a batch of conversations


def check_stream(state: Mapping[str, Any], fields: type[msgspec.Struct]) -> None:
    """Raise ValueError where a stream's part of a state lacks a field or has one of another type."""
    try:
        msgspec.convert(dict(state), fields)
    except msgspec.ValidationError as error:
        raise ValueError(f"'stream' of the state is not what state_dict() returned: {error}") from error


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

    def __repr__(self) -> str:
        share = self.size(0) / max(1, len(self.cache))
        which = "" if self._rule is None else f" ({share:.1%} of the rows: {self._rule.digest})"
        return f"{self.size(0):,} rows{which} of {self.cache!r}, {self.ordering.kind} order, seed {self.seed}"

    @property
    def caches(self) -> tuple[Cache, ...]:
        return (self.cache,)

    @property
    def seed(self) -> int:
        return self.ordering.seed

    @property
    def selections(self) -> tuple[Selection | None]:
        """The selected rows of the epoch's first generation; None where all are selected."""
        return (self._segments[0].selection,)

    def chunks_of_lanes(self, lanes: Callable[[int], Sequence[int]]) -> Numbers | None:
        """The chunks of `lanes(number of lanes)`; None where lanes do not have chunks of the cache as it is pinned."""
        order, is_whole = self._orders[0], self.generations == (self.cache.generation.number,)
        if not isinstance(order, WindowOrder) or self._rule is not None or not is_whole:
            return None
        return order.chunks_of(lanes(order.window.lanes))

    @property
    def generations(self) -> tuple[int, ...]:
        """The generation that the epoch began with, and those whose rows were added to it."""
        return tuple(segment.pinned.generation.number for segment in self._segments)

    def size(self, epoch: int) -> int:
        return int(self._starts[-1])

    def locate(self, epoch: int, positions: Numbers) -> Located:
        if len(self._segments) == 1:
            return Located(self._segments[0].rows(self._orders[0].rows_at(epoch, positions)))
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
            raise StateMismatch(self.cache.root, {"what is read": ("a mixture", "one cache")})
        check_stream(state, CacheState)
        mine, pinned = self.state(), self.cache.generation.number
        asked = () if state.get("automatic") and self.ordering.automatic else ("shuffle",)
        self._refuse_other(state, mine, ("layers", "seed", "selection", *asked))
        generations = state["generations"]
        if state.get("cache_id") != mine["cache_id"]:
            generations = self._equal_generations(state)
        if max(generations) > pinned:
            raise StateMismatch(self.cache.root, {"generation": (max(generations), pinned)})
        then = self._with(self.cache, generations, Ordering.of_state(state))
        self._refuse_other(state, then.state(), ("chunks", "rows", "selected"))
        if position:
            then.check_replaced()
        return then

    def check_replaced(self) -> None:
        """Raise where chunks of this epoch have other rows in the generation it is read through.

        Chunks that have as many rows of other content are read, with a warning.
        """
        old, new = self.generations[0], self.cache.generation.number
        replaced = [segment.replaced for segment in self._segments]
        rows, content = (np.unique(np.concatenate(chunks)) for chunks in zip(*replaced, strict=True))
        if len(rows):
            differs = {f"the rows of chunk {_listed(rows)}": (f"of generation {old}", f"others in generation {new}")}
            advice = "to begin the next epoch, load the state with epoch + 1 and position 0"
            raise StateMismatch(self.cache.root, differs, advice)
        if len(content):
            warnings.warn(
                f"chunk {_listed(content)} of '{self.cache.root}' was replaced between generation {old} and {new}: "
                "this epoch reads the new content",
                stacklevel=2,
            )

    def has_replaced(self) -> bool:
        """Whether chunks of this epoch were replaced in the generation it is read through."""
        return any(len(chunks) for segment in self._segments for chunks in segment.replaced)

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
        found: dict[str, int] = {}
        numbers = [number for number in generation_numbers(self.cache.store) if number <= self.cache.generation.number]
        for number in sorted(numbers, reverse=True):
            if found.keys() >= set(state["chunks"]):
                break
            found.setdefault(generation_of(self.cache, number).content_digest, number)
        if not found.keys() >= set(state["chunks"]):
            then_and_now = {name: (state.get(name), self.state()[name]) for name in ("cache_id", "chunks")}
            raise StateMismatch(self.cache.root, then_and_now)
        return [found[digest] for digest in state["chunks"]]

    def _refuse_other(self, state: Mapping[str, Any], mine: Mapping[str, Any], names: Sequence[str]) -> None:
        differs = {name: (state.get(name), mine[name]) for name in names if state.get(name) != mine[name]}
        if differs:
            raise StateMismatch(self.cache.root, differs)


def _listed(chunks: Numbers) -> str:
    more = f" and {len(chunks) - 5} more" if len(chunks) > 5 else ""
    return ", ".join(map(str, chunks[:5].tolist())) + more


def generation_of(cache: Cache, generation: int) -> Cache:
    try:
        return cache.at_generation(generation)
    except NothingPublished as error:
        raise GenerationGone(cache.root, generation) from error


Report = Callable[[Growth], None]


class SharedNumber(Protocol):
    def first(self, number: int) -> int:
        """Return the number of rank 0; every rank must call this."""
        ...


@runtime_checkable
class MixedStream(Stream, Protocol):
    """A stream over several caches, each of which grows by itself."""

    @property
    def streams(self) -> Sequence[CacheStream]:
        """The stream of each cache, with its newest rows."""
        ...

    def grown(self, generations: Sequence[int], epoch: int) -> "MixedStream":
        """Return the stream from an epoch on, with these generations; each cache first finishes its pass."""
        ...


class Growing:
    """Moves a stream to newer generations; rank 0 decides for all ranks."""

    def __init__(self, policy: Policy, ranks: Ranks, agreement: SharedNumber) -> None:
        if policy not in get_args(Policy):
            raise choice_error("growth", policy, get_args(Policy))
        if policy != "pinned" and not ranks.can_agree:
            raise ValueError(
                f"growth={policy!r} needs ranks that agree on a generation: leave rank and world_size to "
                "torch.distributed, or keep growth='pinned' and call loader.move_to(generation) on every rank"
            )
        self.policy, self._agreement = policy, agreement

    def within(self, stream: Stream, report: Report) -> Stream | None:
        """Return the running epoch with added rows at its end; None if there are none, or they wait for the next."""
        if self.policy != "within" or not isinstance(stream, CacheStream):
            return None
        newest = self._newest(stream)
        newer = stream if newest == stream.cache.generation.number else stream.read_through(newest)
        growth = newer.growth()
        if growth is None or newer.has_replaced():  # replaced chunks wait for the next epoch, and so do added rows
            return None
        extended = newer.with_added_rows()
        if extended.size(0) == stream.size(0):
            return None
        report(growth)
        return extended

    def between(self, stream: Stream, epoch: int, report: Report) -> Stream:
        """Return the stream of an epoch that begins."""
        if isinstance(stream, MixedStream):
            return self._grown(stream, epoch, report)
        if not isinstance(stream, CacheStream):
            return stream
        now = stream.cache.generation.number if self.policy == "pinned" else self._newest(stream)
        return self.begin_at(stream, now, report)

    def _grown(self, mixture: MixedStream, epoch: int, report: Report) -> Stream:
        if self.policy == "pinned":
            return mixture
        newest = [self._newest(stream) for stream in mixture.streams]
        pairs = list(zip(mixture.streams, newest, strict=True))
        if all(stream.cache.generation.number == number for stream, number in pairs):
            return mixture
        try:
            following = mixture.grown(newest, epoch)
        except (StateMismatch, GenerationGone) as error:  # training continues with the rows that it has
            warnings.warn(
                f"the mixture keeps the rows that it began with: {error}; create it again to use the new ones",
                stacklevel=2,
            )
            return mixture
        for (old, number), new in zip(pairs, following.streams, strict=True):
            before = old.cache.generation.number
            if before != number:
                report(Growth(before, number, old.size(0), new.size(0)))
        return following

    def begin_at(self, stream: CacheStream, generation: int, report: Report) -> CacheStream:
        """Return the stream of an epoch that begins with all rows of a generation."""
        if stream.generations == (generation,):
            return stream
        following, before = stream.on_newest_rows(generation), stream.generations[-1]
        if generation != before:
            report(Growth(before, generation, stream.size(0), following.size(0)))
        return following

    def _newest(self, stream: CacheStream) -> int:
        return self._agreement.first(max(stream.newest(), stream.cache.generation.number))


Name = TypeVar("Name")
STATE_FIELDS = ("version", "epoch", "position", "stream")


def checked_cache(cache: Cache) -> Cache:
    if not isinstance(cache, Cache):
        raise TypeError(f"expected a cache, not a {type(cache).__name__}: {_advice(cache)}")
    return cache


def checked_source(source: Cache | Stream) -> Cache | Stream:
    if not isinstance(source, Cache | Stream):
        raise TypeError(f"a Loader reads a cache or a Mixture, not a {type(source).__name__}: {_advice(source)}")
    return source


def checked_rule(selection: SelectionRule | None) -> SelectionRule | None:
    if selection is not None and not isinstance(selection, SelectionRule):
        raise TypeError(f"selection is {selection!r}; pass a rule: Split('train'), Split('validation') or Where(…)")
    return selection


def checked_names(option: str, names: Sequence[Name]) -> tuple[Name, ...]:
    """Return a list of names as a tuple; a single string, which is also a sequence, is refused."""
    if isinstance(names, str):
        raise TypeError(f"{option} is {names!r}; pass a list of names: [{names!r}]")
    return tuple(names)


def checked_batch_size(size: int, world_size: int, micro_batches: int = 1) -> int:
    """Return a global batch size that micro-batches and ranks can share evenly."""
    size = checked_whole("global_batch_size", size, "a whole number of rows")
    if size < 1:
        raise ValueError(f"global_batch_size must be at least 1 (got {size})")
    if size % world_size:
        raise ValueError(
            f"global_batch_size must be a multiple of the world size {world_size} (got {size}), so that all ranks take "
            "equal shares"
        )
    if checked_whole("micro_batches", micro_batches) < 1 or size % (world_size * micro_batches):
        raise ValueError(
            f"micro_batches must be at least 1 and divide the rows of a rank, {size // world_size} of "
            f"global_batch_size={size} (got {micro_batches})"
        )
    return size


def checked_whole(option: str, number: int, what: str = "a whole number") -> int:
    try:
        return index(number)
    except TypeError as error:
        raise TypeError(f"{option} is {number!r}; pass {what}") from error


def checked_count(field: str, number: object) -> int:
    """Return a count from a state; `state_dict` writes only non-negative ints, never bools."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"'{field}' of the state is {number!r}; it must be a whole number of at least 0")
    return number


def checked_state(state: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    """Return a state that has all fields of this version, or that is of another version, which the caller refuses."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state is a {type(state).__name__}; pass the dict that state_dict() returned, from JSON: "
            "json.loads(text)"
        )
    fields = STATE_FIELDS if state.get("version") == version else STATE_FIELDS[:1]
    missing = [field for field in fields if field not in state]
    if missing:
        raise ValueError(f"not the state of a Loader: it lacks {', '.join(missing)}; pass what state_dict() returned")
    if not isinstance(state.get("stream", {}), Mapping):
        found = type(state["stream"]).__name__
        raise TypeError(f"'stream' of the state is a {found}; pass the dict that state_dict() returned")
    return state


def _advice(value: object) -> str:
    root = repr(str(value)) if isinstance(value, str) or hasattr(value, "__fspath__") else "root"
    return f"open one with fb.open_cache({root})"
