"""Estimate what a build will take, from a sample of the source."""

from collections.abc import Sequence
from math import ceil
from typing import get_args

import msgspec

from forebay.building.planning import SourceListing, Trial, _body_bytes, _encoded, chunk_weight, try_readable
from forebay.cache.catalog import read_recipe_document
from forebay.cache.plan import load_plan
from forebay.cache.records import Estimate
from forebay.cache.segment import Unreadable, unreadable_note
from forebay.cache.status import find_gaps
from forebay.columns import Codec
from forebay.errors import SourceNotFound, SourceUnreadable
from forebay.recipe import Recipe, fields_of, fingerprint, hooks_of, identity_of
from forebay.source import Source, SourceFile
from forebay.store.base import Store


def bytes_by_codec(trial: Trial, recipe: Recipe) -> dict[str, int]:
    """How large the rows of a trial are under each codec, where the recipe leaves the choice."""
    if trial.made is None or "codec" not in fields_of(recipe):
        return {}
    found = {}
    for codec in get_args(Codec):
        columns = [msgspec.structs.replace(column, codec=codec) for column in recipe.columns()]
        found[codec] = _body_bytes(_encoded(trial.made, columns, trial.samples))
    return found


SAMPLED_SHARE = 0.0375  # the rest of 5 % goes into finding where samples begin and end
MOST_SAMPLED = {"bytes": 32 * 1024 * 1024, "samples": 8192}
LONGER_JUDGED = 4  # how many times planning's sample an estimate may read, where a sample takes long
WITH_DUPLICATES = "duplicates are counted as if they stayed: only a build, which reads all, finds out how many they are"


def estimate_build(
    listing: SourceListing,
    recipe: Recipe,
    store: Store | None,
    workers: int,
    skip_unreadable: bool = False,
    said: Sequence[str] = (),
) -> Estimate:
    """Sample at most 5 % of the source, and scale. `said` are notes of the recipe, which is resolved."""
    source, files = listing.source, listing.files
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
        seconds=trial.scaled(trial.seconds, total) / min(workers, chunks),
        workers=min(workers, chunks),  # a chunk is made by one
        failures=round(trial.scaled(trial.failures, total)),
        statistics=_scaled_statistics(trial, total),
        free_bytes=free,
        fits=free is None or stored <= free,
        failure_reason=reason,
        failure_example=example,
        all_failed=trial.all_failed,
        notes=(*said, *_notes(recipe, trial), *unreadable_note(unreadable.found), *listing.notes),
    )


def of_missing(
    store: Store, recipe: Recipe, layer: str, whole: Estimate, start_chunk: int | None, end_chunk: int | None
) -> Estimate:
    """The estimate of what a cache still lacks of a range of chunks; `whole` where this recipe has planned none."""
    kept, plan = read_recipe_document(store, layer), load_plan(store)
    if kept is None or not plan.segments or kept.fingerprint != fingerprint(recipe):
        return whole
    (found,) = find_gaps(store, layer)
    missing = [
        chunk
        for chunk in found.missing
        if (start_chunk or 0) <= chunk <= (found.planned if end_chunk is None else end_chunk)
    ]
    if missing:
        note = f"{len(missing):,} of {found.planned:,} planned chunk(s) are missing: the figures are of them"
    else:
        asked = "are" if start_chunk is None and end_chunk is None else "that were asked for are"
        note = f"nothing is missing: all of the {found.planned:,} planned chunk(s) {asked} present"
    weight = int(plan.weights[missing].sum())
    share = weight / max(1, int(plan.weights.sum()))
    stored = round(share * whole.stored_bytes)
    workers = min(whole.workers, max(1, len(missing)))
    return msgspec.structs.replace(
        whole,
        source_weight=weight,
        chunks=len(missing),
        stored_bytes=stored,
        rows=round(share * whole.rows),
        raw_bytes=round(share * whole.raw_bytes),
        failures=round(share * whole.failures),
        by_codec={codec: round(share * size) for codec, size in whole.by_codec.items()},
        seconds=share * whole.seconds * whole.workers / workers,
        workers=workers,
        statistics={name: round(share * value) for name, value in whole.statistics.items()},
        fits=whole.free_bytes is None or stored <= whole.free_bytes,
        notes=(*whole.notes, note),
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
