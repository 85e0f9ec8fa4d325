"""Estimate a build: rows, bytes and time, from a sample of the source."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from forebay.building.listing import SourceListing, check_readable
from forebay.building.trial import Trial, chunk_weight, try_recipe
from forebay.cache.reports import Estimate
from forebay.cache.state import Index, numbers
from forebay.errors import SourceNotFound
from forebay.recipe import Recipe, fingerprint, hooks_of, identity_of
from forebay.source import Source
from forebay.store.base import Store

SAMPLED_SHARE = 0.0375  # the rest of 5% goes into finding where samples begin and end
MOST_SAMPLED = {"bytes": 32 * 1024 * 1024, "samples": 8192}
LONGER_JUDGED = 4  # how many times planning's sample an estimate may read, where a sample takes long
WITH_DUPLICATES = "duplicates are included: only a build, which reads the whole source, can count them"


def estimate_build(
    listing: SourceListing,
    recipe: Recipe,
    store: Store | None,
    workers: int,
    notes: Sequence[str] = (),
    missing: "MissingChunks | None" = None,
) -> Estimate:
    """Sample at most 5% of the source, but a few whole documents, and scale, to its missing chunks if a cache is begun.

    `seconds` covers listing, and making and writing the chunks; planning and the start of workers are not counted.
    """
    source, files = listing.source, listing.files
    if not files:
        raise SourceNotFound(str(source.describe()))
    check_readable(source, files)
    whole = sum(map(source.weight, files))
    budget = max(1, min(_most_sampled(source, recipe), int(whole * SAMPLED_SHARE)))
    trial = try_recipe(source, files, recipe, budget)
    total = whole if missing is None else missing.weight
    planned = max(1, ceil(total / chunk_weight(recipe.chunk_target(), trial, source.unit)))
    chunks = planned if missing is None else len(missing.chunks)
    workers = min(workers, max(1, chunks))
    busiest = ceil(chunks / workers) / max(1, chunks)  # the share of one worker: a chunk is made by one
    shown = (*notes, *_notes(recipe, trial), *listing.notes)
    scaled, free = _scaled(trial, total, chunks), store.free_bytes() if store else None
    return Estimate(
        files=len(files),
        source_weight=total,
        unit=source.unit,
        chunks=chunks,
        seconds=listing.seconds + trial.scaled(trial.seconds, total) * busiest,
        workers=workers,
        free_bytes=free,
        fits=free is None or scaled["stored_bytes"] <= free,
        notes=(*shown, *([missing.note] if missing else [])),
        **scaled,
    )


def _scaled(trial: Trial, total: int, chunks: int) -> dict[str, Any]:
    """The fields of an estimate that come from the trial, for a source that weighs `total`."""
    reason, _, example = trial.reasons.most_frequent() if trial.failures else ("", 0, "")
    return {
        "sampled_weight": trial.weight if trial.samples else 0,
        "rows": round(trial.scaled(trial.rows, total)),
        "raw_bytes": round(trial.scaled(trial.raw_bytes, total)),
        "stored_bytes": round(trial.scaled(trial.stored_bytes, total) + chunks * trial.head_bytes),
        "failures": round(trial.scaled(trial.failures, total)),
        "statistics": {
            name: round(trial.scaled(value, total))
            for name, value in trial.statistics.items()
            if not isinstance(value, list)
        },
        "failure_reason": reason,
        "failure_example": example,
        "all_failed": trial.all_failed,
    }


@dataclass(frozen=True, slots=True)
class MissingChunks:
    """The missing chunks in a range of a begun cache."""

    planned: int
    chunks: tuple[int, ...]
    weight: int
    is_range: bool

    @property
    def note(self) -> str:
        if self.chunks:
            return f"{len(self.chunks):,} of {self.planned:,} planned chunk(s) are missing; these figures cover them"
        chunks = "the chunks of this range" if self.is_range else f"all {self.planned:,} planned chunk(s)"
        return f"nothing is missing: {chunks} are present"


def missing_chunks(
    store: Store, recipe: Recipe, layer: str, start: int | None, end: int | None
) -> MissingChunks | None:
    """The chunks of a range that are planned by this recipe and missing; None where it has planned none."""
    index = Index.take(store)
    stored, plan = index.recipe(layer), index.plan
    if stored is None or not plan.segments or stored.fingerprint != fingerprint(recipe):
        return None
    state = index.state(layer)
    planned = int(state.planned.sum())
    chunks = tuple(
        n for n in numbers(state.todo & ~state.file) if (start or 0) <= n <= (len(plan) if end is None else end)
    )
    return MissingChunks(planned, chunks, int(plan.weights[list(chunks)].sum()), not start is end is None)


def _notes(recipe: Recipe, trial: Trial) -> tuple[str, ...]:
    notes = [] if identity_of(recipe) is None else [WITH_DUPLICATES]
    if trial.failures:
        reason, count, example = trial.reasons.most_frequent()
        tried = f"{trial.failures:,} of {trial.samples:,} trial samples failed"
        notes.append(f"{tried}, {count:,} as '{reason}' ({example}); {trial.reasons.advice()}")
    return tuple(notes)


def _most_sampled(source: Source, recipe: Recipe) -> int:
    most = MOST_SAMPLED[source.unit]
    enough = hooks_of(recipe).judged_by
    return most if source.unit == "bytes" or enough is None else min(most, LONGER_JUDGED * enough)
