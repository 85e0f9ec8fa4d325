"""Exact deduplication, decided once, at planning: of equal samples the first in the order of the source is kept.

    every sample ─▶ its identity ─▶ sorted on disk ─▶ later ones of equals: left out of their chunk, by the plan
                                        ▲        └──▶ first ones: kept beside the plan, for when the cache grows
    what earlier segments kept ─────────┘

So it is the same for any number of workers, and a chunk stays a pure function of the recipe and its slice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from forebay.cache.census import Census
from forebay.cache.cut import OnCut
from forebay.cache.identities import Identities, kept_identities, load_identities
from forebay.cache.plan import Plan, Segment, load_plan
from forebay.cache.runs import RECORD_BYTES, Run, RunWriter, merge_runs
from forebay.cache.scratch import Scratch, scratch_folder
from forebay.columns import Array
from forebay.errors import Damaged, RecipeInvalid
from forebay.format import layout
from forebay.recipe import Identity, Recipe, identity_of
from forebay.source import Source
from forebay.store.base import Buffer, Store

SORT_BYTES = 256 * 1024 * 1024
LIMIT_SHARE = 4  # a fourth of a memory limit, where that is less


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A segment that is not in the plan yet, and the file of identities that goes with it, if any."""

    segment: Segment
    identities: Sequence[Buffer] = ()

    def append(self, store: Store) -> bool:
        """Make it part of the plan; False where another planner was first. The identities are there before it is."""
        number, digest = self.segment.number, self.segment.identities
        key = layout.identities(number, digest)
        if self.identities and not store.create(key, self.identities) and not _is_sound(store, self.segment):
            store.replace(key, self.identities)
        created = store.create(layout.plan_segment(number), self.segment.encode())
        if not created and self.identities and load_plan(store).segments[number].identities != digest:
            store.delete(key)
        return created


def deduplicate(
    store: Store,
    source: Source,
    recipe: Recipe,
    segment: Segment,
    earlier: Plan,
    on_cut: OnCut,
    memory_limit: int | None = None,
) -> Draft:
    """A segment that continues a plan, without what repeats earlier samples if its recipe wants that."""
    identity = identity_of(recipe)
    _check_as_before(store, recipe, earlier)
    if identity is None:
        return Draft(segment)
    kept = kept_identities(store, earlier)
    budget = SORT_BYTES if memory_limit is None else min(SORT_BYTES, memory_limit // LIMIT_SHARE)
    search = Search(source, identity, kept, max(1, budget // RECORD_BYTES), scratch_folder(store))
    tensors, identities = search.run(segment, on_cut)
    sealed = identities.encode(segment.number)
    return Draft(segment.without_duplicates(tensors, bytes(sealed[-1]).hex()), sealed)


@dataclass(frozen=True, slots=True)
class Search:
    """Looking for duplicates in a source, with room for so many records at a time."""

    source: Source
    identity: Identity
    kept: Sequence[Identities]
    capacity: int
    folder: str | None

    def run(self, segment: Segment, on_cut: OnCut) -> tuple[dict[str, Array], Identities]:
        """What a segment says of duplicates, and the identities that it is the first to have."""
        with RunWriter(self.capacity, self.folder) as writer:
            ends, checks = self._read(segment, writer, on_cut)
            runs, marks = writer.finish()
        identities = self._mark_repeated(runs, marks)
        return self._by_chunk(marks, ends) | {"chunk_check": np.array(checks, np.uint64)}, identities

    def _read(self, segment: Segment, writer: RunWriter, on_cut: OnCut) -> tuple[list[int], list[int]]:
        """Read every sample once; per chunk, how many there were up to its end, and what its samples are."""
        ends, checks = [0], []
        path, files, passed = None, -1, 0
        for chunk in range(len(segment)):
            census = Census(self.identity)
            for part in segment.parts(chunk):
                files += part.file.path != path
                path = part.file.path
                for sample in self.source.read(part):
                    writer.add(census.take(sample))
                passed += part.weight
                on_cut(files, segment.file_count, passed)
            ends.append(writer.count)
            checks.append(census.check)
        on_cut(segment.file_count, segment.file_count, passed)
        return ends, checks

    def _mark_repeated(self, runs: Sequence[Run], marks: Array) -> Identities:
        """Mark every sample whose identity an earlier sample has; the identities that none had before."""
        with Scratch(self.folder) as high, Scratch(self.folder) as low:
            for batch in merge_runs(runs, self.capacity):
                repeats = batch.repeats()
                once = batch.where(~repeats)
                known = _any_holds(self.kept, once)
                marks[batch.samples[repeats | known[np.cumsum(~repeats) - 1]]] = 1
                fresh = once.where(~known)
                high.append(fresh.high)
                low.append(fresh.low)
            return Identities(high.mapped(np.uint64), low.mapped(np.uint64))

    def _by_chunk(self, marks: Array, ends: Sequence[int]) -> dict[str, Array]:
        counts = [0]
        with Scratch(self.folder) as ordinals:
            for start, stop in pairwise(ends):
                marked = np.flatnonzero(marks[start:stop])
                ordinals.append(marked.astype(np.uint32))
                counts.append(len(marked))
            return {"chunk_duplicates": np.cumsum(counts, dtype=np.uint64), "duplicates": ordinals.mapped(np.uint32)}


def _any_holds(kept: Iterable[Identities], run: Run) -> Array:
    known = np.zeros(len(run), np.bool_)
    for identities in kept:
        known |= identities.holds(run.high, run.low)
    return known


def _check_as_before(store: Store, recipe: Recipe, earlier: Plan) -> None:
    """A cache whose older samples were judged otherwise cannot promise anything of the new ones."""
    judged = [bool(segment.identities) for segment in earlier.segments]
    if identity_of(recipe) is not None and not all(judged):
        raise RecipeInvalid(
            f"the recipe '{recipe.kind}' leaves out duplicates, but the cache at '{store.address}' was planned without "
            f"looking for them; build a new cache"
        )
    if identity_of(recipe) is None and any(judged):
        raise RecipeInvalid(
            f"the cache at '{store.address}' was planned without duplicates, but the recipe '{recipe.kind}' has no "
            f"`identity` to find more of them; give it back, or build a new cache"
        )


def _is_sound(store: Store, segment: Segment) -> bool:
    try:
        load_identities(store, segment)
    except Damaged:
        return False
    return True
