"""Try a recipe on a sample of the source: to size chunks, to fail early, to estimate a build."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import get_args

import msgspec
import numpy as np

from forebay.building.failures import Reasons
from forebay.cache.records import Estimate
from forebay.cache.segment import Unreadable, unreadable_note
from forebay.columns import Codec, Column
from forebay.errors import ForebayError, FunctionFailed, RecipeInvalid, SourceNotFound, SourceUnreadable
from forebay.format.chunk import EncodedChunk, encode_chunk
from forebay.recipe import ChunkTarget, Recipe, Rows, fields_of, hooks_of, identity_of, join_rows
from forebay.source import Failure, Part, Sample, Source, SourceFile, Unit
from forebay.store.base import Store

CAP_BYTES = 128 * 1024 * 1024
OVERWEIGHT = 1.25  # how far a chunk may go past its weight, unless one part alone does
DEFAULT_CHUNK_BYTES = 32 * 1024 * 1024
DEFAULT_CHUNK_SAMPLES = 1000
SAMPLE_PLACES = 24
MOST_FILES_PER_PLACE = 1000
WITHOUT_LOOKUPS = 1.1  # how much more of a stream is read for the same: nothing is looked up in it
SAMPLE_WEIGHT = {"bytes": 4 * 1024 * 1024, "samples": 512}
HEADS = 16
HEAD_WEIGHT = {"bytes": 16 * 1024, "samples": 4}


@dataclass(frozen=True, slots=True)
class Trial:
    """What a recipe made of a small part of the source."""

    weight: int
    seconds: float
    samples: int
    failures: int
    rows: float  # that so much would fill in a large chunk
    raw_bytes: int
    head_bytes: int  # every chunk has a header
    stored_bytes: int  # index and data, which grow with the rows
    made: Rows | None = None
    tried: int = 0  # samples, each counted once: in a small source the places overlap
    reasons: Reasons = field(default_factory=Reasons)  # why samples failed, each counted once

    @property
    def all_failed(self) -> bool:
        return 0 < self.samples <= self.failures

    def scaled(self, amount: float, total: int) -> float:
        """What was counted in the sample, for a source that weighs `total`."""
        return amount / max(1, self.weight) * total


def chunk_weight(target: ChunkTarget, trial: Trial, unit: Unit = "bytes") -> int:
    """What a slice must weigh to come out as large as the recipe wants, and at most 128 MiB."""
    if not trial.rows or not trial.raw_bytes:
        return DEFAULT_CHUNK_BYTES if unit == "bytes" else DEFAULT_CHUNK_SAMPLES
    wanted = (target.bytes or DEFAULT_CHUNK_BYTES) / trial.raw_bytes
    if target.rows is not None:
        wanted = target.rows / trial.rows
    return max(1, int(trial.weight * min(wanted, CAP_BYTES / OVERWEIGHT / trial.raw_bytes)))


def try_readable(
    source: Source, files: Sequence[SourceFile], recipe: Recipe, unreadable: Unreadable, budget: int | None = None
) -> Trial:
    """`try_recipe` with the files that can be read."""
    while True:
        try:
            return try_recipe(source, unreadable.without(files), recipe, budget)
        except SourceUnreadable as error:
            unreadable.take(error, files)


def try_recipe(source: Source, files: Sequence[SourceFile], recipe: Recipe, budget: int | None = None) -> Trial:
    """Make rows of a few small parts spread over the source. Those that the recipe fails on are left out.

    The build then says which chunk fails, and makes the others; what is wrong with the recipe itself, or with the
    source, is raised.
    """
    places = sample_places(source, files, budget or _planning_budget(source, files, recipe))
    started = time.perf_counter()
    glances = [TrialSamples(source, parts) for parts in places]
    made = _made(recipe, glances)
    if not made:
        return Trial(1, 0.0, 0, 0, 0.0, 0, 0, 0)
    rows = join_rows([rows for _, rows in made], recipe.columns())
    used = [glance for glance, _ in made]
    samples = sum(glance.count for glance in used)
    failures = [*(failure for glance in used for failure in glance.failures), *rows.failures]
    encoded = _encoded(rows, recipe.columns(), samples)
    seconds = time.perf_counter() - started
    expected = hooks_of(recipe).rows_from(rows.statistics)
    return Trial(
        weight=max(1, sum(glance.weight for glance in used)),
        seconds=seconds,
        samples=samples,
        failures=len(failures),
        rows=encoded.meta.rows if expected is None else expected,
        raw_bytes=sum(column.nbytes for column in rows.columns.values()),
        head_bytes=len(encoded.buffers[0]),
        stored_bytes=_body_bytes(encoded),
        made=rows,
        tried=len(set[str]().union(*(glance.ids for glance in used))),
        reasons=Reasons({failure.sample: failure for failure in failures}.values()),
    )


def _planning_budget(source: Source, files: Sequence[SourceFile], recipe: Recipe) -> int:
    """A few MiB of bytes; of samples, which may be costly to get, a fourth at most."""
    if source.unit == "bytes":
        return SAMPLE_WEIGHT["bytes"]
    most = min(SAMPLE_WEIGHT["samples"], hooks_of(recipe).judged_by or SAMPLE_WEIGHT["samples"])
    return min(most, max(SAMPLE_PLACES, sum(map(source.weight, files)) // 4))


def _made(recipe: Recipe, glances: Sequence["TrialSamples"]) -> list[tuple["TrialSamples", Rows]]:
    """What the recipe makes of each place: what belongs together in the source stays together."""
    made: list[tuple[TrialSamples, Rows]] = []
    failed: Exception | None = None
    for glance in glances:
        try:
            made.append((glance, recipe.make(glance)))
        except FunctionFailed as error:
            failed = error
        except (OSError, ForebayError):
            raise
        except Exception as error:  # a recipe may raise anything
            failed = error
    if isinstance(failed, FunctionFailed) and not made:
        raise failed
    if failed is not None and not made:
        raise RecipeInvalid(f"the recipe '{recipe.kind}' fails on all it was tried on: {failed!r}") from failed
    return made


class TrialSamples:
    """The samples of some parts, read for judging only; a source may have a cheaper way for that."""

    def __init__(self, source: Source, parts: Sequence[Part]) -> None:
        self.count = 0
        self.ids: set[str] = set()
        self.failures: list[Failure] = []
        self.weight = sum(part.weight for part in parts)
        self._read = source.glance
        self._parts = parts

    def __iter__(self) -> Iterator[Sample]:
        for part in self._parts:
            for sample in self._read(part):
                self.count += 1
                if isinstance(sample, Sample):
                    self.ids.add(sample.id)
                    yield sample
                else:
                    self.ids.add(sample.sample)
                    self.failures.append(sample)


def bytes_by_codec(trial: Trial, recipe: Recipe) -> dict[str, int]:
    """How large the rows of a trial are under each codec, where the recipe leaves the choice."""
    if trial.made is None or "codec" not in fields_of(recipe):
        return {}
    found = {}
    for codec in get_args(Codec):
        columns = [msgspec.structs.replace(column, codec=codec) for column in recipe.columns()]
        found[codec] = _body_bytes(_encoded(trial.made, columns, trial.samples))
    return found


def _encoded(made: Rows, columns: Sequence[Column], samples: int) -> EncodedChunk:
    return encode_chunk(made.columns, tuple(columns), layer="trial", chunk=0, fingerprint="", samples=samples)


def _body_bytes(encoded: EncodedChunk) -> int:
    return encoded.size - len(encoded.buffers[0])


def sample_heads(source: Source, files: Sequence[SourceFile]) -> Iterator[Sample]:
    """The first few samples of a few files spread over the source; planning names files that cannot be read."""
    chosen = {round(at) for at in np.linspace(0, len(files) - 1, min(HEADS, len(files)))}
    for index in sorted(chosen):
        weight = HEAD_WEIGHT[source.unit]
        with suppress(SourceUnreadable):
            stop = next(source.cuts(files[index], 0, weight, weight), None)
            if stop is not None:
                yield from TrialSamples(source, [Part(files[index], 0, stop)])


def sample_places(source: Source, files: Sequence[SourceFile], budget: int) -> list[list[Part]]:
    """A few small parts at each of 24 places, evenly by weight.

    A stream is only read from its beginning: the places in it make one part there, as long as all of them.
    """
    weights = np.array([source.weight(file) for file in files], np.int64)
    ends = np.cumsum(weights)
    piece = ceil(budget / SAMPLE_PLACES)
    found: dict[int, list[int]] = {}  # file -> the offsets of the places in it
    for place in range(SAMPLE_PLACES):
        at = int(ends[-1]) * (2 * place + 1) // (2 * SAMPLE_PLACES)
        index = min(int(np.searchsorted(ends, at, side="right")), len(files) - 1)
        found.setdefault(index, []).append(at - int(ends[index] - weights[index]))
    places: list[list[Part]] = []
    for index, offsets in found.items():
        for parts in _in_file(source, files, index, offsets, piece, int(weights[index])):
            if parts and parts not in places:
                places.append(parts)
    return places


def _in_file(
    source: Source, files: Sequence[SourceFile], index: int, offsets: list[int], piece: int, weight: int
) -> Iterator[list[Part]]:
    """The parts of the places that fall into one file."""
    if weight <= piece:
        yield _run(source, files, index, piece)
    elif files[index].stream:
        yield _piece(source, files[index], 0, int(piece * len(offsets) * WITHOUT_LOOKUPS))
    else:
        yield from (_piece(source, files[index], offset, piece) for offset in offsets)


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


SAMPLED_SHARE = 0.0375  # the rest of 5 % goes into finding where samples begin and end
MOST_SAMPLED = {"bytes": 32 * 1024 * 1024, "samples": 8192}
LONGER_JUDGED = 4  # how many times planning's sample an estimate may read, where a sample takes long
WITH_DUPLICATES = "duplicates are counted as if they stayed: only a build, which reads all, finds out how many they are"


def estimate_build(
    source: Source, recipe: Recipe, store: Store | None, workers: int, skip_unreadable: bool = False
) -> Estimate:
    """Sample at most 5 % of the source, and scale."""
    files = source.files()
    if not files:
        raise SourceNotFound(str(source.describe()))
    unreadable = Unreadable(skip_unreadable)
    unreadable.take_listed(source, files)
    total = _weigh(source, files, unreadable)
    budget = max(1, min(_most_sampled(source, recipe), int(total * SAMPLED_SHARE)))
    trial = try_readable(source, files, recipe, unreadable, budget)
    chunks = max(1, ceil(total / chunk_weight(recipe.chunk_target(), trial, source.unit)))
    heads = chunks * trial.head_bytes
    stored = round(trial.scaled(trial.stored_bytes, total) + heads)
    free = store.free_bytes() if store else None
    reason, _, example = trial.reasons.most_frequent() if trial.failures else ("", 0, "")
    return Estimate(
        files=len(files),
        source_weight=total,
        unit=source.unit,
        sampled_weight=trial.weight,
        chunks=chunks,
        rows=round(trial.scaled(trial.rows, total)),
        raw_bytes=round(trial.scaled(trial.raw_bytes, total)),
        stored_bytes=stored,
        by_codec={
            codec: round(trial.scaled(size, total) + heads) for codec, size in bytes_by_codec(trial, recipe).items()
        },
        seconds=trial.scaled(trial.seconds, total) / workers,
        workers=workers,
        failures=round(trial.scaled(trial.failures, total)),
        statistics=_scaled_statistics(trial, total),
        free_bytes=free,
        fits=free is None or stored <= free,
        failure_reason=reason,
        failure_example=example,
        all_failed=trial.all_failed,
        notes=(*_notes(recipe, trial), *unreadable_note(unreadable.found)),
    )


def _weigh(source: Source, files: Sequence[SourceFile], unreadable: Unreadable) -> int:
    total = 0
    for file in unreadable.without(files):
        try:
            total += source.weight(file)
        except SourceUnreadable as error:
            unreadable.take(error, files)
    return total


def _notes(recipe: Recipe, trial: Trial) -> tuple[str, ...]:
    notes = [] if identity_of(recipe) is None else [WITH_DUPLICATES]
    if trial.failures:
        reason, count, example = trial.reasons.most_frequent()
        tried = f"{len(trial.reasons):,} of the {trial.tried:,} sample(s) that were tried failed"
        notes.append(f"{tried}, {count:,} as '{reason}' ({example}); {trial.reasons.advice()}")
    return tuple(notes)


def _most_sampled(source: Source, recipe: Recipe) -> int:
    most = MOST_SAMPLED[source.unit]
    enough = hooks_of(recipe).judged_by
    return most if source.unit == "bytes" or enough is None else min(most, LONGER_JUDGED * enough)


def _scaled_statistics(trial: Trial, total: int) -> dict[str, int]:
    """What the recipe counts, for the whole source."""
    counted = trial.made.statistics if trial.made else {}
    return {name: round(trial.scaled(value, total)) for name, value in counted.items() if not isinstance(value, list)}
