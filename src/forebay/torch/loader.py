"""The loader: batches of a cache or a mixture, in an order that is a function of the position.

    loader = Loader(cache, global_batch_size=48, seed=0)
    for batch in loader:                       # one epoch, from the loader's position on
        loss = model(batch["tokens"], batch["labels"], batch["positions"], batch["seq_lens"])
        checkpoint(loader.state_dict())        # counts the batches that were yielded, not those made ahead

Yielding the last batch of an epoch moves the loader to the start of the next one, so `for batch in loader` and
`islice(loader, len(loader))` leave it in the same place.

There are no worker processes: a few threads locate, gather, check and derive batches ahead of the training step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from forebay.errors import StateMismatch
from forebay.feeding.arguments import (
    checked_batch_size,
    checked_count,
    checked_rule,
    checked_source,
    checked_state,
    checked_whole,
)
from forebay.feeding.growth import Growing
from forebay.feeding.mixture import Mixture
from forebay.feeding.prefetch import BatchGroups, Prefetcher, PrefetchPlan, batch_bytes
from forebay.feeding.shuffle import Ranks, Shuffle, choose_ordering, decoded_columns, refuse_decoding_again
from forebay.feeding.stream import (
    CacheStream,
    Growth,
    Policy,
    SelectionRule,
    Stream,
)
from forebay.masks.documents import LabelStyle
from forebay.order.orders import ShuffleQuality
from forebay.order.window import Window
from forebay.read.cache import Cache
from forebay.torch.assemble import Collate, Transform, batch_kind, check_rows
from forebay.torch.batches import Batch, Buffers, Derived
from forebay.torch.ranks import RANK_TIMEOUT, Agreement, current_ranks

STATE_VERSION = 2  # version 1 had other shuffles of few rows and of compressed caches


class Loader:
    """Yields the batches of a cache, or of any stream of rows, as dicts of tensors.

    A cache with `tokens` and `seq_lens` gives batches for a language model (see `forebay.torch.batches`); another
    cache, or `columns`, gives columns as they are stored. `collate` makes other batches, with `columns` beside them; a
    cache of images has one by default (`forebay.torch.ImageBatch`).

    Rank and world size come from torch.distributed or torchrun; every rank takes its share of each global batch. Ranks
    compare generations, seed and batch size before the first batch, not in the constructor. Make a loader that only one
    rank has with `rank=0, world_size=1`.

    shuffle       "auto", "global", "window" (sized by `window`) or None
    selection     a `Split` or `Where`
    drop_last     leave out the rows that fill no batch; if False, the last batch is filled up on all ranks (row_weight)
    restart       start from the first batch at every `iter`, with the same batches, and keep no state: for validation
    labels        "shifted" (the next token), "unshifted" (the token itself) or None
    derive        any of "positions", "document_ids", "cu_seqlens"
    transform     a function that changes batches
    growth        what to do with newly published rows: "pinned" ignores them, "epoch" adds them in the next epoch,
                  "within" also at the end of the running one; `on_growth` is called with every `Growth`
    threads       0 makes each batch when it is asked for; `prefetch` is the number of batches made ahead
    rank_timeout  seconds that ranks wait for each other before the first batch
    """

    def __init__(
        self,
        source: Cache | Stream,
        *,
        global_batch_size: int,
        seed: int | None = None,
        shuffle: Shuffle | None = "auto",
        window: Window | None = None,
        selection: SelectionRule | None = None,
        drop_last: bool = True,
        restart: bool = False,
        columns: Sequence[str] | None = None,
        labels: LabelStyle | None = "shifted",
        derive: Sequence[Derived] = ("positions",),
        collate: Collate | None = None,
        transform: Transform | None = None,
        growth: Policy = "pinned",
        on_growth: Callable[[Growth], None] | None = None,
        threads: int | None = None,
        prefetch: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        rank_timeout: float = RANK_TIMEOUT,
    ) -> None:
        self.ranks = current_ranks(rank, world_size)
        self.global_batch_size = checked_batch_size(global_batch_size, self.ranks.world_size)
        self.drop_last = drop_last
        self._restart = restart
        self.epoch = self.position = 0
        self.grown: Growth | None = None
        self._on_growth = on_growth
        self._agreement = Agreement(self.ranks, rank_timeout)
        self._agreed = False
        self._growing = Growing(growth, self.ranks, self._agreement)
        self._turn = 0
        source = checked_source(source)
        caches = [source] if isinstance(source, Cache) else list(source.caches)
        _refuse_strangers(self.ranks, caches)
        kind = batch_kind(caches, columns, collate, labels, derive)
        if not isinstance(source, Cache):
            _refuse_beside(
                source,
                seed=seed not in (None, source.seed),
                shuffle=shuffle != "auto",
                window=window is not None,
                selection=selection is not None,
                growth=growth != "pinned",
                on_growth=on_growth is not None,
            )
        seed = checked_whole("seed", seed or 0)
        self.stream = self._stream(source, kind.columns, shuffle, seed, window, checked_rule(selection))
        if kind.collate is not None:
            for cache, selected in zip(self.stream.caches, self.stream.selections, strict=True):
                check_rows(kind.collate, cache, selected)
        self._columns = kind.columns
        self._plan = PrefetchPlan.of(
            kind.threads if threads is None else checked_whole("threads", threads),
            None if prefetch is None else checked_whole("prefetch", prefetch),
            read_bytes=batch_bytes(caches[0], kind.columns, self._local_size),
            batch_bytes=kind.row_bytes * self._local_size,
            decoded=any(decoded_columns(cache, kind.columns) for cache in caches),
        )
        self._maker = kind.maker(Buffers(keep=self._plan.batches + 2), transform)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch; growth within the epoch adds to it."""
        size = self.stream.size(self.epoch)
        return size // self.global_batch_size if self.drop_last else -(-size // self.global_batch_size)

    def __repr__(self) -> str:
        rank = f", rank {self.ranks.rank} of {self.ranks.world_size}" if self.ranks.world_size > 1 else ""
        return (
            f"<Loader of {self.stream!r} in batches of {self.global_batch_size}{rank}, at row {self.position:,} of "
            f"{self.stream.size(self.epoch):,} of epoch {self.epoch}>"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of this epoch; with `restart`, the first epoch from its start.

        A loader has one position, so a later iteration ends an earlier one.
        """
        self._turn += 1
        if self._restart:
            self.epoch = self.position = 0
        return self._batches(self._turn)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a few hundred bytes of JSON; with `restart`, always that of the start."""
        return {
            "version": STATE_VERSION,
            "epoch": 0 if self._restart else self.epoch,
            "position": 0 if self._restart else self.position,
            "stream": self.stream.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: with any batch size, number of ranks and threads, and on a cache that has grown.

        With `restart`, the state is checked and otherwise ignored.
        """
        if checked_state(state, STATE_VERSION)["version"] != STATE_VERSION:
            raise StateMismatch(self._root, {"the version of the state": (state["version"], STATE_VERSION)})
        epoch, position = (checked_count(name, state[name]) for name in ("epoch", "position"))
        if self._restart:
            return
        restored = self.stream.restored(state["stream"], epoch, position)
        if position > restored.size(epoch):
            raise StateMismatch(self._root, {"position": (position, f"at most {restored.size(epoch)}")})
        if isinstance(restored, CacheStream):
            refuse_decoding_again(restored.cache, self._columns, restored.ordering, self.ranks)
        self.epoch, self.position, self._agreed = epoch, position, False
        self.stream = restored if self.position else self._growing.between(restored, self._report)
        self._turn += 1
        if self.position and isinstance(restored, CacheStream) and (growth := restored.growth()) is not None:
            self._report(growth)
        if self.position:  # another batch size may leave no batch of this epoch
            self._advance(self.position)

    def shuffle_quality(self) -> ShuffleQuality:
        """Measure how close the order is to a global shuffle, on batches of the running epoch."""
        return self._one_cache().quality(self.epoch, self.global_batch_size)

    def move_to(self, generation: int) -> None:
        """Read a newer generation; its added rows come in the next epoch, or in this one with growth="within".

        Before the first batch of an epoch, that epoch has all rows of the generation. Later, StateMismatch is raised
        where the generation has other rows in chunks of this epoch.
        """
        stream = self._one_cache()
        if not stream.cache.generation.number <= generation <= stream.newest():
            raise ValueError(
                f"generation is {generation}; '{stream.cache.root}' is read at generation "
                f"{stream.cache.generation.number}, and the newest is {stream.newest()}"
            )
        if not self.position:  # no batch of this epoch was yielded yet
            self.stream = self._growing.begin_at(stream, generation, self._report)
            return
        newer = stream.read_through(generation)
        newer.check_replaced()
        self.stream = newer

    def _stream(
        self,
        source: Cache | Stream,
        columns: Sequence[str],
        shuffle: Shuffle | None,
        seed: int,
        window: Window | None,
        selection: SelectionRule | None,
    ) -> Stream:
        if not isinstance(source, Cache):
            return source
        choose = partial(choose_ordering, columns=columns, shuffle=shuffle, seed=seed, window=window)
        stream = CacheStream(source, choose, selection)
        refuse_decoding_again(source, columns, stream.ordering, self.ranks)
        return stream

    def _batches(self, turn: int) -> Iterator[Batch]:
        self._check_turn(turn)
        self._compare_ranks()
        self._seek_batch()
        epoch = self.epoch
        while turn == self._turn and self.epoch == epoch:
            yield from self._prefetched(turn, self._stretch_end())

    def _seek_batch(self) -> None:
        """Move to the next batch: at the start of the next epoch if this one has no further batch."""
        if self.position:
            self._advance(self.position)
        else:
            self._append_added(0)
        if not self._has_batch(self.position):  # else empty epochs would follow each other for ever
            raise ValueError(
                f"the {self.stream.size(self.epoch):,} rows of an epoch fill no batch of {self.global_batch_size:,}; "
                "choose a smaller global_batch_size, or drop_last=False"
            )

    def _advance(self, position: int) -> None:
        """Move to a position of this epoch, or to the start of the next one if no batch follows it."""
        self._append_added(position)
        if self._has_batch(position):
            self.position = position
            return
        following = self._growing.between(self.stream, self._report)
        self.epoch, self.position, self.stream = self.epoch + 1, 0, following

    def _append_added(self, position: int) -> None:
        """Append newly published rows, with growth="within", while the rest of this epoch fills no batch."""
        while self.stream.size(self.epoch) - position < self.global_batch_size:
            extended = self._growing.within(self.stream, self._report)
            if extended is None:
                return
            self.stream = extended

    def _has_batch(self, position: int) -> bool:
        left = self.stream.size(self.epoch) - position
        return left >= self.global_batch_size or (left > 0 and not self.drop_last)

    def _stretch_end(self) -> int:
        """Return the end of the remaining whole batches, or of the last, smaller one if none is whole."""
        size = self.stream.size(self.epoch)
        whole = (size - self.position) // self.global_batch_size * self.global_batch_size
        return self.position + whole if whole else size

    def _prefetched(self, turn: int, stop: int) -> Iterator[Batch]:
        """Yield the batches up to a position; in a forked process, with its own threads."""
        at = self.position
        first = at + self.global_batch_size  # made alone, so that it does not wait for a whole group
        while at < stop:
            prefetcher = self._prefetcher(at, stop if at >= first else min(first, stop))
            try:
                for handoff in prefetcher.items():
                    while handoff:
                        self._check_turn(turn)
                        self._advance(min(stop, at + self.global_batch_size))
                        at = min(stop, at + self.global_batch_size)
                        yield handoff.pop()
                    if not prefetcher.belongs_to_this_process:
                        break
            finally:
                prefetcher.stop()

    def _prefetcher(self, start: int, stop: int) -> Prefetcher[list[Batch]]:
        plan, size = self._plan, self.global_batch_size
        groups = BatchGroups(
            self.stream, self.epoch, start, stop, size, plan, self.ranks, self._maker, filled=not self.drop_last
        )
        return Prefetcher(groups.make, len(groups), threads=plan.threads, queued=plan.queued)

    def _report(self, growth: Growth) -> None:
        """Call `on_growth` once for each growth."""
        if growth == self.grown:
            return
        self.grown = growth
        if self._on_growth is not None:
            self._on_growth(growth)

    def _one_cache(self) -> CacheStream:
        if not isinstance(self.stream, CacheStream):
            raise TypeError(
                f"shuffle_quality() and move_to() need a Loader over one cache; this one reads a "
                f"{type(self.stream).__name__}"
            )
        return self.stream

    def _check_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise RuntimeError(
                "this iterator was superseded by a later iter(loader) or load_state_dict(); use the newest one"
            )

    def _compare_ranks(self) -> None:
        """Raise where ranks would read different rows; called before the first batch, also after a loaded state."""
        if self._agreed:
            return
        options = {"global_batch_size": self.global_batch_size, "drop_last": self.drop_last}
        facts = {**options, "growth": self._growing.policy, **self.state_dict()}
        self._agreement.check(facts)
        self._agreed = True

    @property
    def _local_size(self) -> int:
        return self.global_batch_size // self.ranks.world_size

    @property
    def _root(self) -> str:
        return ", ".join(dict.fromkeys(cache.root for cache in self.stream.caches))


def _refuse_strangers(ranks: Ranks, caches: Sequence[Cache]) -> None:
    """Raise where ranks may have opened different generations and cannot compare them."""
    if ranks.world_size == 1 or ranks.known_by != "environment":
        return
    for cache in caches:
        if not cache.pinned_explicitly:
            raise ValueError(
                f"RANK={ranks.rank} and WORLD_SIZE={ranks.world_size} are set, but torch.distributed has no process "
                f"group, so ranks cannot compare which generation of '{cache.root}' they opened: call "
                "init_process_group() first, or open one by number, "
                f"fb.open_cache(root, generation={cache.generation.number}), or pass rank= and world_size="
            )


def _refuse_beside(stream: Stream, **passed: bool) -> None:
    """Raise for arguments that a stream decides itself, and that would have no effect."""
    names = [name for name, is_passed in passed.items() if is_passed]
    if names:
        raise ValueError(
            f"{', '.join(names)} cannot be passed with a {type(stream).__name__}, which has its own order and "
            f"generations; pass it to the {type(stream).__name__} if it takes it"
        )


def change_weights(loader: Loader, weights: Sequence[float]) -> None:
    """Set new weights from the loader's next batch on; its state keeps them. Call iter(loader) again to continue."""
    if not isinstance(loader.stream, Mixture):
        raise TypeError(f"change_weights() needs a Loader over a Mixture; it reads a {type(loader.stream).__name__}")
    state = loader.state_dict()
    loader.stream = loader.stream.with_weights(weights, loader.epoch, loader.position)
    loader.load_state_dict({**state, "stream": loader.stream.state()})
