"""`forebay grow`, `refresh`, `repair`, `clean`, `drop`, `copy`, `rekey` and `import`."""

import errno
import os
from collections.abc import Mapping, Sequence
from glob import has_magic
from importlib import import_module
from typing import Any

import click

from forebay import api, sources
from forebay.building.begin import begun_plan
from forebay.cache.catalog import read_cache_document
from forebay.cache.plan import Plan
from forebay.cli.settings import BuildSettings
from forebay.cli.verb import (
    Finding,
    cache_argument,
    complete_added_layer,
    complete_file,
    complete_folder,
    decorated,
    existing_copy,
    passed_flags,
    refuse_memory,
    shown_progress,
    source_argument,
    source_option,
    struct_options,
    verb,
)
from forebay.errors import LibraryMissing, SourceInvalid
from forebay.format.tensors import VARIABLE
from forebay.kinds import reopen_source
from forebay.source import Source
from forebay.sources.bucket_files import relative_url
from forebay.sources.paths import named_below, without_stream_suffix
from forebay.sources.source_settings import HUB, TEXT_SUFFIXES, TextSettings, is_on_hub
from forebay.store import open_store
from forebay.store.base import is_url


def _repair(cache: str, copy: str | None, check_source: bool, workers: int | None) -> Any:
    """Restore what verify finds damaged, from a copy or from the source.

    A file is restored only if it matches the published checksum, byte for byte. Exits 1 if something could not be
    restored.

    Example: forebay repair caches/edu --from backup/edu
    """
    with shown_progress() as on_progress:
        report = api.repair(cache, copy=copy, check_source=check_source, workers=workers, on_progress=on_progress)
    return Finding(report, "NotRepaired", f"some of '{cache}' could not be restored") if report.failed else report


repair = verb("repair")(
    decorated(
        _repair,
        cache_argument,
        click.option(
            "--from",
            "copy",
            callback=existing_copy,
            shell_complete=complete_folder,
            metavar="FOLDER|URL",
            help="Copy to restore chunks from first.",
        ),
        source_option,
        *struct_options(BuildSettings, "Build", "workers"),
    )
)


@verb()
@cache_argument
@click.option(
    "--keep-generations", type=click.IntRange(min=1), metavar="N", help="Also remove all generations but the newest N."
)
def clean(cache: str, keep_generations: int | None) -> Any:
    """Remove leftovers of dead builders, and replaced chunks.

    Never removes data in use. A claim of another machine is removed only if it is not renewed for a minute. What a
    killed planner has found is removed too, unless another one is at work.

    Example: forebay clean caches/edu --keep-generations 3
    """
    return api.clean(cache, keep_generations=keep_generations)


@verb()
@cache_argument
@click.argument("layers", metavar="LAYER...", nargs=-1, required=True, shell_complete=complete_added_layer)
def drop(cache: str, layers: tuple[str, ...]) -> Any:
    """Drop layers: publish a generation without them.

    `forebay info CACHE` lists the layers; the one that the cache was built with cannot be dropped. Readers of older
    generations keep them. `forebay clean CACHE --keep-generations 1` frees their space.

    Example: forebay drop caches/art clip vae
    """
    return api.drop(cache, *layers)


@verb()
@cache_argument
@click.argument("destination", metavar="DEST", shell_complete=complete_folder)
def copy(cache: str, destination: str) -> Any:
    """Make a verified copy of the newest generation.

    Can be interrupted and run again. `forebay repair CACHE --from DEST` restores chunks from the copy.

    Example: forebay copy caches/edu backup/edu
    """
    refuse_memory(destination)
    with shown_progress() as on_progress:
        return api.copy(cache, destination, on_progress=on_progress)


@verb()
@cache_argument
@click.option("--old-key-env", metavar="NAME", help="Environment variable with the present key.")
@click.option("--old-key-file", type=click.Path(exists=True, dir_okay=False), help="File with the present key.")
@click.option("--new-key-env", metavar="NAME", help=f"Environment variable with the new key. [default: {VARIABLE}]")
def rekey(cache: str, old_key_env: str | None, old_key_file: str | None, new_key_env: str | None) -> Any:
    """Add a key to a cache, or replace its key.

    Checks every byte, then signs each generation with the new key. Without an old key the cache must not be signed:
    adding a key trusts its present content. Removes older generations that list a lost or damaged file. Chunks do not
    change. Stop builds of the cache first. A key is never an argument, because other users could see it.

    \b
    Example: forebay rekey caches/edu
             forebay rekey caches/edu --old-key-env OLD_KEY
    """
    if old_key_env and old_key_file:
        raise click.UsageError("--old-key-env and --old-key-file both name the old key; use one of them.")
    old = _from_environment(old_key_env, "--old-key-env") if old_key_env else None
    old = _from_file(old_key_file) if old_key_file else old
    new = _from_environment(new_key_env or VARIABLE, "--new-key-env")
    with shown_progress() as on_progress:
        return api.rekey(cache, old_key=old, new_key=new, on_progress=on_progress)


def _from_environment(name: str, option: str) -> bytes:
    value = os.fsencode(os.environ.get(name, ""))
    if not value:
        raise click.UsageError(
            f"the environment variable '{name}' is not set or empty; set it, or name another with {option}."
        )
    return value


def _from_file(path: str) -> bytes:
    """The content of a file, without a final newline."""
    with open(path, "rb") as file:
        value = file.read().removesuffix(b"\n").removesuffix(b"\r")
    if not value:
        raise click.UsageError(f"'{path}' is empty; it must contain the old key.")
    return value


@verb("import")
@click.argument("old", shell_complete=complete_file)
@click.option(
    "-o",
    "--into",
    metavar="CACHE",
    required=True,
    shell_complete=complete_folder,
    help="Folder of the cache, new or existing.",
)
def import_pt_cache(old: str, into: str) -> Any:
    """Import a teacher cache that a training script wrote with torch.save.

    OLD is a cache.pt, or a folder with encodings.pt (text encodings), lune.pt (mid-block features of a UNet) and sol.pt
    (statistics of its attention). Only tensors are unpickled. Rows with NaN, or with zeros only, are marked absent, and
    `forebay status` lists them.

    Example: forebay import old/cache.pt --into caches/art
    """
    refuse_memory(into)
    if os.path.isfile(into):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file; --into needs a folder", into)
    return _importing().import_pt_cache(old, into)


def _importing() -> Any:
    try:
        return import_module("forebay.compat.pt_import")
    except ModuleNotFoundError as missing:
        raise LibraryMissing(str(missing.name), "reading an old cache", "torch") from missing


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
