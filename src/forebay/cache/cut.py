"""Cutting a source into chunks, before any work starts."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from math import ceil

import numpy as np

from forebay.errors import ForebayError, RecipeInvalid
from forebay.format.chunk import encode_chunk
from forebay.recipe import ChunkTarget, Recipe
from forebay.source import Part, Sample, Source, SourceFile, Unit

CAP_BYTES = 128 * 1024 * 1024
OVERWEIGHT = 1.25  # how far a chunk may go past its weight, unless one part alone does
DEFAULT_CHUNK_BYTES = 32 * 1024 * 1024
DEFAULT_CHUNK_SAMPLES = 1000
SAMPLE_PLACES = 16
MOST_FILES_PER_PLACE = 1000
SAMPLE_WEIGHT = {"bytes": 4 * 1024 * 1024, "samples": 64}

OnCut = Callable[[int, int, int], None]  # files cut so far, files in all, weight passed so far


@dataclass(frozen=True, slots=True)
class Trial:
    """What a recipe made of a small part of the source, per weight.

    Places are chosen evenly by weight, so the mean over places stands for the whole, however uneven its files are.
    """

    weight: int
    seconds: float
    samples: float
    failures: float
    rows: float
    raw_bytes: float
    stored_bytes: float  # index and data, which grow with the rows; every chunk has a header besides
    head_bytes: float

    @classmethod
    def mean(cls, trials: Sequence["Trial"]) -> "Trial":
        names = [one.name for one in fields(cls) if one.name != "weight"]
        means = {name: sum(getattr(trial, name) for trial in trials) / max(1, len(trials)) for name in names}
        return cls(weight=sum(trial.weight for trial in trials), **means)


def cut_source(
    source: Source, files: Sequence[SourceFile], weight: int, starts: Mapping[str, int], on_cut: OnCut
) -> list[list[Part]]:
    """Parts in the order of the source, grouped into chunks of about `weight`.

    `starts` says how far a file is planned already; what comes before is left out.
    """
    chunks: list[list[Part]] = []
    open_chunk: list[Part] = []
    used = passed = 0
    for count, file in enumerate(files):
        start = starts.get(file.path, 0)
        stops: list[int] = []
        for stop in source.cuts(file, start, weight - used, weight):
            stops.append(stop)
            on_cut(count, len(files), passed + stop - start)
        passed += stops[-1] - start if stops else 0
        scanned = source.scanned(file)
        for stop in stops:
            if open_chunk and used + stop - start > OVERWEIGHT * weight:
                chunks.append(open_chunk)
                open_chunk, used = [], 0
            open_chunk.append(Part(scanned, start, stop))
            used += stop - start
            start = stop
            if used >= weight:
                chunks.append(open_chunk)
                open_chunk, used = [], 0
    on_cut(len(files), len(files), passed)
    return [*chunks, open_chunk] if open_chunk else chunks


def chunk_weight(target: ChunkTarget, trial: Trial, unit: Unit = "bytes") -> int:
    """What a slice must weigh to come out as large as the recipe wants, and at most 128 MiB."""
    if not trial.rows or not trial.raw_bytes:
        return DEFAULT_CHUNK_BYTES if unit == "bytes" else DEFAULT_CHUNK_SAMPLES
    wanted = (target.bytes or DEFAULT_CHUNK_BYTES) / trial.raw_bytes
    if target.rows is not None:
        wanted = target.rows / trial.rows
    return max(1, int(min(wanted, CAP_BYTES / OVERWEIGHT / trial.raw_bytes)))


def try_recipe(source: Source, files: Sequence[SourceFile], recipe: Recipe, budget: int | None = None) -> Trial:
    """Make rows of a few small parts spread over the source. One that the recipe fails on is left out.

    The build then says which chunk fails, and makes the others; what is wrong with the recipe itself, or with the
    source, is raised.
    """
    places = sample_places(source, files, budget or SAMPLE_WEIGHT[source.unit])
    trials = []
    failed: Exception | None = None
    for parts in places:
        try:
            trials.append(_try_place(source, recipe, parts))
        except (OSError, ForebayError):
            raise
        except Exception as error:  # a recipe may raise anything
            failed = error
            continue
    if places and not trials:
        raise RecipeInvalid(f"the recipe '{recipe.kind}' fails on all it was tried on: {failed!r}") from failed
    return Trial.mean(trials)


def _try_place(source: Source, recipe: Recipe, parts: list[Part]) -> Trial:
    started = time.perf_counter()
    seen = [sample for part in parts for sample in source.read(part)]
    samples = [sample for sample in seen if isinstance(sample, Sample)]
    made = recipe.make(iter(samples))
    encoded = encode_chunk(made.columns, recipe.columns(), layer="trial", chunk=0, fingerprint="", samples=len(seen))
    weight = max(1, sum(part.weight for part in parts))
    return Trial(
        weight=weight,
        seconds=(time.perf_counter() - started) / weight,
        samples=len(seen) / weight,
        failures=(len(made.failures) + len(seen) - len(samples)) / weight,
        rows=encoded.meta.rows / weight,
        raw_bytes=sum(column.nbytes for column in made.columns.values()) / weight,
        stored_bytes=(encoded.size - len(encoded.buffers[0])) / weight,
        head_bytes=len(encoded.buffers[0]),
    )


def sample_places(source: Source, files: Sequence[SourceFile], budget: int) -> list[list[Part]]:
    """A few small parts at each of 16 places, evenly by weight; of a stream, only its beginning."""
    weights = np.array([source.weight(file) for file in files], np.int64)
    ends = np.cumsum(weights)
    piece = ceil(budget / SAMPLE_PLACES)
    places: list[list[Part]] = []
    for place in range(SAMPLE_PLACES):
        at = int(ends[-1]) * place // SAMPLE_PLACES
        index = min(int(np.searchsorted(ends, at, side="right")), len(files) - 1)
        offset = at - int(ends[index] - weights[index])
        if weights[index] > piece:
            parts = _piece(source, files[index], offset, piece)
        else:
            parts = _run(source, files, index + (offset > 0), piece)
        if parts and parts not in places:
            places.append(parts)
    return places


def _piece(source: Source, file: SourceFile, at: int, piece: int) -> list[Part]:
    """One part of about `piece` that begins near `at`, or at the beginning where the file cannot be cut there."""
    if at and not file.stream:
        edges = list(islice(source.cuts(file, 0, at, piece), 2))
        if len(edges) == 2:
            return [Part(file, edges[0], edges[1])]
    stop = next(source.cuts(file, 0, piece, piece), None)
    return [] if stop is None else [Part(file, 0, stop)]


def _run(source: Source, files: Sequence[SourceFile], index: int, piece: int) -> list[Part]:
    """Whole files, one after the other, that weigh about `piece`: taken as they come, small and large alike."""
    parts: list[Part] = []
    weight = 0
    for file in files[index : index + MOST_FILES_PER_PLACE]:
        parts += _piece(source, file, 0, piece)
        weight += parts[-1].weight if parts else 0
        if weight >= piece:
            break
    return parts
