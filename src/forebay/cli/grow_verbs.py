"""`forebay grow` and `forebay refresh`: new and changed source files."""

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

# What a data set on the hub is known by; a newer revision of it is the same data set.
HUB_IDENTITY = ("subset", "split", "text", "endpoint")


def source_like_before(cache: str, paths: Sequence[str], download: Mapping[str, Any]) -> Source:
    """Other data, read as the plan's source reads its own; `download` says how, where it is on the hub."""
    described = _described(cache)
    if described["kind"] == "hub":
        return _on_hub(cache, described, paths, download)
    if described["kind"] == "image_manifest":
        return _with_manifest(cache, described, paths)
    if "patterns" not in described:
        raise click.UsageError(
            f"'{cache}' was built from a source of kind '{described['kind']}', which no path names; grow it in Python: "
            f"fb.grow({cache!r}, source)"
        )
    if any(map(is_on_hub, paths)) or download:
        raise click.UsageError(f"'{cache}' was built from files, and grows by files; the hub needs a separate cache.")
    root, patterns = named_below(paths, None)
    return reopen_source({**described, "root": root, "patterns": list(patterns)})


def _described(cache: str) -> Mapping[str, Any]:
    store = open_store(cache)
    read_cache_document(store)
    return begun_plan(store).source


def _with_manifest(cache: str, described: Mapping[str, Any], paths: Sequence[str]) -> Source:
    """The manifest with further lines, wherever it is now; the images stay where they are."""
    if len(paths) != 1 or is_on_hub(paths[0]):
        raise click.UsageError(
            f"'{cache}' was built from one manifest, and grows by its further lines: name that file."
        )
    refuse_url(paths[0])
    return reopen_source({**described, "manifest": os.path.relpath(os.path.abspath(paths[0]), described["root"])})


def _on_hub(cache: str, described: Mapping[str, Any], paths: Sequence[str], download: Mapping[str, Any]) -> Source:
    """The same data set at another revision: one source must read all that the plan has.

    Naming the data set allows to contact the user's hub. Another that only the cache names, the user has to name too.
    """
    own = f"{HUB}{described['name']}"
    if list(paths) != [own]:
        raise click.UsageError(f"'{cache}' was built from {own}, and grows by a newer revision of it: name {own}.")
    repository = sources.HubSource.from_description(described).repository
    if not repository.asked.is_named:
        raise click.UsageError(
            f"'{cache}' was built from the hub at {repository.address}, which is not yours; name it with "
            f"HF_ENDPOINT={repository.address} if you trust it: your token is sent there."
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
    """Append new files, and what was appended to known ones, then build it.

    SOURCE is read as the first build read it; the recipe is the one that the cache keeps. A known file with other
    content is an error that names it. A cache of a data set on the hub grows by a newer revision of it.

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
@click.option("--drop-missing", is_flag=True, help="Leave out the samples of source files that are gone.")
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
    """Make the rows of edited source files again.

    Compares the source with what was planned, and makes the chunks of changed files again as new revisions in a new
    generation; chunks keep their numbers, and runs that pinned an older generation keep reading it. Chunks of further
    layers follow. Images whose sidecar alone was edited are not decoded again. New files and appended data are for
    `forebay grow`. Exit code 1 when a layer could not follow.

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
