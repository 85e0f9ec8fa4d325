"""`forebay verify`, `repair`, `update`, `copy`, `clean`, `drop` and `import`: keep caches right, and make others."""

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from forebay import api
from forebay.cli.options import (
    SIZE,
    WrongUsage,
    cache_argument,
    check_destination,
    complete_file,
    complete_folder,
    decorated,
    existing_copy,
    network_option,
    option,
    passed_flags,
    source_argument,
    struct_options,
    whole,
    wrong_source_as_usage,
)
from forebay.cli.output import Finding, shown_progress
from forebay.cli.settings import BuildSettings
from forebay.cli.verb import verb
from forebay.errors import LibraryMissing
from forebay.format.codecs import MAX_BLOCK_BYTES
from forebay.named_sources import source_like
from forebay.preview.words import command_line
from forebay.read.opening import open_cache
from forebay.source import Source
from forebay.sources.source_settings import TextSettings
from forebay.store import open_store
from forebay.teachers import Alignment, check_alignment
from forebay.teachers.align import Expected


@verb()
@cache_argument
@option("--full", is_flag=True, help="Also decode every row and hash the source.")
@option("--align", is_flag=True, help="Also check teacher layers: shapes, buckets, ranges, and recomputed rows.")
@option(
    "--expect",
    type=click.Choice(["tinyflux"]),
    help="With --align, fail unless layers are as in the TinyFlux document.",
)
@option(
    "--held-out",
    type=whole(0),
    default=0,
    metavar="ROWS",
    help="With --align, run timed teachers on this many rows halfway between buckets: the error of interpolation.",
)
@option("--cache-id", metavar="ID", help="Fail unless the cache has this id.")
@option("--min-generation", type=whole(0), metavar="N", help="Fail if the newest generation is older.")
@option("--digest", metavar="SHA256", help="Fail unless the newest generation has this digest.")
@option(
    "--max-block-bytes",
    type=SIZE,
    default=f"{MAX_BLOCK_BYTES >> 20}MiB",
    show_default=True,
    help="Largest decoded size of a compressed block, with --full.",
)
@network_option
def verify(
    cache: str, full: bool, align: bool, expect: Expected | None, held_out: int, allow_network: bool, **pins: Any
) -> Any:
    """Check every published byte.

    Lists bad chunks with layer, column, block and byte range, missing chunks, foreign files and stale sources. Exits 1
    if something is damaged or stale. --align compares teacher layers with their recipes and, if the teacher's files are
    available, recomputes a few rows of each. Prints the id of the cache and the digest of its generation; --cache-id,
    --min-generation and --digest detect a cache that was swapped or rolled back.

    \b
    Example: forebay verify caches/edu --full
             forebay verify caches/art --align
    """
    with shown_progress() as on_progress:
        report = api.verify(cache, allow_network=allow_network, full=full, **pins, on_progress=on_progress)
    align = align or bool(expect) or bool(held_out)
    alignment = Alignment(root=cache, layers=())
    if align and report.sound:
        alignment = check_alignment(open_cache(cache), held_out=held_out, allow_network=allow_network, expect=expect)
    records = [report, alignment] if align else report
    if not report.sound:
        return Finding(records, "Damaged", f"'{cache}' is damaged or stale", command_line("repair", cache))
    if not alignment.aligned:
        how = "are not as expected" if alignment.unmet else "differ from their recipes"
        return Finding(records, "NotAligned", f"teacher layers of '{cache}' {how}")
    return records


def _repair(cache: str, copy: str | None, allow_network: bool, workers: int | None) -> Any:
    """Restore damaged chunks from a copy or the source.

    A file is restored only if it matches the published checksum, byte for byte. Exits 1 if some are still damaged.

    Example: forebay repair caches/edu --from backup/edu
    """
    with shown_progress() as on_progress:
        report = api.repair(cache, copy=copy, allow_network=allow_network, workers=workers, on_progress=on_progress)
    return Finding(report, "NotRepaired", f"some of '{cache}' could not be restored") if report.failed else report


repair = verb("repair")(
    decorated(
        _repair,
        cache_argument,
        option(
            "--from",
            "copy",
            callback=existing_copy,
            shell_complete=complete_folder,
            metavar="FOLDER|URL",
            help="Copy to restore chunks from first.",
        ),
        network_option,
        *struct_options(BuildSettings, "Build", "workers"),
    )
)


@verb()
@cache_argument
@option("--keep-generations", type=whole(1), metavar="N", help="Also remove all generations but the newest N.")
@option("--unpublished", is_flag=True, help="Withdraw the last update if nothing of it is published.")
def clean(cache: str, keep_generations: int | None, unpublished: bool) -> Any:
    """Remove leftovers of stale builders, and files of dropped layers.

    Never removes data in use. A claim of another machine is removed only if it is not renewed for a minute.
    --unpublished withdraws an update without any published chunk.

    Example: forebay clean caches/edu --keep-generations 3
    """
    return api.clean(cache, keep_generations=keep_generations, unpublished=unpublished)


@verb()
@cache_argument
@click.argument("layers", metavar="LAYER...", nargs=-1, required=True)
def drop(cache: str, layers: tuple[str, ...]) -> Any:
    """Drop layers: publish a generation without them.

    `forebay info CACHE` lists the layers; the base layer stays. Readers of older generations keep them.
    `forebay clean CACHE --keep-generations 1` frees their space.

    Example: forebay drop caches/art clip vae
    """
    return api.drop(cache, *layers)


@verb()
@cache_argument
@click.argument("destination", metavar="DEST", shell_complete=complete_folder)
@option("--old-key-env", metavar="NAME", help="Environment variable with the key of CACHE, if it is another one.")
@option("--sign", is_flag=True, help="Sign the copy of a cache that has no key, if you trust it.")
def copy(cache: str, destination: str, old_key_env: str | None, sign: bool) -> Any:
    """Make a verified copy of the newest generation.

    The copy is signed with the key in FOREBAY_HMAC_KEY, if it is set. A key is never an argument, because other users
    could see it. Resumes if run again. `forebay repair CACHE --from DEST` restores chunks from it.

    Example: forebay copy caches/edu backup/edu
    """
    check_destination(destination)
    old = _from_environment(old_key_env) if old_key_env else None
    with shown_progress() as on_progress:
        return api.copy(cache, destination, old_key=old, sign=sign, on_progress=on_progress)


def _from_environment(name: str) -> bytes:
    value = os.fsencode(os.environ.get(name, ""))
    if not value:
        raise WrongUsage(
            f"the environment variable '{name}' is not set or empty", "set it, or pass another with --old-key-env"
        )
    return value


@verb("import")
@click.argument("old", shell_complete=complete_file)
@option(
    "-o",
    "--into",
    metavar="CACHE",
    required=True,
    shell_complete=complete_folder,
    help="Folder of the cache, new or existing.",
)
@option(
    "--time-direction",
    type=click.Choice(["t0_noise", "t0_data"]),
    default="t0_noise",
    show_default=True,
    help="End of its t that is noise.",
)
def import_pt_cache(old: str, into: str, time_direction: str) -> Any:
    """Import a teacher cache that a training script wrote with torch.save.

    OLD is a cache.pt with encodings, lune (mid-block features of a UNet) and sol (statistics of its attention). Only
    tensors are unpickled. Rows with NaN, or with zeros only, are marked absent, and `forebay status` lists them.

    Example: forebay import old/cache.pt --into caches/art
    """
    check_destination(into)
    try:
        importing = import_module("forebay.compat.pt_import")
    except ModuleNotFoundError as missing:
        message = f"reading an old cache needs '{missing.name!s}', which is not installed"
        raise LibraryMissing(message, hint="pip install 'forebay[torch]'", extra="torch") from missing
    return importing.import_pt_cache(old, into, time_direction=time_direction)


def source_like_before(cache: str, paths: Sequence[str], **download: Any) -> Source:
    """A source like that of the cache, for the paths on the command line."""
    with wrong_source_as_usage():
        return source_like(open_store(cache), paths, **download)


DOWNLOAD = ("revision", "spool", "download_retries", "download_timeout")


def _update(cache: str, paths: tuple[str, ...], **flags: Any) -> Any:
    """Append new or extended source files to a cache.

    Reads SOURCE like the first build, with the recipe of the cache. Fails if a known file has other content: published
    rows never change, so build a new cache with --reuse. A cache of a dataset on the hub is updated with a newer
    revision of it.

    \b
    Example: forebay update caches/edu 'data/2025-*.jsonl'
             forebay update caches/fineweb hub:HuggingFaceFW/fineweb-edu
    """
    passed = passed_flags(flags)
    download = {name: passed.pop(name) for name in DOWNLOAD if name in passed}
    with shown_progress() as on_progress:
        return api.update(cache, source_like_before(cache, paths, **download), on_progress=on_progress, **passed)


update = verb("update")(
    decorated(
        _update,
        cache_argument,
        source_argument(required=True),
        *struct_options(TextSettings, "Source", *DOWNLOAD),
        *struct_options(BuildSettings, "Build", "workers", "memory_limit", "max_failures"),
        network_option,
    )
)
