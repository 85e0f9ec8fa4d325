"""One function per verb: `build`, `update`, `repair`, `estimate` and so on.

Each takes the root of a cache (a folder, a URL or a store) and returns a record.
"""

import errno
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import wraps
from importlib import import_module
from multiprocessing import parent_process
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args

import msgspec

from forebay.building.build import build as build_layer
from forebay.building.build import check_is_recipe, check_range, check_start, replace_layers
from forebay.building.estimate import MissingChunks, estimate_build, missing_chunks
from forebay.building.layers import new_files, resolve_recipe, stored_source, why_unchecked
from forebay.building.listing import SourceListing
from forebay.building.options import BuildOptions, silent
from forebay.building.repair import repair as repair_cache
from forebay.building.update import update as update_cache
from forebay.cache.catalog import read_recipe_document
from forebay.cache.clean import clean_cache, drop_layers
from forebay.cache.copy import copy_cache
from forebay.cache.heartbeat import LEASE_SECONDS
from forebay.cache.reports import (
    BuildReport,
    CleanReport,
    CopyReport,
    DropReport,
    DryRun,
    Estimate,
    LayerSummary,
    OnProgress,
    RepairReport,
    Status,
    Summary,
    VerifyReport,
)
from forebay.cache.source_check import unread_note
from forebay.cache.state import Index
from forebay.cache.status import SHOWN_FAILURES, Depth, cache_status, check_begun, summarize_cache
from forebay.cache.verify import verify_cache
from forebay.engine.base import Engine
from forebay.errors import ForebayError, LibraryMissing, choice_error
from forebay.fields import check_flags, checked_number, checked_whole
from forebay.format.codecs import MAX_BLOCK_BYTES
from forebay.kinds import WRONG, recipe_class
from forebay.named_sources import AnySource, new_source, source_like
from forebay.read.pinned import load_pinned
from forebay.recipe import (
    AnyRecipe,
    Recipe,
    RecipeHooks,
    dependencies_of,
    differing_fields,
    fingerprint,
    hooks_of,
    recipe_mismatch,
)
from forebay.source import listed_once
from forebay.store import Root, open_store
from forebay.store.base import Store

ShowProgress = bool | OnProgress | None
Mode = Literal["forward", "inverse"]
P = ParamSpec("P")
R = TypeVar("R")


def _reporting(verb: Callable[P, R]) -> Callable[P, R]:
    """Show a verb's progress: always for `progress=True`, in terminals and notebooks for None, never for False.

    A function is called with every `Progress` instead, as `on_progress` is.
    """

    @wraps(verb)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> R:
        show, passed = cast(ShowProgress, kwargs.pop("progress", None)), kwargs.get("on_progress")
        if not (show is None or isinstance(show, bool) or callable(show)):
            raise TypeError(f"progress must be True, False, None or a function (got {show!r})")
        if not (passed is None or callable(passed)):
            raise TypeError(f"on_progress must be a function (got {passed!r})")
        calls = [cast(OnProgress, call) for call in (passed, show) if callable(call)]
        with ExitStack() as ending:
            if show is True or (show is None and not calls and _is_watched()):
                drawing = import_module("forebay.preview.progress")  # and rich with it, only where it is shown
                calls.append(ending.enter_context(drawing.shown_progress()))
            kwargs["on_progress"] = lambda progress: [call(progress) for call in calls]
            return verb(*args, **kwargs)

    return reporting


def _is_watched() -> bool:
    """Whether standard error is a terminal, or this is a notebook's process; never a worker that it started."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    return parent_process() is None and (on_terminal or "ipykernel" in sys.modules)


@_reporting
def build(
    root: Root,
    source: AnySource | None,
    recipe: AnyRecipe,
    *,
    layer: str | None = None,
    workers: int | None = None,
    engine: str | Engine | None = None,
    mode: Mode = "forward",
    start_chunk: int | None = None,
    end_chunk: int | None = None,
    memory_limit: int | None = None,
    max_failures: int | float | None = None,
    replace: bool = False,
    reuse: Root | None = None,
    copy: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Build the missing chunks of a layer.

    `source` is a path, a glob, `hub:org/name` or a bucket URL, a list of them, or one of `fb.sources`.
    A recipe that `reads` columns adds a layer to existing rows and needs no source. `workers=0` makes
    chunks in this process, and so does `engine="inline"`; `engine="local"`, the default, starts worker processes. Each
    worker, also a single one, tokenizes in one thread unless you set `FASTOKENS_BPE_THREADS`; this process leaves the
    number to that variable. `engine="ray"`, or a `forebay.engine.ray.RayEngine`, makes them on a Ray cluster, where an
    actor tokenizes in `num_cpus` threads unless its node sets the variable.
    `mode="inverse"` adds new files, then fills gaps from the far end. The range is inclusive.
    `max_failures`, a count or a share up to 1.0 of the samples of each segment, replaces the default of 1% or 10; it is
    stored for later commands. `replace` drops a layer above the base that another recipe made, and builds it anew.
    `reuse` is an older cache whose unchanged chunks a new cache takes over, by hard link unless `copy`.

    A terminal or a notebook shows a progress bar; `progress=False` hides it, `progress=True` shows it anywhere,
    and a function is called with every `Progress` instead. This applies to all verbs with progress.
    """
    check_is_recipe(recipe)
    check_range(start_chunk, end_chunk)
    check_flags(replace=replace, copy=copy)
    _check_copies(copy, reuse)
    if mode not in get_args(Mode):
        raise choice_error("mode", mode, get_args(Mode))
    options = BuildOptions(
        workers=workers, memory_limit=memory_limit, max_failures=max_failures, lease_seconds=lease_seconds,
        engine=engine, on_progress=on_progress or silent,
    )  # fmt: skip
    opened = None if source is None else new_source(recipe, source)
    store, name = open_store(root), layer_name(recipe) if layer is None else layer
    if replace:
        replace_layers(store, {name: recipe})
    old = None if reuse is None else open_store(reuse)
    chunks: dict[str, int | None] = {"start_chunk": start_chunk, "end_chunk": end_chunk}
    return build_layer(store, opened, recipe, name, options, mode=mode, reuse=old, copy=copy, **chunks)


def build_layers(
    root: Root, recipes: Mapping[str, AnyRecipe], *, replace: Collection[str] = (), **options: Any
) -> list[BuildReport]:
    """Add several layers, by name, one after the other: each is complete before the next begins.

    Each layer's models are released before the next layer begins; a layer that is complete loads none.
    Missing files that a layer needs are reported before the first is begun. Layers in `replace` that other recipes made
    are dropped first, together. The further arguments are those of `build`.
    """
    for recipe in recipes.values():
        dependencies_of(recipe)
    if unknown := set(replace) - recipes.keys():
        raise ValueError(f"replace must name layers that are built (got {', '.join(sorted(unknown))})")
    BuildOptions(**{field.name: options[field.name] for field in fields(BuildOptions) if field.name in options})
    if replace:
        replace_layers(open_store(root), {layer: recipes[layer] for layer in replace})
    return [build(root, None, recipe, layer=layer, **options) for layer, recipe in recipes.items()]


def _check_copies(copy: bool, reuse: Root | None) -> None:
    if copy and reuse is None:
        raise ForebayError(
            "there is no cache to copy chunks from",
            hint="pass one to reuse (reuse=OLD, --reuse OLD), or leave out copy",
        )


@_reporting
def update(
    root: Root,
    source: AnySource,
    *,
    recipe: Recipe | None = None,
    allow_network: bool = False,
    workers: int | None = None,
    memory_limit: int | None = None,
    max_failures: int | float | None = None,
    lease_seconds: float = LEASE_SECONDS,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Append new files, and data appended to known files, as a new segment of the plan; then build it.

    A known file with other content is an error that lists it: published rows never change. A model on the hub that is
    only recorded in the cache is fetched only with `allow_network`. The further arguments are those of `build`.
    """
    check_flags(allow_network=allow_network)
    options = BuildOptions(
        workers=workers,
        memory_limit=memory_limit,
        max_failures=max_failures,
        lease_seconds=lease_seconds,
        on_progress=on_progress or silent,
    )
    store = open_store(root)
    return update_cache(store, source_like(store, source), recipe, options, allow_network)


@_reporting
def verify(
    root: Root,
    *,
    source: AnySource | None = None,
    allow_network: bool = False,
    full: bool = False,
    cache_id: str | None = None,
    min_generation: int | None = None,
    digest: str | None = None,
    max_block_bytes: int = MAX_BLOCK_BYTES,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check every published byte against its digest; `full` also decodes all rows and hashes the source again.

    A source on another machine is contacted only with `allow_network`, or if it is passed.
    `cache_id`, `min_generation` and `digest` reject another cache, as in `open_cache`, and
    `max_block_bytes` limits the decoded size of one compressed block.
    """
    checked_whole("max_block_bytes", max_block_bytes, 1)
    check_flags(allow_network=allow_network, full=full)
    store = open_store(root)
    named = None if source is None else source_like(store, source)
    if (cache_id, min_generation, digest) != (None, None, None):
        load_pinned(store, None, cache_id, min_generation, digest)
    report, index = verify_cache(
        store,
        lambda index: named or stored_source(index.sound_plan, allow_network),
        full,
        on_progress or silent,
        max_block_bytes,
    )
    unread = "" if full or index.sound_plan is None else unread_note(index.sound_plan)
    note = unread if report.source_checked else why_unchecked(index, named)
    return msgspec.structs.replace(report, source_note=note)


@_reporting
def repair(
    root: Root,
    *,
    source: AnySource | None = None,
    allow_network: bool = False,
    recipe: AnyRecipe | None = None,
    copy: Root | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> RepairReport:
    """Restore damaged and missing chunks from a copy of the cache, or make them again from the source.

    A source on another machine is read only with `allow_network`, or if it is passed.
    """
    options = BuildOptions(workers=workers, memory_limit=memory_limit, on_progress=on_progress or silent)
    check_flags(allow_network=allow_network)
    if recipe is not None:
        check_is_recipe(recipe)
    store, copied = open_store(root), None if copy is None else open_store(copy)
    named = None if source is None else source_like(store, source)
    return repair_cache(store, named, recipe, copied, options, allow_network)


@listed_once()
def status(
    root: Root,
    *,
    source: AnySource | None = None,
    allow_network: bool = False,
    failures: int | None = SHOWN_FAILURES,
    depth: Depth = "chunks",
) -> Status:
    """Return the state of a cache: present, missing, suspect and claimed chunks, failed samples, stale sources.

    The first `failures` failed samples are listed, or all of them for None. With `allow_network`, or if the source is
    passed, the source is listed to find new files, also on another machine. With `depth="index"` no chunk is opened
    and the source is not read: a cache of any size can be polled.
    `planners` are the builders that are still planning, even before there is a plan.
    """
    if depth not in get_args(Depth):
        raise choice_error("depth", depth, get_args(Depth))
    check_flags(allow_network=allow_network)
    if failures is not None:
        checked_whole("failures", failures)
    store = open_store(root)
    check_begun(store)
    index = Index.take(store)
    if depth == "index":
        return msgspec.structs.replace(cache_status(index, None, 0, depth), source_note="the source was not checked")
    named = None if source is None else source_like(store, source)
    asked = named or stored_source(index.sound_plan, allow_network)
    report = cache_status(index, asked, failures)
    if not report.source_checked:
        return msgspec.structs.replace(report, source_note=why_unchecked(index, asked))
    report = msgspec.structs.replace(report, source_note=unread_note(index.plan))
    if source is None and not allow_network:
        return report  # an untrusted cache may name any folder of this machine
    return msgspec.structs.replace(report, new=new_files(store, index.sound_plan, named, allow_network))


def info(root: Root, *, generation: int | None = None) -> Summary:
    """Describe a cache, at its newest generation or at another one."""
    if generation is not None:
        checked_whole("generation", generation)
    return _with_figures(summarize_cache(open_store(root), generation))


def estimate(
    source: AnySource,
    recipe: Recipe,
    *,
    into: Root | None = None,
    workers: int | None = None,
    layer: str | None = None,
    start_chunk: int | None = None,
    end_chunk: int | None = None,
) -> Estimate:
    """Estimate the size and time of a build from a sample: at most 5% of the source, at least a few whole documents.

    If `into` has a cache of this recipe, the figures are those of its missing chunks, within an inclusive range. The
    tags of all images are read unless the recipe has a vocabulary. `seconds` covers listing the source and making
    chunks on this machine, not planning and starting workers.
    """
    check_is_recipe(recipe)
    check_range(start_chunk, end_chunk)
    store = None if into is None else open_store(into)
    listing = SourceListing(new_source(recipe, source), store)
    name = layer_name(recipe) if layer is None else layer
    resolved, notes = resolve_recipe(store, listing, recipe, name)
    lacks = None if store is None else missing_chunks(store, resolved, name, start_chunk, end_chunk)
    return _estimated(listing, resolved, store, workers, notes, lacks)


def _estimated(
    listing: SourceListing,
    recipe: Recipe,
    store: Store | None,
    workers: int | None,
    notes: Sequence[str],
    lacks: MissingChunks | None,
) -> Estimate:
    options = BuildOptions(workers=workers).suited_to(recipe, listing.source)
    return estimate_build(listing, recipe, store, options.slots(options.open_engine()), notes, lacks)


def dry_run(
    root: Root,
    source: AnySource,
    recipe: Recipe,
    *,
    layer: str | None = None,
    workers: int | None = None,
    start_chunk: int | None = None,
    end_chunk: int | None = None,
) -> DryRun:
    """Return what `build` with these arguments would do, and write nothing.

    `planned` counts the chunks of the plan and `missing` lists those to build, within an inclusive range; both
    are None if there is no plan yet. `estimate` has their size and time. A layer of another recipe is an error, as in
    `build`. For teacher layers, use `fb.teachers.estimate_teachers`.
    """
    check_is_recipe(recipe)
    check_range(start_chunk, end_chunk)
    store, name = open_store(root), layer_name(recipe) if layer is None else layer
    listing = SourceListing(new_source(recipe, source), store)
    resolved, notes = resolve_recipe(store, listing, recipe, name)
    stored = read_recipe_document(store, name)
    if stored is not None and stored.fingerprint != fingerprint(resolved):
        raise recipe_mismatch(store.address, name, differing_fields(stored, resolved), is_base=True)
    lacks = missing_chunks(store, resolved, name, start_chunk, end_chunk)
    if lacks is not None:
        check_start(store, start_chunk, lacks.planned)
    return DryRun(
        root=store.address,
        layer=name,
        kind=recipe.kind,
        planned=lacks.planned if lacks else None,
        missing=lacks.chunks if lacks else None,
        estimate=_estimated(listing, resolved, store, workers, notes, lacks),
    )


def clean(
    root: Root,
    *,
    keep_generations: int | None = None,
    unpublished: bool = False,
    lease_seconds: float = LEASE_SECONDS,
) -> CleanReport:
    """Remove temporary files and claims of stale builders, and files of dropped layers; never data in use.

    `unpublished` also withdraws the last segment of the plan if nothing of it is published, with its files.
    """
    if keep_generations is not None:
        checked_whole("keep_generations", keep_generations, 1)
    checked_number("lease_seconds", lease_seconds, 0)
    check_flags(unpublished=unpublished)
    return clean_cache(open_store(root), keep_generations, lease_seconds, unpublished)


def drop(root: Root, *layers: str) -> DropReport:
    """Publish a generation without some layers above the base; older generations keep them until they are cleaned."""
    if not layers:
        raise ValueError("drop needs the name of at least one layer")
    return drop_layers(open_store(root), layers)


@_reporting
def copy(
    root: Root,
    destination: Root,
    *,
    old_key: bytes | None = None,
    sign: bool = False,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> CopyReport:
    """Copy the newest generation and check every chunk; the copy is signed with the key in use.

    `old_key` is the key of the original if it differs; `sign` allows signing an original without a tag.
    """
    check_flags(sign=sign)
    if old_key is not None and not (isinstance(old_key, bytes) and old_key):
        raise TypeError("old_key must be bytes, and at least one")  # its value stays out of the message
    if isinstance(destination, str | os.PathLike) and os.path.isfile(destination):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file, and a cache is a folder", os.fspath(destination))
    return copy_cache(open_store(root), open_store(destination), on_progress or silent, old_key=old_key, sign=sign)


def layer_name(recipe: AnyRecipe) -> str:
    """The name of a recipe's layer, unless the caller chooses one."""
    return hooks_of(recipe).default_layer or recipe.kind


def _with_figures(summary: Summary) -> Summary:
    """Return the summary with the figures that each layer's kind, if installed, derives from its statistics."""
    layers = tuple(
        msgspec.structs.replace(layer, figures=_derived(layer, lambda hooks: hooks.figures)) for layer in summary.layers
    )
    base = next((layer for layer in layers if layer.layer == summary.base), None)
    return msgspec.structs.replace(
        summary, layers=layers, metadata=_derived(base, lambda hooks: hooks.metadata) if base else {}
    )


def _derived(layer: LayerSummary, hook: Callable[[RecipeHooks], Callable[..., dict[str, Any]]]) -> dict[str, object]:
    try:
        derive = hook(hooks_of(recipe_class(layer.kind)))
    except LibraryMissing:
        return {}
    holds = {"chunks": layer.chunks, "rows": layer.rows, "bytes": layer.bytes}
    try:
        return derive(layer.fields, layer.statistics, holds)
    except WRONG:  # an untrusted recipe names this kind and has other fields, or its chunks other statistics
        return {}
