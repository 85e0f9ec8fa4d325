"""What a build would do, found out without writing anything."""

from dataclasses import replace

import msgspec

from forebay import api
from forebay.cache.making import in_order
from forebay.cache.plan import load_plan
from forebay.cache.publish import read_recipe_document
from forebay.cache.records import Estimate
from forebay.cache.settle import settle
from forebay.cli.records import DryRun
from forebay.cli.settings import Settings
from forebay.errors import RecipeMismatch
from forebay.recipe import differing_fields, fingerprint
from forebay.store import open_store


def dry_run_of(settings: Settings) -> DryRun:
    root, layer = str(settings.build.into), settings.build.layer or settings.recipe.kind
    recipe, _ = settle(open_store(root), settings.source, settings.recipe, layer)
    planned, missing = _gaps(root, layer, replace(settings, recipe=recipe))
    estimate = api.estimate(
        settings.source,
        settings.recipe,
        into=root,
        workers=settings.build.workers,
        skip_unreadable=settings.build.skip_unreadable,
    )
    return DryRun(
        root=root,
        layer=layer,
        kind=settings.recipe.kind,
        planned=planned,
        missing=missing,
        estimate=estimate if missing is None else _of_missing(root, missing, estimate),
    )


def _of_missing(root: str, missing: tuple[int, ...], whole: Estimate) -> Estimate:
    """What is left of an estimate of the whole source for the chunks that are missing."""
    weights = load_plan(open_store(root)).weights
    weight = int(weights[list(missing)].sum())
    share = weight / max(1, int(weights.sum()))
    stored = round(share * whole.stored_bytes)
    return msgspec.structs.replace(
        whole,
        source_weight=weight,
        chunks=len(missing),
        stored_bytes=stored,
        **{name: round(share * getattr(whole, name)) for name in ("rows", "raw_bytes", "failures")},
        by_codec={codec: round(share * size) for codec, size in whole.by_codec.items()},
        seconds=share * whole.seconds,
        statistics={name: round(share * value) for name, value in whole.statistics.items()},
        fits=whole.free_bytes is None or stored <= whole.free_bytes,
    )


def _gaps(root: str, layer: str, settings: Settings) -> tuple[int | None, tuple[int, ...] | None]:
    """How many chunks are planned and which of those asked for are missing; None where there is no plan."""
    store = open_store(root)
    kept = read_recipe_document(store, layer)
    if kept is not None and kept.fingerprint != fingerprint(settings.recipe):
        raise RecipeMismatch(root, layer, differing_fields(kept, settings.recipe))
    if kept is None or not load_plan(store).segments:
        return None, None
    found = api.gaps(root, layer=layer)[0]
    asked = in_order(range(found.planned), settings.build.mode, settings.build.start_chunk, settings.build.end_chunk)
    return found.planned, tuple(sorted(set(asked) & set(found.missing)))
