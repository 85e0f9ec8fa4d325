"""Repair chunks: from a copy, or made again from the source."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from forebay.building.builder import BuildOptions
from forebay.building.layer_build import build_chunks, remake_chunks
from forebay.building.repair_index import _ADVICE, RepairInputs, RepairLog, _adopts, _key
from forebay.cache.catalog import chunk_files, outdated_chunks, published_record, sound_record
from forebay.cache.copy import read_published
from forebay.cache.publish import adoption_rule, builder_versions, listed_plan
from forebay.cache.records import VerifyReport
from forebay.cache.verify import (
    check_chunk,
    identity_problems,
    index_problems,
    newest_sound,
    orphan_problems,
    orphans,
    outdated_layers,
)
from forebay.engine.base import Engine
from forebay.errors import BuildFailed, BuildStopped, ForebayError, NotForebay
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.format.sealed import hmac_key
from forebay.recipe import input_layers, versions_of
from forebay.store.base import Missing


def repair_chunks(
    means: RepairInputs,
    report: VerifyReport,
    generation: Generation,
    engine: Engine,
    terms: BuildOptions,
    mending: RepairLog,
) -> None:
    """Take bad and missing chunks from a copy where it has them, make the others again.

    A base chunk that came out with other rows leaves chunks of further layers without the rows they were made for;
    those are made again too.
    """
    tried: set[str] = set()
    for layer, records in bad_chunks(report, generation).items():
        left = [record for record in records if not _take_from_copy(means, layer, record, mending)]
        _remake(means, layer, left, generation, engine, terms, mending)
        tried |= {_key(layer, record) for record in records}
    newest, _ = newest_sound(means.store)
    orphaned: dict[str, list[ChunkRecord]] = {}
    for layer, record in orphans(newest):
        if _key(layer, record) not in tried:
            orphaned.setdefault(layer, []).append(record)
    for layer, records in orphaned.items():
        _remake(means, layer, records, newest, engine, terms, mending)
    if hmac_key() is None:  # with a key, no file counts before it is listed, so there is nothing to put right
        _make_unlisted(means, engine, terms, mending)


def _make_unlisted(means: RepairInputs, engine: Engine, terms: BuildOptions, mending: RepairLog) -> None:
    """Make planned chunks again whose file is damaged, or of another source, and listed by no generation.

    A lost generation leaves them behind: `gaps` counts them as there, and a reader never sees their rows.
    """
    store, (newest, _) = means.store, newest_sound(means.store)
    plan, adopts = listed_plan(store, newest), _adopts(means, newest.base, newest.layers)
    for layer in sorted(newest.layers, key=partial(layer_height, newest)):
        table, asked = newest.table(layer), plan.revisions(layer)
        listed = set(table.chunks.tolist()) - set(outdated_chunks(table, asked).tolist())
        allowed = adoption_rule(layer, adopts, None if layer == newest.base else newest.table(newest.base))
        unsound: dict[int, str] = {}
        for chunk, revision in chunk_files(store, layer).items():
            if chunk in listed or chunk >= len(asked) or revision < asked[chunk]:
                continue
            record = sound_record(store, layer, chunk, revision)
            if record is None or allowed is None or not allowed(record):
                unsound[chunk] = layout.chunk(layer, chunk, revision)
        if unsound:
            _build_unlisted(means, layer, unsound, engine, terms, mending)


def _build_unlisted(
    means: RepairInputs, layer: str, unsound: Mapping[int, str], engine: Engine, terms: BuildOptions, mending: RepairLog
) -> None:
    store, failed, advice = means.store, {}, f"run `forebay build {means.store.address}` when that is put right"
    try:
        place = means.workplace_of(layer)
        versions = builder_versions(versions_of(place.job.recipe))
        build_chunks(place, sorted(unsound), engine, replace(terms, versions=versions, max_failures=1.0))
    except BuildFailed as error:
        failed = error.failed or dict.fromkeys(unsound, str(error))
    except ForebayError as error:
        failed = dict.fromkeys(unsound, str(error))
    newest, _ = newest_sound(store)
    for chunk, key in unsound.items():
        record = published_record(newest, layer, chunk)
        if record is not None:
            why = "its file was not sound, and no generation that can be read lists it; it was made from the source"
            mending.replaced[_key(layer, record)] = why
        else:
            reason = _ADVICE.sub("", failed.get(chunk, "it was not made"))
            mending.failed[key] = f"its file is not sound, and no generation lists it: {reason}; {advice}"


def _remake(
    means: RepairInputs,
    layer: str,
    records: list[ChunkRecord],
    generation: Generation,
    engine: Engine,
    terms: BuildOptions,
    mending: RepairLog,
) -> None:
    if not records:
        return
    try:
        place = means.workplace_of(layer)
        own = replace(terms, versions=builder_versions(versions_of(place.job.recipe)))
        tally = remake_chunks(place, [record.chunk for record in records], generation, engine, own)
    except BuildStopped:
        raise  # the user stopped the repair; no chunk failed
    except ForebayError as error:
        for record in records:
            mending.fail(_key(layer, record), error)
        return
    for record in records:
        made = tally.records.get(record.chunk)
        if made is None:
            reason = tally.failed.get(record.chunk, "it was not made")
            mending.failed[_key(layer, record)] = _ADVICE.sub("", reason)
        elif made.revision == record.revision:
            mending.restored.append(_key(layer, made))
        else:
            why = _why_other_bytes(record, made) + _other_versions(generation, own.versions)
            mending.replaced[_key(layer, made)] = why


def _other_versions(generation: Generation, now: Mapping[str, str]) -> str:
    """Which libraries are not those that any earlier chunk was made with."""
    known: dict[str, set[str]] = {}
    for versions in generation.versions:
        for name, version in versions.items():
            known.setdefault(name, set()).add(version)
    others = [
        f"{name} {version} (before: {', '.join(sorted(known[name]))})"
        for name, version in now.items()
        if name in known and version not in known[name]
    ]
    return f": {', '.join(others)}" if others else ""


def check_repaired(means: RepairInputs, mending: RepairLog) -> None:
    """Whatever `verify` would still find is a failure: nothing that a repair leaves behind goes unsaid."""
    store = means.store
    generation, bad = newest_sound(store)
    left = [*bad, *index_problems(store, generation), *identity_problems(store, generation)]
    left += [*outdated_layers(generation), *orphan_problems(generation)]
    for problem in left:
        mending.failed.setdefault(problem.key, _ADVICE.sub("", problem.problem))
    for layer, record in _touched_chunks(generation, {*mending.restored, *mending.replaced}):
        if check_chunk(store, layer, record, full=False) != []:
            mending.failed.setdefault(_key(layer, record), "it was put back, and is damaged again; check the disk")
    mending.restored = [key for key in mending.restored if key not in mending.failed]


def _touched_chunks(generation: Generation, keys: set[str]) -> Iterator[tuple[str, ChunkRecord]]:
    for layer, table in generation.layers.items():
        for record in table.records():
            if _key(layer, record) in keys:
                yield layer, record


def bad_chunks(report: VerifyReport, generation: Generation) -> dict[str, list[ChunkRecord]]:
    """layer -> the chunks to put back, the base layer first, and every layer after those it reads."""
    found: dict[str, set[int]] = {}
    for problem in report.bad:
        if problem.chunk >= 0:
            found.setdefault(problem.layer, set()).add(problem.chunk)
    for layer, chunks in report.missing.items():
        found.setdefault(layer, set()).update(chunks)
    ordered = sorted(found, key=lambda name: (layer_height(generation, name), name))
    records = {
        layer: [published_record(generation, layer, chunk) for chunk in sorted(found[layer])] for layer in ordered
    }
    return {layer: [record for record in some if record is not None] for layer, some in records.items()}


def layer_height(generation: Generation, layer: str) -> int:
    """How many layers lie between this one and the samples."""
    if layer == generation.base:
        return 0
    below = [name for name in input_layers(generation.recipe(layer)) if name in generation.recipes]
    return 1 + max((layer_height(generation, name) for name in below), default=0)


def _take_from_copy(means: RepairInputs, layer: str, record: ChunkRecord, mending: RepairLog) -> bool:
    if means.copy is None:
        return False
    key = _key(layer, record)
    try:
        value = read_published(means.copy, key, record)  # what is hashed is what is written
        if value is None:
            return False
        means.store.replace(key, [value])
    except (Missing, NotForebay, IsADirectoryError):
        return False
    mending.restored.append(key)
    return True


def _why_other_bytes(listed: ChunkRecord, made: ChunkRecord) -> str:
    if listed.base != made.base:
        return "the rows of the base layer that it was made for are others now"
    if listed.content == made.content:
        return "the same content came out as other bytes with the library versions installed now"
    return "the source, the libraries or the device of now gave other content"
