"""One function per verb about tiers: what training will fetch, fill a tier beforehand, list it, clean it."""

import os
from collections.abc import Sequence

from forebay.cache.reports import OnProgress, RemoteEstimate, TierClean, TierContents, TierFill, TierShare
from forebay.errors import TierUnusable
from forebay.feeding.remote_plan import estimate_remote as remote_estimate
from forebay.feeding.remote_plan import warm_tier
from forebay.fields import as_bytes, checked_number, checked_whole
from forebay.read.opening import open_cache
from forebay.store import Root
from forebay.store.tier_folder import TierFolder


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
    layers: Sequence[str] | None = None,
) -> RemoteEstimate:
    """What training from a remote cache will fetch: exact, because the order is a function of the seed.

    `bandwidth` of a node is in bytes per second, `latency` in seconds, `batch_size` counts rows of all ranks.
    """
    for name, number in {"nodes": nodes, "ranks_per_node": ranks_per_node, "batch_size": batch_size}.items():
        checked_whole(name, number, 1)
    checked_whole("seed", seed)
    checked_number("bandwidth", bandwidth)
    checked_number("latency", latency, allows_zero=True)
    return remote_estimate(
        open_cache(root, layers=layers),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        tier_bytes=None if tier_bytes is None else as_bytes(tier_bytes),
        bandwidth=bandwidth,
        latency=latency,
        batch_size=batch_size,
        seed=seed,
    )


def warm_cache(
    root: Root,
    tier: str | os.PathLike[str],
    *,
    tier_bytes: int | str | None = None,
    lanes: Sequence[int] | None = None,
    node: int | None = None,
    nodes: int = 1,
    ranks_per_node: int = 1,
    seed: int = 0,
    layers: Sequence[str] | None = None,
    on_progress: OnProgress | None = None,
) -> TierFill:
    """Fetch the chunks of a remote cache into a tier before training: all, or those of some window-shuffle lanes.

    `node=1, nodes=4` fetches what the second of four nodes needs: `forebay estimate remote CACHE` shows how much.
    """
    cache = open_cache(root, layers=layers, tier=tier, tier_bytes=tier_bytes)
    return warm_tier(
        cache,
        lanes=lanes,
        node=node,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        seed=seed,
        on_progress=on_progress,
    )


def tier_contents(path: str | os.PathLike[str]) -> TierContents:
    """What the tier of chunks in a folder keeps, cache by cache."""
    folder = TierFolder(path).opened()
    caches = tuple(
        TierShare(cache_id=one.cache_id, addresses=one.addresses, chunks=one.chunks, bytes=one.bytes)
        for one in folder.caches()
    )
    return TierContents(path=folder.path, bytes=sum(one.bytes for one in caches), caches=caches)


def clean_tier(path: str | os.PathLike[str], cache_id: str | None = None) -> TierClean:
    """Remove the chunks and documents of one cache, or of all, from a tier of chunks."""
    folder = TierFolder(path).opened()
    known = [one.cache_id for one in folder.caches()]
    chosen = known if cache_id is None else [name for name in known if name.startswith(cache_id)]
    if cache_id is not None and len(chosen) != 1:
        raise TierUnusable(
            f"'{folder.path}' cannot be used as a tier: "
            f"{'several caches have ids that begin' if chosen else 'no cache has an id that begins'} "
            f"with '{cache_id}'",
            hint=f"list them: forebay tier list {folder.path}",
            path=folder.path,
        )
    return TierClean(path=folder.path, caches=tuple(chosen), freed_bytes=sum(map(folder.clean, chosen)))
