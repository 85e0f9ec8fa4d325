"""Try a recipe on a sample of the source: how large chunks come out, and whether samples fail.

source  ├──▪────▪────▪────▪────▪────▪────┤   24 small parts, evenly by weight; a recipe makes rows of each
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import Any

import numpy as np

from forebay.building.cutting import OVERWEIGHT
from forebay.building.samples import ChunkSamples
from forebay.errors import ForebayError, RecipeInvalid, SourceInvalid, SourceUnreadable
from forebay.failure_reasons import Reasons
from forebay.format.chunk import encode_chunk
from forebay.recipe import ChunkTarget, Recipe, Rows, hooks_of, join_rows
from forebay.source import Part, Sample, Source, SourceFile, Unit

CAP_BYTES = 128 * 1024 * 1024
DEFAULT_CHUNK_BYTES = 32 * 1024 * 1024
DEFAULT_CHUNK_SAMPLES = 1000
SAMPLE_PROBES = 24
MOST_BUDGETS = 4
TRIAL_BYTES = 96 * 1024 * 1024  # of rows that a trial makes
SPREAD = 4  # probes are tried in this many rounds
MOST_FILES_PER_PROBE = 1000
WITHOUT_LOOKUPS = 1.1  # how much more of a stream is read for the same: nothing is looked up in it
SAMPLE_WEIGHT = {"bytes": 4 * 1024 * 1024, "samples": 512}
LITTLE_WEIGHT = {"bytes": 64 * 1024, "samples": 24}  # tried at every probe whatever its share of the source
HEADS = 16
HEAD_WEIGHT = {"bytes": 16 * 1024, "samples": 4}


@dataclass(frozen=True, slots=True)
class Trial:
    """The rows of a small part of the source."""

    weight: int
    seconds: float  # to read, make, encode and hash it
    samples: int
    failures: int
    rows: float  # that so much would fill in a large chunk
    raw_bytes: int
    head_bytes: int  # every chunk has a header
    stored_bytes: int  # index and data, which grow with the rows
    statistics: Mapping[str, Any] = field(default_factory=dict)  # of its rows
    reasons: Reasons = field(default_factory=Reasons)  # why samples failed

    @property
    def all_failed(self) -> bool:
        return 0 < self.samples <= self.failures

    def scaled(self, amount: float, total: int) -> float:
        """A count of the trial, scaled to a source that weighs `total`."""
        return amount / max(1, self.weight) * total


def chunk_weight(target: ChunkTarget, trial: Trial, unit: Unit = "bytes") -> int:
    """The slice weight that makes chunks of the recipe's target size, at most 128 MiB."""
    if not trial.rows or not trial.raw_bytes:
        return DEFAULT_CHUNK_BYTES if unit == "bytes" else DEFAULT_CHUNK_SAMPLES
    wanted = (target.bytes or DEFAULT_CHUNK_BYTES) / trial.raw_bytes
    if target.rows is not None:
        wanted = target.rows / trial.rows
    return max(1, int(trial.weight * min(wanted, CAP_BYTES / OVERWEIGHT / trial.raw_bytes)))


def try_recipe(source: Source, files: Sequence[SourceFile], recipe: Recipe, budget: int | None = None) -> Trial:
    """Make rows of small parts of the files. Parts that the recipe fails on are left out.

    The build then reports the chunks that fail and makes the others; errors of the recipe or the source are raised.
    """
    budget = budget or _planning_budget(source, sum(map(source.weight, files)), recipe)
    return _try_probes(source, sample_probes(source, files, budget), recipe)


def _planning_budget(source: Source, total: int, recipe: Recipe) -> int:
    """The trial budget: a few MiB, or at most a fourth of the samples of a source that counts samples."""
    if source.unit == "bytes":
        return SAMPLE_WEIGHT["bytes"]
    most = min(SAMPLE_WEIGHT["samples"], hooks_of(recipe).judged_by or SAMPLE_WEIGHT["samples"])
    return min(most, max(SAMPLE_PROBES, total // 4))


def _try_probes(source: Source, probes: Sequence[list[Part]], recipe: Recipe) -> Trial:
    started = time.perf_counter()
    tried = _tried(source, recipe, probes)
    if not tried:
        return Trial(1, 0.0, 0, 0, 0.0, 0, 0, 0)
    rows = join_rows([rows for _, _, rows in tried], recipe.columns())
    read = [samples for _, samples, _ in tried]
    count = sum(samples.count for samples in read)
    failures = [*(failure for samples in read for failure in samples.failures), *rows.failures]
    columns = tuple(recipe.columns())
    encoded = encode_chunk(rows.columns, columns, layer="trial", chunk=0, fingerprint="", samples=count)
    encoded.sha256()
    expected = hooks_of(recipe).rows_from(rows.statistics)
    return Trial(
        weight=max(1, sum(_weight_read(source, parts, samples) for parts, samples, _ in tried)),
        seconds=time.perf_counter() - started,
        samples=count,
        failures=len(failures),
        rows=encoded.meta.rows if expected is None else expected,
        raw_bytes=sum(column.nbytes for column in rows.columns.values()),
        head_bytes=len(encoded.buffers[0]),
        stored_bytes=encoded.size - len(encoded.buffers[0]),
        statistics=rows.statistics,
        reasons=Reasons(failures),
    )


def _tried(source: Source, recipe: Recipe, probes: Sequence[list[Part]]) -> list[tuple[list[Part], ChunkSamples, Rows]]:
    """The rows of each probe; probes are tried spread over the source, while their rows fit into memory."""
    tried: dict[int, tuple[list[Part], ChunkSamples, Rows]] = {}
    failed: Exception | None = None
    size_bytes = 0
    for at in sorted(range(len(probes)), key=lambda at: (at % SPREAD, at)):
        if size_bytes >= TRIAL_BYTES:
            break
        samples = ChunkSamples(source, probes[at], preview=True)
        try:
            rows = recipe.make(samples)
        except SourceInvalid as error:
            failed = error
        except (OSError, ForebayError):
            raise
        except Exception as error:  # a recipe may raise anything, and may raise it for a few samples only
            failed = RecipeInvalid(f"the recipe '{recipe.kind}' fails on all it was tried on: {error!r}")
            failed.__cause__ = error
        else:
            tried[at] = probes[at], samples, rows
            size_bytes += sum(column.nbytes for column in rows.columns.values())
    if failed is not None and not tried:
        raise failed
    return [tried[at] for at in sorted(tried)]


def _weight_read(source: Source, parts: Sequence[Part], samples: ChunkSamples) -> int:
    """What was read: a preview may return fewer samples than a part has, and a slice of a function more."""
    whole = sum(part.weight for part in parts)
    return min(samples.count, whole) if source.unit == "samples" else whole


def sample_heads(source: Source, files: Sequence[SourceFile]) -> Iterator[Sample]:
    """The first few samples of a few files spread over the source; planning reports files that cannot be read."""
    chosen = {round(at) for at in np.linspace(0, len(files) - 1, min(HEADS, len(files)))}
    for index in sorted(chosen):
        weight = HEAD_WEIGHT[source.unit]
        with suppress(SourceUnreadable):
            stop = next(source.cuts(files[index], 0, weight, weight), None)
            if stop is not None:
                yield from ChunkSamples(source, [Part(files[index], 0, stop)], preview=True)


def sample_probes(source: Source, files: Sequence[SourceFile], budget: int) -> list[list[Part]]:
    """Small parts at 24 offsets, evenly by weight; no two overlap.

    A stream is only read from its beginning: the offsets in it make one part there, as long as all of them.
    """
    weights = np.fromiter(map(source.weight, files), np.int64, len(files))
    ends, piece = np.cumsum(weights), ceil(budget / SAMPLE_PROBES)
    offsets: dict[int, list[int]] = {}  # file -> offsets in it
    for probe in range(SAMPLE_PROBES):
        at = int(ends[-1]) * (2 * probe + 1) // (2 * SAMPLE_PROBES)
        index = min(int(np.searchsorted(ends, at, side="right")), len(weights) - 1)
        offsets.setdefault(index, []).append(at - int(ends[index] - weights[index]))
    probes: list[list[Part]] = []
    passed: dict[str, int] = {}  # file -> where the last part of it ends
    for index, in_file in offsets.items():
        for parts in _in_file(source, files, index, in_file, piece):
            fresh = [part for part in parts if part.start >= passed.get(part.file.path, 0)]
            passed |= {part.file.path: part.stop for part in fresh}
            probes += [fresh] if fresh else []
    return _within(probes, max(budget, LITTLE_WEIGHT[source.unit]))


def _within(probes: list[list[Part]], budget: int) -> list[list[Part]]:
    """The probes; at least two, within a few budgets, if a source cannot be cut into small parts."""
    weight = sum(part.weight for parts in probes for part in parts)
    most = max(2, int(len(probes) * MOST_BUDGETS * budget / max(1, weight)))
    if len(probes) <= most:
        return probes
    return [probes[(2 * at + 1) * len(probes) // (2 * most)] for at in range(most)]


def _in_file(
    source: Source, files: Sequence[SourceFile], index: int, offsets: Sequence[int], piece: int
) -> Iterator[list[Part]]:
    """The parts of the probes that fall into one file."""
    file = files[index]
    if source.weight(file) <= piece:
        yield _whole_files(source, files[index : index + MOST_FILES_PER_PROBE], piece)
    elif file.stream:
        yield _piece(source, file, 0, int(piece * len(offsets) * WITHOUT_LOOKUPS))
    else:
        yield from (_piece(source, file, offset, piece) for offset in offsets)


def _piece(source: Source, file: SourceFile, at: int, piece: int) -> list[Part]:
    """One part of about `piece` that begins near `at`, or at the beginning without a cut near it."""
    if at:
        edges = list(islice(source.cuts(file, 0, at, piece), 2))
        if len(edges) == 2:
            return [Part(file, edges[0], edges[1])]
    stop = next(source.cuts(file, 0, piece, piece), None)
    return [] if stop is None else [Part(file, 0, stop)]


def _whole_files(source: Source, files: Iterable[SourceFile], piece: int) -> list[Part]:
    """Consecutive whole files with a total weight of about `piece`."""
    parts: list[Part] = []
    weight = 0
    for file in files:
        parts += (begun := _piece(source, file, 0, piece))
        weight += sum(part.weight for part in begun)
        if weight >= piece:
            break
    return parts
