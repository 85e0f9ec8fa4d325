"""Every chunk of every layer as one character, from listings alone: no file is opened to draw the map.

.  missing     planned, not made
c  claimed     a builder computes it now, or next
a  abandoned   its builder died or has been silent for a lease
f  failed      a builder gave it up, and said why
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

from forebay.cache.catalog import layers_of, newest_generation, open_chunk, read_recipe_document
from forebay.cache.claims import Claim, Pulses, claimed, is_abandoned, read_claims
from forebay.cache.plan import Plan, load_plan
from forebay.cache.records import ClaimStatus, Record
from forebay.errors import ChunkMissing, Damaged, ForebayError
from forebay.format import layout
from forebay.format.generation import ChunkTable, Generation
from forebay.store.base import Store

MISSING, CLAIMED, ABANDONED, FAILED, MADE, PUBLISHED, LOST, BAD = ".cafuplb"
NAMES = {
    MISSING: "missing",
    CLAIMED: "claimed",
    ABANDONED: "abandoned",
    FAILED: "failed",
    MADE: "made",
    PUBLISHED: "published",
    LOST: "lost",
    BAD: "bad",
}
CHECK_SECONDS = 0.1  # that one map spends on comparing headers
MOST_UNPLANNED = 1 << 20  # cells of a map whose plan is damaged: a stranger's generation may have any numbers
MOST_CLAIMS = 10_000  # that are listed one by one
Codes = NDArray[np.uint8]


class LayerMap(Record, frozen=True, kw_only=True):
    layer: str
    kind: str
    planned: int
    states: str  # one character per chunk, as the module docstring lists them
    counts: dict[str, int]
    files_bytes: int  # of all chunk files that are there, published or not
    headers_checked: int  # of the published chunks


class ChunkMap(Record, frozen=True, kw_only=True):
    """The state of every chunk of a cache."""

    root: str
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

    def check(self, store: Store, layer: str, table: ChunkTable, seconds: float) -> int:
        """Compare headers for at most `seconds`; returns how many are compared by now."""
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
                    open_chunk(store, layer, record)
                except ChunkMissing:
                    pass
                except (Damaged, OSError) as error:
                    self.bad[layer, record.chunk, record.sha256] = str(error)
                known.add(head)
        return len(table)

    def report(self, layer: str, chunk: int, sha256: bytes, problem: str) -> None:
        """Remember a chunk that could not be read, whatever its header says."""
        self.bad[layer, chunk, sha256] = problem

    def problem(self, layer: str, chunk: int, sha256: bytes) -> str:
        return self.bad.get((layer, chunk, sha256), "")


def is_here(store: Store) -> bool:
    """Whether chunks are files of this machine: to open one of another store would fetch all of it."""
    return store.local_path(layout.CACHE) is not None


def chunk_map(store: Store, heads: HeadChecks, pulses: Pulses) -> tuple[ChunkMap, dict[str, dict[str, Claim]]]:
    """The map of a cache as it is now, and the claims by layer and key."""
    newest, plan, note = _index(store)
    names = layers_of(store, newest.recipes if newest else ())
    claims = {name: read_claims(store, name) for name in names}
    layers = tuple(_layer_map(store, name, plan, newest, claims[name], heads, pulses) for name in names)
    found = ChunkMap(
        root=store.address,
        generation=newest.number if newest else None,
        rows=int(newest.table(newest.base).rows.sum()) if newest else 0,
        layers=layers,
        claims=tuple(claim_status(name, key, claims[name][key], pulses) for name, key in _listed(claims)),
        note=note,
    )
    return found, claims


def _listed(claims: Mapping[str, Mapping[str, Claim]]) -> list[tuple[str, str]]:
    """Layers and keys of claims in order; of very many, first those of builders that work."""
    found = [(claim.state == "failed", name, key) for name in claims for key, claim in claims[name].items()]
    return sorted((name, key) for _, name, key in sorted(found)[:MOST_CLAIMS])


def _index(store: Store) -> tuple[Generation | None, Plan, str]:
    """The newest generation and the plan; where one is damaged, the map goes without it and says so."""
    note = ""
    newest, plan = None, Plan((), ())
    try:
        newest = newest_generation(store)
    except (ForebayError, OSError) as error:
        note = str(error)
    try:
        plan = load_plan(store)
    except (ForebayError, OSError) as error:
        note = note or str(error)
    return newest, plan, note


def _layer_map(
    store: Store,
    layer: str,
    plan: Plan,
    newest: Generation | None,
    claims: Mapping[str, Claim],
    heads: HeadChecks,
    pulses: Pulses,
) -> LayerMap:
    table = newest.table(layer) if newest else ChunkTable.of([])
    files = _files(store, layer)
    planned = len(plan) or min(MOST_UNPLANNED, int(table.chunks.max(initial=-1)) + 1)
    codes = np.full(planned, ord(MISSING), np.uint8)
    for key, claim in claims.items():
        chunk, state = claimed(key)[0], _claim_state(key, claim, pulses)
        if chunk < planned:
            codes[chunk] = ord({"failed": FAILED, "working": CLAIMED}.get(state, ABANDONED))
    there = np.fromiter((chunk for chunk, _ in files if chunk < planned), np.int64)
    codes[there] = ord(MADE)
    _mark_listed(codes, table, files)
    checked = heads.check(store, layer, table, CHECK_SECONDS)
    for name, chunk, sha256 in list(heads.bad):
        at = table.position(chunk) if name == layer and chunk < planned else None
        if at is not None and table.digests["sha256"][at].tobytes() == sha256 and codes[chunk] != ord(LOST):
            codes[chunk] = ord(BAD)
    kept = read_recipe_document(store, layer)
    states = codes.tobytes().decode("ascii")
    return LayerMap(
        layer=layer,
        kind=kept.kind if kept else "",
        planned=planned,
        states=states,
        counts={NAMES[code]: count for code, count in sorted(Counter(states).items())},
        files_bytes=sum(files.values()),
        headers_checked=checked,
    )


def _files(store: Store, layer: str) -> dict[tuple[int, int], int]:
    """(chunk, revision) -> bytes of its file."""
    found = ((layout.parse_chunk(entry.key), entry.size) for entry in store.entries(layout.layer_folder(layer)))
    return {parsed: size for parsed, size in found if parsed is not None}


def _mark_listed(codes: Codes, table: ChunkTable, files: Mapping[tuple[int, int], int]) -> None:
    listed = zip(table.chunks.tolist(), table.numbers["revision"].tolist(), strict=True)
    sizes = np.fromiter((files.get(one, -1) for one in listed), np.int64, len(table))
    states = np.where(sizes < 0, ord(LOST), np.where(sizes == table.numbers["size"], ord(PUBLISHED), ord(BAD)))
    shown = table.chunks < len(codes)
    codes[table.chunks[shown]] = states[shown]


def _claim_state(key: str, claim: Claim, pulses: Pulses) -> str:
    if claim.state == "failed":
        return "failed"
    return "abandoned" if is_abandoned(claim) or pulses.is_silent(claim.owner, key, claim.beat) else "working"


def claim_status(layer: str, key: str, claim: Claim, pulses: Pulses) -> ClaimStatus:
    return ClaimStatus(
        layer=layer,
        chunk=claimed(key)[0],
        host=claim.host,
        pid=claim.pid,
        state=_claim_state(key, claim, pulses),
        reason=claim.reason,
    )
