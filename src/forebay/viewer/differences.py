"""Two caches, or two generations of one: what differs in recipe, counts and figures."""

from collections.abc import Sequence

import numpy as np

from forebay.api import summarize
from forebay.cache.catalog import load_generation
from forebay.cache.records import LayerSummary, Record, Summary
from forebay.format.generation import ChunkTable, Generation
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache


class Difference(Record, frozen=True, kw_only=True):
    """One fact of both sides; `same` is False where they differ."""

    group: str
    name: str
    a: object
    b: object
    same: bool


class ChunkDifference(Record, frozen=True, kw_only=True):
    layer: str
    same: int  # chunks with the same content
    differ: int
    only_a: int
    only_b: int


class Comparison(Record, frozen=True, kw_only=True):
    a: str
    b: str
    generation_a: int
    generation_b: int
    facts: tuple[Difference, ...]
    chunks: tuple[ChunkDifference, ...]


def compare(caches: Sequence[ShownCache], query: Query) -> Comparison:
    """The comparison of the caches with the numbers `a` and `b`, at `generation_a` and `generation_b`."""
    left, right = (_side(caches, query, name) for name in ("a", "b"))
    (a, old), (b, new) = left, right
    facts = [
        Difference(group=group, name=name, a=one, b=other, same=one == other)
        for group, name, one, other in _joined(
            *(_facts(summarize(each.store, generation=at.number)) for each, at in (left, right))
        )
    ]
    layers = sorted({*old.layers, *new.layers}, key=lambda name: (name != old.base, name))
    return Comparison(
        a=a.root,
        b=b.root,
        generation_a=old.number,
        generation_b=new.number,
        facts=tuple(facts),
        chunks=tuple(_chunks(layer, old.table(layer), new.table(layer)) for layer in layers),
    )


def _side(caches: Sequence[ShownCache], query: Query, name: str) -> tuple[ShownCache, Generation]:
    number = query.whole(name, 0 if name == "a" else min(1, len(caches) - 1))
    if number >= len(caches):
        raise BadQuery(f"'{name}' must be a cache from 0 to {len(caches) - 1} (got {number})")
    return caches[number], load_generation(caches[number].store, query.some(f"generation_{name}"))


Facts = dict[tuple[str, str], object]


def _facts(summary: Summary) -> Facts:
    found: Facts = {
        ("cache", "cache id"): summary.cache_id,
        ("cache", "generation"): summary.generation,
        ("cache", "rows"): summary.rows,
        ("cache", "bytes"): summary.bytes,
        ("cache", "digest"): summary.digest,
        ("cache", "source"): summary.source,
        ("cache", "versions"): list(summary.versions),
    }
    for layer in summary.layers:
        found |= {(f"layer {layer.layer}", name): value for name, value in _layer_facts(layer).items()}
    return found


def _layer_facts(layer: LayerSummary) -> dict[str, object]:
    sums = {name: value for name, value in layer.statistics.items() if not isinstance(value, list)}
    return {
        "kind": layer.kind,
        "fingerprint": layer.fingerprint,
        **{f"recipe: {name}": value for name, value in layer.fields.items()},
        "columns": list(layer.columns),
        "chunks": layer.chunks,
        "rows": layer.rows,
        "bytes": layer.bytes,
        "failures": layer.failures,
        **{f"sum: {name}": value for name, value in sums.items()},
        **{f"figure: {name}": value for name, value in layer.figures.items()},
    }


def _joined(left: Facts, right: Facts) -> list[tuple[str, str, object, object]]:
    keys = dict.fromkeys([*left, *right])
    return [(group, name, left.get((group, name)), right.get((group, name))) for group, name in keys]


def _chunks(layer: str, old: ChunkTable, new: ChunkTable) -> ChunkDifference:
    both, at_old, at_new = np.intersect1d(old.chunks, new.chunks, assume_unique=True, return_indices=True)
    alike = (old.digests["content"][at_old] == new.digests["content"][at_new]).all(axis=1)
    return ChunkDifference(
        layer=layer,
        same=int(alike.sum()),
        differ=len(both) - int(alike.sum()),
        only_a=len(old) - len(both),
        only_b=len(new) - len(both),
    )
