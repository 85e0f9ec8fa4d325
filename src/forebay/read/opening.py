"""Open a cache at a generation, with a tier for the chunks of a remote one."""

import os
from collections.abc import Sequence

from forebay.errors import TierUnusable, not_found
from forebay.fields import as_bytes, checked_whole
from forebay.format.codecs import MAX_BLOCK_BYTES
from forebay.read.cache import Cache
from forebay.read.maps import MAX_MAPS
from forebay.read.pinned import load_pinned
from forebay.read.readers import DEFAULT_MEMORY, Options
from forebay.store import LocalStore, Root, open_store
from forebay.store.base import Store, is_url
from forebay.store.tiered import TieredStore


def open_cache(
    root: Root,
    *,
    generation: int | None = None,
    layers: Sequence[str] | None = None,
    memory: int | str = DEFAULT_MEMORY,
    max_maps: int = MAX_MAPS,
    max_block_bytes: int = MAX_BLOCK_BYTES,
    cache_id: str | None = None,
    min_generation: int | None = None,
    digest: str | None = None,
    tier: str | os.PathLike[str] | None = None,
    tier_bytes: int | str | None = None,
) -> Cache:
    """Open a cache at a generation, by default the newest.

    With `layers`, the cache has the rows that all of them have and reads their columns by default; without, it has the
    rows of the base layer. `memory` limits the decoded blocks that are kept (bytes, or "1GB"). `max_block_bytes` limits
    the decoded size of one compressed block, because a forged cache could expand 30,000 times; raise it for a trusted
    cache with larger rows.

    `tier` is a folder on a local disk where the chunks of a remote cache are kept, at most `tier_bytes` of them
    ("500GB"); all caches and processes of a machine can share it.

    `cache_id`, `min_generation` and `digest` reject another cache, a generation below that number, and any generation
    but the one with this SHA-256. `forebay info` and `forebay verify` show all three.
    """
    memory = checked_whole("memory", as_bytes(memory) if isinstance(memory, str) else memory)
    max_maps = checked_whole("max_maps", max_maps, 1)
    options = Options(memory, max_maps, checked_whole("max_block_bytes", max_block_bytes, 1))
    checked_whole("generation", generation or 0)
    checked_whole("min_generation", min_generation or 0)
    if isinstance(layers, str):
        raise TypeError(f"layers is {layers!r}; pass a list of names: [{layers!r}]")
    store = with_tier(open_store(root), tier, tier_bytes)
    pinned = load_pinned(store, generation, cache_id, min_generation, digest)
    names = tuple(dict.fromkeys([pinned.base, *(layers or ())]))
    if unknown := [name for name in names if name not in pinned.recipes]:
        raise not_found("layer", unknown[0], store.address, sorted(pinned.recipes))
    return Cache(store, pinned, names, options, pinned_explicitly=generation is not None)


def with_tier(store: Store, tier: str | os.PathLike[str] | None, tier_bytes: int | str | None) -> Store:
    """A store whose chunks are kept in the folder `tier`; the store itself if there is none."""
    if tier is None:
        if tier_bytes is not None:
            raise ValueError(f"tier_bytes={tier_bytes!r} needs the folder of a tier: pass tier='/nvme/forebay'")
        return store
    if is_url(os.fspath(tier)):
        raise TierUnusable(
            f"'{os.fspath(tier)}' cannot be used as a tier: it is a URL, and a tier is a folder",
            hint="pass the path of a folder",
        )
    limit = None if tier_bytes is None else as_bytes(tier_bytes)
    return TieredStore(LocalStore(tier), store, limit_bytes=limit)
