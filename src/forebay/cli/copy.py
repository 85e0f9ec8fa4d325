"""`forebay copy`: a verified copy, for backup."""

import click

from forebay import api
from forebay.cli.options import cache_argument, complete_folder, json_option
from forebay.cli.progress import shown_progress
from forebay.cli.show import show


@click.command()
@cache_argument
@click.argument("destination", metavar="DEST", shell_complete=complete_folder)
@json_option
def copy(cache: str, destination: str, as_json: bool) -> None:
    """Copy what the newest generation lists, every chunk checked on the way.

    It can be interrupted and run again; a later `forebay repair CACHE --from DEST` takes chunks from the copy.

    Example: forebay copy caches/edu backup/edu
    """
    with shown_progress(as_json) as on_progress:
        report = api.copy(cache, destination, on_progress=on_progress)
    show(report, as_json)
