"""`forebay repair`, `clean`, `drop`, `copy`, `rekey` and `import`."""

import errno
import os
from importlib import import_module
from typing import Any

import click

from forebay import api
from forebay.cli.options import (
    cache_argument,
    complete_file,
    complete_folder,
    decorated,
    existing_copy,
    refuse_memory,
    source_option,
    struct_options,
)
from forebay.cli.settings import BuildSettings
from forebay.cli.verb import Finding, shown_progress, verb
from forebay.errors import LibraryMissing
from forebay.format.tensors import VARIABLE


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

    Never removes data in use. A claim of another machine is removed only if it is not renewed for a minute.

    Example: forebay clean caches/edu --keep-generations 3
    """
    return api.clean(cache, keep_generations=keep_generations)


@verb()
@cache_argument
@click.argument("layers", metavar="LAYER", nargs=-1, required=True)
def drop(cache: str, layers: tuple[str, ...]) -> Any:
    """Drop layers: publish a generation without them.

    Readers of older generations keep them. `forebay clean CACHE --keep-generations 1` frees their space.

    Example: forebay drop caches/art lune sol
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
    """Import a teacher cache of the old format.

    OLD is a cache.pt, or a folder with encodings.pt, lune.pt and sol.pt. Only tensors are unpickled. Rows with NaN, or
    with zeros only, are marked absent, and `forebay status` lists them.

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
