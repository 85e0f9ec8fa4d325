"""Repairing: put back what verify found bad, and nothing else.

What the newest sound generation carries in words (cache.json, recipes) comes from it. Everything else comes from a copy
of the cache, or is made again; it goes back in place only when it is, to the byte, what was published.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from forebay.cache.build import Terms
from forebay.cache.crew import Engine
from forebay.cache.duplicates import deduplicate
from forebay.cache.identities import load_identities
from forebay.cache.making import Workplace, remake_chunks
from forebay.cache.plan import Plan, Segment, decode_segment, files_apart, load_plan
from forebay.cache.prepare import first_segment, sealed_constants
from forebay.cache.publish import generation_numbers, publish_over_damaged, read_cache_document
from forebay.cache.published import published_record
from forebay.cache.records import VerifyReport
from forebay.cache.verify import identity_problems, index_problems, newest_sound, orphans
from forebay.errors import Damaged, ForebayError, IndexCorrupt
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.recipe import AnyRecipe, Recipe, input_layers
from forebay.source import Source
from forebay.store.base import Buffer, Store


@dataclass(slots=True)
class Mending:
    """What a repair has done so far, by key."""

    restored: list[str] = field(default_factory=list)  # the very bytes that were published are back
    replaced: dict[str, str] = field(default_factory=dict)  # why other bytes had to be published
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Means:
    """What a repair can draw on."""

    store: Store
    copy: Store | None
    source: Source | None
    recipe_of: Callable[[str], AnyRecipe]  # layer -> its recipe, ready to make chunks
    workplace_of: Callable[[str], Workplace]


def repair_index(means: Means, mending: Mending) -> Generation:
    """Put back cache.json, recipes, constants and plan, then see to a sound newest generation."""
    store = means.store
    try:
        generation, bad = newest_sound(store)
    except IndexCorrupt:
        return _list_anew(store, mending)
    for problem in index_problems(store, generation):
        _put_back(means, mending, problem.key, partial(_published_bytes, means, generation, problem.key))
    for problem in identity_problems(store, generation):  # named by segments that may be back only now
        _put_back(means, mending, problem.key, partial(_identity_bytes, means, problem.key))
    if bad:
        generation = publish_over_damaged(store, generation)
    for problem in bad:
        store.delete(problem.key)
        mending.replaced[problem.key] = f"it could not be read; generation {generation.number} stands in its place"
    return generation


def _put_back(means: Means, mending: Mending, key: str, published: Callable[[], list[Buffer]]) -> None:
    try:
        means.store.replace(key, published())
        mending.restored.append(key)
    except ForebayError as error:
        mending.failed[key] = str(error)


def _list_anew(store: Store, mending: Mending) -> Generation:
    """No generation can be read: chunks prove themselves by their own digests, and are listed again."""
    damaged = generation_numbers(store)
    generation = publish_over_damaged(store, None)
    for number in damaged:
        store.delete(layout.generation(number))
        why = f"it could not be read; generation {generation.number} lists every chunk that was found sound"
        mending.replaced[layout.generation(number)] = why
    return generation


def repair_chunks(
    means: Means, report: VerifyReport, generation: Generation, engine: Engine, terms: Terms, mending: Mending
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


def _remake(
    means: Means,
    layer: str,
    records: list[ChunkRecord],
    generation: Generation,
    engine: Engine,
    terms: Terms,
    mending: Mending,
) -> None:
    if not records:
        return
    try:
        place = means.workplace_of(layer)
        tally = remake_chunks(place, [record.chunk for record in records], generation, engine, terms)
    except ForebayError as error:
        mending.failed |= {_key(layer, record): str(error) for record in records}
        return
    for record in records:
        made = tally.records.get(record.chunk)
        if made is None:
            mending.failed[_key(layer, record)] = tally.failed.get(record.chunk, "it was not made")
        elif made.revision == record.revision:
            mending.restored.append(_key(layer, made))
        else:
            mending.replaced[_key(layer, made)] = _why_other_bytes(record, made)


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


def _published_bytes(means: Means, generation: Generation, key: str) -> list[Buffer]:
    """The bytes that were published under a key of the index."""
    texts = {layout.recipe(layer): text for layer, text in generation.recipes.items()}
    texts[layout.CACHE] = generation.cache
    if key in texts:
        return [texts[key].encode()]
    if means.copy is not None:
        return [_copied_index(means.copy, generation, key)]
    for layer, digest in generation.constants.items():
        if key == layout.constants(layer):
            return _checked(sealed_constants(means.recipe_of(layer), layer), digest, means.store, key)
    return _planned_again(means, generation, key)


def _copied_index(copy: Store, generation: Generation, key: str) -> bytes:
    try:
        value = copy.read(key)
    except KeyError as error:
        raise Damaged(f"'{key}' cannot be put back: the copy at '{copy.address}' has none") from error
    for number, digest in enumerate(generation.plan):
        if key == layout.plan_segment(number) and decode_segment(memoryview(value), copy.address, key)[1] == digest:
            return value
    for layer, digest in generation.constants.items():
        if key == layout.constants(layer) and hashlib.sha256(value).hexdigest() == digest:
            return value
    raise Damaged(f"'{key}' cannot be put back: the copy at '{copy.address}' has other bytes")


def _identity_bytes(means: Means, key: str) -> list[Buffer]:
    """A segment's identities, from a copy, or taken again from the source; right only if their digest is."""
    plan = load_plan(means.store)
    segment = plan.segments[layout.parse_identities(key) or 0]
    if means.copy is not None:
        return [_copied_identities(means.copy, segment, key)]
    if means.source is None:
        raise Damaged(f"'{key}' cannot be put back without its source or a copy; run `forebay repair … --from COPY`")
    recipe = means.recipe_of(read_cache_document(means.store).base)
    assert isinstance(recipe, Recipe)
    earlier = Plan(plan.segments[: segment.number], plan.digests[: segment.number])
    draft = deduplicate(means.store, means.source, recipe, segment, earlier, lambda *_: None)
    if draft.segment.identities != segment.identities:
        raise Damaged(
            f"'{key}' cannot be put back: the source now has other samples; run `forebay repair … --from COPY`"
        )
    return list(draft.identities)


def _copied_identities(copy: Store, segment: Segment, key: str) -> memoryview:
    try:
        load_identities(copy, segment)
    except Damaged as error:
        raise Damaged(f"'{key}' cannot be put back: the copy at '{copy.address}' has no sound one") from error
    return copy.map(key)


def _planned_again(means: Means, generation: Generation, key: str) -> list[Buffer]:
    advice = f"'{key}' cannot be put back without a copy of the cache; run `forebay repair … --from COPY`"
    if len(generation.plan) != 1:
        raise Damaged(advice)
    if means.source is None:
        raise Damaged(f"{advice}, or pass the source itself to `forebay.repair`, so that it is planned again")
    recipe = means.recipe_of(generation.base)
    assert isinstance(recipe, Recipe)
    first = first_segment(means.source, files_apart(means.store, means.source), recipe, lambda *_: None)
    planned = deduplicate(means.store, means.source, recipe, first, Plan((), ()), lambda *_: None).segment
    for segment in (planned, planned.without_change_times()):
        value = segment.encode()
        whole = memoryview(b"".join(value))
        if decode_segment(whole, means.store.address, key)[1] == generation.plan[0]:
            return value
    raise Damaged(f"{advice} (planning the source again gave another plan)")


def _checked(value: list[Buffer], digest: str, store: Store, key: str) -> list[Buffer]:
    if hashlib.sha256(b"".join(value)).hexdigest() != digest:
        raise Damaged(f"'{key}' of '{store.address}' cannot be put back: the recipe now gives other constants")
    return value


def _take_from_copy(means: Means, layer: str, record: ChunkRecord, mending: Mending) -> bool:
    if means.copy is None:
        return False
    key = _key(layer, record)
    try:
        view = means.copy.map(key)
    except KeyError:
        return False
    if hashlib.sha256(view).digest() != record.sha256:
        return False
    means.store.replace(key, [view])
    mending.restored.append(key)
    return True


def _why_other_bytes(listed: ChunkRecord, made: ChunkRecord) -> str:
    if listed.base != made.base:
        return "the rows of the base layer that it was made for are others now"
    if listed.content == made.content:
        return "the same content came out as other bytes with the library versions installed now"
    return "the source, the libraries or the device of now gave other content"


def _key(layer: str, record: ChunkRecord) -> str:
    return layout.chunk(layer, record.chunk, record.revision)
