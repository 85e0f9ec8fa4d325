"""Begin a new cache with the unchanged chunks of an old one: `build … --into NEW --reuse OLD`.

OLD   segment 0   chunk 0 = a b   chunk 1 = b c   chunk 2 = d          c was edited, e is new
NEW   segment 0   chunk 0 = a b   chunk 1 = b     chunk 2 = d          chunks 0 and 2 are placed and listed
      segment 1   chunk 3 = c e

The new cache keeps the chunk numbers of the old one. A slice without its changed files may be empty. Chunks are placed
before the segments are created, and listed before the last one is, so that other builders need no option.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from forebay.building.layers import bind_layer
from forebay.building.segments import Draft, Planner, check_kind
from forebay.building.update import append_new_files
from forebay.building.writer import CacheWriter
from forebay.cache.catalog import begin_cache, has_sha256, newest_generation
from forebay.cache.plan import Plan
from forebay.cache.publish import create_next
from forebay.cache.reports import Progress
from forebay.cache.segment import Segment
from forebay.cache.source_check import SourceCheck
from forebay.cache.state import Index, numbers
from forebay.columns import Array
from forebay.errors import ForebayError, RecipeMismatch
from forebay.file_table import FileTable
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable
from forebay.format.tensors import hmac_key
from forebay.recipe import differing_fields, input_layers, is_same_recipe, recipe_mismatch
from forebay.source import SourceFile
from forebay.store.base import read_document


def begin_reusing(cache: CacheWriter, planner: Planner, layer: str, old: Index, copy: bool) -> None:
    """Plan a new cache from an old one, link and list its unchanged chunks, then append new files.

    Held: the claim on the plan. A run that was killed is finished by the same command.
    """
    _check_reusable(cache, planner, layer, old)
    source = _compared(planner, old)
    segments = _copied_segments(old.plan, source)
    digests = tuple(segment.digest for segment in segments)
    if cache.index.newest is not None:  # an earlier run has listed the chunks
        if cache.index.plan.digests == digests:
            append_new_files(cache, planner)
        return
    cache.check_base(begin_cache(cache.store, layer).base, layer)
    bind_layer(cache.store, planner.recipe, layer)
    placed = Placement(old, cache, copy).place_layers(_unchanged(old.plan, source.gone))
    for segment in segments[len(cache.index.plan.segments) :]:
        cache.append(Draft(segment))
    if cache.index.plan.digests[: len(segments)] != digests:
        raise ForebayError(
            f"the plan at '{cache.store.address}' is not that of '{old.store.address}' and this source",
            hint=f"delete '{cache.store.address}' and run the same command again",
        )
    if sum(record.rows for record in placed[layer]):
        _publish(cache, old, placed)
    cache.refresh()
    reused, listed = len(placed[layer]), len(old.table(layer))
    cache.notes.append(f"{reused:,} of {listed:,} chunk(s) of '{old.store.address}' are reused")
    append_new_files(cache, planner)


def _check_reusable(cache: CacheWriter, planner: Planner, layer: str, old: Index) -> None:
    """Raise unless the old cache was built by this recipe from a source of this kind, without deduplication."""
    root, stored = old.store.address, old.recipe(layer)
    if old.published.base != layer or stored is None:
        raise ForebayError(f"'{root}' cannot be reused: its base layer is '{old.base}', not '{layer}'")
    newest = cache.index.newest
    if newest is not None and newest.document.cache_id == old.published.document.cache_id:
        raise ForebayError(
            f"'{cache.store.address}' is '{root}' itself or a copy of it", hint="choose a new folder for the cache"
        )
    if not is_same_recipe(stored, planner.recipe):
        mismatch = recipe_mismatch(root, layer, differing_fields(stored, planner.recipe), True)
        hint = f"pass the recipe of '{root}' (see `forebay info {root}`), or leave out --reuse"
        raise RecipeMismatch(mismatch.message, hint=hint, **mismatch.facts)
    if old.plan.deduplicates:
        raise ForebayError(
            f"'{root}' cannot be reused: its recipe leaves out duplicates, which depend on all samples",
            hint="build a new cache without --reuse",
        )
    check_kind(old.store, planner.source, old.plan)


@dataclass(frozen=True, slots=True)
class SourceNow:
    """The current state of the files that an old cache was planned from."""

    gone: Collection[str]  # changed, missing, or not in the source passed
    now: Mapping[str, SourceFile]  # the same content, as the file looks now


def _compared(planner: Planner, old: Index) -> SourceNow:
    fresh = SourceCheck.of(old, planner.source).freshness(listed=planner.listing.walked).complete()
    passed = FileTable.of(planner.listing.apart)
    absent = (path for path in old.plan.files if passed.find(path) is None)
    now = {path: file for path, file in fresh.now.items() if path not in fresh.grown}  # its planned part has no look
    return SourceNow({*fresh.changed, *fresh.missing, *absent}, now)


def _copied_segments(plan: Plan, source: SourceNow) -> list[Segment]:
    """The segments of a plan without missing files; a withdrawn segment has no files."""
    segments: list[Segment] = []
    for segment in plan.segments:
        gone = set(segment.files.paths()) if segment.number in plan.withdrawn else source.gone
        if any(segment.files.find(path) is not None for path in (*gone, *source.now)):
            segment = _without_files(segment, gone, source.now)
        segments.append(replace(segment, previous=segments[-1].digest if segments else ""))
    return segments


def _without_files(segment: Segment, gone: Collection[str], now: Mapping[str, SourceFile]) -> Segment:
    """The segment with the same chunk numbers, and without the parts of some files."""
    stays = np.array([path not in gone for path in segment.files.paths()], np.bool_)
    files = FileTable.of(now.get(file.path, file) for file in segment.files if file.path not in gone)
    part_file = segment.tensors["part_file"].astype(np.int64)
    has_file = stays[part_file] if len(part_file) else np.zeros(0, np.bool_)
    before = np.concatenate([[0], np.cumsum(has_file)])
    parts = {name: segment.tensors[name][has_file] for name in ("part_start", "part_stop")}
    tensors = {
        "chunk_parts": before[segment.tensors["chunk_parts"].astype(np.int64)].astype(np.uint64),
        "part_file": (np.cumsum(stays) - 1)[part_file[has_file]].astype(np.uint64),
        **parts,
        **files.tensors,
    }
    return replace(segment, tensors=tensors)


def _unchanged(plan: Plan, gone: Collection[str]) -> Array:
    """Per chunk, True if all files of its slice are unchanged."""
    unchanged = plan.planned.copy()
    for path in gone:
        for chunk, *_ in plan.parts_of_file(path):
            unchanged[chunk] = False
    return unchanged


@dataclass(frozen=True, slots=True)
class Placement:
    """Gives a new cache the chunk files of an old one: by hard link, a copy in the bucket, or a copy."""

    old: Index
    cache: CacheWriter
    copy: bool

    def place_layers(self, unchanged: Array) -> dict[str, list[ChunkRecord]]:
        """The records of placed chunks by layer, lowest first; a layer needs the chunks of all layers it reads."""
        placed: dict[str, list[ChunkRecord]] = {}
        for layer in sorted(self.old.published.layers, key=self.old.height):
            recipe, usable = self.old.recipe(layer), set(numbers(unchanged))
            if recipe is None or (layer != self.old.base and not self._bind(layer)):
                continue
            for below in () if layer == self.old.base else (self.old.base, *input_layers(recipe)):
                usable &= {record.chunk for record in placed.get(below, ())}
            records = [record for record in self.old.table(layer).records() if record.chunk in usable]
            placed[layer] = self._place_chunks(layer, records)
        return placed

    def _bind(self, layer: str) -> bool:
        """Give the new cache the recipe and the constants of a layer above the base; False if they are damaged."""
        newest = self.old.published
        self.cache.store.create(layout.recipe(layer), [newest.recipes[layer].encode()])
        digest = newest.constants.get(layer)
        return digest is None or self._place_file(layout.constants(newest.folder(layer)), bytes.fromhex(digest))

    def _place_chunks(self, layer: str, records: Sequence[ChunkRecord]) -> list[ChunkRecord]:
        folder, placed = self.old.published.folder(layer), list[ChunkRecord]()
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            outcomes = pool.map(lambda record: self._place_file(record.key(folder), record.sha256), records)
            for done, (record, is_placed) in enumerate(zip(records, outcomes, strict=True), 1):
                placed += [record] if is_placed else []
                self.cache.show(Progress(phase="copying", done=done, total=len(records)))
        return placed

    def _place_file(self, key: str, sha256: bytes) -> bool:
        """Place one file; False if it is damaged or gone in the old cache."""
        store, old = self.cache.store, self.old.store
        if has_sha256(store, key, sha256):
            return True
        if not has_sha256(old, key, sha256):
            return False
        if self.copy or not store.link(key, old):
            store.replace(key, [old.view(key)])
        return True


def _publish(cache: CacheWriter, old: Index, placed: Mapping[str, Sequence[ChunkRecord]]) -> None:
    """List all placed chunks at once, under the library versions that made them."""
    newest, store, plan = old.published, cache.store, cache.index.plan
    limits = {layer: limit for layer, limit in newest.max_failures.items() if layer in placed}
    if cache.options.max_failures is not None:
        limits[newest.base] = cache.options.max_failures
    first = replace(
        newest,
        number=0,
        cache=read_document(store, layout.CACHE).decode(),
        recipes={layer: read_document(store, layout.recipe(layer)).decode() for layer in placed},
        constants={layer: digest for layer, digest in newest.constants.items() if layer in placed},
        plan=plan.digests,
        layers={layer: ChunkTable.of(records) for layer, records in placed.items()},
        tagged=hmac_key() is not None,
        source=plan.source,
        max_failures=limits,
    )
    create_next(store, lambda: newest_generation(store), lambda existing: first if existing is None else None)
