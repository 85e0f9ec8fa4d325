"""The loader: batches of a cache or a mixture, in an order that is a function of the position.

    loader = Loader(cache, global_batch_size=48, seed=0)
    for batch in loader:                       # one epoch, from the loader's position on
        loss = model(batch["tokens"], batch["labels"], batch["positions"], batch["seq_lens"])
        checkpoint(loader.state_dict())        # counts the batches that were yielded, not those made ahead

Yielding the last batch of an epoch moves the loader to the start of the next one, so `for batch in loader` and
`islice(loader, len(loader))` leave it in the same place.

There are no worker processes: a few threads locate, gather, check and derive batches ahead of the training step.
"""

import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from forebay.feeding.ahead import Ahead
from forebay.feeding.choose_order import Shuffle
from forebay.feeding.fetch import AHEAD_BYTES, Fetcher
from forebay.feeding.growing import Growing
from forebay.feeding.mixture import Mixture
from forebay.feeding.statistics import Handoff, HandoffMeter, LoaderStatistics, write_statistics
from forebay.feeding.steps import AHEAD_BYTES as BATCH_BYTES
from forebay.feeding.steps import BatchTask, Locator, Pace, Ranges, epoch_ranges, tasks
from forebay.feeding.stream import (
    CacheStream,
    Growth,
    Policy,
    SelectionRule,
    Stream,
    checked_batch_size,
    checked_source,
    checked_state,
    state_mismatch,
)
from forebay.fields import check_flags, checked_whole
from forebay.order.window import ShuffleQuality, Window
from forebay.read.cache import Cache
from forebay.read.views import View
from forebay.torch.batches import Batch, Buffers
from forebay.torch.collate import (
    Assembler,
    BatchMaker,
    Collate,
    Transform,
    caches_of,
    checked_collate,
    usual_collate,
)
from forebay.torch.loader_arguments import (
    check_decoded_once,
    check_rows,
    checked_bytes,
    checked_threads,
    ordered,
    too_few_rows,
    with_hints,
)
from forebay.torch.ranks import Agreement, RankSource, current_ranks, sum_over

STATE_VERSION = 3


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class _Queue(NamedTuple):
    """Batches that are made ahead, of a stream; `stop` also runs when the loader is freed."""

    handoffs: Ahead[BatchTask, Handoff]
    stream: Stream
    stop: Callable[[], object]


class Loader:
    """Yields the batches of a cache, a mixture or any other stream of rows, as dicts of tensors.

    Rank and world size come from torch.distributed or torchrun; every rank takes its share of each global batch. Ranks
    compare generations, content, seed, batch size and options before the first batch, not in the constructor.

    source        a cache, the path of one, a `Mixture` or another `Stream`
    micro_batches yield lists of this many batches, for gradient accumulation; the position counts whole lists
    collate       makes batches of rows: `TokenBatch`, `PreferenceBatch`, `ImageBatch`, `StoredBatch` or one of your
                  own; by default `usual_collate(source)`
    columns       further columns: names of stored ones, those of layers with presence bits; `Timed("lune", 0.5)` for
                  teacher features at t; "row" (row number) and "row_id" (chunk and row) name the rows
    transform     a function `(batch, coins) -> batch`
    shuffle       "auto", "global", "window", a `Window`, or None for the stored order
    selection     a `Split`, a `Where`, or `Present("layer")` for the rows that layers have
    drop_last     drop an incomplete last batch; if False, it is filled up on all ranks (row_weight)
    restart       start from the first batch at every `iter`, with the same batches, and keep no state: for validation
    growth        newly published rows: ignore them ("pinned"), add them in the next epoch ("epoch") or at the end of
                  this one ("within": train while it builds); `on_growth` is called with every `Growth`
    ranks         a `ProcessGroup`, the data-parallel part of a `DeviceMesh`, or `Ranks(rank, world_size)`
    threads       that make batches; 0 makes each on request. By default 2 if columns are decoded or pixels painted,
                  else 1; at most `prefetch` batches are made ahead, by default as many as fit in 32 MiB, at least 2
    fetch_ahead   bytes of chunks of a remote cache to fetch before a batch needs them
    statistics_file  a JSON file that is replaced by `statistics()` about once a second; `{rank}` in it is the rank
    """

    epoch = position = 0
    grown: Growth | None = None
    schedule: Stateful | None = None  # saved and restored with the position
    _turn, _agreed = 0, False
    _next_queue: "_Queue | None" = None  # between two epochs: the batches that were made ahead

    @with_hints
    def __init__(
        self,
        source: Cache | Stream | str | os.PathLike[str],
        *,
        global_batch_size: int,
        micro_batches: int | None = None,
        collate: Collate | None = None,
        columns: Sequence[str | View] = (),
        transform: Transform | None = None,
        seed: int | None = None,
        shuffle: Shuffle | Window | None = "auto",
        selection: SelectionRule | None = None,
        drop_last: bool = True,
        restart: bool = False,
        growth: Policy = "pinned",
        on_growth: Callable[[Growth], None] | None = None,
        ranks: RankSource = None,
        threads: int | None = None,
        prefetch: int | None = None,
        fetch_ahead: int | str = AHEAD_BYTES,
        statistics_file: str | os.PathLike[str] | None = None,
    ) -> None:
        check_flags(drop_last=drop_last, restart=restart)
        self.ranks = current_ranks(ranks)
        self._sum = partial(sum_over, ranks=self.ranks, source=ranks)
        source, steps = checked_source(source), 1 if micro_batches is None else micro_batches
        self.global_batch_size = checked_batch_size(global_batch_size, self.ranks.world_size, steps)
        self._micro_batches, self._micro_size = micro_batches, self.global_batch_size // steps
        self.drop_last, self.restarts, self._on_growth = drop_last, restart, on_growth
        self._agreement = Agreement(self.ranks, self.ranks.timeout)
        self._growing, self._meter = Growing(growth, self.ranks, self._agreement.first), HandoffMeter()
        self._statistics_file = None if statistics_file is None else os.fspath(statistics_file)
        collate = usual_collate(source) if collate is None else checked_collate(collate)
        self._assembler = Assembler.of(caches_of(source), collate, columns, transform, Buffers(2 * BATCH_BYTES))
        self.stream = ordered(source, self._assembler.columns, seed, shuffle, selection, growth, on_growth, restart)
        least = self.global_batch_size if drop_last and growth == "pinned" else 0  # rows of an epoch
        check_rows(self.stream, self._assembler, self.ranks, least)
        self._asked_for = {"columns": sorted(map(str, columns)), **collate.facts()}
        self._threads, self._prefetch = checked_threads(self._assembler, threads, prefetch)
        self._fetcher = Fetcher(self._assembler.columns, self.ranks, checked_bytes("fetch_ahead", fetch_ahead))

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

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this epoch; with `restart`, the first epoch from its start.

        A loader has one position, so a later iteration ends an earlier one, and `next(iter(loader))` consumes a batch.
        """
        self._turn += 1
        if self.restarts:
            self.epoch = self.position = 0
        return self._batches(self._turn)

    def forever(self, max_steps: int | None = None) -> Iterator[Any]:
        """Yield the batches of this epoch and of all that follow, at most `max_steps` of them.

        Steps are counted from this call on, also after `load_state_dict`: pass total - done to continue a run.
        """
        return repeated(self, max_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a few hundred bytes of JSON; with `restart`, always that of the start."""
        return {
            "version": STATE_VERSION,
            "epoch": 0 if self.restarts else self.epoch,
            "position": 0 if self.restarts else self.position,
            "stream": self.stream.state(),
            **({} if self.schedule is None else {"schedule": self.schedule.state_dict()}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: with any batch size, number of ranks and threads, and on a cache that has grown.

        With `restart`, the state is checked and otherwise ignored.
        """
        version = checked_state(state, STATE_VERSION)["version"]
        if version != STATE_VERSION:
            raise state_mismatch(self._root, {"the version of the state": (version, STATE_VERSION)})
        epoch, position = state["epoch"], state["position"]
        if self.restarts:
            return
        restored = self.stream.restored(state["stream"], epoch, position)
        if position > restored.size(epoch):
            raise state_mismatch(self._root, {"position": (position, f"at most {restored.size(epoch)}")})
        check_decoded_once(restored, self._assembler.columns, self.ranks)
        self.epoch, self.position, self._agreed = epoch, position, False
        self.stream = restored if self.position else self._growing.between(restored, epoch, self._report)
        self._turn += 1
        if self.position and isinstance(restored, CacheStream) and (growth := restored.growth()) is not None:
            self._report(growth)
        if self.position:  # another batch size may leave no batch of this epoch
            self._advance(self.position)
        if self.schedule is not None and "schedule" in state:
            self.schedule.load_state_dict(state["schedule"])

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks that share batches, such as `batch["num_label_tokens"]`.

        It is a collective: every rank calls it, with the tensor on the device of its backend.
        """
        return self._sum(value)

    def shuffle_quality(self) -> ShuffleQuality:
        """Measure how close the order is to a global shuffle, on batches of the running epoch."""
        return self._one_cache().quality(self.epoch, self.global_batch_size)

    def statistics(self) -> LoaderStatistics:
        """Return wait times and fetched bytes; `print(loader.statistics())` is one line.

        `msgspec.json.encode` makes JSON of it.
        """
        where = {"epoch": self.epoch, "position": self.position}
        ranks = {"rank": self.ranks.rank, "world_size": self.ranks.world_size}
        return self._meter.statistics(self.stream.caches, **where, **ranks)

    def move_to(self, generation: int) -> None:
        """Read a newer generation; its added rows come in the next epoch, or in this one with growth="within".

        Before the first batch of an epoch, that epoch has all rows of the generation.
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
        self.stream = stream.read_through(generation)

    def _batches(self, turn: int) -> Iterator[Any]:
        self._check_turn(turn)
        self._compare_ranks()
        self._seek_batch()
        epoch, step = self.epoch, list[Batch]()
        while turn == self._turn and self.epoch == epoch:  # again for rows that are added within the epoch
            at, stop, queue = self.position, self._known_ranges()[-1][1], self._queue_from_here()
            try:
                self._fetch_from(at)  # not before: what the first batch needs is asked for first
                self._meter.asks()
                for handoff in queue.handoffs:
                    self._meter.receives(handoff)
                    self._fetch_from(at)
                    while handoff.batches:
                        step.append(handoff.batches.pop())
                        end = min(stop, at + self.global_batch_size)
                        if len(step) * self._micro_size < end - at:
                            continue
                        if turn != self._turn:
                            self._check_turn(turn)
                        at = end
                        if stop - end >= self.global_batch_size:  # all but the last batches
                            self.position = end
                        else:
                            self._advance(end)
                        yield step.pop() if self._micro_batches is None else _emptied(step)
                    if handoff.error is not None:
                        raise handoff.error
                    self._write_statistics()
                    if self.epoch != epoch or not queue.handoffs.belongs_to_this_process:
                        break
                    self._meter.asks()
            finally:
                self._meter.ends()
                self._keep_or_stop(queue, is_last=self.epoch == epoch + 1 and turn == self._turn)

    def _seek_batch(self) -> None:
        """Move to the next batch: at the start of the next epoch if this one has no further batch."""
        if self.position:
            self._advance(self.position)
        else:
            self._append_added(0)
        if not self._has_batch(self.position):  # else empty epochs would follow each other forever
            raise too_few_rows(self.global_batch_size, self.stream.size(self.epoch))

    def _advance(self, position: int) -> None:
        """Move to a position of this epoch, or to the start of the next one if no batch follows it."""
        self._append_added(position)
        if self._has_batch(position):
            self.position = position
            return
        following = self._growing.between(self.stream, self.epoch + 1, self._report)
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

    def _queue_from_here(self) -> "_Queue":
        """Return the batches from here on: those that were begun in the epoch before, if they are the same."""
        queue, self._next_queue = self._next_queue, None
        if queue is not None:
            if queue.stream is self.stream and queue.handoffs.belongs_to_this_process and not self.position:
                return queue
            queue.stop()
        pace = Pace(self._threads, self._prefetch if self._threads else 1)
        locator = Locator(self.stream, self._micro_size, self.ranks, filled=not self.drop_last)
        make = BatchMaker(self._assembler.reading(self.stream), locator, pace)
        following = self._ranges if self._is_endless else None
        listed = tasks(self.epoch, self._known_ranges(), following, self._micro_size, self.ranks, pace)
        handoffs = Ahead(listed, make, pace.fits, self._threads, "feed")
        return _Queue(handoffs, self.stream, weakref.finalize(self, handoffs.stop))

    def _keep_or_stop(self, queue: "_Queue", *, is_last: bool) -> None:
        """Keep the batches of the next epoch that were begun, for its iteration."""
        is_next = is_last and not self.position and self.stream is queue.stream and self._is_endless
        if is_next and queue.handoffs.belongs_to_this_process:
            self._next_queue = queue
        else:
            queue.stop()

    @property
    def _is_endless(self) -> bool:
        """Whether the following epochs are known now: they have the same rows, in another order."""
        if self.restarts or self._growing.policy != "pinned":
            return False
        stream = self.stream
        return not isinstance(stream, CacheStream) or stream.generations == (stream.cache.generation.number,)

    def _known_ranges(self) -> Ranges:
        """Return the rest of this epoch; of one that may grow, only whole batches while there are any."""
        ranges = epoch_ranges(self.stream, self.global_batch_size, self.drop_last, self.epoch, self.position)
        return ranges if self._is_endless else ranges[:1]

    @property
    def _ranges(self) -> Callable[[int], Ranges]:
        # Not a method: threads that hold it would keep the loader alive.
        return partial(epoch_ranges, self.stream, self.global_batch_size, self.drop_last)

    def _fetch_from(self, position: int) -> None:
        """Fetch the chunks that follow a position of this epoch."""
        last_known = None if self._is_endless else self.epoch
        end = partial(_epoch_end, self.stream, self.global_batch_size, self.drop_last, last_known)
        self._fetcher.reach(self.stream, (self.epoch, position), end)

    def _write_statistics(self) -> None:
        if self._statistics_file is not None and self._meter.file_is_due():
            path = self._statistics_file.replace("{rank}", str(self.ranks.rank))
            write_statistics(path, self.statistics())

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
        """Raise where ranks would make different batches; called before the first one, also after a loaded state."""
        if not self._agreed:
            self._agreement.check(self._facts())
            self._agreed = True

    def _facts(self) -> dict[str, Any]:
        """Return what must be the same on every rank."""
        options = {"global_batch_size": self.global_batch_size, "micro_batches": self._micro_batches}
        recipes = [{layer: cache.recipe(layer).fingerprint for layer in cache.layers} for cache in self.stream.caches]
        facts = {**options, "drop_last": self.drop_last, "growth": self._growing.policy, "recipe": recipes}
        return {**facts, **self._asked_for, **self.state_dict()}

    @property
    def _root(self) -> str:
        return ", ".join(dict.fromkeys(cache.root for cache in self.stream.caches))


def repeated(loader: Iterable[Any], max_steps: int | None) -> Iterator[Any]:
    """Yield the batches of all epochs of a loader from here on, at most `max_steps` of them."""
    steps = itertools.count() if max_steps is None else range(checked_whole("max_steps", max_steps))
    epochs = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    return (batch for _, batch in zip(steps, epochs, strict=False))


def compare_together(loaders: Sequence[Loader], facts: Mapping[str, Any]) -> None:
    """Compare loaders that take turns, and further facts, between ranks, in one exchange."""
    loaders[0]._agreement.check({**facts, "loaders": [loader._facts() for loader in loaders]})
    for loader in loaders:
        loader._agreed = True


def _emptied(step: list[Batch]) -> list[Batch]:
    """Return the batches of a step, and forget them: their memory is reused when the caller frees them."""
    taken = step[:]
    step.clear()
    return taken


def _epoch_end(stream: Stream, batch_size: int, drop_last: bool, last_known: int | None, epoch: int) -> int:
    """Return the position at which an epoch ends, 0 if its rows are not known yet."""
    if last_known is not None and epoch > last_known:
        return 0
    size = stream.size(epoch)
    return size // batch_size * batch_size if drop_last else size


def change_weights(loader: Loader, weights: Sequence[float]) -> None:
    """Set new weights from the loader's next batch on; its state keeps them. Call iter(loader) again to continue."""
    if not isinstance(loader.stream, Mixture):
        raise TypeError(f"change_weights() needs a Loader over a Mixture; it reads a {type(loader.stream).__name__}")
    state = loader.state_dict()
    loader.stream = loader.stream.with_weights(weights, loader.epoch, loader.position)
    loader.load_state_dict({**state, "stream": loader.stream.state()})
