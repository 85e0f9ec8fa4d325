"""Estimating: what a build will take, judged by a small sample of the source, before anything is written."""

from collections.abc import Sequence
from math import ceil

from forebay.cache.cut import Trial, bytes_by_codec, chunk_weight, try_readable
from forebay.cache.records import Estimate
from forebay.cache.unreadable import Unreadable, unreadable_note
from forebay.errors import SourceNotFound, SourceUnreadable
from forebay.recipe import Recipe, identity_of
from forebay.source import Source, SourceFile
from forebay.store.base import Store

SAMPLED_SHARE = 0.0375  # the rest of 5 % goes into finding where samples begin and end
MOST_SAMPLED = {"bytes": 32 * 1024 * 1024, "samples": 8192}
LONGER_JUDGED = 4  # an estimate may look at so many times what planning does, where a sample takes long
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
    enough: int | None = getattr(recipe, "judged_by", None)
    return most if source.unit == "bytes" or enough is None else min(most, LONGER_JUDGED * enough)


def _scaled_statistics(trial: Trial, total: int) -> dict[str, int]:
    """What the recipe counts, for the whole source."""
    counted = trial.made.statistics if trial.made else {}
    return {name: round(trial.scaled(value, total)) for name, value in counted.items() if not isinstance(value, list)}
