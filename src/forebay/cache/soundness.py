"""Which generations, documents and segments of a cache are sound, whatever is wrong with the others."""

from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from forebay.cache.catalog import (
    generation_numbers,
    load_generation,
    problem_of,
    read_cache_document,
    sound_record,
    text_problem,
    unpublished,
)
from forebay.cache.identities import load_identities
from forebay.cache.reports import Problem
from forebay.cache.segment import Segment, decode_segment
from forebay.cache.state import Index, chunk_numbers
from forebay.errors import Damaged, ForebayError, FormatTooNew, KeyRefused
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.format.tensors import VARIABLE, is_whole, unseal
from forebay.recipe import RecipeDocument
from forebay.store.base import Missing, Pieces, Store, index_corrupt, key_refused, load_index, sha256_of

STRAY_GAP = 8  # segments that may be lost before one that exists


@dataclass(frozen=True, slots=True)
class Generations:
    """The newest sound generation of a cache, and the problems of others, by key."""

    newest: Generation | None
    numbers: tuple[int, ...]  # of all of them
    damaged: Mapping[str, str]
    foreign: Mapping[str, str]  # sound, and of another cache
    refused: KeyRefused | None  # the newest that the key in use refuses

    @property
    def is_lost(self) -> bool:
        """True if a generation newer than the newest sound one may have listed more."""
        return self.newest is None or max(self.damaged, default="") > layout.generation(self.newest.number)

    @property
    def harmless(self) -> list[str]:
        """The keys of foreign generations that are older than the newest sound one: no reader opens them."""
        last = "" if self.newest is None else layout.generation(self.newest.number)
        return [key for key in self.foreign if key < last]

    def published(self, store: Store) -> tuple[Generation, list[Problem]]:
        """The newest sound generation, and the problems of others; raises if none is sound."""
        bad = {**self.damaged, **self.foreign}
        if self.newest is None:
            raise _none_sound(store, self.refused, bad)
        problems = (Problem(key=key, problem=bad[key]) for key in sorted(bad, reverse=True))
        return self.newest, [one for one in problems if one.key not in self.harmless]


def check_generations(store: Store, *, past_refused: bool = False) -> Generations:
    """Every generation of a cache, checked from the newest down.

    One that the key refuses is an error if it is the newest: its content is unknown, and no older one may stand in for
    it, except in `repair`. Below one that the key accepts it is just bad.
    """
    sound: Generation | None = None
    refused: KeyRefused | None = None
    damaged, foreign = dict[str, str](), dict[str, str]()
    numbers = generation_numbers(store)
    for number in reversed(numbers):
        key = layout.generation(number)
        try:
            generation = load_generation(store, number)
        except KeyRefused as error:
            if sound is None and not past_refused:
                raise
            refused, damaged[key] = refused or error, problem_of(error)
        except Damaged as error:
            if isinstance(error, FormatTooNew) and is_whole(load_index(store, key)):
                raise  # it is sound, and of a newer forebay: only that can check it
            damaged[key] = problem_of(error)
        else:
            if problem := foreign_problem(store, generation, sound):
                foreign[key] = problem
            else:
                sound = sound or generation
    return Generations(sound, tuple(numbers), damaged, foreign, refused)


def _none_sound(store: Store, refused: KeyRefused | None, bad: Mapping[str, str]) -> ForebayError:
    """Why no generation can be used."""
    root = store.address
    if refused is not None:
        problem = (
            f"no generation has a tag of the key in {VARIABLE}; `forebay repair {root} --from COPY` takes a tagged "
            f"copy, and `forebay copy {root} NEW --sign` signs a cache that never had a key, if you trust the folder"
        )
        return key_refused(root, str(refused.facts.get("key", "")), problem)
    if bad:
        return index_corrupt(root, max(bad), f"no generation can be read; the newest: {bad[max(bad)]}")
    return unpublished(store)


def foreign_problem(store: Store, generation: Generation, newer: Generation | None = None) -> str:
    """Why a generation belongs to another cache; empty if it belongs to this one.

    The id in `cache.json` decides, or the id of a newer generation; else segments, or intact chunk files.
    """
    cache_id = generation.document.cache_id
    known = newer.document.cache_id if newer is not None else None
    if known is None:
        with suppress(ForebayError):
            known = read_cache_document(store).cache_id
    if known is not None:
        return "" if known == cache_id else f"it is of another cache (id {cache_id}, this one has {known})"
    segments = [segment for number in segment_numbers(store) if (segment := sound_segment(store, number)) is not None]
    is_own = any(one.digest in generation.plan for one in segments) if segments else _has_chunks_of(store, generation)
    problem = f"it is of another cache (id {cache_id}): it lists no segment and no intact chunk file that is here"
    return "" if is_own else problem


def _has_chunks_of(store: Store, generation: Generation) -> bool:
    """True if a listed chunk file is here and intact, or if there are no chunk files."""
    for folder, record in generation.chunks():
        with suppress(Missing, Damaged, IsADirectoryError):
            if Pieces(store, record.key(folder)).sha256 == record.sha256:
                return True
    return not any(layout.parse_chunk(entry.key) for entry in store.entries(layout.LAYERS))


def index_problems(index: Index) -> list[Problem]:
    """Problems of cache.json, recipes, constants, segments and identities."""
    problems = {**document_problems(index), **plan_problems(index)}
    return [Problem(key=key, problem=why) for key, why in problems.items()]


def document_problems(index: Index) -> dict[str, str]:
    """Problems of cache.json, recipes and constants, by key."""
    store, generation = index.store, index.published
    texts = {layout.CACHE: generation.cache}
    texts |= {layout.recipe(layer): text for layer, text in generation.recipes.items()}
    problems = {key: text_problem(store, key, text) for key, text in texts.items()}
    for layer, digest in generation.constants.items():
        key = layout.constants(generation.folder(layer))
        problems[key] = constants_problem(store, key, digest)
    return {key: why for key, why in problems.items() if why}


def constants_problem(store: Store, key: str, digest: str = "") -> str:
    """Why constants are not the published ones, or contradict their own digest; empty if they are sound."""
    try:
        view = load_index(store, key)
        unseal(view, store.address, key, "constants")
    except Missing:
        return "it is gone"
    except Damaged as error:
        return problem_of(error)
    return "" if digest in ("", sha256_of(view).hex()) else "its SHA-256 is not the published one"


def plan_problems(index: Index) -> dict[str, str]:
    """Problems of segments, listed or not, and of identities (only `update` needs them), by key.

    Chunks of a lost generation may depend on segments that no generation lists.
    """
    store, listed, plan = index.store, index.published.plan, index.sound_plan
    segments = dict(enumerate(plan.segments)) if plan is not None else {}
    problems = {}
    for number in range(max(len(listed), *(one + 1 for one in segment_numbers(store)), 0)):
        why = ""
        if number not in segments:
            segment, why = read_segment(store, number)
            if segment is not None:
                expected = listed[number] if number < len(listed) else ""
                why = misfit(segment, number, expected, segments.get(number - 1), index.published.document.cache_id)
                segments[number] = segment
            problems[layout.plan_segment(number)] = why
        if not why and segments[number].identities:
            key = layout.identities(number, segments[number].identities)
            problems[key] = identities_problem(store, segments[number])
    return {key: why for key, why in problems.items() if why}


def misfit(segment: Segment, number: int, expected: str, before: Segment | None, cache_id: str) -> str:
    """Why a segment that can be read is not the published one, or not of this plan; empty if it is."""
    if expected:
        return "" if segment.digest == expected else "it is not the segment that was published"
    edge = (before.digest, before.first_chunk + len(before)) if before is not None else None
    if segment.number != number or edge not in (None, (segment.previous, segment.first_chunk)):
        return "it does not continue the plan"
    return "" if segment.cache_id == cache_id else "it is of another cache"


def identities_problem(store: Store, segment: Segment) -> str:
    """Why the identities of a segment cannot be used; empty if they can."""
    try:
        load_identities(store, segment)
    except Damaged as error:
        return problem_of(error)
    return ""


def sound_segment(store: Store, number: int) -> Segment | None:
    """A segment on disk; None if it is gone or damaged."""
    return read_segment(store, number)[0]


def read_segment(store: Store, number: int) -> tuple[Segment | None, str]:
    """A segment on disk; None, and why, if it is gone or damaged."""
    key = layout.plan_segment(number)
    try:
        return decode_segment(load_index(store, key), store.address, key), ""
    except FormatTooNew:
        raise
    except Missing:
        return None, "it is gone"
    except Damaged as error:
        return None, problem_of(error)


def segment_numbers(store: Store) -> list[int]:
    """The numbers of segment files; one far beyond the others is a stray file."""
    parsed = (layout.parse_segment(entry.key) for entry in store.entries(layout.PLAN))
    numbers = sorted(number for number in parsed if number is not None)
    return [number for number in numbers if number < 2 * len(numbers) + STRAY_GAP]


def sound_records(
    store: Store, recipe: RecipeDocument, wanted: Container[int] = range(layout.MAX_NUMBER)
) -> Iterator[ChunkRecord]:
    """The records of the chunk files of a layer that are sound, listed or not; each file is read whole."""
    folder = layout.document_folder(recipe)
    for chunk in chunk_numbers((entry.key for entry in store.entries(folder)), folder).tolist():
        if chunk in wanted and (record := sound_record(store, recipe, chunk)) is not None:
            yield record
