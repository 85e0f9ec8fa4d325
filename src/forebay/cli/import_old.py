"""`forebay import`: a teacher cache of the old format as a cache of ours."""

import errno
import os
from importlib import import_module
from typing import Any

import click

from forebay.cli.options import complete_file, complete_folder, json_option
from forebay.cli.show import show
from forebay.errors import LibraryMissing


@click.command("import")
@click.argument("old", shell_complete=complete_file)
@click.option(
    "--into", metavar="CACHE", required=True, shell_complete=complete_folder, help="Where the cache is, or will be."
)
@json_option
def import_old(old: str, into: str, as_json: bool) -> None:
    """Make a cache of a teacher cache of the old format.

    OLD is a cache.pt, or a folder of encodings.pt, lune.pt and sol.pt. Nothing but tensors is unpickled. Rows that hold
    NaN or nothing but zeros are absent, and `forebay status` lists them.

    Example: forebay import old/cache.pt --into caches/art
    """
    if os.path.isfile(into):
        raise NotADirectoryError(errno.ENOTDIR, "there is a file, and a cache is a folder", into)
    show(_importing().import_old(old, into), as_json)


def _importing() -> Any:
    try:
        return import_module("forebay.torch.old_import")
    except ModuleNotFoundError as missing:
        raise LibraryMissing(str(missing.name), "reading an old cache", "torch") from missing
