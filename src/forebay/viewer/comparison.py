"""Differences between two caches, or two generations of one, in recipes, rows, columns and figures.

Chunks are compared by the content digests in the two indexes; their files are listed, not read. A chunk that is lost or
known to be damaged on one side counts as such, not as the same.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.api import info
from forebay.cache.catalog import load_generation
from forebay.cache.reports import LayerSummary, Summary
from forebay.format.generation import Generation
from forebay.records import Record
from forebay.viewer.chunk_map import BAD, CHECK_SECONDS, LOST, chunk_files, listed_states
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache


class Difference(Record, frozen=True, kw_only=True):
    """One fact of both sides; `same` is False where they differ."""

    group: str  # recipe of LAYER, rows, LAYER, or identity
    name: str
    a: object
    b: object
    same: bool


class ChunkDifference(Record, frozen=True, kw_only=True):
    """Chunks and rows of one layer. A chunk counts once: as unusable if a side lost it or found it damaged."""

    layer: str
    same: int  # chunks with the same content digest
    same_rows: int
    differ: int
    only_a: int
    only_b: int
    damaged_a: int  # lost or bad
    damaged_b: int
    unusable: int  # chunks of both sides that are lost or bad on one of them


class Comparison(Record, frozen=True, kw_only=True):
    a: str
    b: str
    generation_a: int
    generation_b: int
    rows_a: int
    rows_b: int
    chunks: tuple[ChunkDifference, ...]
    facts: tuple[Difference, ...]  # recipes and rows first, ids and digests last


def compare(caches: Sequence[ShownCache], query: Query) -> Comparison:
    """The comparison of the caches with the numbers `a` and `b`, at `generation_a` and `generation_b`."""
    left, right = (_side(caches, query, name) for name in ("a", "b"))
    (a, old), (b, new) = left, right
    summaries = [info(each.store, generation=at.number) for each, at in (left, right)]
    facts = _joined(*map(_facts, summaries))
    layers = sorted({*old.layers, *new.layers}, key=lambda name: (name != old.base, name))
    return Comparison(
        a=a.root,
        b=b.root,
        generation_a=old.number,
        generation_b=new.number,
        rows_a=summaries[0].rows,
        rows_b=summaries[1].rows,
        chunks=tuple(_chunks(layer, left, right) for layer in layers),
        facts=tuple(
            Difference(group=group, name=name, a=one, b=other, same=one == other) for group, name, one, other in facts
        ),
    )


def _side(caches: Sequence[ShownCache], query: Query, name: str) -> tuple[ShownCache, Generation]:
    number = query.whole(name, 0 if name == "a" else min(1, len(caches) - 1))
    if number >= len(caches):
        raise BadQuery(f"'{name}' must be a cache from 0 to {len(caches) - 1} (got {number})")
    return caches[number], load_generation(caches[number].store, query.some(f"generation_{name}"))


Facts = dict[tuple[str, str], object]


def _facts(summary: Summary) -> Facts:
    facts: Facts = {}
    for layer in summary.layers:
        recipe = {"kind": layer.kind, **layer.fields, "columns": list(layer.columns)}
        facts |= {(f"recipe of {layer.layer}", name): value for name, value in recipe.items()}
    facts |= {("rows", "rows"): summary.rows, ("rows", "bytes"): summary.bytes, ("rows", "source"): summary.source}
    for layer in summary.layers:
        facts |= {(f"layer {layer.layer}", name): value for name, value in _counts(layer).items()}
    facts |= {("identity", f"fingerprint of {layer.layer}"): layer.fingerprint for layer in summary.layers}
    return facts | {
        ("identity", "cache id"): summary.cache_id,
        ("identity", "digest"): summary.digest,
        ("identity", "generation"): summary.generation,
        ("identity", "versions"): list(summary.versions),
    }


def _counts(layer: LayerSummary) -> dict[str, object]:
    sums = {name: value for name, value in layer.statistics.items() if not isinstance(value, list)}
    return {
        "chunks": layer.chunks,
        "rows": layer.rows,
        "bytes": layer.bytes,
        "failures": layer.failures,
        **{f"sum: {name}": value for name, value in sums.items()},
        **{f"figure: {name}": value for name, value in layer.figures.items()},
    }


def _joined(left: Facts, right: Facts) -> list[tuple[str, str, object, object]]:
    """Facts of both sides, by groups in the order of the left one."""
    keys = dict.fromkeys([*left, *right])
    groups = list(dict.fromkeys(group for group, _ in left if group != "identity"))
    groups += [group for group in dict.fromkeys(group for group, _ in right) if group not in groups]
    ordered = sorted(keys, key=lambda key: (key[0] == "identity", groups.index(key[0])))
    return [(group, name, left.get((group, name)), right.get((group, name))) for group, name in ordered]


def _chunks(layer: str, left: tuple[ShownCache, Generation], right: tuple[ShownCache, Generation]) -> ChunkDifference:
    old, new = left[1].table(layer), right[1].table(layer)
    states_a, states_b = (_states(layer, *side) for side in (left, right))
    both, at_old, at_new = np.intersect1d(old.chunks, new.chunks, assume_unique=True, return_indices=True)
    unusable = _is_unusable(states_a[at_old]) | _is_unusable(states_b[at_new])
    alike = (old.digests["content"][at_old] == new.digests["content"][at_new]).all(axis=1) & ~unusable
    return ChunkDifference(
        layer=layer,
        same=int(alike.sum()),
        same_rows=int(old.rows[at_old][alike].sum()),
        differ=int((~alike & ~unusable).sum()),
        only_a=len(old) - len(both),
        only_b=len(new) - len(both),
        damaged_a=int(_is_unusable(states_a).sum()),
        damaged_b=int(_is_unusable(states_b).sum()),
        unusable=int(unusable.sum()),
    )


def _states(layer: str, shown: ShownCache, generation: Generation) -> NDArray[np.uint8]:
    if layer not in generation.layers:
        return np.zeros(0, np.uint8)
    table, folder = generation.table(layer), generation.folder(layer)
    shown.heads.check(shown.store, folder, table, CHECK_SECONDS)
    return listed_states(layer, table, chunk_files(shown.store, folder), shown.heads)


def _is_unusable(states: NDArray[np.uint8]) -> NDArray[np.bool_]:
    unusable: NDArray[np.bool_] = (states == ord(LOST)) | (states == ord(BAD))
    return unusable
