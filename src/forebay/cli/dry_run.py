"""What a build would do, found out without writing anything."""

from dataclasses import replace

from forebay import api
from forebay.cache.making import in_order
from forebay.cache.plan import load_plan
from forebay.cache.publish import read_recipe_document
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
    return DryRun(
        root=root,
        layer=layer,
        kind=settings.recipe.kind,
        planned=planned,
        missing=missing,
        estimate=api.estimate(
            settings.source,
            settings.recipe,
            into=root,
            workers=settings.build.workers,
            skip_unreadable=settings.build.skip_unreadable,
        ),
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
