"""The calls that tie the rooms together: `build`, `grow`, `repair`, `estimate` and their kin.

Everything here takes the root of a cache (a folder's path or a store) and answers with a record.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from multiprocessing import parent_process
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args

import msgspec

from forebay.building.begin import check_start, kept_source, new_files, resolve_recipe, why_unchecked
from forebay.building.grow_cache import grow_base
from forebay.building.layer_build import (
    BuildRequest,
    build_layer,
    check_is_recipe,
    check_is_source,
    replace_layers,
    silent,
    with_workers,
    worker_count,
)
from forebay.building.planning import MissingChunks, SourceListing, estimate_build, missing_chunks
from forebay.building.refresh_cache import refresh_cache
from forebay.building.repair_cache import repair_before_build, repair_cache
from forebay.building.task import start_seconds
from forebay.cache.catalog import Snapshot, load_generation, read_cache_document, read_recipe_document
from forebay.cache.claims import LEASE_SECONDS
from forebay.cache.clean import clean_cache, drop_layers
from forebay.cache.copy import copy_cache, rekey_cache
from forebay.cache.records import (
    BuildReport,
    CleanReport,
    CopyReport,
    DropReport,
    DryRun,
    Estimate,
    GapList,
    LayerSummary,
    OnProgress,
    RefreshReport,
    RekeyReport,
    RemoteEstimate,
    RepairReport,
    Status,
    Summary,
    TierClean,
    TierContents,
    TierFill,
    TierShare,
    VerifyReport,
)
from forebay.cache.status import SHOWN_FAILURES, Depth, cache_status, find_gaps, planned_status, summarize_cache
from forebay.cache.verify import newest_sound, verify_generation
from forebay.engine import LocalEngine
from forebay.engine.base import Engine
from forebay.errors import CacheNotFound, RecipeMismatch, TierUnusable, UnknownKind, choice_error
from forebay.feeding.chunk_ahead import estimate_remote as feeding_estimate
from forebay.feeding.chunk_ahead import warm_tier
from forebay.fields import as_bytes
from forebay.format import layout
from forebay.format.chunk import MAX_BLOCK_BYTES
from forebay.format.tensors import hmac_key
from forebay.kinds import WRONG, recipe_class
from forebay.read.cache import check_pins, open_cache
from forebay.recipe import AnyRecipe, Recipe, RecipeHooks, dependencies_of, differing_fields, fingerprint, hooks_of
from forebay.source import Source, listed_once
from forebay.store import Root, open_store
from forebay.store.base import Store
from forebay.store.tier_folder import TierFolder

ShowProgress = bool | OnProgress | None
Mode = Literal["forward", "inverse"]
P = ParamSpec("P")
R = TypeVar("R")


def _reporting(verb: Callable[P, R]) -> Callable[P, R]:
    """Show a verb's progress: `progress=True` always, None where a person sees it, False never.

    A function is called with every `Progress` instead, as `on_progress` is.
    """

    @wraps(verb)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> R:
        show, passed = cast(ShowProgress, kwargs.pop("progress", None)), kwargs.get("on_progress")
        if not (show is None or isinstance(show, bool) or callable(show)):
            raise TypeError(f"progress must be True, False, None or a function (got {show!r})")
        calls = [cast(OnProgress, call) for call in (passed, show) if callable(call)]
        with ExitStack() as ending:
            if show is True or (show is None and not calls and _is_watched()):
                drawing = import_module("forebay.preview.console")  # and rich with it, only where it is shown
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
    source: Source | None,
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
    skip_unreadable: bool = False,
    replace: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    begin_at: float | None = None,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Compute what is missing of a layer, and nothing else.

    A recipe that `reads` columns adds a layer on the rows that are there; it needs no source. `workers=0` makes
    chunks in this process, and so does `engine="inline"`; `engine="local"`, the default, starts worker processes. Each
    worker, also a single one, tokenizes in one thread unless you set `FASTOKENS_BPE_THREADS`; this process leaves the
    number to that variable. `engine="ray"`, or a `forebay.engine.ray.RayEngine`, makes them on a Ray cluster, where an
    actor tokenizes in `num_cpus` threads unless its node sets the variable.
    `mode="inverse"` first checks every chunk that is there, then fills gaps from the far end. The range is inclusive.
    `max_failures` is a count, or a share below 1; without it a build stops at a chunk of which all samples fail.
    `skip_unreadable` leaves out damaged files of the source, which the report lists. `replace` drops
    a layer above the base that another recipe made, and builds it anew. `begin_at`, a share of the chunks (0.25: after
    a quarter), is where this builder begins if several work on one cache; each makes whatever is missing.

    A bar shows how far it is in a terminal or a notebook; `progress=False` hides it, `progress=True` shows it anywhere,
    and a function is called with every `Progress` instead. The same goes for every verb that takes long.
    """
    check_is_recipe(recipe)
    name = layer or layer_name(recipe)
    if replace:
        replace_layers(open_store(root), {name: recipe})
    if begin_at is not None and not 0 <= begin_at < 1:
        raise ValueError(f"begin_at is a share of the chunks, at least 0 and below 1 (got {begin_at!r})")
    request = BuildRequest(
        workers, memory_limit, max_failures, skip_unreadable, lease_seconds, on_progress, engine, begin_at
    )
    check_first = repair_before_build if mode == "inverse" else None
    return build_layer(open_store(root), source, recipe, name, mode, start_chunk, end_chunk, request, check_first)


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
    if replace:
        replace_layers(open_store(root), {layer: recipes[layer] for layer in replace})
    return [build(root, None, recipe, layer=layer, **options) for layer, recipe in recipes.items()]


@_reporting
def grow(
    root: Root,
    source: Source,
    *,
    recipe: Recipe | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    max_failures: int | float | None = None,
    skip_unreadable: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Append new files, and what was appended to known ones, as a new segment of the plan; then build it.

    A known file with other content is an error that names it. The further arguments are those of `build`.
    """
    request = BuildRequest(workers, memory_limit, max_failures, skip_unreadable, lease_seconds, on_progress)
    return grow_base(open_store(root), source, recipe, request)


@_reporting
def refresh(
    root: Root,
    *,
    source: Source | None = None,
    check_source: bool = False,
    recipes: Mapping[str, AnyRecipe] | None = None,
    drop_missing: bool = False,
    workers: int | None = None,
    memory_limit: int | None = None,
    max_failures: int | float | None = None,
    lease_seconds: float = LEASE_SECONDS,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> RefreshReport:
    """Make the chunks of changed source files again, as new revisions in a new generation.

    Chunks keep their numbers, and generations that are there keep their files. Chunks of further layers that were made
    from the old rows are made again too if their recipe can be opened here, or is passed in `recipes` by the name of
    its layer; otherwise they are missing, and named. `drop_missing` leaves out the samples of files that are gone;
    their rows are kept otherwise. A source on another machine that the cache names is read only with `check_source`,
    or where it is passed.
    """
    request = BuildRequest(workers, memory_limit, max_failures, False, lease_seconds, on_progress)
    return refresh_cache(open_store(root), source, check_source, recipes or {}, drop_missing, request)


@_reporting
def verify(
    root: Root,
    *,
    source: Source | None = None,
    check_source: bool = False,
    full: bool = False,
    cache_id: str | None = None,
    min_generation: int | None = None,
    digest: str | None = None,
    max_block_bytes: int = MAX_BLOCK_BYTES,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check every published byte against its digest; `full` also decodes all rows and hashes the source again.

    A source on another machine that the cache names is asked only with `check_source`, or where it is passed.
    `cache_id`, `min_generation` and `digest` refuse another cache in this place, as `open_cache` does, and
    `max_block_bytes` bounds what one compressed block decodes to.
    """
    if max_block_bytes < 1:
        raise ValueError(f"max_block_bytes must be at least 1 (got {max_block_bytes})")
    store = open_store(root)
    if (cache_id, min_generation, digest) != (None, None, None):
        check_pins(store, load_generation(store), cache_id, min_generation, digest)
    generation, bad = newest_sound(store)
    snapshot = Snapshot(store, generation, below="")
    asked = source or kept_source(snapshot.sound_plan, check_source)
    report = verify_generation(snapshot, bad, asked, full, on_progress or silent, max_block_bytes)
    note = "" if report.source_checked else why_unchecked(snapshot, asked)
    if (lost := [bad.key for bad in report.bad if layout.parse_segment(bad.key) is not None]) and asked is not None:
        advice = f"'{lost[0]}' of the plan is damaged; run `forebay repair {store.address}`"
        note = f"the source was not checked: {advice}"
    return msgspec.structs.replace(report, source_note=note)


@_reporting
def repair(
    root: Root,
    *,
    source: Source | None = None,
    check_source: bool = False,
    recipe: AnyRecipe | None = None,
    copy: Root | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> RepairReport:
    """Put back exactly what `verify` finds bad or missing: from a copy of the cache, or made again from the source.

    A source on another machine that the cache names is read only with `check_source`, or where it is passed.
    """
    request = BuildRequest(workers, memory_limit, on_progress=on_progress)
    copied = None if copy is None else open_store(copy)
    return repair_cache(open_store(root), source, recipe, copied, request, check_source)


def gaps(root: Root, *, layer: str | None = None) -> GapList:
    """Return the chunks that are planned and missing, a record per layer."""
    return GapList(find_gaps(open_store(root), layer))


@listed_once()
def status(
    root: Root,
    *,
    source: Source | None = None,
    check_source: bool = False,
    failures: int | None = SHOWN_FAILURES,
    depth: Depth = "chunks",
) -> Status:
    """How far a cache is: chunks present, missing, suspect, claimed by whom; failed samples; stale sources.

    Of the failed samples, the first `failures` are listed, and all of them where that is None. With `check_source`, or
    where the source is passed, it is listed to find new files, and a source on another machine is asked.
    With `depth="index"` no chunk is opened and the source is not asked: a cache of any size can be polled.
    `planners` are the builders that still plan, also where there is nothing else yet.
    """
    if depth not in get_args(Depth):
        raise choice_error("depth", depth, get_args(Depth))
    store = open_store(root)
    try:
        read_cache_document(store)
    except CacheNotFound:
        return planned_status(store)
    snapshot = Snapshot.take(store, below="")
    if depth == "index":
        return msgspec.structs.replace(cache_status(snapshot, None, 0, depth), source_note="the source was not asked")
    asked = source or kept_source(snapshot.sound_plan, check_source)
    found = cache_status(snapshot, asked, failures)
    if not found.source_checked:
        return msgspec.structs.replace(found, source_note=why_unchecked(snapshot, asked))
    if source is None and not check_source:
        return found  # a stranger's cache may name any folder of this machine
    return msgspec.structs.replace(found, new=new_files(store, snapshot.sound_plan, source, check_source))


def summarize(root: Root, *, generation: int | None = None) -> Summary:
    """What a cache is, at its newest generation or at another."""
    return _with_figures(summarize_cache(open_store(root), generation))


def estimate(
    source: Source,
    recipe: Recipe,
    *,
    into: Root | None = None,
    workers: int | None = None,
    skip_unreadable: bool = False,
    layer: str | None = None,
    start_chunk: int | None = None,
    end_chunk: int | None = None,
) -> Estimate:
    """What a build will take, estimated from a sample: at most 5 % of the source, but at least a few whole documents.

    If a cache that this recipe began is at `into`, the figures are of its missing chunks, in an inclusive range of
    them. Of images, the tags of all are read as well, unless the recipe names its vocabulary. `seconds` is of the whole
    build on this machine; unless `workers` is 0, a worker process is started to measure how long that takes.
    """
    started = time.perf_counter()
    check_is_recipe(recipe)
    store = None if into is None else open_store(into)
    listing = SourceListing(check_is_source(source), store)
    name = layer or layer_name(recipe)
    settled, said = resolve_recipe(store, listing, recipe, name)
    lacks = None if store is None else missing_chunks(store, settled, name, start_chunk, end_chunk)
    return _estimated(listing, settled, store, workers, skip_unreadable, said, lacks, started)


def _estimated(
    listing: SourceListing,
    recipe: Recipe,
    store: Store | None,
    workers: int | None,
    skip_unreadable: bool,
    said: Sequence[str],
    lacks: MissingChunks | None,
    started: float,
) -> Estimate:
    """`estimate_build` with the start of workers, which is measured where a build would start some."""
    workers = with_workers(BuildRequest(workers=workers), recipe, listing.source).workers
    count, is_work = worker_count(workers), lacks is None or bool(lacks.chunks)
    starting = start_seconds(LocalEngine(), recipe) if workers != 0 and is_work else 0.0
    return estimate_build(
        listing, recipe, store, count, skip_unreadable, said, lacks, started=started, starting=starting
    )


def dry_run(
    root: Root,
    source: Source,
    recipe: Recipe,
    *,
    layer: str | None = None,
    workers: int | None = None,
    start_chunk: int | None = None,
    end_chunk: int | None = None,
    skip_unreadable: bool = False,
) -> DryRun:
    """Return what `build` with these arguments would do, and write nothing.

    `planned` counts the chunks of the plan and `missing` lists those that would be built, of an inclusive range; both
    are None if there is no plan yet. `estimate` is what they will take. Another recipe's layer is an error, as in
    `build`. For teacher layers, use `fb.teachers.estimate_teachers`.
    """
    started = time.perf_counter()
    check_is_recipe(recipe)
    store, name = open_store(root), layer or layer_name(recipe)
    listing = SourceListing(check_is_source(source), store)
    settled, said = resolve_recipe(store, listing, recipe, name)
    kept = read_recipe_document(store, name)
    if kept is not None and kept.fingerprint != fingerprint(settled):
        raise RecipeMismatch(store.address, name, differing_fields(kept, settled), is_base=True)
    lacks = missing_chunks(store, settled, name, start_chunk, end_chunk)
    if lacks is not None:
        check_start(store.address, start_chunk, lacks.planned)
    return DryRun(
        root=store.address,
        layer=name,
        kind=recipe.kind,
        planned=lacks.planned if lacks else None,
        missing=lacks.chunks if lacks else None,
        estimate=_estimated(listing, settled, store, workers, skip_unreadable, said, lacks, started),
    )


def estimate_remote(
    root: Root,
    *,
    nodes: int = 1,
    ranks_per_node: int = 1,
    tier_bytes: int | str | None = None,
    bandwidth: float = 125e6,
    latency: float = 0.02,
    batch_size: int = 32,
    seed: int = 0,
    layers: Sequence[str] | None = None,
) -> RemoteEstimate:
    """What training from a remote cache will fetch: exact, because the order is a function of the seed.

    `bandwidth` of a node is in bytes per second, `latency` in seconds, `batch_size` counts rows of all ranks.
    """
    for name, number in {"nodes": nodes, "ranks_per_node": ranks_per_node, "batch_size": batch_size}.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1 (got {number})")
    return feeding_estimate(
        open_cache(root, layers=layers),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        tier_bytes=None if tier_bytes is None else as_bytes(tier_bytes),
        bandwidth=bandwidth,
        latency=latency,
        batch_size=batch_size,
        seed=seed,
    )


def warm_cache(
    root: Root,
    tier: str | os.PathLike[str],
    *,
    tier_bytes: int | str | None = None,
    lanes: Sequence[int] | None = None,
    node: int | None = None,
    nodes: int = 1,
    ranks_per_node: int = 1,
    seed: int = 0,
    layers: Sequence[str] | None = None,
    on_progress: OnProgress | None = None,
) -> TierFill:
    """Fetch the chunks of a remote cache into a tier before training: all, or those of some window-shuffle lanes.

    `node=1, nodes=4` fetches what the second of four nodes needs: `forebay estimate CACHE --remote` shows how much.
    """
    cache = open_cache(root, layers=layers, tier=tier, tier_bytes=tier_bytes)
    return warm_tier(
        cache,
        lanes=lanes,
        node=node,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        seed=seed,
        on_progress=on_progress,
    )


def tier_contents(path: str | os.PathLike[str]) -> TierContents:
    """What the tier of chunks in a folder keeps, cache by cache."""
    folder = TierFolder(path).opened()
    caches = tuple(
        TierShare(cache_id=one.cache_id, addresses=one.addresses, chunks=one.chunks, bytes=one.bytes)
        for one in folder.caches()
    )
    return TierContents(path=folder.path, bytes=sum(one.bytes for one in caches), caches=caches)


def clean_tier(path: str | os.PathLike[str], cache_id: str | None = None) -> TierClean:
    """Remove the chunks and documents of one cache, or of all, from a tier of chunks."""
    folder = TierFolder(path).opened()
    known = [one.cache_id for one in folder.caches()]
    chosen = known if cache_id is None else [name for name in known if name.startswith(cache_id)]
    if cache_id is not None and len(chosen) != 1:
        raise TierUnusable(
            folder.path,
            f"{'several caches have ids that begin' if chosen else 'no cache has an id that begins'} with '{cache_id}'",
            f"list them: forebay tier list {folder.path}",
        )
    return TierClean(path=folder.path, caches=tuple(chosen), freed_bytes=sum(map(folder.clean, chosen)))


def clean(root: Root, *, keep_generations: int | None = None, lease_seconds: float = LEASE_SECONDS) -> CleanReport:
    """Remove temporary files of dead writers, claims of dead builders, replaced chunks; never data in use."""
    return clean_cache(open_store(root), keep_generations, lease_seconds)


def drop(root: Root, *layers: str) -> DropReport:
    """Publish a generation without some layers above the base; older generations keep them until they are cleaned."""
    return drop_layers(open_store(root), layers)


@_reporting
def rekey(
    root: Root,
    *,
    old_key: bytes | None = None,
    new_key: bytes | None = None,
    progress: ShowProgress = None,
    on_progress: OnProgress | None = None,
) -> RekeyReport:
    """Sign the generations of a cache with another key, after checking every byte that they list.

    `old_key` is the key that they are tagged with, None where they carry no tag; `new_key` is the key to sign them
    with, at least 16 bytes, unless one is passed the one in FOREBAY_HMAC_KEY. Adding a key changes the digest that
    `open_cache(digest=…)` compares; replacing one by another does not.
    """
    new = hmac_key() if new_key is None else new_key
    return rekey_cache(open_store(root), old_key, new, on_progress or silent)


@_reporting
def copy(
    root: Root, destination: Root, *, progress: ShowProgress = None, on_progress: OnProgress | None = None
) -> CopyReport:
    """Copy what the newest generation lists, every chunk checked on the way."""
    if isinstance(destination, str | os.PathLike) and os.path.isfile(destination):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file, and a cache is a folder", os.fspath(destination))
    return copy_cache(open_store(root), open_store(destination), on_progress or silent)


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
    except UnknownKind:
        return {}
    holds = {"chunks": layer.chunks, "rows": layer.rows, "bytes": layer.bytes}
    try:
        return derive(layer.fields, layer.statistics, holds)
    except WRONG:  # a stranger's recipe names this kind and has other fields, or its chunks other statistics
        return {}
