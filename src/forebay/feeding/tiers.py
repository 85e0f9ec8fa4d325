"""One function per tier verb: estimate downloads, fill, list and clean.

What training fetches is exact, because the order of rows is a function of the seed.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from forebay.cache.reports import (
    OnProgress,
    Progress,
    RemoteEstimate,
    TierClean,
    TierContents,
    TierFill,
    TierShare,
)
from forebay.errors import TierUnusable
from forebay.feeding.choose_order import choose_ordering
from forebay.feeding.fetch import THREADS, chunks_needed
from forebay.feeding.stream import CacheStream, Ranks
from forebay.fields import as_bytes, checked_number, checked_whole
from forebay.order.shuffle import Numbers
from forebay.order.window import Window, WindowOrder, lanes_of
from forebay.read.cache import Cache
from forebay.read.opening import open_cache
from forebay.store import Root, open_store
from forebay.store.tier_folder import TierFolder, cache_name, full_address
from forebay.store.tiered import RANGE_BYTES, TieredStore

OPEN_TRIPS = 2  # list the generations, read the newest; then chunks


def estimate_remote(
    root: Root,
    *,
    nodes: int = 1,
    ranks_per_node: int = 1,
    tier_bytes: int | str | None = None,
    bandwidth: float = 125e6,
    latency: float = 0.02,
    batch_size: int = 32,
    seed: int = 0,
    window: Window | None = None,
    layers: Sequence[str] | None = None,
) -> RemoteEstimate:
    """Downloads of the busiest node with window shuffle, in the first epoch and in later ones.

    `bandwidth` of a node is in bytes per second, `latency` in seconds, `batch_size` counts rows of all ranks.
    """
    for name, number in {"nodes": nodes, "ranks_per_node": ranks_per_node, "batch_size": batch_size}.items():
        checked_whole(name, number, 1)
    checked_number("bandwidth", bandwidth)
    checked_number("latency", latency, 0)
    job = _Job.of(open_cache(root, layers=layers), nodes, ranks_per_node, checked_whole("seed", seed), window)
    limit = None if tier_bytes is None else as_bytes(tier_bytes)
    return _estimate(job, limit, bandwidth, latency, batch_size)


def _estimate(job: "_Job", tier_bytes: int | None, bandwidth: float, latency: float, batch_size: int) -> RemoteEstimate:
    sizes, parts = job.sizes, [job.chunks_of(node) for node in range(job.nodes)]
    node = int(np.argmax([sizes[part].sum() for part in parts]))
    chunks, first = parts[node], job.first_batch(node, batch_size)
    node_bytes, first_bytes = int(sizes[chunks].sum()), int(sizes[first].sum())
    passing = job.not_admitted(node, chunks, tier_bytes)
    later_bytes = int(sizes[passing].sum())
    mixed_chunks = 2 * job.window.chunks * -(-job.window.lanes // job.nodes)  # that the lanes of a node mix at a time
    return RemoteEstimate(
        root=job.cache.root,
        generation=job.cache.generation.number,
        chunks=len(sizes),
        bytes=int(sizes.sum()),
        nodes=job.nodes,
        ranks_per_node=job.ranks,
        lanes=job.window.lanes,
        node_chunks=len(chunks),
        node_bytes=node_bytes,
        mixed_bytes=min(node_bytes, mixed_chunks * int(sizes.max(initial=0))),
        tier_bytes=tier_bytes,
        first_epoch_bytes=node_bytes,
        first_epoch_requests=job.requests(chunks),
        later_epoch_bytes=later_bytes,
        later_epoch_requests=job.requests(passing),
        hit_rate=1 - len(passing) / max(1, len(chunks)),
        bandwidth=bandwidth,
        latency=latency,
        batch_size=batch_size,
        first_batch_chunks=len(first),
        first_batch_bytes=first_bytes,
        first_batch_seconds=(OPEN_TRIPS + 1) * latency + first_bytes / bandwidth,
        first_epoch_seconds=node_bytes / bandwidth,
        later_epoch_seconds=later_bytes / bandwidth,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A training job on some nodes with window shuffle: which chunks each node needs, and when."""

    cache: Cache
    stream: CacheStream
    window: Window
    nodes: int
    ranks: int  # of a node
    sizes: Numbers  # bytes of each chunk

    @classmethod
    def of(cls, cache: Cache, nodes: int, ranks: int, seed: int, window: Window | None) -> "_Job":
        ordering = choose_ordering(cache, cache.default_columns, "window", seed, window)
        assert ordering.window is not None
        stream = CacheStream(cache, lambda _: ordering)
        return cls(cache, stream, ordering.window, nodes, ranks, cache.chunk_bytes(cache.default_columns))

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks

    def chunks_of(self, node: int) -> Numbers:
        lanes = {lane for rank in self._ranks_of(node) for lane in lanes_of(rank, self.world_size, self.window.lanes)}
        order = WindowOrder(np.diff(self.cache.chunk_starts), self.stream.seed, self.window)
        return order.chunks_of(sorted(lanes))

    def first_batch(self, node: int, batch_size: int) -> Numbers:
        positions = np.arange(min(len(self.cache), batch_size))
        mine = positions[(positions % self.world_size) // self.ranks == node]
        return np.unique(self.cache.chunk_positions(self.stream.locate(0, mine).rows))

    def not_admitted(self, node: int, chunks: Numbers, tier_bytes: int | None) -> Numbers:
        """Return the chunks of a node that a tier of this size has no place for, as it admits them by first use."""
        if tier_bytes is None or tier_bytes >= self.sizes[chunks].sum():
            return chunks[:0]
        admitted, left = [], tier_bytes
        for chunk in self._by_first_use(node):
            if self.sizes[chunk] <= left:
                admitted.append(chunk)
                left -= int(self.sizes[chunk])
        return np.setdiff1d(chunks, admitted)

    def requests(self, chunks: Numbers) -> int:
        files = self.cache.file_bytes(self.cache.default_columns)
        return sum(int((-(-sizes[chunks] // RANGE_BYTES)).sum()) for sizes in files)

    def _by_first_use(self, node: int) -> list[int]:
        first, end = dict[int, int](), [len(self.cache), 0]  # of the first epoch, and of none after it
        for rank in self._ranks_of(node):
            for need in chunks_needed(self.stream, Ranks(rank, self.world_size), (0, 0), end.__getitem__):
                first[need.chunk] = min(need.cursor[1], first.get(need.chunk, need.cursor[1]))
        return sorted(first, key=first.__getitem__)

    def _ranks_of(self, node: int) -> range:
        return range(node * self.ranks, (node + 1) * self.ranks)


def warm_cache(
    root: Root,
    tier: str | os.PathLike[str],
    *,
    tier_bytes: int | str | None = None,
    node: int | None = None,
    nodes: int = 1,
    ranks_per_node: int = 1,
    seed: int = 0,
    window: Window | None = None,
    layers: Sequence[str] | None = None,
    on_progress: OnProgress | None = None,
) -> TierFill:
    """Fetch the chunks of a remote cache into a tier before training: all, or those that one node needs.

    `node=1, nodes=4` fetches what the second of four nodes needs: `forebay estimate remote CACHE` shows how much.
    """
    checked_whole("nodes", nodes, 1)
    checked_whole("ranks_per_node", ranks_per_node, 1)
    checked_whole("seed", seed)
    if node is None and nodes > 1:
        raise ValueError(f"nodes={nodes} needs node=, from 0 to {nodes - 1}; leave out both to fetch all chunks")
    if node is not None and checked_whole("node", node) >= nodes:
        raise ValueError(f"node must be from 0 to {nodes - 1} (got {node}); pass nodes=, the number of them")
    cache = open_cache(root, layers=layers, tier=tier, tier_bytes=tier_bytes)
    job = _Job.of(cache, nodes, ranks_per_node, seed, window)
    return _fill(job, np.arange(len(job.sizes)) if node is None else job.chunks_of(node), on_progress)


def _fill(job: _Job, chunks: Numbers, on_progress: OnProgress | None) -> TierFill:
    cache, store, started = job.cache, job.cache.store, time.monotonic()
    assert isinstance(store, TieredStore)
    admitted: list[bool] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for is_admitted in pool.map(lambda chunk: cache.keep_chunk(chunk, cache.default_columns), chunks.tolist()):
            admitted.append(is_admitted)
            if on_progress is not None:
                spent, fetched = time.monotonic() - started, store.transfers().bytes_fetched
                on_progress(
                    Progress(phase="warming", done=len(admitted), total=len(chunks), read_bytes=fetched, seconds=spent)
                )
    transfers = store.transfers()
    return TierFill(
        root=cache.root,
        tier=store.tier.path,
        chunks=len(chunks),
        bytes=int(job.sizes[chunks].sum()),
        fetched_chunks=transfers.fetched,
        fetched_bytes=transfers.bytes_fetched,
        refused_chunks=admitted.count(False),
        seconds=time.monotonic() - started,
    )


def tier_contents(path: str | os.PathLike[str]) -> TierContents:
    """The contents of a tier folder, cache by cache."""
    folder = TierFolder(path).opened()
    caches = tuple(TierShare(address=one.address, chunks=one.chunks, bytes=one.bytes) for one in folder.caches())
    return TierContents(path=folder.path, bytes=sum(one.bytes for one in caches), caches=caches)


def clean_tier(path: str | os.PathLike[str], cache: str | None = None) -> TierClean:
    """Remove the chunks and documents of the cache at an address, or of all, from a tier of chunks."""
    folder = TierFolder(path).opened()
    name = None if cache is None else cache_name(full_address(open_store(cache)))
    chosen = [one for one in folder.caches() if name in (None, one.name)]
    if cache is not None and not chosen:
        raise TierUnusable(
            f"the tier at '{folder.path}' has nothing of a cache at '{cache}'",
            hint=f"list them: forebay tier list {folder.path}",
            path=folder.path,
        )
    freed = sum(folder.clean(one.name) for one in chosen)
    return TierClean(path=folder.path, caches=tuple(one.address for one in chosen), freed_bytes=freed)
