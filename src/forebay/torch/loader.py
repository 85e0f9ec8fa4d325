"""Feeding training: batches of a cache, in an order that is a function of the position.

    loader = Loader(cache, global_batch_size=48, seed=0)
    for batch in loader:                       # one epoch, from where the loader stands
        loss = model(batch["tokens"], batch["labels"], batch["positions"], batch["seq_lens"])
        checkpoint(loader.state_dict())        # what was yielded is behind it, what was made ahead is not

When the last batch of an epoch is handed out, the loader stands at the start of the next one: it does not matter
whether the consumer asks once more (`for batch in loader`) or counts batches (`islice(loader, len(loader))`).

No worker processes: a few threads locate, gather, check and derive batches ahead of the training step.
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
    """The batches of a cache, or of any stream of rows.

    A cache with `tokens` and `seq_lens` gives batches for a language model (see `forebay.torch.batches`); another
    one, or `columns`, gives columns as they are. `collate` makes batches of another kind, with `columns` beside them; a
    cache of images has one by default (`forebay.torch.ImageBatch`).

    Rank and world size are those of torch.distributed or of torchrun; every rank takes its share of each global batch.
    Before the first batch the ranks compare generations, seed and batch size; the constructor waits for nobody. A
    loader that only one rank has is made with `rank=0, world_size=1`.

    shuffle       "auto", "global", "window" (sized by `window`) or None
    selection     a `Split` or `Where`
    drop_last     leave out the rows that fill no batch; without, the last batch is filled up on all ranks (row_weight)
    restart       begin anew at every `iter`, with the same batches, and keep no state: for validation
    labels        "next", "aligned" or None
    derive        some of "positions", "document_ids", "cu_seqlens"
    transform     changes batches
    growth        what becomes of rows that are published meanwhile: "pinned" leaves them, "epoch" takes them up in the
                  next epoch, "within" also at the end of the running one; `on_growth` is called with every `Growth`
    threads       0 makes batches when they are asked for; `prefetch` is how many are made ahead
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
        labels: LabelStyle | None = "next",
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
        self._pace = PrefetchPlan.of(
            kind.threads if threads is None else checked_whole("threads", threads),
            None if prefetch is None else checked_whole("prefetch", prefetch),
            read_bytes=batch_bytes(caches[0], kind.columns, self._local_size),
            batch_bytes=kind.row_bytes * self._local_size,
            decoded=any(decoded_columns(cache, kind.columns) for cache in caches),
        )
        self._making = kind.making(Buffers(keep=self._pace.batches + 2), transform)

    def __len__(self) -> int:
        """Batches of a whole epoch, as far as is known now."""
        size = self.stream.size(self.epoch)
        return size // self.global_batch_size if self.drop_last else -(-size // self.global_batch_size)

    def __repr__(self) -> str:
        rank = f", rank {self.ranks.rank} of {self.ranks.world_size}" if self.ranks.world_size > 1 else ""
        return (
            f"<Loader of {self.stream!r} in batches of {self.global_batch_size}{rank}, at row {self.position:,} of "
            f"{self.stream.size(self.epoch):,} of epoch {self.epoch}>"
        )

    def __iter__(self) -> Iterator[Batch]:
        """The rest of this epoch, or with `restart` the first epoch from its start.

        There is one place where a loader stands: a later iteration ends an earlier one.
        """
        self._turn += 1
        if self._restart:
            self.epoch = self.position = 0
        return self._batches(self._turn)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in a few hundred bytes that JSON can hold; with `restart`, always at its start."""
        return {
            "version": STATE_VERSION,
            "epoch": 0 if self._restart else self.epoch,
            "position": 0 if self._restart else self.position,
            "stream": self.stream.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where a loader stood: with any batch size, number of ranks, threads, and on a cache that has grown.

        With `restart`, a loader stays at its start.
        """
        if checked_state(state, STATE_VERSION)["version"] != STATE_VERSION:
            raise StateMismatch(self._root, {"the version of the state": (state["version"], STATE_VERSION)})
        epoch, position = (checked_count(name, state[name]) for name in ("epoch", "position"))
        if self._restart:
            return
        resumed = self.stream.resumed(state["stream"], epoch, position)
        if position > resumed.size(epoch):
            raise StateMismatch(self._root, {"position": (position, f"at most {resumed.size(epoch)}")})
        if isinstance(resumed, CacheStream):
            refuse_decoding_again(resumed.cache, self._columns, resumed.ordering, self.ranks)
        self.epoch, self.position, self._agreed = epoch, position, False
        self.stream = resumed if self.position else self._growing.between(resumed, self._report)
        self._turn += 1
        if self.position and isinstance(resumed, CacheStream) and (growth := resumed.growth()) is not None:
            self._report(growth)
        if self.position:  # another batch size may leave no batch of this epoch
            self._advance(self.position)

    def shuffle_quality(self) -> ShuffleQuality:
        """How near the order comes to a global shuffle, measured on batches of the running epoch."""
        return self._one_cache().quality(self.epoch, self.global_batch_size)

    def move_to(self, generation: int) -> None:
        """Take up the rows of a newer generation: from the next epoch on, or in this one with growth="within".

        Between two epochs, and before the first batch, the epoch that begins has all rows of that generation. Within an
        epoch, a generation that has other rows in chunks of this epoch is refused.
        """
        stream = self._one_cache()
        if not stream.cache.generation.number <= generation <= stream.newest():
            raise ValueError(
                f"generation is {generation}; '{stream.cache.root}' is read at generation "
                f"{stream.cache.generation.number}, and the newest is {stream.newest()}"
            )
        if not self.position:  # nothing of this epoch was handed out
            self.stream = self._growing.moved(stream, generation, self._report)
            return
        newer = stream.reading(generation)
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
            yield from self._fed(turn, self._stretch_end())

    def _seek_batch(self) -> None:
        """Stand before a batch: where this epoch has no further one, at the start of the next."""
        if self.position:
            self._advance(self.position)
        else:
            self._take_up_added(0)
        if not self._has_batch(self.position):  # an epoch without a batch would be over at once, again and again
            raise ValueError(
                f"the {self.stream.size(self.epoch):,} rows of an epoch fill no batch of {self.global_batch_size:,}; "
                "choose a smaller global_batch_size, or drop_last=False"
            )

    def _advance(self, position: int) -> None:
        """Stand at a position of this epoch; at the start of the next one, where no batch follows."""
        self._take_up_added(position)
        if self._has_batch(position):
            self.position = position
            return
        following = self._growing.between(self.stream, self._report)
        self.epoch, self.position, self.stream = self.epoch + 1, 0, following

    def _take_up_added(self, position: int) -> None:
        """Let rows that were published meanwhile follow, where the rest of this epoch fills no batch."""
        while self.stream.size(self.epoch) - position < self.global_batch_size:
            followed = self._growing.within(self.stream, self._report)
            if followed is None:
                return
            self.stream = followed

    def _has_batch(self, position: int) -> bool:
        left = self.stream.size(self.epoch) - position
        return left >= self.global_batch_size or (left > 0 and not self.drop_last)

    def _stretch_end(self) -> int:
        """The end of the whole batches from here on; of the last, smaller one, where there are none."""
        size = self.stream.size(self.epoch)
        whole = (size - self.position) // self.global_batch_size * self.global_batch_size
        return self.position + whole if whole else size

    def _fed(self, turn: int, stop: int) -> Iterator[Batch]:
        """The batches up to a position. A process that was forked meanwhile continues with its own threads."""
        at = self.position
        first = at + self.global_batch_size  # made alone: it does not wait until a whole run is found
        while at < stop:
            feed = self._feed(at, stop if at >= first else min(first, stop))
            try:
                for piece in feed.items():
                    while piece:
                        self._check_turn(turn)
                        self._advance(min(stop, at + self.global_batch_size))
                        at = min(stop, at + self.global_batch_size)
                        yield piece.pop()
                    if not feed.is_mine:
                        break
            finally:
                feed.stop()

    def _feed(self, start: int, stop: int) -> Prefetcher[list[Batch]]:
        pace, size = self._pace, self.global_batch_size
        runs = BatchGroups(
            self.stream, self.epoch, start, stop, size, pace, self.ranks, self._making, filled=not self.drop_last
        )
        return Prefetcher(runs.make, len(runs), threads=pace.threads, ahead=pace.ahead)

    def _report(self, growth: Growth) -> None:
        """Once for each growth: when it is seen."""
        if growth == self.grown:
            return
        self.grown = growth
        if self._on_growth is not None:
            self._on_growth(growth)

    def _one_cache(self) -> CacheStream:
        if not isinstance(self.stream, CacheStream):
            raise TypeError(f"this is of one cache; the loader reads a {type(self.stream).__name__}")
        return self.stream

    def _check_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise RuntimeError("the loader was iterated anew or given a state; go on with the newest iterator")

    def _compare_ranks(self) -> None:
        """Before the first batch, and the first after a state: refuse ranks that would read different rows."""
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
    """Ranks that cannot compare what they opened, and may have opened different generations."""
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


def _refuse_beside(stream: Stream, **given: bool) -> None:
    """A stream has its order and its rows: what was asked for beside it would be silently left out."""
    left_out = [name for name, is_given in given.items() if is_given]
    if left_out:
        raise ValueError(
            f"{', '.join(left_out)} cannot be given beside a {type(stream).__name__}, which has its own order and "
            "generations; give it where that is made, if it can be"
        )


def change_weights(loader: Loader, weights: Sequence[float]) -> None:
    """Other weights from the loader's next batch on; its state keeps them. Iterate anew to go on."""
    if not isinstance(loader.stream, Mixture):
        raise TypeError(f"weights belong to a mixture; the loader reads a {type(loader.stream).__name__}")
    state = loader.state_dict()
    loader.stream = loader.stream.with_weights(weights, loader.epoch, loader.position)
    loader.load_state_dict({**state, "stream": loader.stream.state()})
