"""Cutting a source into chunks, before any work starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

import numpy as np

from forebay.format.chunk import EncodedChunk, encode_chunk
from forebay.recipe import ChunkTarget, Recipe
from forebay.source import Failure, Part, Sample, Source, SourceFile

CAP_BYTES = 128 * 1024 * 1024
DEFAULT_CHUNK_BYTES = 32 * 1024 * 1024
SAMPLE_PLACES = 16
SAMPLE_WEIGHT = {"bytes": 4 * 1024 * 1024, "samples": 64}

OnFile = Callable[[int, int], None]  # files cut so far, files in all


@dataclass(frozen=True, slots=True)
class Trial:
    """What a recipe made of a small part of the source."""

    weight: int
    rows: int
    raw_bytes: int
    encoded: EncodedChunk | None
    samples: int
    failures: int


def cut_source(
    source: Source, files: Sequence[SourceFile], weight: int, starts: Mapping[str, int], on_file: OnFile
) -> list[list[Part]]:
    """Parts in the order of the source, grouped into chunks of about `weight`.

    `starts` says how far a file is planned already; what comes before is left out.
    """
    chunks: list[list[Part]] = []
    open_chunk: list[Part] = []
    used = 0
    for count, file in enumerate(files):
        start = starts.get(file.path, 0)
        stops = list(source.cuts(file, start, weight - used, weight))
        scanned = source.scanned(file)
        for stop in stops:
            open_chunk.append(Part(scanned, start, stop))
            used += stop - start
            start = stop
            if used >= weight:
                chunks.append(open_chunk)
                open_chunk, used = [], 0
        on_file(count + 1, len(files))
    return [*chunks, open_chunk] if open_chunk else chunks


def chunk_weight(target: ChunkTarget, trial: Trial) -> int:
    """What a slice must weigh to come out as large as the recipe wants, and at most 128 MiB."""
    if not trial.weight or not trial.rows:
        return DEFAULT_CHUNK_BYTES
    bytes_per_weight = max(trial.raw_bytes, 1) / trial.weight
    wanted = (target.bytes or DEFAULT_CHUNK_BYTES) / bytes_per_weight
    if target.rows is not None:
        wanted = target.rows * trial.weight / trial.rows
    return max(1, int(min(wanted, CAP_BYTES / bytes_per_weight)))


def try_recipe(source: Source, files: Sequence[SourceFile], recipe: Recipe, budget: int | None = None) -> Trial:
    """Make rows of a few small parts spread over the source."""
    parts = sample_parts(source, files, budget or SAMPLE_WEIGHT[source.unit])
    seen = [sample for part in parts for sample in source.read(part)]
    samples = [sample for sample in seen if isinstance(sample, Sample)]
    weight = sum(part.weight for part in parts)
    if not samples:
        return Trial(weight, 0, 0, None, len(seen), len(seen))
    made = recipe.make(iter(samples))
    encoded = encode_chunk(made.columns, recipe.columns(), layer="trial", chunk=0, fingerprint="", samples=len(samples))
    failures = len(made.failures) + sum(isinstance(sample, Failure) for sample in seen)
    raw_bytes = sum(column.nbytes for column in made.columns.values())
    return Trial(weight, encoded.meta.rows, raw_bytes, encoded, len(seen), failures)


def sample_parts(source: Source, files: Sequence[SourceFile], budget: int) -> list[Part]:
    """Small parts at even distances over the whole source; of a stream, only its beginning."""
    weights = np.array([source.weight(file) for file in files], np.int64)
    ends = np.cumsum(weights)
    piece = ceil(budget / SAMPLE_PLACES)
    parts: list[Part] = []
    for place in range(SAMPLE_PLACES):
        at = int(ends[-1]) * place // SAMPLE_PLACES
        index = min(int(np.searchsorted(ends, at, side="right")), len(files) - 1)
        offset = at - int(ends[index] - weights[index])
        if weights[index] > piece:
            found = _piece(source, files[index], offset, piece)
        else:
            found = _run(source, files, index + (offset > 0), piece)
        known = {(part.file.path, part.start) for part in parts}
        parts += [part for part in found if (part.file.path, part.start) not in known]
        if sum(one.weight for one in parts) >= budget:
            break
    return parts


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
    while index < len(files) and sum(part.weight for part in parts) < piece:
        parts += _piece(source, files[index], 0, piece)
        index += 1
    return parts
