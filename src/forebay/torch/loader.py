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
from typing import Any, Literal

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from forebay.errors import StateMismatch
from forebay.feeding.chunk_ahead import AHEAD_BYTES, ChunkAhead, allow_passing
from forebay.feeding.mixture import Mixture
from forebay.feeding.prefetch import BatchesAhead, PrefetchPlan, Ranges, batch_bytes
from forebay.feeding.statistics import HandoffMeter, LoaderStatistics, write_statistics
from forebay.feeding.stream import (
    CacheStream,
    Growing,
    Growth,
    Policy,
    Ranks,
    SelectionRule,
    Shuffle,
    Stream,
    checked_batch_size,
    checked_count,
    checked_rule,
    checked_source,
    checked_state,
    checked_whole,
    choose_ordering,
    decoded_columns,
    refuse_decoding_again,
)
from forebay.masks.documents import LabelStyle
from forebay.masks.train_on import Kind, TrainOn
from forebay.order.orders import ShuffleQuality, Window
from forebay.read.cache import Cache
from forebay.torch.assemble import Collate, FeaturesAt, Name, Times, Transform, batch_kind, check_rows, rank_facts
from forebay.torch.batches import Batch, Buffers
from forebay.torch.packed_batch import Derived
from forebay.torch.ranks import RANK_TIMEOUT, Agreement, current_ranks, sum_over

STATE_VERSION = 3


class Loader:
    """Yields the batches of a cache, or of any stream of rows, as dicts of tensors.

    A cache with `tokens` and `seq_lens` gives batches for a language model (see `forebay.torch.packed_batch`), a cache
    of images those of `forebay.torch.ImageBatch`, and one of preferences those of `forebay.torch.PreferenceBatch`;
    `collate` makes others. `columns`, `identify` and `features` add to all of them (see `forebay.torch.assemble`). A
    cache of another kind has no such batches: its columns come as they are stored, all or those of `columns`.

    Rank and world size come from torch.distributed or torchrun; every rank takes its share of each global batch. Ranks
    compare generations, content, seed, batch size, labels and columns before the first batch, not in the constructor.
    Make a loader that only one rank has with `rank=0, world_size=1`. Where a model is also split by tensors or stages,
    pass the data-parallel part: `device_mesh=mesh["dp"]`, all of whose ranks take different rows, or its
    `process_group`.

    micro_batches yield lists of this many batches, for gradient accumulation; the position counts whole lists
    shuffle       "auto", "global", "window" (sized by `window`) or None
    selection     a `Split`, a `Where`, or `Present("layer")` for the rows that layers have
    drop_last     leave out the rows that fill no batch; if False, the last batch is filled up on all ranks (row_weight)
    restart       start from the first batch at every `iter`, with the same batches, and keep no state: for validation
    columns       columns to add as they are stored, those of layers with presence bits; encodings of prompts, for every
                  row
    collate       makes batches of rows, such as `ImageBatch(cache)`; "stored" makes none: `columns` come alone
    identify      "row" (row number), "row_id" (chunk and row): the names of the rows
    features      layer → t, a number, a function of coins or `FeaturesAt`: teacher features at t
    labels        "shifted" (the next token; the default on a token cache), "unshifted" (the token itself) or None
    derive        any of "positions" (the default on a token cache), "document_ids", "cu_seqlens", "num_label_tokens",
                  or "device": tokens as they are stored, for `derive_on_device`
    train_on      kinds of tokens of a chat cache that the loss counts, such as ("response", "stop"), with weights as a
                  dict; by default all that a model generates. `forebay.masks.TrainOn` also chooses the last turn only
    loss_mask     a column with one number per token: 0 for labels that the loss ignores
    max_documents documents of a row, so that `seq_lens` and `cu_seqlens` have fixed shapes
    transform     a function that changes batches
    growth        what to do with newly published rows: "pinned" ignores them, "epoch" adds them in the next epoch,
                  "within" (one cache only) also at the end of the running one; `on_growth` is called with every
                  `Growth`
    threads       0 makes each batch when it is asked for; at most `prefetch` batches are made ahead, by at most as many
                  threads. Where compiled code does nearly all of the work, all but one of them need no GIL
    rank_timeout  seconds that ranks wait for each other before the first batch
    statistics_file  a JSON file that is replaced by `statistics()` about once a second; `{rank}` in it is the rank
    fetch_ahead   bytes of chunks of a remote cache to fetch before a batch needs them
    """

    def __init__(
        self,
        source: Cache | Stream,
        *,
        global_batch_size: int,
        micro_batches: int | None = None,
        seed: int | None = None,
        shuffle: Shuffle | None = "auto",
        window: Window | None = None,
        selection: SelectionRule | None = None,
        drop_last: bool = True,
        restart: bool = False,
        columns: Sequence[str] | None = None,
        labels: LabelStyle | Literal["auto"] | None = "auto",
        derive: Sequence[Derived] | Literal["device"] | None = None,
        train_on: TrainOn | Sequence[Kind] | Mapping[Kind, float] | None = None,
        loss_mask: str | None = None,
        max_documents: int | None = None,
        identify: Sequence[Name] = (),
        features: Mapping[str, Times | FeaturesAt] | None = None,
        collate: Collate | Literal["stored"] | None = None,
        transform: Transform | None = None,
        growth: Policy = "pinned",
        on_growth: Callable[[Growth], None] | None = None,
        threads: int | None = None,
        prefetch: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: ProcessGroup | None = None,
        device_mesh: DeviceMesh | None = None,
        rank_timeout: float = RANK_TIMEOUT,
        statistics_file: str | os.PathLike[str] | None = None,
        fetch_ahead: int = AHEAD_BYTES,
    ) -> None:
        self.ranks = current_ranks(rank, world_size, process_group, device_mesh)
        self._sum = partial(sum_over, ranks=self.ranks, process_group=process_group, device_mesh=device_mesh)
        steps = 1 if micro_batches is None else micro_batches
        self.global_batch_size = checked_batch_size(global_batch_size, self.ranks.world_size, steps)
        self._micro_batches = micro_batches
        self._micro_size = self.global_batch_size // steps
        self.drop_last = drop_last
        self._restart = restart
        self.epoch = self.position = 0
        self.grown: Growth | None = None
        self._on_growth = on_growth
        self._agreement = Agreement(self.ranks, rank_timeout)
        self._agreed = False
        self._growing = Growing(growth, self.ranks, self._agreement)
        self._turn = 0
        self._meter = HandoffMeter()
        self._statistics_file = None if statistics_file is None else os.fspath(statistics_file)
        source = checked_source(source)
        caches = [source] if isinstance(source, Cache) else list(source.caches)
        _refuse_strangers(self.ranks, caches)
        kind = batch_kind(
            caches,
            columns,
            collate,
            labels,
            derive,
            train_on,
            loss_mask=loss_mask,
            max_documents=max_documents,
            identify=identify,
            features=features,
        )
        if not isinstance(source, Cache):
            _refuse_beside(
                source,
                seed=seed not in (None, source.seed),
                shuffle=shuffle != "auto",
                window=window is not None,
                selection=selection is not None,
                growth=growth != "pinned" and not isinstance(source, Mixture),
                on_growth=on_growth is not None and not (isinstance(source, Mixture) and growth == "epoch"),
            )
            if growth == "within":
                raise ValueError(
                    "growth='within' needs one cache, at whose end new rows follow; a mixture takes them up from the "
                    "next epoch on: growth='epoch'"
                )
            if growth == "epoch" and restart:
                raise ValueError(
                    "growth='epoch' and restart=True cannot be used together with a mixture: it would begin anew at an "
                    "epoch before its new rows; leave out one of them"
                )
        seed = checked_whole("seed", seed or 0)
        self.stream = self._stream(source, kind.columns, shuffle, seed, window, checked_rule(selection))
        if kind.collate is not None:
            for cache, selected in zip(self.stream.caches, self.stream.selections, strict=True):
                check_rows(kind.collate, cache, selected)
        self._columns = kind.columns
        self._asked_for = rank_facts(kind.targets, columns, features)
        self._refuse_decoding_again(self.stream)
        self._plan = PrefetchPlan.of(
            kind.threads if threads is None else checked_whole("threads", threads),
            None if prefetch is None else checked_whole("prefetch", prefetch),
            read_bytes=batch_bytes(caches[0], kind.columns, self._local_size),
            batch_bytes=kind.row_bytes * self._local_size,
            decoded=any(decoded_columns(cache, kind.columns) for cache in caches),
            compiled=kind.compiled and transform is None and not any(cache.is_remote for cache in caches),
        )
        self._fetch_ahead = checked_whole("fetch_ahead", fetch_ahead, "a number of bytes")
        if fetch_ahead < 0:
            raise ValueError(f"fetch_ahead must be at least 0 (got {fetch_ahead})")
        self._ahead: ChunkAhead | None = None
        self._stop_ahead: Callable[[], object] | None = None
        kept = self._plan.batches + 2 * steps
        self._maker = kind.maker(Buffers(kept * kind.row_bytes * self._local_size), transform, self._plan.handoff)
        self._kept: BatchesAhead | None = None  # between two epochs: the batches that were made ahead
        self._stop_kept: weakref.finalize[..., Loader] | None = None

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

        A loader has one position, so a later iteration ends an earlier one, and `next(iter(loader))` uses up a batch.
        """
        self._turn += 1
        if self._restart:
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
            "epoch": 0 if self._restart else self.epoch,
            "position": 0 if self._restart else self.position,
            "stream": self.stream.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: with any batch size, number of ranks and threads, and on a cache that has grown.

        With `restart`, the state is checked and otherwise ignored.
        """
        self._check_version(state)
        epoch, position = (checked_count(name, state[name]) for name in ("epoch", "position"))
        if self._restart:
            return
        restored = self.stream.restored(state["stream"], epoch, position)
        if position > restored.size(epoch):
            raise StateMismatch(self._root, {"position": (position, f"at most {restored.size(epoch)}")})
        self._refuse_decoding_again(restored)
        self.epoch, self.position, self._agreed = epoch, position, False
        self.stream = restored if self.position else self._growing.between(restored, epoch, self._report)
        self._turn += 1
        if self.position and isinstance(restored, CacheStream) and (growth := restored.growth()) is not None:
            self._report(growth)
        if self.position:  # another batch size may leave no batch of this epoch
            self._advance(self.position)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks that share batches, such as `batch["num_label_tokens"]`.

        It is a collective: every rank calls it, with the tensor on the device of its backend.
        """
        return self._sum(value)

    def shuffle_quality(self) -> ShuffleQuality:
        """Measure how close the order is to a global shuffle, on batches of the running epoch."""
        return self._one_cache().quality(self.epoch, self.global_batch_size)

    def statistics(self) -> LoaderStatistics:
        """Return what the run waited for, and what was fetched; `print(loader.statistics())` is one line.

        `msgspec.json.encode` makes JSON of it.
        """
        where = {"epoch": self.epoch, "position": self.position}
        ranks = {"rank": self.ranks.rank, "world_size": self.ranks.world_size}
        return self._meter.statistics(self.stream.caches, **where, **ranks)

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
        return CacheStream(source, choose, selection)

    def _refuse_decoding_again(self, stream: Stream) -> None:
        if isinstance(stream, CacheStream):
            refuse_decoding_again(stream.cache, self._columns, stream.ordering, self.ranks)
        if isinstance(stream, Mixture):  # shares deal the rows of every lane to all ranks
            for each in stream.streams:
                refuse_decoding_again(each.cache, self._columns, each.ordering, Ranks(0, 1))

    def _batches(self, turn: int) -> Iterator[Any]:
        self._check_turn(turn)
        self._compare_ranks()
        self._seek_batch()
        epoch = self.epoch
        while turn == self._turn and self.epoch == epoch:
            yield from self._prefetched(turn)

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

    def _prefetched(self, turn: int) -> Iterator[Any]:
        """Yield the batches of this epoch whose rows are known; in a forked process, with its own threads."""
        epoch, at, size = self.epoch, self.position, self.global_batch_size
        stop = self._known_ranges()[-1][1]
        ahead = self._batches_ahead()
        try:
            self._fetch_from(at)  # not before: what the first batch needs is asked for first
            step: list[Batch] = []
            for handoff in self._meter.waiting(ahead.handoffs):
                self._fetch_from(at)
                while handoff.batches:
                    step.append(handoff.batches.pop())
                    end = min(stop, at + size)
                    if len(step) * self._micro_size < end - at:
                        continue
                    if turn != self._turn:
                        self._check_turn(turn)
                    at = end
                    if end + size <= stop:  # a whole batch of this epoch follows
                        self.position = end
                    else:
                        self._advance(end)
                        ahead.reached(self.epoch, self.position)
                    yield step.pop() if self._micro_batches is None else _emptied(step)
                self._write_statistics()
                if self.epoch != epoch or not ahead.belongs_to_this_process:
                    break
        finally:
            is_between_epochs = self.epoch != epoch and turn == self._turn
            if is_between_epochs and ahead.continues_at(self.stream, self.epoch, self.position):
                self._kept = ahead
                self._stop_kept = weakref.finalize(self, ahead.stop)
            else:
                ahead.stop()

    def _batches_ahead(self) -> BatchesAhead:
        """Return the batches from here on: those that were begun in the epoch before, if they are the same."""
        kept, self._kept = self._kept, None
        if kept is not None:
            assert self._stop_kept is not None
            self._stop_kept.detach()
            if kept.continues_at(self.stream, self.epoch, self.position):
                return kept
            kept.stop()
        return BatchesAhead(
            self.stream,
            self.epoch,
            self._known_ranges(),
            self._ranges if self._is_endless else None,
            self._micro_size,
            self._plan,
            self.ranks,
            self._maker,
            self._columns,
            filled=not self.drop_last,
        )

    @property
    def _is_endless(self) -> bool:
        """Whether the following epochs are known now: they have the same rows, in another order."""
        if self._restart or self._growing.policy != "pinned":
            return False
        stream = self.stream
        return not isinstance(stream, CacheStream) or stream.generations == (stream.cache.generation.number,)

    def _known_ranges(self) -> Ranges:
        """Return the rest of this epoch; of one that may grow, only whole batches while there are any."""
        ranges = _epoch_ranges(self.stream, self.global_batch_size, self.drop_last, self.epoch, self.position)
        return ranges if self._is_endless else ranges[:1]

    @property
    def _ranges(self) -> Callable[[int], Ranges]:
        # Not a method: threads that hold it would keep the loader alive.
        return partial(_epoch_ranges, self.stream, self.global_batch_size, self.drop_last)

    def _fetch_from(self, position: int) -> None:
        """Fetch the chunks that follow a position of this epoch."""
        if not any(cache.is_remote for cache in self.stream.caches):
            return
        place = (self.epoch, position)
        if self._ahead is not None and self._ahead.follows(self.stream, place):
            self._ahead.reached(place)
            return
        if self._stop_ahead is not None:
            self._stop_ahead()
        allow_passing(self.stream, self._columns, self.ranks, self._fetch_ahead)
        end = partial(_epoch_end, self.stream, self.global_batch_size, self.drop_last, self._last_known_epoch)
        self._ahead = ChunkAhead(self.stream, self._columns, self.ranks, place, end, self._fetch_ahead)
        self._stop_ahead = weakref.finalize(self, self._ahead.stop)

    @property
    def _last_known_epoch(self) -> int | None:
        """The last epoch whose rows are known now; None if no cache of this loader grows."""
        return None if self._growing.policy == "pinned" and not self._restart else self.epoch

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

    def _check_version(self, state: Mapping[str, Any]) -> None:
        version = checked_state(state, STATE_VERSION)["version"]
        if version == STATE_VERSION:
            return
        following = state["epoch"] + 1 if isinstance(state.get("epoch"), int) else "…"
        raise StateMismatch(
            self._root,
            {"the version of the state": (version, STATE_VERSION)},
            "its order of rows is that of an older forebay: finish its epoch with that release, or begin the next one "
            f"with load_state_dict({{**loader.state_dict(), 'epoch': {following}}})",
        )

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
    def restarts(self) -> bool:
        """Whether every `iter` starts from the first batch."""
        return self._restart

    @property
    def _local_size(self) -> int:
        return self._micro_size // self.ranks.world_size

    @property
    def _root(self) -> str:
        return ", ".join(dict.fromkeys(cache.root for cache in self.stream.caches))


def repeated(loader: Iterable[Any], max_steps: int | None) -> Iterator[Any]:
    """Yield the batches of all epochs of a loader from here on, at most `max_steps` of them."""
    if max_steps is not None and checked_whole("max_steps", max_steps) < 0:
        raise ValueError(f"max_steps must be at least 0 (got {max_steps}): the steps from this call on")
    steps = itertools.count() if max_steps is None else range(max_steps)
    epochs = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    return (batch for _, batch in zip(steps, epochs, strict=False))


def compare_together(loaders: Sequence[Loader], facts: Mapping[str, Any]) -> None:
    """Compare loaders that take turns, and further facts, between ranks, in one exchange."""
    loaders[0]._agreement.check({**facts, "loaders": [loader._facts() for loader in loaders]})
    for loader in loaders:
        loader._agreed = True


def _epoch_ranges(stream: Stream, batch_size: int, drop_last: bool, epoch: int, position: int = 0) -> Ranges:
    """Return the positions of an epoch's whole batches from one on, then those of an incomplete last batch."""
    size = stream.size(epoch)
    end = size - (size - position) % batch_size
    ranges = [(position, end)] if drop_last else [(position, end), (end, size)]
    return [(start, stop) for start, stop in ranges if start < stop]


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
    if not names:
        return
    kind, way = type(stream).__name__, "leave it out"
    if isinstance(stream, Mixture):
        ways = {"selection": "Ingredient(cache, selection=…)", "on_growth": "growth='epoch' with it"}
        way = f"pass {' and '.join(dict.fromkeys(ways.get(name, f'Mixture.of(…, {name}=…)') for name in names))}"
    raise ValueError(f"{', '.join(names)} cannot be passed with a {kind}, which has its own order and rows; {way}")


def change_weights(loader: Loader, weights: Sequence[float]) -> None:
    """Set new weights from the loader's next batch on; its state keeps them. Call iter(loader) again to continue."""
    if not isinstance(loader.stream, Mixture):
        raise TypeError(f"change_weights() needs a Loader over a Mixture; it reads a {type(loader.stream).__name__}")
    state = loader.state_dict()
    loader.stream = loader.stream.with_weights(weights, loader.epoch, loader.position)
    loader.load_state_dict({**state, "stream": loader.stream.state()})
