"""Begin a cache or a layer, or open again what was begun.

To begin one is to resolve its recipe, to plan it, and to write what is fixed before the first chunk. The recipes and
the source of a cache are opened again by what it keeps of them. Whoever made a cache chose the names in it: what is on
another machine is contacted only where the caller allows it.
"""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import msgspec

from forebay.building.dedup import ReadAhead, deduplicate
from forebay.building.planning import (
    OnCut,
    SourceListing,
    Trial,
    chunk_weight,
    cut_source,
    limited_chunks,
    sample_heads,
    scratch_folder,
    try_readable,
    wait_until_settled,
)
from forebay.cache.catalog import (
    Snapshot,
    begin_cache,
    check_index,
    check_layer_name,
    column_homes,
    generation_numbers,
    layers_of,
    newest_generation,
    read_cache_document,
    read_recipe_document,
)
from forebay.cache.plan import KeptResults, Plan, Segment, Unreadable, decode_segment, keeping_results, load_identities
from forebay.columns import Array, Column, Ragged
from forebay.errors import (
    Damaged,
    ForebayError,
    IndexCorrupt,
    KeyRefused,
    LayerNotFound,
    LibraryMissing,
    NothingMade,
    RangeInvalid,
    RecipeInvalid,
    RecipeMismatch,
    SourceEmpty,
    SourceInvalid,
    SourceNeeded,
    SourceNotContacted,
    SourceNotFound,
    SourceUnreadable,
    StoreRefused,
    StoreUnavailable,
    UnknownKind,
)
from forebay.format import layout
from forebay.format.generation import Generation
from forebay.format.layout import FORMAT_VERSION, decode_recipe_document
from forebay.format.tensors import hmac_key, seal
from forebay.kinds import recipe_class, remote_source, reopen_recipe, reopen_source
from forebay.read.cache import open_cache
from forebay.recipe import (
    AnyRecipe,
    Recipe,
    canonical_json,
    check_recipe,
    constants_of,
    differing_fields,
    document,
    hooks_of,
    identity_of,
    input_names,
    is_same_recipe,
    reads_of,
    same_document,
)
from forebay.source import Sample, Source, SourceFile, allows_all
from forebay.store.base import Buffer, Store, holds, load_index, naming_full_disk, with_retries
from forebay.store.local import LocalStore

PROBE_BYTES = 1 << 16
PROBES = 3
ENOUGH_SAMPLES = 16  # fewer samples that all failed say nothing about the others


def prepare_base(
    snapshot: Snapshot,
    listing: SourceListing,
    recipe: Recipe,
    layer: str,
    on_cut: OnCut,
    memory_limit: int | None = None,
    max_failures: int | float | None = None,
    skip_unreadable: bool = False,
    on_little_room: Callable[[int, int], None] = lambda needed, free: None,
    start_chunk: int | None = None,
    read_ahead: ReadAhead | None = None,
) -> Snapshot:
    """The index of a cache whose base layer this recipe makes, planned now if it is new.

    A new source of which every sample that planning tries fails is refused, unless all of them may fail. So is a plan
    that ends before `start_chunk`. `read_ahead` has workers read what deduplication needs.
    """
    unreadable = Unreadable(skip_unreadable)
    check_index(snapshot)
    store, newest, plan, source = snapshot.store, snapshot.newest, snapshot.plan, listing.source
    check_recipe(recipe)
    check_kind(store, source, plan)
    # Planned before anything is written: a source, a recipe or a range that does not work leaves nothing behind.
    draft = None
    unsigned = is_unsigned(newest, plan)
    if unsigned and newest is not None:
        raise unsigned_plan(store, plan, len(newest.plan))
    if not plan.segments or unsigned:
        files = listing.apart
        if not files and listing.files:
            raise SourceInvalid(
                f"all of the source lies in '{store.address}', where the cache would be; choose another"
            )
        unreadable.take_listed(source, files)
        wait_until_settled(files)
        trial = try_readable(source, files, recipe, unreadable) if files else None
        if trial is not None and not allows_all(max_failures):
            check_trial(store, trial, sum(map(source.weight, unreadable.without(files))))
        if trial is not None:
            _compare_with_disk(store, source, unreadable.without(files), trial, on_little_room)
        with keeping_results(store) as kept:
            draft = _first_draft(
                store, source, files, recipe, on_cut, trial, memory_limit, unreadable, kept, read_ahead
            )
    check_start(store.address, start_chunk, len(plan) if draft is None else len(draft.segment))
    cache = begin_cache(store, layer)
    if cache.base != layer:
        raise RecipeInvalid(
            f"the cache at '{store.address}' has the base layer '{cache.base}'; a further layer's recipe must declare "
            f"the base columns it reads"
        )
    prepare_layer(store, recipe, layer)
    if draft is None:
        return snapshot
    draft.append(store)
    begun = with_retries(partial(_planned, store))
    if hmac_key() is not None and begun.plan.digests != (draft.segment.digest(),):
        raise unsigned_plan(store, begun.plan, 0)
    return begun


def _planned(store: Store) -> Snapshot:
    """The index, read again after planning: that takes as long as the source is large, and another may have been first.

    A listing from before the segment was written would look like a source without samples.
    """
    begun = Snapshot.take(store)
    if not begun.plan.segments:
        cause = f"'{layout.plan_segment(0)}' is written, and its listing does not show it"
        raise StoreUnavailable(store.address, "list the plan", cause, "run the same command again")
    return begun


def check_kind(store: Store, source: Source, plan: Plan) -> None:
    """Parts count in the unit of their source, and `repair` reads all of them with one source.

    So does a build that resumes: it reads the rest as it has read the chunks that exist.
    """
    if not plan.segments:
        return
    planned, given = plan.source, source.describe()
    old, new = planned.get("kind"), given.get("kind")
    if old != new:
        raise ForebayError(
            f"the cache at '{store.address}' was built from a source of kind '{old}', and this one is of kind '{new}'; "
            f"pass a source of kind '{old}', or build into a new root"
        )
    for name in source.read_by:
        if planned.get(name) != given.get(name):
            raise ForebayError(
                f"the cache at '{store.address}' was built from a source with {name}={planned.get(name)!r} and cannot "
                f"continue with {name}={given.get(name)!r}; pass the same value again, or build a new cache"
            )


def _probe_folder(store: Store) -> TemporaryDirectory[str]:
    """A folder where the cache will be; a planner that failed may have removed the root since it was looked for."""
    for _ in range(PROBES):
        with suppress(FileNotFoundError):
            return TemporaryDirectory(prefix=".forebay-probe-", dir=scratch_folder(store))
    return TemporaryDirectory(prefix=".forebay-probe-", dir=scratch_folder(store))


@contextmanager
def probed_destination(store: Store) -> Iterator[str]:
    """Refuse a folder in which no file can be written or linked, or that has no room, before anything is read.

    Nothing is left there; a cache that is not there yet is tried in the folder that it will be made in. Yields the path
    of the file that was written, by which another machine sees that it shares the folder; empty where there is none.
    """
    folder = scratch_folder(store)
    with ExitStack() as ending:
        if folder is None:
            yield ""
            return
        try:
            with naming_full_disk(store, lambda: PROBE_BYTES):
                inside = ending.enter_context(_probe_folder(store))
                LocalStore(inside).create("probe", [bytes(PROBE_BYTES)], durable=False)
        except StoreRefused as error:
            raise StoreRefused(store.address, error.problem, error.advice) from error
        except OSError as error:
            if isinstance(error, ForebayError):
                raise
            raise OSError(error.errno, error.strerror, store.address) from error
        yield os.path.join(inside, "probe")


def check_start(root: str, start_chunk: int | None, planned: int) -> None:
    """Refuse a range of chunks that begins beyond the plan."""
    if start_chunk and start_chunk >= planned:
        raise RangeInvalid(root, start_chunk, planned)


def begun_plan(store: Store) -> Plan:
    """The plan of a cache to continue with; where there is none, an error says what is lost and what to run."""
    snapshot = Snapshot.take(store)
    check_index(snapshot)
    plan = snapshot.plan
    if not plan.segments:
        raise ForebayError(
            f"the cache at '{store.address}' has no plan and nothing published: its build ended before it was planned, "
            f"or both are lost; name the source again, `forebay build KIND SOURCE… --into {store.address}`"
        )
    return plan


def is_unsigned(newest: Generation | None, plan: Plan) -> bool:
    """Whether a key is in use and the plan has segments that no tagged generation covers."""
    return hmac_key() is not None and len(plan.segments) > (len(newest.plan) if newest else 0)


def unsigned_plan(store: Store, plan: Plan, number: int, compared: bool = False) -> KeyRefused:
    """Why a segment that no tagged generation covers is refused; `compared`: it is not what the source gives."""
    at = min(number, len(plan.segments) - 1)
    verb = "refresh" if plan.segments[at].amends else "grow"
    if not number:
        way = f"delete '{store.address}' and build it again"
    elif compared:
        way = f"delete it if nobody runs `forebay {verb}` now, and run `forebay {verb} {store.address}` again"
    elif verb == "grow":
        way = "name its source again with `forebay grow`"
    else:
        way = f"run `forebay refresh {store.address}`, which compares it with the source"
    problem = f"no tagged generation covers it, and the source was not planned so by this build; {way}"
    return KeyRefused(store.address, layout.plan_segment(at), problem)


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A segment that is not in the plan yet, and the file of identities that goes with it, if any."""

    segment: Segment
    identities: Sequence[Buffer] = ()

    def append(self, store: Store) -> bool:
        """Make it part of the plan; False where another planner was first. The identities are there before it is."""
        number, digest = self.segment.number, self.segment.identities
        key = layout.identities(number, digest)
        if self.identities and not store.create(key, self.identities) and not _is_sound(store, self.segment):
            store.replace(key, self.identities)
        place = layout.plan_segment(number)
        created = store.create(place, self.segment.encode())
        if not created and self.identities:
            first, _ = decode_segment(load_index(store, place), store.address, place)
            if first.identities != digest:
                store.delete(key)
        return created


def draft_segment(
    store: Store,
    source: Source,
    recipe: Recipe,
    segment: Segment,
    earlier: Plan,
    on_cut: OnCut,
    memory_limit: int | None = None,
    kept_results: KeptResults | None = None,
    read_ahead: ReadAhead | None = None,
) -> Draft:
    """The next segment of a plan, without what repeats earlier samples if its recipe leaves that out."""
    _check_as_before(store, recipe, earlier)
    identity = identity_of(recipe)
    if identity is None:
        return Draft(segment)
    found = deduplicate(
        store, source, recipe, identity, segment, earlier, on_cut, memory_limit, kept_results, read_ahead
    )
    return Draft(*found)


def _check_as_before(store: Store, recipe: Recipe, earlier: Plan) -> None:
    """Refuse where older samples were compared by another rule: new ones could not be compared with them."""
    judged = [bool(segment.identities) for segment in earlier.segments]
    if identity_of(recipe) is not None and not all(judged):
        raise RecipeInvalid(
            f"the recipe '{recipe.kind}' leaves out duplicates, but the cache at '{store.address}' was planned without "
            f"looking for them; build a new cache"
        )
    if identity_of(recipe) is None and any(judged):
        raise RecipeInvalid(
            f"the cache at '{store.address}' was planned without duplicates, but the recipe '{recipe.kind}' has no "
            f"`identity` to find more of them; give it back, or build a new cache"
        )


def _is_sound(store: Store, segment: Segment) -> bool:
    try:
        load_identities(store, segment)
    except Damaged:
        return False
    return True


def _first_draft(
    store: Store,
    source: Source,
    files: Sequence[SourceFile],
    recipe: Recipe,
    on_cut: OnCut,
    trial: Trial | None,
    memory_limit: int | None,
    unreadable: Unreadable,
    kept: KeptResults,
    read_ahead: ReadAhead | None,
) -> Draft:
    """The first segment, planned again without a file that only deduplication, which reads all, found unreadable."""
    while True:
        try:
            first = first_segment(source, files, recipe, on_cut, trial, unreadable, kept)
            if not len(first):
                raise SourceEmpty(store.address, f"none of the {len(files):,} file(s) of the source has a sample")
            return draft_segment(store, source, recipe, first, Plan((), ()), on_cut, memory_limit, kept, read_ahead)
        except SourceUnreadable as error:
            unreadable.take(error, files)


def _compare_with_disk(
    store: Store, source: Source, files: Sequence[SourceFile], trial: Trial, on_little_room: Callable[[int, int], None]
) -> None:
    """Call with the bytes that are needed and free, before the work starts, where the disk cannot hold it."""
    free, total = store.free_bytes(), sum(map(source.weight, files))
    needed = round(trial.scaled(trial.stored_bytes, total))
    if free and needed > free:  # what has none at all is not a disk, or says so at once
        on_little_room(needed, free)


def check_trial(store: Store, trial: Trial, weight: int, read_like: str = "") -> None:
    """Refuse a source of `weight` of which nothing can be made, before all of it is read.

    `read_like` says how the cache reads its source, where more of that is to be added.
    """
    if not trial.all_failed:
        return
    if trial.samples >= ENOUGH_SAMPLES or trial.weight >= weight:
        reasons = trial.reasons
        advice = reasons.advice() if not read_like else ""
        raise NothingMade(
            store.address, len(reasons), *reasons.most_frequent(), advice, sampled=True, read_like=read_like
        )


def first_segment(
    source: Source,
    files: Sequence[SourceFile],
    recipe: Recipe,
    on_cut: OnCut,
    trial: Trial | None = None,
    unreadable: Unreadable | None = None,
    kept: KeptResults | None = None,
) -> Segment:
    """Return the first segment of a plan; the same source gives the same segment."""
    if not files:
        raise SourceNotFound(str(source.describe()))
    unreadable = unreadable or Unreadable()
    trial = trial or try_readable(source, files, recipe, unreadable)
    target = recipe.chunk_target()
    weight = chunk_weight(target, trial, source.unit)
    chunks = cut_source(source, unreadable.without(files), weight, {}, on_cut, unreadable, kept)
    chunks = limited_chunks(source, chunks, target.most_samples)
    segment = Segment.planned(chunks, files, number=0, first_chunk=0, source=source.describe(), weight=weight)
    return segment.passing_over(unreadable)


def prepare_layer(store: Store, recipe: AnyRecipe, layer: str) -> None:
    """Keep the recipe of a layer, or compare it with the one that is kept."""
    check_layer_name(layer)
    check_recipe(recipe)
    kept = read_recipe_document(store, layer)
    layers = layers_of(store) if kept is None or reads_of(recipe) else []
    inputs = _inputs(store, recipe, layer, layers)
    if kept is None:
        _check_names(store, recipe, layer, layers)
        _keep_recipe(store, recipe, layer, inputs)
        kept = read_recipe_document(store, layer)
    if kept is None:  # whoever kept it took it back
        raise RecipeInvalid(f"another build withdrew layer '{layer}', as a further layer has one of its columns")
    if not is_same_recipe(kept, recipe, inputs):
        raise RecipeMismatch(store.address, layer, differing_fields(kept, recipe, inputs), not reads_of(recipe))
    if not same_document(kept, document(recipe, layer, FORMAT_VERSION, inputs, kept.dependencies), recipe):
        problem = "it declares other columns than its recipe, with the same fingerprint; raise the recipe's revision"
        raise IndexCorrupt(store.address, layout.recipe(layer), f"{problem} where `columns` or `reads` changed")
    if not holds(store, layout.constants(layer)):  # who kept the recipe may have died before it kept these
        _keep_constants(store, recipe, layer)


def _keep_recipe(store: Store, recipe: AnyRecipe, layer: str, inputs: Mapping[str, str]) -> None:
    """Of two builders that begin a layer, the one whose recipe is kept keeps its constants, and the other none."""
    text = msgspec.json.format(msgspec.json.encode(document(recipe, layer, FORMAT_VERSION, inputs)))
    try:
        decode_recipe_document(text, layer, store.address, layout.recipe(layer))
    except IndexCorrupt as error:  # nobody could read it back
        raise RecipeInvalid(f"the recipe '{recipe.kind}' of layer '{layer}' cannot be kept: {error.problem}") from error
    if store.create(layout.recipe(layer), [text + b"\n"]):
        try:
            # Again, now that others see it: a layer with the same column may have begun since the first check.
            _check_names(store, recipe, layer, layers_of(store))
        except RecipeInvalid:
            store.delete(layout.recipe(layer))
            raise
        _keep_constants(store, recipe, layer)


def sealed_constants(recipe: AnyRecipe, layer: str) -> Sequence[Buffer]:
    """Return the bytes of a layer's constants; none if its recipe has none."""
    constants = constants_of(recipe)
    metadata = {"format_version": FORMAT_VERSION, "type": "constants", "layer": layer}
    return seal(metadata, dict(sorted(constants.items()))) if constants else []


def _keep_constants(store: Store, recipe: AnyRecipe, layer: str) -> None:
    """In place of whatever may lie there without a recipe."""
    constants = sealed_constants(recipe, layer)
    if constants:
        store.replace(layout.constants(layer), constants)
    elif holds(store, layout.constants(layer)):
        store.delete(layout.constants(layer))


def _inputs(store: Store, recipe: AnyRecipe, layer: str, layers: Sequence[str]) -> dict[str, str]:
    """The further layers that a recipe reads here, as dependencies: none where it reads base columns only.

    A layer stands on a cache that is there, and reads columns that some layer of it has.
    """
    if not reads_of(recipe):
        return {}
    base = read_cache_document(store).base
    homes = column_homes({layer: _columns(store, layer) for layer in layers}, base)
    found: dict[str, str] = {}
    if missing := [name for name in reads_of(recipe) if name not in homes]:
        columns = f"column{'s' if len(missing) > 1 else ''} " + ", ".join(f"'{name}'" for name in missing)
        raise RecipeInvalid(
            f"layer '{layer}' reads the {columns}, which no layer of '{store.address}' has; there are: "
            f"{', '.join(homes)}; build the layer that makes {'them' if len(missing) > 1 else 'it'} first"
        )
    for name in reads_of(recipe):
        if homes[name].layer != base:
            kept = read_recipe_document(store, homes[name].layer)
            assert kept is not None
            found[kept.layer] = kept.fingerprint
    return input_names(found)


def _check_names(store: Store, recipe: AnyRecipe, layer: str, layers: Sequence[str]) -> None:
    """A column is asked for by its name alone, so no two layers may share one."""
    taken = {column.name: name for name in layers if name != layer for column in _columns(store, name)}
    for column in recipe.columns():
        if column.name in taken:
            raise RecipeInvalid(f"layer '{taken[column.name]}' has a column '{column.name}' already; choose another")
        if column.name == "present" and reads_of(recipe):
            raise RecipeInvalid("a layer's presence bits are called 'present'; choose another name for the column")


def _columns(store: Store, layer: str) -> tuple[Column, ...]:
    kept = read_recipe_document(store, layer)
    return kept.columns if kept else ()


AnyR = TypeVar("AnyR", bound=AnyRecipe)


@dataclass(frozen=True, slots=True)
class Survey:
    """What a recipe may ask about the source before it decides: a few samples, or what is said of every one."""

    listing: SourceListing | None
    store: Store | None = None

    def rows(self, names: Sequence[str], count: int) -> dict[str, Array | Ragged]:
        """The first rows of some columns of a cache that is there, of the first chunk that has them all at most.

        None where no layer has such a column: whoever prepares the layer says so.
        """
        newest = newest_generation(self.store) if self.store is not None else None
        if self.store is None or newest is None:
            return {}
        homes = column_homes({layer: newest.recipe(layer).columns for layer in newest.recipes}, newest.base)
        if not all(name in homes for name in names):
            return {}
        layers = dict.fromkeys(homes[name].layer for name in names)
        cache = open_cache(self.store, generation=newest.number, layers=list(layers))
        first = int(cache.chunk_starts[1]) if len(cache.chunk_numbers) else 0
        return cache.read(range(min(count, first)), names)

    def __call__(self) -> Iterable[Sample]:
        return () if self.listing is None else sample_heads(self.listing.source, self.listing.files)

    def annotations(self) -> Iterable[Mapping[str, Any]]:
        """The metadata of all samples, in order; where the source cannot tell it apart, every sample is read."""
        return () if self.listing is None else self.listing.source.annotations(self.listing.files)


def resolve_recipe(
    store: Store | None, listing: SourceListing | None, recipe: AnyR, layer: str
) -> tuple[AnyR, tuple[str, ...]]:
    """The recipe with every choice made, and what there is to say about the choices.

    A layer that is there has made them; a new one makes them by a few samples of the source.
    """
    kept = None
    if store is not None:
        check_layer_name(layer)
        kept = read_recipe_document(store, layer)
    return hooks_of(recipe).settled(kept.fields if kept else None, Survey(listing, store))


_CANNOT_OPEN = (UnknownKind, LibraryMissing, SourceInvalid, SourceNeeded)


def check_kept_texts(store: Store) -> None:
    """With a key, refuse to build by what a cache keeps before a tag covers it: anyone may have put it there."""
    if hmac_key() is not None and newest_generation(store) is None:
        read_cache_document(store)
        problem = "nothing is published yet, so no tag covers it; name the source and the recipe again to build it"
        raise KeyRefused(store.address, layout.CACHE, problem)


def kept_recipe(store: Store, layer: str, verb: str, check_source: bool) -> AnyRecipe:
    """The recipe that a layer keeps; `verb` is named in the error where something would have to be fetched for it."""
    kept = read_recipe_document(store, layer)
    if kept is None:
        raise LayerNotFound(store.address, layer, [])
    return reopen_recipe(kept, constants_file(store, layer), root=store.address, verb=verb, check_source=check_source)


def constants_file(store: Store, layer: str) -> str | None:
    """A file with the constants of a layer; for a store without files, a copy that is removed when the process ends."""
    key = layout.constants(layer)
    path = store.local_path(key)
    if path is not None or not holds(store, key):
        return path
    folder = tempfile.mkdtemp(prefix="forebay-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copied = os.path.join(folder, os.path.basename(key))
    with open(copied, "wb") as file:
        file.write(store.view(key))
    return copied


@contextmanager
def released(recipe: AnyRecipe) -> Iterator[list[str]]:
    """Release what a recipe has loaded here when the work ends, however it ends; the list then holds its notes."""
    said: list[str] = []
    try:
        yield said
    finally:
        said += hooks_of(recipe).release()


def recipe_until(
    ending: ExitStack, store: Store, passed: AnyRecipe | None, kept: Callable[[str], AnyRecipe], layer: str
) -> AnyRecipe:
    """A layer's recipe: the one passed where it is of that kind, else the kept one; released at the end."""
    recipe = _matching(store, passed, layer) or kept(layer)
    ending.enter_context(released(recipe))
    return recipe


def _matching(store: Store, passed: AnyRecipe | None, layer: str) -> AnyRecipe | None:
    kept = read_recipe_document(store, layer)
    if passed is None or kept is None or kept.kind != passed.kind:
        return None
    settled, _ = resolve_recipe(store, None, passed, layer)
    prepare_layer(store, settled, layer)
    return settled


def kept_workers(store: Store) -> int | None:
    """How many processes the recipes of a cache ask for: none beside this one where one of them loads a model."""
    kept = [read_recipe_document(store, layer) for layer in layers_of(store)]
    asked = [_asked_workers(one.kind) for one in kept if one is not None]
    return min((number for number in asked if number is not None), default=None)


def _asked_workers(kind: str) -> int | None:
    try:
        asked: object = hooks_of(recipe_class(kind)).workers
        return 0 if isinstance(asked, property) else cast(int | None, asked)  # by its fields: this process will do
    except UnknownKind:
        return None


def source_for(store: Store, source: Source | None, check_source: bool, plan: Plan, verb: str) -> Source:
    """The source that was passed, or the one that the plan names where it may be asked."""
    if source is None and not check_source and (remote := remote_source(plan.source)):
        raise SourceNotContacted(store.address, remote, verb)
    return source or _kept(plan.described, check_source)  # which says what is in the way


def _kept(description: Mapping[str, Any], check_source: bool) -> Source:
    """A source that nobody but the cache names: only where that is allowed are its folders walked."""
    source = reopen_source(description)
    return source.without_gone() if check_source else source.unwalked()


def kept_source(plan: Plan | None, check_source: bool) -> Source | None:
    """Return the source that a plan describes; None if it cannot be opened here."""
    return reopened(check_source, plan.source) if plan is not None and plan.segments else None


def reopened(check_source: bool, description: Mapping[str, Any]) -> Source | None:
    """The source that a description names, None where it cannot be opened, or is remote and may not be asked."""
    try:
        if remote_source(description) and not check_source:
            return None
        return _kept(description, check_source)
    except _CANNOT_OPEN:
        return None


def new_files(store: Store, plan: Plan | None, asked: Source | None, check_source: bool) -> tuple[str, ...]:
    """Files that the source passed, or a pattern of the cache, names and no segment of the plan has, by name."""
    segments = [segment for segment in plan.segments if not segment.amends] if plan is not None else []
    if plan is None or not segments:
        return ()
    texts = dict.fromkeys(canonical_json(one.source) for one in segments if "patterns" in one.source)
    kept = [reopened(check_source, json.loads(text)) for text in texts]
    root = segments[0].source.get("root")
    named = [asked if root is None else asked.rebased(root)] if asked is not None else kept
    found: set[str] = set()
    for source in named:
        if source is not None and "patterns" in source.describe():
            with suppress(OSError, SourceNotFound, SourceUnreadable):  # what is planned is looked at by name
                found |= {file.path for file in SourceListing(source, store).apart if file.size > 0}
    return tuple(sorted(found - plan.files.keys()))


def why_unchecked(snapshot: Snapshot, asked: Source | None) -> str:
    """Why a source was not checked, and what to do about it."""
    store = snapshot.store
    try:
        plan = snapshot.plan
    except Damaged as error:
        return f"the source was not checked: {error}"
    if not plan.segments:
        gone = f"'{layout.plan_segment(0)}' is gone; run `forebay repair {store.address}`"
        return f"the source was not checked: {gone if generation_numbers(store) else 'nothing is planned yet'}"
    if asked is None:
        try:
            if remote := remote_source(plan.source):
                return f"the source '{remote}' was not checked; pass --check-source (check_source=True) to contact it"
            reopen_source(plan.source)
        except _CANNOT_OPEN as error:
            return f"the source was not checked: {error}"
    return "the source was not checked: it could not be reached, or the plan is damaged"
