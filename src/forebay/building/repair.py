"""Repair a cache: restore the index, then replace damaged and lost chunks by files with the same content.

listed, SHA-256 differs ─▶ from the copy ─▶ sound file with the listed content ─▶ made again ─▶ stays listed, failed
unlisted file           ─▶ adopted or made again, as in `build`
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from forebay.building.chunk_maker import ChunkJob
from forebay.building.layers import restore_constants, source_for
from forebay.building.make import make
from forebay.building.options import BuildOptions
from forebay.building.repair_run import RepairRun
from forebay.building.restore_documents import recipe_problem
from forebay.building.restore_index import check_copy, restore_index
from forebay.building.update import named_alike
from forebay.building.writer import CacheWriter
from forebay.cache.catalog import readable_recipe
from forebay.cache.copy import read_published
from forebay.cache.reports import Problem, RepairReport
from forebay.cache.soundness import check_generations
from forebay.cache.source_check import SourceCheck
from forebay.cache.state import Index, numbers
from forebay.cache.verify import check_all, check_chunk, compare_source, listed_problems
from forebay.errors import BuildFailed, CacheNotFound, Damaged, ForebayError, FormatTooNew
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.format.tensors import hmac_key
from forebay.recipe import AnyRecipe, RecipeDocument
from forebay.source import Source
from forebay.store.base import Missing, Store
from forebay.store.retrying import RetryingStore

ADVICE = re.compile(r"; run `forebay (?:verify`, then `forebay )?repair[^`]*`")


def repair(
    store: Store,
    source: Source | None,
    recipe: AnyRecipe | None,
    copy: Store | None,
    options: BuildOptions,
    allow_network: bool,
) -> RepairReport:
    """Restore what is damaged or lost. Whatever `verify` still finds afterwards is a failure of the repair."""
    run = RepairRun(RetryingStore(store), copy, source, recipe, allow_network)
    check_copy(run.store, copy)
    try:
        restore_index(run)
    except (Damaged, CacheNotFound) as error:
        raise _without_advice(run, error) from error
    index = Index.take(run.store)
    for layer in sorted(index.layers, key=index.height):
        _repair_layer(run, options, Index.take(run.store, index), layer)
    newest, log = check_repaired(run), run.log
    return RepairReport(
        root=run.store.address,
        restored=tuple(dict.fromkeys(key for key in log.restored if key not in log.failed)),
        replaced=log.replaced,
        failed={key: ADVICE.sub("", reason) for key, reason in log.failed.items()},
        generation=newest.number,
        notes=tuple(log.notes),
    )


def _without_advice(run: RepairRun, error: ForebayError) -> ForebayError:
    """The error without a hint that suggests the running command."""
    if isinstance(error, FormatTooNew):
        return error
    hint = error.hint if error.hint and "forebay repair" not in error.hint else run.copy_hint
    return type(error)(ADVICE.sub("", error.message), hint=hint, **error.facts)


def _repair_layer(run: RepairRun, options: BuildOptions, index: Index, layer: str) -> None:
    """Put back the listed chunks of a layer that are damaged, and list or make again its unlisted files."""
    document, folder = index.recipe(layer), index.folder(layer)
    if document is None or folder is None:
        return
    listed = [(folder, record) for record in index.table(layer).records()]
    checked, _ = check_all(listed, partial(check_chunk, run.store, full=False), options.on_progress)
    bad = {one.chunk: one for (_, one), problems in zip(listed, checked, strict=True) if problems != []}
    for chunk in [chunk for chunk, record in bad.items() if _from_copy(run, folder, record)]:
        del bad[chunk]
    is_readable = hmac_key() is None and index.sound_plan is not None
    unlisted = numbers(index.state(layer).unlisted) if is_readable else []  # a killed repair or build left them
    if bad or unlisted:
        _remake(run, options, index, document, bad, unlisted)


def _from_copy(run: RepairRun, folder: str, record: ChunkRecord) -> bool:
    """Take a chunk from the copy if it has the listed bytes."""
    if run.copy is None:
        return False
    try:
        value = read_published(run.copy, record.key(folder), record)  # what is hashed is what is written
    except (Missing, Damaged, IsADirectoryError):
        return False
    return value is not None and run.write(record.key(folder), lambda: [value])


def _remake(
    run: RepairRun,
    options: BuildOptions,
    index: Index,
    document: RecipeDocument,
    bad: Mapping[int, ChunkRecord],
    unlisted: Sequence[int],
) -> None:
    """Make chunks as `build` does; a listed one that would have other content stays listed as it is."""
    folder, log = layout.document_folder(document), run.log
    reasons = _make_chunks(run, options, index, document, bad, unlisted)
    table = Index.take(run.store, index).table(document.layer)
    for chunk, record in bad.items():
        key, at = record.key(folder), table.position(chunk)
        now = table.record(at) if at is not None else record
        if chunk in reasons or check_chunk(run.store, folder, now, False) != []:
            log.failed[key] = reasons.get(chunk, "it was not made")
        elif now.sha256 == record.sha256:
            log.restored.append(key)
        else:
            log.replaced[key] = "the file has the same content in other bytes, as another library version writes it"
    for chunk in unlisted:
        key = layout.chunk(folder, chunk)
        if table.position(chunk) is not None:
            log.replaced.setdefault(key, "no generation listed it; it was compared with the source, or made again")
        elif chunk in reasons:  # else a living builder makes it
            log.failed[key] = f"no generation lists it: {reasons[chunk]}"


def _make_chunks(
    run: RepairRun,
    options: BuildOptions,
    index: Index,
    document: RecipeDocument,
    bad: Mapping[int, ChunkRecord],
    unlisted: Sequence[int],
) -> dict[int, str]:
    """Make chunks; returns why some could not be made. Changed source files fail only the chunks that need them."""
    chunks = [*bad, *unlisted]
    try:
        recipe = run.recipe_of(document)
        with CacheWriter(run.store, options.suited_to(recipe), is_repair=True, before=index) as cache:
            job = replace(cache.job(recipe, document.layer), repairs=dict(bad))
            if not document.reads:
                job = _with_source(run, cache.index, job)
            if not len(cache.index.table(document.layer)):
                restore_constants(run.store, recipe, document)
            return dict(make(cache, job, chunks).failed)
    except BuildFailed as error:
        return dict(error.facts.get("failed", {})) or dict.fromkeys(chunks, error.message)
    except ForebayError as error:
        return dict.fromkeys(chunks, f"{error.message}; {error.hint}" if error.hint else error.message)


def _with_source(run: RepairRun, index: Index, job: ChunkJob) -> ChunkJob:
    """The job of the base layer; files that look different and have the planned content are read as they look now."""
    source = named_alike(source_for(run.store, run.source, run.allow_network, index.plan, "repair"), index.plan)
    return replace(job, source=source, now=dict(SourceCheck.of(index, source).freshness().now))


def check_repaired(run: RepairRun) -> Generation:
    """The newest generation; whatever `verify` would still find is added to the failures."""
    store = run.store
    newest, problems = check_generations(store, past_refused=hmac_key() is not None).published(store)
    index = Index(store, newest)
    for problem in [*problems, *listed_problems(index), *_bound_problems(index)]:
        run.log.failed.setdefault(problem.key, problem.problem)
    for layer in index.layers:
        folder, touched = index.folder(layer) or "", {*run.log.restored, *run.log.replaced}
        for record in index.table(layer).records():
            key = record.key(folder)
            if key in touched and check_chunk(store, folder, record, False) != []:
                run.log.failed.setdefault(key, "it was put back, and is damaged again; check the disk")
    _note_source(run, index)
    return newest


def _bound_problems(index: Index) -> list[Problem]:
    """Recipe files that contradict themselves."""
    problems = []
    for layer in index.layers:
        document = readable_recipe(index.store, layer)
        if document is not None and (problem := recipe_problem(document)):
            problems.append(Problem(key=layout.recipe(layer), problem=problem, layer=layer))
    return problems


def _note_source(run: RepairRun, index: Index) -> None:
    """Changed source files are not damage of the cache; they are reported."""
    plan = index.sound_plan
    if plan is None or not plan.segments or run.source is None:
        return
    fresh = compare_source(index, named_alike(run.source, plan))
    if fresh is not None and fresh.stale:
        run.log.notes.append(f"{len(fresh.stale):,} source file(s) differ from the plan; see `forebay verify`")
