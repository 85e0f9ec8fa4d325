"""`forebay grow` and `forebay refresh`: add new source files, rebuild changed ones."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from forebay import api, sources
from forebay.building.begin import begun_plan
from forebay.cache.catalog import read_cache_document
from forebay.cli.options import (
    DOWNLOAD_OPTIONS,
    HUB,
    REVISION_OPTION,
    Command,
    cache_argument,
    complete_file,
    decorated,
    failures_option,
    is_on_hub,
    json_option,
    memory_option,
    refuse_standard_input,
    skip_option,
    source_option,
    workers_option,
)
from forebay.cli.progress import shown_progress
from forebay.cli.show import show
from forebay.kinds import reopen_source
from forebay.source import Source
from forebay.sources.paths import named_below, refuse_url
from forebay.store import open_store

# The fields that identify a data set on the hub, apart from its revision.
HUB_IDENTITY = ("subset", "split", "text", "endpoint")


def source_like_before(cache: str, paths: Sequence[str], download: Mapping[str, Any]) -> Source:
    """A source like that of the cache, for other paths; `download` has the options for the hub."""
    described = _described(cache)
    if described["kind"] == "hub":
        return _on_hub(cache, described, paths, download)
    if described["kind"] == "image_manifest":
        return _with_manifest(cache, described, paths)
    if "patterns" not in described:
        raise click.UsageError(
            f"'{cache}' was built from a source of kind '{described['kind']}', which has no path; grow it in Python: "
            f"fb.grow({cache!r}, source)"
        )
    if any(map(is_on_hub, paths)) or download:
        raise click.UsageError(f"'{cache}' was built from files and grows by files; use a separate cache for the hub.")
    root, patterns = named_below(paths, None)
    return reopen_source({**described, "root": root, "patterns": list(patterns)})


def _described(cache: str) -> Mapping[str, Any]:
    store = open_store(cache)
    read_cache_document(store)
    return begun_plan(store).source


def _with_manifest(cache: str, described: Mapping[str, Any], paths: Sequence[str]) -> Source:
    """The manifest with more lines, at its present path; the images must not move."""
    if len(paths) != 1 or is_on_hub(paths[0]):
        raise click.UsageError(f"'{cache}' was built from one manifest and grows by lines added to it: pass that file.")
    refuse_url(paths[0])
    return reopen_source({**described, "manifest": os.path.relpath(os.path.abspath(paths[0]), described["root"])})


def _on_hub(cache: str, described: Mapping[str, Any], paths: Sequence[str], download: Mapping[str, Any]) -> Source:
    """The same data set at another revision.

    Naming the data set allows contacting the user's hub, but not another hub that only the cache names.
    """
    own = f"{HUB}{described['name']}"
    if list(paths) != [own]:
        raise click.UsageError(f"'{cache}' was built from {own} and grows by a newer revision of it: pass {own}.")
    repository = sources.HubSource.from_description(described).repository
    if not repository.asked.is_named:
        raise click.UsageError(
            f"'{cache}' was built from the hub at {repository.address}, which is not your endpoint; if you "
            f"trust it, set HF_ENDPOINT={repository.address}: your token will be sent there."
        )
    return sources.hub(described["name"], **{name: described[name] for name in HUB_IDENTITY}, **download)


def _with_download_options(command: Command) -> Command:
    return decorated(command, REVISION_OPTION, *DOWNLOAD_OPTIONS)


@click.command()
@cache_argument
@click.argument(
    "paths", nargs=-1, required=True, metavar="SOURCE...", callback=refuse_standard_input, shell_complete=complete_file
)
@_with_download_options
@workers_option
@memory_option
@failures_option
@skip_option
@json_option
def grow(
    cache: str,
    paths: tuple[str, ...],
    workers: int | None,
    memory_limit: int | None,
    max_failures: int | float | None,
    skip_unreadable: bool | None,
    as_json: bool,
    **download: Any,
) -> None:
    """Add new files, and data appended to known files, to a cache.

    Reads SOURCE like the first build, with the recipe of the cache. Fails if the content of a known file has changed. A
    cache of a data set on the hub grows by a newer revision of it.

    \b
    Example: forebay grow caches/edu 'data/2025-*.jsonl'
             forebay grow caches/fineweb hub:HuggingFaceFW/fineweb-edu
    """
    given = {name: value for name, value in download.items() if value is not None}
    with shown_progress(as_json) as on_progress:
        report = api.grow(
            cache,
            source_like_before(cache, paths, given),
            workers=workers,
            memory_limit=memory_limit,
            max_failures=max_failures,
            skip_unreadable=bool(skip_unreadable),
            on_progress=on_progress,
        )
    show(report, as_json)


@click.command()
@cache_argument
@click.option("--drop-missing", is_flag=True, help="Drop the samples of deleted source files.")
@source_option
@workers_option
@memory_option
@failures_option
@json_option
@click.pass_context
def refresh(
    ctx: click.Context,
    cache: str,
    drop_missing: bool,
    check_source: bool,
    workers: int | None,
    memory_limit: int | None,
    max_failures: int | float | None,
    as_json: bool,
) -> None:
    """Rebuild the rows of edited source files.

    Compares the source with the plan, and rebuilds the chunks of changed files as new revisions in a new generation.
    Chunks keep their numbers, and readers of an older generation are not affected. Other layers are rebuilt as well.
    Images of which only the sidecar changed are not decoded again. New files and appended data are for `forebay grow`.
    Exits 1 if a layer could not be rebuilt.

    Example: forebay refresh caches/photos
    """
    with shown_progress(as_json) as on_progress:
        report = api.refresh(
            cache,
            check_source=check_source,
            drop_missing=drop_missing,
            workers=workers,
            memory_limit=memory_limit,
            max_failures=max_failures,
            on_progress=on_progress,
        )
    show(report, as_json)
    ctx.exit(int(bool(report.missing)))
