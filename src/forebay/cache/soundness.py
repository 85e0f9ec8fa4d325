"""Which generations, documents and segments of a cache are sound, whatever is wrong with the others."""

from contextlib import suppress

from forebay.cache.catalog import (
    generation_numbers,
    load_generation,
    problem_of,
    read_cache_document,
    text_problem,
    unpublished,
)
from forebay.cache.identities import load_identities
from forebay.cache.reports import Problem
from forebay.cache.segment import Segment, decode_segment
from forebay.cache.state import Index
from forebay.errors import Damaged, ForebayError, FormatTooNew, KeyRefused
from forebay.format import layout
from forebay.format.generation import Generation
from forebay.format.tensors import VARIABLE, is_whole, unseal
from forebay.store.base import Missing, Pieces, Store, index_corrupt, key_refused, load_index, sha256_of

STRAY_GAP = 8  # segments that may be lost before one that exists
FOREIGN = "it is of another cache"


def newest_sound(store: Store, *, past_refused: bool = False) -> tuple[Generation, list[Problem]]:
    """The newest sound generation of this cache, and the problems of others.

    One that the key refuses is an error if it is the newest: its content is unknown, and no older one may stand in for
    it, except in `repair`. Below one that the key accepts it is just bad. Generations of another cache are reported.
    """
    sound: Generation | None = None
    refused: KeyRefused | None = None
    bad: list[Problem] = []
    for number in reversed(generation_numbers(store)):
        key = layout.generation(number)
        try:
            generation = load_generation(store, number)
            problem = foreign_problem(store, generation, sound)
        except KeyRefused as error:
            if sound is None and not past_refused:
                raise
            refused, problem = refused or error, problem_of(error)
        except Damaged as error:
            if isinstance(error, FormatTooNew) and is_whole(load_index(store, key)):
                raise  # it is sound, and of a newer forebay: only that can check it
            problem = problem_of(error)
        if problem:
            bad.append(Problem(key=key, problem=problem))
        else:
            sound = sound or generation
    if sound is None:
        raise _none_sound(store, refused, bad)
    return sound, bad


def split_foreign(problems: list[Problem], newest: Generation) -> tuple[list[Problem], list[str]]:
    """The problems of generations, and the keys of those of another cache that are older: no reader opens them."""
    last = layout.generation(newest.number)
    foreign = [one.key for one in problems if one.problem.startswith(FOREIGN) and one.key < last]
    return [one for one in problems if one.key not in foreign], foreign


def _none_sound(store: Store, refused: KeyRefused | None, bad: list[Problem]) -> ForebayError:
    """Why no generation can be used."""
    root = store.address
    if refused is not None:
        problem = (
            f"no generation has a tag of the key in {VARIABLE}; `forebay repair {root} --from COPY` takes a tagged "
            f"copy, and `forebay copy {root} NEW --sign` signs a cache that never had a key, if you trust the folder"
        )
        return key_refused(root, str(refused.facts.get("key", "")), problem)
    if bad:
        return index_corrupt(root, bad[0].key, f"no generation can be read; the newest: {bad[0].problem}")
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
        return "" if known == cache_id else f"{FOREIGN} (id {cache_id}, this one has {known})"
    segments = [segment for number in segment_numbers(store) if (segment := sound_segment(store, number)) is not None]
    is_own = any(one.digest in generation.plan for one in segments) if segments else _has_chunks_of(store, generation)
    return "" if is_own else f"{FOREIGN} (id {cache_id}): it lists no segment and no intact chunk file that is here"


def _has_chunks_of(store: Store, generation: Generation) -> bool:
    """True if a listed chunk file is here and intact, or if there are no chunk files."""
    for folder, record in generation.chunks():
        with suppress(Missing, Damaged, IsADirectoryError):
            if Pieces(store, record.key(folder)).sha256 == record.sha256:
                return True
    return not any(layout.parse_chunk(entry.key) for entry in store.entries(layout.LAYERS))


def index_problems(index: Index) -> list[Problem]:
    """Problems of cache.json, recipes, constants, segments and identities."""
    store, generation = index.store, index.published
    texts = {layout.CACHE: generation.cache}
    texts |= {layout.recipe(layer): text for layer, text in generation.recipes.items()}
    problems = {key: text_problem(store, key, text) for key, text in texts.items()}
    for layer, digest in generation.constants.items():
        key = layout.constants(generation.folder(layer))
        problems[key] = _constants_problem(store, key, digest)
    return [Problem(key=key, problem=why) for key, why in {**problems, **_plan_problems(index)}.items() if why]


def _constants_problem(store: Store, key: str, digest: str) -> str:
    """Why constants are not the published ones, or contradict their own digest; empty if they are sound."""
    try:
        view = load_index(store, key)
        unseal(view, store.address, key, "constants")
    except Missing:
        return "it is gone"
    except Damaged as error:
        return problem_of(error)
    return "" if sha256_of(view).hex() == digest else "its SHA-256 is not the published one"


def _plan_problems(index: Index) -> dict[str, str]:
    """Problems of segments, listed or not, and of identities (only `update` needs them).

    Chunks of a lost generation may depend on segments that no generation lists.
    """
    store, listed, plan = index.store, index.published.plan, index.sound_plan
    segments = dict(enumerate(plan.segments)) if plan is not None else {}
    problems = {}
    for number in sorted({*range(len(listed)), *segment_numbers(store)}):
        if number not in segments:
            segment, why = read_segment(store, number)
            if segment is not None:
                expected = listed[number] if number < len(listed) else ""
                why = _misfit(segment, number, expected, segments.get(number - 1), index.published.document.cache_id)
                segments[number] = segment
            problems[layout.plan_segment(number)] = why
        if not problems.get(layout.plan_segment(number)) and segments[number].identities:
            key = layout.identities(number, segments[number].identities)
            problems[key] = _identities_problem(store, segments[number])
    return problems


def _misfit(segment: Segment, number: int, expected: str, before: Segment | None, cache_id: str) -> str:
    """Why a segment that can be read is not the published one, or not of this plan; empty if it is."""
    if expected:
        return "" if segment.digest == expected else "it is not the segment that was published"
    if not continues(segment, number, before):
        return "it does not continue the plan"
    return "" if segment.cache_id == cache_id else "it is of another cache"


def _identities_problem(store: Store, segment: Segment) -> str:
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


def continues(segment: Segment, number: int, before: Segment | None) -> bool:
    """True if a segment has its number and follows the one before it, as far as that is known."""
    if segment.number != number or before is None:
        return segment.number == number
    return (segment.previous, segment.first_chunk) == (before.digest, before.first_chunk + len(before))


def segment_numbers(store: Store) -> list[int]:
    """The numbers of segment files; one far beyond the others is a stray file."""
    parsed = (layout.parse_segment(entry.key) for entry in store.entries(layout.PLAN))
    numbers = sorted(number for number in parsed if number is not None)
    return [number for number in numbers if number < 2 * len(numbers) + STRAY_GAP]
