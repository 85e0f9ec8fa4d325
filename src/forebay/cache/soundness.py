"""Which generations and segments of a cache are sound, whatever is wrong with the others."""

from contextlib import suppress
from itertools import islice

from forebay.cache.catalog import (
    generation_numbers,
    head_problem,
    load_generation,
    problem_of,
    read_cache_document,
    segment_problem,
    unpublished,
)
from forebay.cache.reports import Problem
from forebay.cache.segment import Segment, decode_segment
from forebay.errors import Damaged, ForebayError, FormatTooNew, KeyRefused
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.format.tensors import VARIABLE, is_whole
from forebay.store.base import Missing, Pieces, Store, index_corrupt, key_refused, load_index

STRAY_GAP = 8  # segments that may be lost before one that exists
TELLING = 16  # chunks that tell whether a generation is of the cache it lies in
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

    The id in `cache.json` decides, or the id of a newer generation. If there is neither, the files do: the first
    segment, or most of the first chunks, must be the listed ones.
    """
    cache_id = generation.document.cache_id
    known = newer.document.cache_id if newer is not None else None
    if known is None:
        with suppress(ForebayError):
            known = read_cache_document(store).cache_id
    if known is not None:
        return "" if known == cache_id else f"{FOREIGN} (id {cache_id}, this one has {known})"
    if any(segment_problem(store, number, digest) is None for number, digest in enumerate(generation.plan)):
        return ""
    right = [_head_is_right(store, *one) for one in islice(generation.chunks(), TELLING)]
    return "" if 2 * sum(right) > len(right) else f"{FOREIGN} (id {cache_id}): no file here is as it lists"


def _head_is_right(store: Store, folder: str, record: ChunkRecord) -> bool:
    try:
        return head_problem(Pieces(store, record.key(folder)), record) is None
    except (Missing, Damaged, OSError):
        return False


def sound_segment(store: Store, number: int) -> Segment | None:
    """A segment on disk; None if it is gone or damaged."""
    key = layout.plan_segment(number)
    try:
        return decode_segment(load_index(store, key), store.address, key)
    except FormatTooNew:
        raise
    except (Missing, Damaged):
        return None


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
