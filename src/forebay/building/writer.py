"""A cache that a verb writes to: plan under a claim, compare the source, prepare the job for `make`."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import cast

from forebay.building.chunk_maker import ChunkJob
from forebay.building.layers import bind_layer, resolve_recipe
from forebay.building.listing import SourceListing
from forebay.building.options import BuildOptions
from forebay.building.segments import Draft, Planner, check_kind, check_signed, is_unsigned
from forebay.cache.catalog import begin_cache, check_base_documents, read_cache_document
from forebay.cache.claims import Claims
from forebay.cache.heartbeat import Heartbeat
from forebay.cache.plan import Plan
from forebay.cache.reports import Progress
from forebay.cache.source_check import SourceCheck, reported, source_changed
from forebay.cache.state import Index, numbers
from forebay.errors import ForebayError, RecipeInvalid
from forebay.file_table import FileTable
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.tensors import hmac_key, short_key_note
from forebay.recipe import AnyRecipe, Recipe
from forebay.source import Source, SourceFile, differing_files, files_changed
from forebay.store.base import Store, naming_full_disk, wait_until_listed
from forebay.store.retrying import RetryingStore

FOREVER = float("inf")


class CacheWriter:
    """A cache that a verb writes to: its store, engine, claims and heartbeat. Used as a context."""

    def __init__(
        self, store: Store, options: BuildOptions, is_repair: bool = False, before: Index | None = None
    ) -> None:
        self.store: Store = RetryingStore(store)
        self.is_repair = is_repair  # which may find damaged documents
        self.options = options
        self.notes: list[str] = list(short_key_note(hmac_key()))
        self.claims = Claims(self.store, options.lease_seconds)
        self.heartbeat = Heartbeat(self.store, options.lease_seconds)
        self.index = before or Index(self.store, None)
        self._ending = ExitStack()
        self._has_begun = False

    def __enter__(self) -> "CacheWriter":
        self.engine = self.options.open_engine()
        self.refresh()
        if self.index.newest is not None and not self.is_repair:
            check_base_documents(self.store, self.index.newest)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, ForebayError):  # claims expire
            self.claims.release_all()
        self._ending.close()

    def start(self) -> None:
        """Begin to write: from now on others see the heartbeat."""
        if not self._has_begun:
            self._has_begun = True
            self._ending.callback(remove_empty_folders, self.store)
            self._ending.enter_context(self.heartbeat)

    def check_destination(self) -> None:
        """Raise if no file can be created at a new cache, before the source is listed."""
        with naming_full_disk(self.store, lambda: 0):
            self.start()
            if self.claims.take(layout.PLAN_CLAIM):
                self.claims.release(layout.PLAN_CLAIM)

    def refresh(self) -> Index:
        """Read new index files."""
        self.index = Index.take(self.store, self.index)
        return self.index

    @contextmanager
    def planning(self) -> Iterator[Index]:
        """Hold the claim on the plan. If another builder plans, wait for its segment, and read it.

        With a key every builder plans: none trusts a segment that no tagged generation covers.
        """
        self.start()
        following = layout.plan_segment(len(self.index.plan.segments))
        shown = Progress(phase="waiting", done=0, total=0, unit="files")

        def is_planned() -> bool:
            self.show(shown)
            return self.store.head(following) is not None

        wait_seconds = FOREVER if hmac_key() is None else 0.0
        with self.claims.holding(layout.PLAN_CLAIM, wait_seconds, is_planned):
            yield self.refresh()

    def planner(self, listing: SourceListing, recipe: Recipe, layer: str, is_part: bool = False) -> Planner:
        """Plans the samples of a source, for the recipe with every choice made."""
        resolved, notes = resolve_recipe(self.store, listing, recipe, layer)
        self.notes += [*notes, *listing.notes]
        limits = self.options.max_failures, self.options.memory_limit
        return Planner(self.store, listing, resolved, self.show_cut, self.warn, *limits, is_part)

    def begin(self, layer: str, recipe: Recipe, draft: Draft) -> None:
        """Create the documents and the first segment of a cache; another planner may be first."""
        with naming_full_disk(self.store, lambda: 0):
            document = begin_cache(self.store, layer)
            self.check_base(document.base, layer)
            bind_layer(self.store, recipe, layer)
            self.append(draft)

    def append(self, draft: Draft) -> None:
        """Append a segment to the plan. If another planner was first, read the one that it wrote."""
        cache_id = read_cache_document(self.store).cache_id
        draft = replace(draft, segment=replace(draft.segment, cache_id=cache_id))
        plan, number = self.index.plan, draft.segment.number
        if draft.append(self.store):
            self.index = Index(self.store, self.index.newest, plan.appended(draft.segment))
            self.refresh()
        else:
            wait_until_listed(self.store, layout.plan_segment(number))
            self.refresh()
        if is_unsigned(self.index):
            check_signed(self.store, self.index.plan, number, draft)

    def check_base(self, base: str, layer: str) -> None:
        if base != layer:
            raise RecipeInvalid(
                f"the cache at '{self.store.address}' has the base layer '{base}'; the recipe of another layer must "
                f"declare the base columns it reads"
            )

    def show(self, progress: Progress) -> None:
        self.heartbeat.progress = progress
        self.options.on_progress(progress)

    def warn(self, note: str) -> None:
        """Show a note now, and in the report."""
        self.notes.append(note)
        self.show(Progress(phase="planning", done=0, total=0, unit="files", note=note))

    def show_cut(self, done: int, total: int, passed: int, size: int) -> None:
        """Show planning progress; slices of a function have no bytes."""
        passed, size = (passed, size) if size > total else (0, 0)
        self.show(Progress(phase="planning", done=done, total=total, unit="files", read_bytes=passed, total_bytes=size))

    def base_job(
        self, planner: Planner, layer: str, walked: Sequence[SourceFile] = (), is_update: bool = False
    ) -> ChunkJob:
        """The job of the base layer, after comparing the source with the plan; an update may have other files.

        Files that were `walked` after the plan was written are not looked at again.
        """
        plan, listing, source = self.index.plan, planner.listing, planner.source
        check_kind(self.store, source, plan)
        job = replace(self.job(planner.recipe, layer), source=source)
        fresh = SourceCheck.of(self.index, source).freshness(listed=walked).complete()
        if fresh.changed:
            raise source_changed(self.store.address, plan, reported(source, plan, fresh.changed))
        if not is_update:
            self.notes += _absent_files(self.store, plan, listing)
        self.notes += _source_notes(self.store.address, listing.apart, plan, len(fresh.grown))
        return replace(job, now=dict(fresh.now))

    def job(self, recipe: AnyRecipe, layer: str) -> ChunkJob:
        """The job of a layer; without a source, it reads the chunks of the newest generation."""
        document, newest = self.index.recipe(layer), self.index.newest
        assert document is not None
        return ChunkJob(
            store=self.store,
            layer=layer,
            recipe=recipe,
            fingerprint=document.fingerprint,
            source=None,
            planned=self.index.plan.digests,
            generation=newest.number if newest is not None else None,
            existing=frozenset(numbers(self.index.state(layer).unlisted)),
            known=self.index,
        )

    def recheck(self, job: ChunkJob, files: Sequence[str], records: Mapping[int, ChunkRecord]) -> ChunkJob:
        """The job after source files changed while they were read; raises if their planned ranges did."""
        plan, source = self.index.plan, cast(Source, job.source)
        changed, now = self._compared(job, [plan.files[path] for path in files if path in plan.files], records)
        if changed:
            raise source_changed(self.store.address, plan, reported(source, plan, changed))
        others = {path: file for path, file in job.now.items() if path not in files}  # one may look as planned again
        return replace(job, now={**others, **now})

    def changed_since(self, job: ChunkJob, records: Mapping[int, ChunkRecord]) -> Mapping[str, str]:
        """The files of some chunks that do not have the planned content now -> how they differ."""
        if job.source is None or not records:
            return {}
        parts = (part for chunk in records for part in self.index.plan.parts(chunk))
        files = {part.file.path: job.now.get(part.file.path, part.file) for part in parts}
        return self._compared(job, list(files.values()), records)[0]

    def _compared(
        self, job: ChunkJob, files: Sequence[SourceFile], records: Mapping[int, ChunkRecord]
    ) -> tuple[Mapping[str, str], Mapping[str, SourceFile]]:
        source = cast(Source, job.source)
        check = SourceCheck.of(Index.take(self.store, self.index), source, self.index.plan, records)
        fresh = check.compared(differing_files(source, files)).complete()
        return fresh.changed, fresh.now


def _absent_files(store: Store, plan: Plan, listing: SourceListing) -> list[str]:
    """A note about planned files that are not in the source passed; raises if none is."""
    passed = FileTable.of(listing.files)
    if len(plan.segments) == 1 and plan.segments[0].files.same_paths(passed):
        return []
    files = plan.files
    absent = sorted(path for path in files if passed.find(path) is None)
    if absent and len(absent) == len(files):
        how = dict.fromkeys(absent, "was planned and is not in the source passed")
        ways = "pass the source that the cache was built from, or add other files with"
        raise files_changed(store.address, how, f"{ways} `forebay update {store.address}`")
    of_all = f"{len(absent):,} of {len(files):,} planned file(s) are not in the source passed"
    return [f"{of_all} (the first is '{absent[0]}'); their rows are kept"] if absent else []


def _source_notes(root: str, files: Sequence[SourceFile], plan: Plan, grown: int) -> list[str]:
    is_same = len(plan.segments) == 1 and plan.segments[0].files.same_paths(FileTable.of(files))
    known = plan.files
    new = [] if is_same else [file.path for file in files if file.path not in known and file.size > 0]
    command = f"`forebay update {root} SOURCE`"
    notes = []
    if new:
        of_all = f"{len(new):,} file(s) of the source are not in the plan (the first is '{min(new)}')"
        notes.append(f"{of_all}; the same build in mode 'inverse', or {command}, adds them")
    notes += [f"{grown:,} file(s) of the source grew; {command} adds the new data"] if grown else []
    left_out = plan.duplicates
    notes += [f"{left_out:,} sample(s) are duplicates of earlier ones and are left out"] if left_out else []
    return notes


def remove_empty_folders(store: Store) -> None:
    """After a build that wrote nothing else: remove the folders of claims and heartbeats, and an empty root."""
    root = store.local_path("")
    if root is not None:
        for folder in (layout.CLAIMS, layout.BUILDERS, ""):
            with suppress(OSError):
                os.rmdir(os.path.join(root, folder))
