"""Plan: the first segment of a cache, and the segments that `update` appends. Planning writes nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.building.cutting import OnCut, cut_source, limited_chunks, wait_until_settled
from forebay.building.dedup import deduplicate
from forebay.building.listing import SourceListing, check_readable
from forebay.building.trial import Trial, chunk_weight, try_recipe
from forebay.cache.plan import Plan
from forebay.cache.segment import Segment, decode_segment
from forebay.cache.source_check import SourceCheck, reported, source_changed
from forebay.cache.state import Index
from forebay.errors import (
    BuildFailed,
    ForebayError,
    RecipeInvalid,
    SourceChanged,
    SourceInvalid,
    SourceNotFound,
    TooManyFailures,
)
from forebay.format import layout
from forebay.format.tensors import hmac_key
from forebay.recipe import Recipe, identity_of
from forebay.source import Source, SourceFile
from forebay.store.base import Buffer, Store, disk_full, key_refused, load_index

ENOUGH_SAMPLES = 16  # fewer samples that all failed say nothing about the others
FAR_TOO_MUCH = 4  # times the free bytes: more than an estimate from a sample is wrong by


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A segment that is not in the plan yet, and its identities file, if the recipe deduplicates."""

    segment: Segment
    identities: Sequence[Buffer] = ()

    def append(self, store: Store) -> bool:
        """Append the segment to the plan, after its identities; False if another planner was first."""
        number, digest = self.segment.number, self.segment.identities
        key = layout.identities(number, digest)
        if self.identities:
            store.replace(key, self.identities)  # named by their digest: whatever is there should have the same bytes
        segment_key = layout.plan_segment(number)
        created = store.create(segment_key, self.segment.encode())
        if not created and self.identities:
            first = decode_segment(load_index(store, segment_key), store.address, segment_key)
            if first.identities != digest:
                store.delete(key)
        return created


@dataclass(frozen=True, slots=True)
class Planner:
    """A source and the recipe that its samples are planned for."""

    store: Store
    listing: SourceListing
    recipe: Recipe
    on_cut: OnCut
    warn: Callable[[str], None]
    max_failures: int | float | None = None
    memory_limit: int | None = None
    is_part: bool = False  # only a range of chunks is wanted now

    @property
    def source(self) -> Source:
        return self.listing.source

    def first(self) -> Draft:
        """The first segment; the same source gives the same segment."""
        files = self.listing.apart
        if not files and self.listing.files:
            raise SourceInvalid(
                f"all of the source lies in '{self.store.address}', where the cache would be; choose another"
            )
        if not files:
            raise SourceNotFound(f"no file matches the source {self.source.describe()}", hint="check the path")
        self._check_files(files)
        trial = try_recipe(self.source, files, self.recipe)
        weight = sum(map(self.source.weight, files))
        if not (isinstance(self.max_failures, float) and self.max_failures >= 1):  # 1.0: every sample may fail
            check_trial(self.store, trial, weight)
        self._check_disk(round(trial.scaled(trial.stored_bytes, weight)))
        chunk = chunk_weight(self.recipe.chunk_target(), trial, self.source.unit)
        segment = self._segment(Plan(()), files, {}, chunk)
        if not len(segment):
            problem = f"none of the {len(files):,} file(s) of the source has a sample"
            raise nothing_to_build(self.store.address, problem)
        return self._without_duplicates(segment, Plan(()))

    def following(self, index: Index, plan: Plan) -> Draft | None:
        """The next segment: new files, and data appended to known files; None if there is nothing new."""
        files, starts = self._new_files(index, plan)
        self._check_files(files)
        segment = self._segment(plan, files, starts, plan.weight)
        is_known = plan.deduplicates or all(file.path in plan.files for file in files)
        return self._without_duplicates(segment, plan) if len(segment) or not is_known else None

    def _check_files(self, files: Sequence[SourceFile]) -> None:
        check_readable(self.source, files)
        wait_until_settled(files)

    def _new_files(self, index: Index, plan: Plan) -> tuple[list[SourceFile], dict[str, int]]:
        """The files that are new or grew, as they look now, and how far those that grew are planned."""
        fresh = SourceCheck.of(index, self.source, plan).freshness(listed=self.listing.walked).complete()
        if fresh.changed:
            raise source_changed(self.store.address, plan, reported(self.source, plan, fresh.changed))
        known, grown = plan.files, set(fresh.grown)
        listed = (file for file in self.listing.apart if file.path not in known or file.path in grown)
        files = [fresh.now.get(file.path, file) for file in listed]
        ends = plan.ends() if grown else {}
        return files, {path: ends.get(path, 0) for path in grown}

    def _segment(self, plan: Plan, files: Sequence[SourceFile], starts: dict[str, int], weight: int) -> Segment:
        """The segment that continues a plan with some files, each from where it is planned."""
        chunks = cut_source(self.source, files, weight, starts, self.on_cut)
        try:
            return Segment.planned(
                limited_chunks(self.source, chunks, self.recipe.chunk_target().most_samples),
                files,
                number=len(plan.segments),
                first_chunk=len(plan),
                source=self.source.describe(),
                weight=weight,
                previous=plan.last_digest,
            )
        except SourceChanged as error:  # a stream that grew behind an unfinished sample
            raise source_changed(self.store.address, plan, error.facts["files"]) from error

    def _without_duplicates(self, segment: Segment, earlier: Plan) -> Draft:
        check_identity(self.store, self.recipe, earlier)
        identity = identity_of(self.recipe)
        if identity is None:
            return Draft(segment)
        return Draft(*deduplicate(self.store, self.source, identity, segment, earlier, self.on_cut, self.memory_limit))

    def _check_disk(self, needed: int) -> None:
        """Warn if the disk cannot hold all chunks; raise if that is sure and all are wanted."""
        free = self.store.free_bytes()
        if not free or needed <= free:  # a store without any free bytes is not a disk
            return
        if needed > FAR_TOO_MUCH * free and not self.is_part:
            raise disk_full(self.store.address, needed, free)
        self.warn(
            f"about {needed:,} bytes are needed at '{self.store.address}', {free:,} are free: the build will stop when "
            f"the disk is full; make room, or build a range of chunks"
        )


def nothing_to_build(root: str, problem: str, hint: str = "choose a source that has samples") -> BuildFailed:
    return BuildFailed(f"nothing to build at '{root}': {problem}", hint=hint)


def check_trial(store: Store, trial: Trial, weight: int) -> None:
    """Raise if every trial sample failed."""
    if not trial.all_failed or (trial.samples < ENOUGH_SAMPLES and trial.weight < weight):
        return
    (reason, count, example), failures = trial.reasons.most_frequent(), len(trial.reasons)
    raise TooManyFailures(
        f"all {failures:,} trial samples failed ({count:,} × {reason}, e.g. {example}); nothing was published at "
        f"'{store.address}'",
        hint=f"{trial.reasons.advice()}, or pass --max-failures 100% to build anyway",
        root=store.address,
        failures=failures,
        reason=reason,
        count=count,
    )


def check_identity(store: Store, recipe: Recipe, earlier: Plan) -> None:
    """Raise if older samples were compared by another rule: new ones could not be compared with them."""
    judged = [bool(segment.identities) for segment in earlier.segments if segment.number not in earlier.withdrawn]
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


def check_kind(store: Store, source: Source, plan: Plan) -> None:
    """Raise unless a source is read as the planned one: parts count in its unit, and chunks continue its rows."""
    if not plan.segments:
        return
    planned, passed = plan.source, source.describe()
    old, new = planned.get("kind"), passed.get("kind")
    if old != new:
        raise ForebayError(
            f"the cache at '{store.address}' was built from a source of kind '{old}', and this one is of kind '{new}'",
            hint=f"pass a source of kind '{old}', or build a new cache",
        )
    for name in source.read_by:
        if planned.get(name) != passed.get(name):
            raise ForebayError(
                f"the cache at '{store.address}' was built from a source with {name}={planned.get(name)!r} and cannot "
                f"continue with {name}={passed.get(name)!r}",
                hint="pass the same value again, or build a new cache",
            )


def is_unsigned(index: Index) -> bool:
    """True if a key is in use and the plan has segments that no tagged generation covers."""
    return hmac_key() is not None and len(index.plan.segments) > (len(index.newest.plan) if index.newest else 0)


def check_signed(store: Store, plan: Plan, number: int, draft: Draft | None) -> None:
    """With a key, a segment that no tagged generation covers must be what the source gives now."""
    if draft is not None and draft.segment.digest == plan.segments[number].digest:
        return
    way = f"delete '{store.address}' and build it again" if not number else f"run `forebay clean {store.address}"
    way += "" if not number else " --unpublished` if nobody updates it now, then `forebay update` again"
    problem = f"no tagged generation covers it, and the source is not planned so now; {way}"
    raise key_refused(store.address, layout.plan_segment(number), problem)
