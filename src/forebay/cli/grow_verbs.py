"""`forebay grow` and `forebay refresh`: add new source files, rebuild changed ones."""

import os
from collections.abc import Mapping, Sequence
from glob import has_magic
from typing import Any

import click

from forebay import api, sources
from forebay.building.begin import begun_plan
from forebay.cache.catalog import read_cache_document
from forebay.cache.plan import Plan
from forebay.cli.options import (
    cache_argument,
    decorated,
    passed_flags,
    source_argument,
    source_option,
    struct_options,
)
from forebay.cli.settings import BuildSettings
from forebay.cli.verb import Finding, shown_progress, verb
from forebay.errors import SourceInvalid, is_url
from forebay.kinds import reopen_source
from forebay.source import Source
from forebay.sources.bucket_files import relative_url
from forebay.sources.paths import named_below, without_stream_suffix
from forebay.sources.source_settings import HUB, TEXT_SUFFIXES, TextSettings, is_on_hub
from forebay.store import open_store

# The fields that identify a data set on the hub, apart from its revision.
HUB_IDENTITY = ("subset", "split", "text", "endpoint")


def source_like_before(cache: str, paths: Sequence[str], download: Mapping[str, Any]) -> Source:
    """A source like that of the cache, for other paths; `download` has the options for the hub."""
    plan = _plan(cache)
    described = plan.source
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
    _check_suffixes(cache, plan, paths)
    root, patterns = named_below(paths, None)
    return reopen_source({**described, "root": root, "patterns": list(patterns)})


def _plan(cache: str) -> Plan:
    store = open_store(cache)
    read_cache_document(store)
    return begun_plan(store)


def _check_suffixes(cache: str, plan: Plan, paths: Sequence[str]) -> None:
    """Refuse a file that a build would read in another format; in folders and globs, the source chooses by suffix."""
    kind = plan.source["kind"]
    own = [suffix for suffix, known in TEXT_SUFFIXES.items() if known == kind]
    if not own or all(map(has_magic, paths)):
        return
    planned = {_suffix(path) for path in plan.files}
    for path in paths:
        if not os.path.isdir(path) and not has_magic(path) and _suffix(path) not in {"", *own, *planned}:
            raise SourceInvalid(
                f"'{path}' ends in {_suffix(path)}, and '{cache}' was built from {kind} files ({', '.join(own)}); pass "
                f"files of that format, or build a separate cache from this one"
            )


def _suffix(path: str) -> str:
    return os.path.splitext(without_stream_suffix(path))[1].lower()


def _with_manifest(cache: str, described: Mapping[str, Any], paths: Sequence[str]) -> Source:
    """The manifest with more lines, at its present path; the images must not move."""
    if len(paths) != 1 or is_on_hub(paths[0]):
        raise click.UsageError(f"'{cache}' was built from one manifest and grows by lines added to it: pass that file.")
    place, root = paths[0], str(described["root"])
    if is_url(place) != is_url(root):
        raise click.UsageError(f"'{cache}' was built from a manifest below '{root}': pass that file.")
    manifest = relative_url(place, root) if is_url(place) else os.path.relpath(os.path.abspath(place), root)
    return reopen_source({**described, "manifest": manifest})


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


DOWNLOAD = ("revision", "spool", "download_retries", "download_timeout")


def _grow(cache: str, paths: tuple[str, ...], **flags: Any) -> Any:
    """Add new files, and data appended to known files, to a cache.

    Reads SOURCE like the first build, with the recipe of the cache. Fails if the content of a known file has changed. A
    cache of a data set on the hub grows by a newer revision of it.

    \b
    Example: forebay grow caches/edu 'data/2025-*.jsonl'
             forebay grow caches/fineweb hub:HuggingFaceFW/fineweb-edu
    """
    passed = passed_flags(flags)
    download = {name: passed.pop(name) for name in DOWNLOAD if name in passed}
    with shown_progress() as on_progress:
        return api.grow(cache, source_like_before(cache, paths, download), on_progress=on_progress, **passed)


def _refresh(cache: str, drop_missing: bool, check_source: bool, **flags: Any) -> Any:
    """Rebuild the rows of edited source files.

    Compares the source with the plan, and rebuilds the chunks of changed files as new revisions in a new generation.
    Chunks keep their numbers, and readers of an older generation are not affected. Other layers are rebuilt as well.
    Images of which only the sidecar changed are not decoded again. New files and appended data are for `forebay grow`.
    Exits 1 if a layer could not be rebuilt.

    Example: forebay refresh caches/photos
    """
    with shown_progress() as on_progress:
        report = api.refresh(
            cache,
            check_source=check_source,
            drop_missing=drop_missing,
            on_progress=on_progress,
            **passed_flags(flags),
        )
    if not report.missing:
        return report
    return Finding(report, "LayersMissing", f"some layers of '{cache}' could not be rebuilt; see 'missing'")


_WORK = ("workers", "memory_limit", "max_failures")
grow = verb("grow")(
    decorated(
        _grow,
        cache_argument,
        source_argument(required=True),
        *struct_options(TextSettings, "Source", *DOWNLOAD),
        *struct_options(BuildSettings, "Build", *_WORK, "skip_unreadable"),
    )
)
refresh = verb("refresh")(
    decorated(
        _refresh,
        cache_argument,
        click.option("--drop-missing", is_flag=True, help="Drop the samples of deleted source files."),
        source_option,
        *struct_options(BuildSettings, "Build", *_WORK),
    )
)
