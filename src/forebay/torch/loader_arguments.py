"""The arguments of a loader, checked before anything is read, and the stream that they describe."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature
from typing import ParamSpec

from forebay.errors import nearest
from forebay.feeding.choose_order import Shuffle, choose_ordering, refuse_decoding_again
from forebay.feeding.mixture import Mixture
from forebay.feeding.stream import (
    CacheStream,
    Growth,
    Policy,
    Ranks,
    SelectionRule,
    Stream,
    checked_rule,
)
from forebay.fields import as_bytes, checked_whole
from forebay.order.window import Window
from forebay.read.cache import Cache
from forebay.torch.collate import Assembler, suitable_threads

Parameters = ParamSpec("Parameters")


def with_hints(init: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Return a constructor that answers an unknown parameter with the one that was probably meant."""
    known = list(signature(init).parameters)[1:]

    @wraps(init)
    def checked(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        for name in options:
            if name not in known:
                raise TypeError(f"Loader has no parameter '{name}'; {nearest(name, known)}")
        init(*arguments, **options)

    return checked


def ordered(
    source: Cache | Stream,
    columns: Sequence[str],
    seed: int | None,
    shuffle: Shuffle | Window | None,
    selection: SelectionRule | None,
    growth: Policy,
    on_growth: Callable[[Growth], None] | None,
    restart: bool,
) -> Stream:
    """Return a cache as a stream. Another stream is returned unchanged, and accepts no order arguments."""
    rule = checked_rule(selection)
    if on_growth is not None and not callable(on_growth):
        raise TypeError(f"on_growth is {on_growth!r}; pass a function that takes a Growth")
    if not isinstance(source, Cache):
        _check_own_order(source, seed, shuffle, rule)
        _check_own_growth(source, growth, on_growth, restart=restart)
        return source
    window = shuffle if isinstance(shuffle, Window) else None
    name: Shuffle | None = "window" if isinstance(shuffle, Window) else shuffle
    seed = checked_whole("seed", seed or 0)
    return CacheStream(source, partial(choose_ordering, columns=columns, shuffle=name, seed=seed, window=window), rule)


def _check_own_order(
    stream: Stream, seed: int | None, shuffle: Shuffle | Window | None, rule: SelectionRule | None
) -> None:
    """Raise for arguments that a stream decides itself."""
    passed = {"seed": seed not in (None, stream.seed), "shuffle": shuffle != "auto", "selection": rule is not None}
    if names := [name for name, is_passed in passed.items() if is_passed]:
        kind = type(stream).__name__
        raise ValueError(
            f"{', '.join(names)} cannot be passed with a {kind}, which has its own order; pass it to the {kind}"
        )


def _check_own_growth(
    stream: Stream, growth: Policy, on_growth: Callable[[Growth], None] | None, *, restart: bool
) -> None:
    may_grow = isinstance(stream, Mixture) and not restart
    if (growth == "pinned" and on_growth is None) or (growth == "epoch" and may_grow):
        return
    name = "on_growth" if growth == "pinned" else f"growth={growth!r} with restart={restart}"
    raise ValueError(
        f"{name} cannot be passed with a {type(stream).__name__}; only a mixture grows, between epochs: pass "
        "growth='epoch' without restart"
    )


def check_rows(stream: Stream, assembler: Assembler, ranks: Ranks, least: int) -> None:
    """Raise where an epoch has fewer rows than a batch, or batches of its rows would be wrong or differ by rank."""
    _check_generations(ranks, stream.caches)
    if stream.size(0) < least:
        raise too_few_rows(least, stream.size(0))
    assembler.check(stream.selections)
    check_decoded_once(stream, assembler.columns, ranks)


def too_few_rows(batch_size: int, rows: int) -> ValueError:
    return ValueError(
        f"global_batch_size ({batch_size:,}) exceeds the epoch ({rows:,} rows); choose a smaller one, or pass "
        "drop_last=False"
    )


def check_decoded_once(stream: Stream, columns: Sequence[str], ranks: Ranks) -> None:
    """Raise where blocks would be decoded repeatedly because those being mixed do not fit in memory."""
    if isinstance(stream, CacheStream):
        refuse_decoding_again(stream.cache, columns, stream.ordering, ranks)
    if isinstance(stream, Mixture):  # shares deal the rows of every lane to all ranks
        for each in stream.streams:
            refuse_decoding_again(each.cache, columns, each.ordering, Ranks(0, 1))


def checked_threads(assembler: Assembler, threads: int | None, prefetch: int | None) -> tuple[int, int | None]:
    """Return the number of threads, at most one per batch that is made ahead, and of these batches."""
    number = suitable_threads(assembler) if threads is None else checked_whole("threads", threads)
    return (number, None) if prefetch is None else (min(number, checked_whole("prefetch", prefetch, 1)), prefetch)


def checked_bytes(option: str, size: int | str) -> int:
    return checked_whole(option, as_bytes(size) if isinstance(size, str) else size)


def _check_generations(ranks: Ranks, caches: Sequence[Cache]) -> None:
    """Raise where ranks may have opened different generations and cannot compare them."""
    if ranks.world_size == 1 or ranks.known_by != "environment":
        return
    for cache in caches:
        if not cache.pinned_explicitly:
            raise ValueError(
                f"RANK={ranks.rank} and WORLD_SIZE={ranks.world_size} are set, but torch.distributed has no process "
                f"group, so ranks cannot compare which generation of '{cache.root}' they opened: call "
                "init_process_group() first, or open one by number, "
                f"fb.open_cache(root, generation={cache.generation.number}), or pass ranks=Ranks(rank, world_size)"
            )
