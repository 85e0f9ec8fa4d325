"""Restore the plan: segments and identities, from the copy or planned again.

A segment that is planned again is accepted if its digest is the published one, or, if that is unknown, if sound chunk
files fit it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from forebay.building.listing import SourceListing
from forebay.building.repair_run import RepairRun
from forebay.building.segments import Draft, Planner
from forebay.cache.plan import Plan
from forebay.cache.soundness import (
    identities_problem,
    misfit,
    plan_problems,
    segment_numbers,
    sound_records,
    sound_segment,
)
from forebay.cache.state import Index
from forebay.errors import Damaged, ForebayError, SourceUnreadable, message_of
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.chunk_file import ChunkFile
from forebay.format.generation import Generation
from forebay.recipe import Recipe, RecipeDocument
from forebay.source import Part, Source, SourceFile
from forebay.store.base import Buffer, Store, load_index


@dataclass(frozen=True)
class PlanRepair:
    """The plan of a cache, and the generation that it must fit."""

    run: RepairRun
    united: Generation

    def restore(self) -> None:
        """Put back segments, then identities, which are checked by their segment."""
        problems = plan_problems(Index(self.run.store, self.united))
        damaged = [key for key in problems if layout.parse_segment(key) is not None]
        for key in damaged:
            self.run.write(key, self._segment, layout.parse_segment(key))
        for key in plan_problems(Index(self.run.store, self.united)) if damaged else problems:
            if (number := layout.parse_identities(key)) is not None:
                self.run.write(key, self._identities, number)

    def with_lost_segments(self) -> Plan:
        """The plan as far as it can be read, after restoring lost segments that sound chunk files need."""
        plan, failed = self._readable(), self.run.log.failed
        while self._has_chunks_beyond(plan):
            key = layout.plan_segment(len(plan.segments))
            if key in failed or not self.run.write(key, self._segment, len(plan.segments)):
                failed[key] = f"it is gone, and chunk files were made by it: {failed[key]}"
                break
            plan = self._readable()
        return plan

    def _readable(self) -> Plan:
        """The segments before the first one that cannot be read, or is not of this plan."""
        plan, cache_id = Plan((), self.united.withdrawn), self.united.document.cache_id
        while (segment := sound_segment(self.run.store, len(plan.segments))) is not None:
            before = plan.segments[-1] if plan.segments else None
            if misfit(segment, len(plan.segments), self._published(len(plan.segments)), before, cache_id):
                break
            plan = plan.appended(segment)
        return plan

    def _published(self, number: int) -> str:
        """The digest of a listed segment; empty if no generation lists it."""
        return self.united.plan[number] if number < len(self.united.plan) else ""

    def _has_chunks_beyond(self, plan: Plan) -> bool:
        """True if the base has sound chunk files that no segment plans: a segment is lost."""
        if self.united.base not in self.united.recipes:
            return False
        document = self.united.recipe(self.united.base)
        return any(sound_records(self.run.store, document, range(len(plan), layout.MAX_NUMBER)))

    def _segment(self, number: int) -> Sequence[Buffer]:
        """A segment from the copy or planned again; the published digest or the next segment must fit it."""
        copy, following = self.run.copy, sound_segment(self.run.store, number + 1)
        digest = self._published(number) or (following.previous if following is not None else "")
        segment = sound_segment(copy, number) if copy is not None else None
        before = sound_segment(self.run.store, number - 1) if number else None
        cache_id = self.united.document.cache_id
        if copy is not None and segment is not None and not misfit(segment, number, digest, before, cache_id):
            return [load_index(copy, layout.plan_segment(number))]
        segment = self._replanned(number, digest).segment
        return replace(segment, cache_id=self.united.document.cache_id).encode()

    def _identities(self, number: int) -> Sequence[Buffer]:
        """The identities of a segment, from the copy or planned again."""
        copy, segment = self.run.copy, sound_segment(self.run.store, number)
        assert segment is not None
        if copy is not None and not identities_problem(copy, segment):
            return [load_index(copy, layout.identities(number, segment.identities))]
        draft = self._replanned(number, segment.digest)
        if draft.segment.identities != segment.identities:
            raise Damaged("the source has other samples now")
        return draft.identities

    def _replanned(self, number: int, digest: str) -> Draft:
        """The segment, planned from the first source that gives the published one; raises if none does."""
        store, united = self.run.store, self.united
        if united.base not in united.recipes:
            raise Damaged("it cannot be planned again: the recipe of the base layer is unknown")
        recipe = cast(Recipe, self.run.recipe_of(united.recipe(united.base)))
        before, later = self._plan_before(number), self._paths_after(number)
        reason = "its source cannot be opened"
        for source in self.run.sources(source_descriptions(store, united)):
            listing = _EarlierFiles(source, store, later)
            planner = Planner(store, listing, recipe, lambda *_: None, lambda _: None, max_failures=1.0)
            try:
                draft = planner.first() if not number else planner.following(Index(store, united, before), before)
            except (ForebayError, OSError) as error:
                reason = message_of(error)
                continue
            if draft is not None and self._is_accepted(draft, digest, before, source):
                return draft
            reason = "the source is planned differently now"
        raise Damaged(f"it cannot be planned again: {reason}")

    def _plan_before(self, number: int) -> Plan:
        segments = [sound_segment(self.run.store, one) for one in range(number)]
        if any(segment is None for segment in segments):
            raise Damaged("it cannot be planned again: a segment before it cannot be read")
        return Plan([segment for segment in segments if segment is not None], self.united.withdrawn)

    def _paths_after(self, number: int) -> frozenset[str]:
        """The files of later segments."""
        store = self.run.store
        segments = [sound_segment(store, one) for one in segment_numbers(store) if one > number]
        return frozenset(path for segment in segments if segment is not None for path in segment.files.paths())

    def _is_accepted(self, draft: Draft, digest: str, before: Plan, source: Source) -> bool:
        if digest:
            return draft.segment.digest == digest
        store, document = self.run.store, self.united.recipe(self.united.base)
        plan, sound = before.appended(draft.segment), list(sound_records(store, document, draft.segment.chunk_numbers))
        return bool(sound) and not any(source_sums_differ(store, document, one, plan, source) for one in sound)


class _EarlierFiles(SourceListing):
    """The files of a source without those that only later segments have."""

    def __init__(self, source: Source, store: Store, later: frozenset[str]) -> None:
        super().__init__(source, store)
        self._later = later

    @cached_property
    def apart(self) -> Sequence[SourceFile]:
        return [file for file in SourceListing(self.source, self._store).apart if file.path not in self._later]


def source_descriptions(store: Store, united: Generation) -> list[Mapping[str, object]]:
    """Descriptions of the source in the generation, then in segments, the newest first."""
    segments = [sound_segment(store, number) for number in reversed(segment_numbers(store))]
    described = [united.source, *(segment.source for segment in segments if segment is not None)]
    return [one for at, one in enumerate(described) if one and one not in described[:at]]


def source_sums_differ(
    store: Store, document: RecipeDocument, record: ChunkRecord, plan: Plan, source: Source | None
) -> bool:
    """True if a chunk was certainly made from other data than its slice of the source.

    A source file that is gone or looks different from when it was planned proves nothing.
    """
    key, parts = record.key(layout.document_folder(document)), plan.parts(record.chunk)
    try:
        sums = list(ChunkFile(store.view(key), key).source_sums())
    except Damaged:
        return True
    if len(sums) != len(parts):
        return True
    return any(_differs(part, known, source) for part, known in zip(parts, sums, strict=True))


def _differs(part: Part, known: int, source: Source | None) -> bool:
    if part.file.digest is not None:
        return part.file.digest != known
    try:
        if source is None or not source.look(part.file.path).same_look(part.file):
            return False
        return source.digest(part.file, part.start, part.stop) != known
    except (OSError, SourceUnreadable):
        return False
