"""What training from a remote cache will fetch, exact because the order is a function; and fetching it beforehand."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from forebay.cache.reports import OnProgress, Progress, RemoteEstimate, TierFill
from forebay.errors import NotFound
from forebay.feeding.choose_order import choose_ordering
from forebay.feeding.fetch import THREADS, chunks_needed
from forebay.feeding.stream import CacheStream, Ranks
from forebay.order.shuffle import Numbers
from forebay.order.window import Ordering, Window, WindowOrder, lanes_of
from forebay.read.cache import Cache
from forebay.store.tiered import RANGE_BYTES, TieredStore

OPEN_TRIPS = 2  # list the generations, read the newest; then chunks


def estimate_remote(
    cache: Cache,
    *,
    nodes: int = 1,
    ranks_per_node: int = 1,
    tier_bytes: int | None = None,
    bandwidth: float = 125e6,
    latency: float = 0.02,
    batch_size: int = 32,
    seed: int = 0,
    window: Window | None = None,
) -> RemoteEstimate:
    """Return what the node that needs most fetches, with window shuffle, in the first epoch and in later ones."""
    names = list(cache.default_columns)
    ordering, window = _window_ordering(cache, names, seed, window)
    order, sizes, world = WindowOrder(_counts(cache), seed, window), cache.chunk_bytes(names), nodes * ranks_per_node
    needs = [_chunks_of_node(order, window, node, ranks_per_node, world) for node in range(nodes)]
    most = int(np.argmax([sizes[chunks].sum() for chunks in needs]))
    chunks, node_bytes = needs[most], int(sizes[needs[most]].sum())
    kept = _kept(cache, ordering, most, ranks_per_node, world, sizes, tier_bytes, node_bytes, chunks)
    passed = np.setdiff1d(chunks, kept)
    first = _first_batch(cache, ordering, most, ranks_per_node, world, batch_size)
    first_bytes, later = int(sizes[first].sum()), int(sizes[passed].sum())
    mixed = min(node_bytes, 2 * window.chunks * -(-window.lanes // nodes) * int(sizes.max(initial=0)))
    return RemoteEstimate(
        root=cache.root,
        generation=cache.generation.number,
        chunks=len(sizes),
        bytes=int(sizes.sum()),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        lanes=window.lanes,
        node_chunks=len(chunks),
        node_bytes=node_bytes,
        mixed_bytes=mixed,
        tier_bytes=tier_bytes,
        first_epoch_bytes=node_bytes,
        first_epoch_requests=_requests(cache, names, chunks),
        later_epoch_bytes=later,
        later_epoch_requests=_requests(cache, names, passed),
        hit_rate=len(kept) / max(1, len(chunks)),
        bandwidth=bandwidth,
        latency=latency,
        batch_size=batch_size,
        first_batch_chunks=len(first),
        first_batch_bytes=first_bytes,
        first_batch_seconds=(OPEN_TRIPS + 1) * latency + first_bytes / bandwidth,
        first_epoch_seconds=node_bytes / bandwidth,
        later_epoch_seconds=later / bandwidth,
    )


def warm_tier(
    cache: Cache,
    *,
    lanes: Sequence[int] | None = None,
    node: int | None = None,
    nodes: int = 1,
    ranks_per_node: int = 1,
    seed: int = 0,
    window: Window | None = None,
    on_progress: OnProgress | None = None,
) -> TierFill:
    """Fetch the chunks of a cache into its tier: all, or those that some lanes of the window shuffle need.

    `node` stands for the lanes of one of several nodes, counted from 0, that train together.
    """
    store = cache.store
    if not isinstance(store, TieredStore):
        raise ValueError(f"'{cache.root}' was opened without a tier; pass tier= to open_cache")
    names, started = list(cache.default_columns), time.monotonic()
    chunks = _chunks_to_warm(cache, lanes, node, nodes, ranks_per_node, seed, window)
    kept: list[bool] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for is_kept in pool.map(lambda chunk: cache.keep_chunk(chunk, names), chunks.tolist()):
            kept.append(is_kept)
            if on_progress is not None:
                spent, fetched = time.monotonic() - started, store.transfers().bytes_fetched
                on_progress(
                    Progress(phase="warming", done=len(kept), total=len(chunks), read_bytes=fetched, seconds=spent)
                )
    found, sizes = store.transfers(), cache.chunk_bytes(names)
    return TierFill(
        root=cache.root,
        tier=store.tier.path,
        chunks=len(chunks),
        bytes=int(sizes[chunks].sum()),
        fetched_chunks=found.fetched,
        fetched_bytes=found.bytes_fetched,
        refused_chunks=kept.count(False),
        seconds=time.monotonic() - started,
    )


def _chunks_to_warm(
    cache: Cache,
    lanes: Sequence[int] | None,
    node: int | None,
    nodes: int,
    ranks_per_node: int,
    seed: int,
    window: Window | None,
) -> Numbers:
    """Return the chunks that some lanes or the ranks of a node need; all of them by default."""
    if node is None and nodes > 1:
        raise ValueError(f"nodes={nodes} needs node=, from 0 to {nodes - 1}; leave out both to fetch all chunks")
    if node is None and lanes is None:
        return np.arange(len(cache.chunk_numbers))
    if node is not None and lanes is not None:
        raise ValueError("pass lanes or node, not both")
    _, window = _window_ordering(cache, cache.default_columns, seed, window)
    order = WindowOrder(_counts(cache), seed, window)
    if node is not None:
        if not 0 <= node < nodes:
            raise ValueError(f"node must be from 0 to {nodes - 1} (got {node}); pass nodes=, the number of them")
        return _chunks_of_node(order, window, node, ranks_per_node, nodes * ranks_per_node)
    assert lanes is not None
    wrong = [lane for lane in lanes if not 0 <= lane < window.lanes]
    if wrong:
        raise NotFound(f"'{cache.root}' is shuffled in {window.lanes} lanes, numbered from 0 (got lane {wrong[0]})")
    return order.chunks_of(lanes)


def _counts(cache: Cache) -> Numbers:
    counts: Numbers = np.diff(cache.chunk_starts)
    return counts


def _window_ordering(cache: Cache, columns: Sequence[str], seed: int, window: Window | None) -> tuple[Ordering, Window]:
    ordering = choose_ordering(cache, columns, "window", seed, window)
    assert ordering.window is not None
    return ordering, ordering.window


def _chunks_of_node(order: WindowOrder, window: Window, node: int, ranks: int, world: int) -> Numbers:
    own = range(node * ranks, (node + 1) * ranks)
    return order.chunks_of(sorted({lane for rank in own for lane in lanes_of(rank, world, window.lanes)}))


def _kept(
    cache: Cache,
    ordering: Ordering,
    node: int,
    ranks: int,
    world: int,
    sizes: Numbers,
    tier_bytes: int | None,
    node_bytes: int,
    chunks: Numbers,
) -> Numbers:
    """Return the chunks that a tier of this size admits in the first epoch: in order of their first use."""
    if tier_bytes is None or tier_bytes >= node_bytes:
        return chunks
    kept, left = [], tier_bytes
    for chunk in _order_of_use(cache, ordering, node, ranks, world):
        if sizes[chunk] <= left:
            kept.append(chunk)
            left -= int(sizes[chunk])
    return np.unique(np.array(kept, np.int64))


def _order_of_use(cache: Cache, ordering: Ordering, node: int, ranks: int, world: int) -> list[int]:
    """Return the chunks of a node in the order in which its ranks need them in the first epoch."""
    stream = _stream(cache, ordering)
    found: dict[int, int] = {}
    for rank in range(node * ranks, (node + 1) * ranks):
        for need in chunks_needed(stream, Ranks(rank, world), (0, 0), lambda epoch: 0 if epoch else len(cache)):
            found[need.chunk] = min(need.place[1], found.get(need.chunk, need.place[1]))
    return sorted(found, key=found.__getitem__)


def _first_batch(cache: Cache, ordering: Ordering, node: int, ranks: int, world: int, batch_size: int) -> Numbers:
    positions = np.arange(min(len(cache), batch_size))
    mine = positions[(positions % world) // ranks == node]
    return np.unique(cache.chunk_positions(_stream(cache, ordering).locate(0, mine).rows))


def _stream(cache: Cache, ordering: Ordering) -> CacheStream:
    return CacheStream(cache, lambda _: ordering)


def _requests(cache: Cache, columns: Sequence[str], chunks: Numbers) -> int:
    return sum(int((-(-sizes[chunks] // RANGE_BYTES)).sum()) for sizes in cache.file_bytes(columns))
