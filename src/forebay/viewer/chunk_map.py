"""Every chunk of every layer as one character, from listings alone: no file is opened to draw the map.

.  missing     planned, not made
c  claimed     a builder computes it now, or next
a  abandoned   its builder died or has been silent for a lease
u  made        a file that no generation lists yet
p  published   listed, and its file has the published size
l  lost        listed, but its file is gone
b  bad         listed, but size, header or index differ from what was published

Headers are compared in the background, a fraction of a second at a time: a map of 100,000 chunks does not wait. Those
of a cache on another machine are not, as that would fetch it.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import open_chunk
from forebay.cache.claims import Claim, read_claims
from forebay.cache.heartbeat import HeartbeatWatch, is_dead
from forebay.cache.reports import ClaimStatus
from forebay.cache.state import Index
from forebay.errors import ChunkMissing, Damaged
from forebay.format import layout
from forebay.format.generation import ChunkTable
from forebay.records import Record
from forebay.store.base import Store

MISSING, CLAIMED, ABANDONED, UNLISTED, PUBLISHED, LOST, BAD = ".cauplb"
NAMES = dict(zip(".cauplb", ["missing", "claimed", "abandoned", "made", "published", "lost", "bad"], strict=True))
CHECK_SECONDS = 0.1  # that one map spends on comparing headers
MOST_UNPLANNED = 1 << 20  # cells of a map whose plan is damaged: an untrusted generation may have any numbers
MOST_CLAIMS = 10_000  # that are listed one by one


class LayerMap(Record, frozen=True, kw_only=True):
    layer: str
    kind: str
    planned: int
    states: str  # one character per chunk, as the module docstring lists them
    counts: dict[str, int]
    files_bytes: int  # of all chunk files, published or not
    published: int  # chunks that the generation lists
    headers_checked: int  # of the published chunks


class ChunkMap(Record, frozen=True, kw_only=True):
    """The state of every chunk of a cache."""

    generation: int | None
    rows: int
    layers: tuple[LayerMap, ...]
    claims: tuple[ClaimStatus, ...]
    note: str = ""  # why the map is incomplete


@dataclass(eq=False)
class HeadChecks:
    """The chunks whose headers were compared with the generation, and those that differ or failed to read."""

    sound: dict[str, set[bytes]] = field(default_factory=dict)  # layer -> digests of heads
    bad: dict[tuple[str, int, bytes], str] = field(default_factory=dict)  # layer, chunk, digest -> problem
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, store: Store, folder: str, table: ChunkTable, seconds: float) -> int:
        """Compare headers for at most `seconds`; returns how many are compared by now."""
        layer = layout.layer_of(folder)
        known, stop = self.sound.setdefault(layer, set()), time.monotonic() + seconds
        if not is_here(store):
            return len(known)
        with self._lock:
            if len(known) >= len(table):
                return len(table)
            for at in range(len(table)):
                head = table.digests["head"][at].tobytes() + int(table.chunks[at]).to_bytes(8, "little")
                if head in known:
                    continue
                if time.monotonic() > stop:
                    return min(len(known), len(table))
                record = table.record(at)
                try:
                    open_chunk(store, folder, record)
                except ChunkMissing:
                    pass
                except (Damaged, OSError) as error:
                    self.bad[layer, record.chunk, record.sha256] = str(error)
                known.add(head)
        return len(table)


def is_here(store: Store) -> bool:
    """True if chunks are files of this machine: opening a remote one would fetch all of it."""
    return store.local_path(layout.CACHE) is not None


def chunk_map(store: Store, heads: HeadChecks, watch: HeartbeatWatch) -> ChunkMap:
    """The map of a cache as it is now."""
    index = Index.take(store)
    plan, newest = index.sound_plan, index.newest
    folders = {layer: folder for layer in index.layers if (folder := index.folder(layer)) is not None}
    claims = {layer: read_claims(store, layout.claims_folder(folder)) for layer, folder in folders.items()}
    named = sorted((layer, key) for layer in claims for key in claims[layer])[:MOST_CLAIMS]
    planned = None if plan is None else len(plan)
    return ChunkMap(
        generation=newest.number if newest else None,
        rows=int(newest.table(newest.base).rows.sum()) if newest else 0,
        layers=tuple(_layer_map(index, layer, planned, claims[layer], heads, watch) for layer in folders),
        claims=tuple(_claim_status(layer, key, claims[layer][key], watch) for layer, key in named),
        note="" if plan is not None else "the plan is damaged; only published chunks are shown",
    )


def _layer_map(
    index: Index, layer: str, planned: int | None, claims: Mapping[str, Claim], heads: HeadChecks, watch: HeartbeatWatch
) -> LayerMap:
    table, folder, recipe = index.table(layer), index.folder(layer) or "", index.recipe(layer)
    files = chunk_files(index.store, folder)
    cells = min(MOST_UNPLANNED, int(table.chunks.max(initial=-1)) + 1) if planned is None else planned
    codes = np.full(cells, ord(MISSING), np.uint8)
    for key, claim in claims.items():
        chunk = _chunk_of(key)
        if 0 <= chunk < cells:
            codes[chunk] = ord(CLAIMED if _claim_state(claim, watch) == "working" else ABANDONED)
    codes[np.fromiter((chunk for chunk in files if chunk < cells), np.int64)] = ord(UNLISTED)
    checked = heads.check(index.store, folder, table, CHECK_SECONDS)
    shown = table.chunks < cells
    codes[table.chunks[shown]] = listed_states(layer, table, files, heads)[shown]
    states = codes.tobytes().decode("ascii")
    return LayerMap(
        layer=layer,
        kind=recipe.kind if recipe else "",
        planned=cells,
        states=states,
        counts={NAMES[code]: count for code, count in sorted(Counter(states).items())},
        files_bytes=sum(files.values()),
        published=len(table),
        headers_checked=checked,
    )


def chunk_files(store: Store, folder: str) -> dict[int, int]:
    """chunk -> bytes of its file."""
    sizes = ((layout.parse_chunk(entry.key), entry.size) for entry in store.entries(folder))
    return {parsed[1]: size for parsed, size in sizes if parsed is not None}


def listed_states(layer: str, table: ChunkTable, files: Mapping[int, int], heads: HeadChecks) -> NDArray[np.uint8]:
    """PUBLISHED, LOST or BAD per chunk of a table, by file sizes and the damage known so far."""
    sizes = np.fromiter((files.get(chunk, -1) for chunk in table.chunks.tolist()), np.int64, len(table))
    states = np.where(sizes < 0, ord(LOST), np.where(sizes == table.numbers["size"], ord(PUBLISHED), ord(BAD)))
    for name, chunk, sha256 in list(heads.bad):
        at = table.position(chunk) if name == layer else None
        if at is not None and table.digests["sha256"][at].tobytes() == sha256 and states[at] != ord(LOST):
            states[at] = ord(BAD)
    return states.astype(np.uint8)


def _chunk_of(key: str) -> int:
    parsed = layout.parse_claim(key)
    return -1 if parsed is None else parsed[1]


def _claim_state(claim: Claim, watch: HeartbeatWatch) -> str:
    return "abandoned" if is_dead(claim.owner) or watch.is_silent(claim.owner) else "working"


def _claim_status(layer: str, key: str, claim: Claim, watch: HeartbeatWatch) -> ClaimStatus:
    return ClaimStatus(
        layer=layer, chunk=_chunk_of(key), host=claim.host, pid=claim.pid, state=_claim_state(claim, watch)
    )
