"""`forebay gaps`: which planned chunks are missing."""

import click

from forebay import api
from forebay.cli.options import cache_argument, json_option
from forebay.cli.show import show


@click.command()
@cache_argument
@click.option("--layer", help="Only this layer.")
@json_option
def gaps(cache: str, layer: str | None, as_json: bool) -> None:
    """List the planned chunks that are missing, and the command that fills them.

    Example: forebay gaps caches/edu
    """
    show(api.gaps(cache, layer=layer), as_json)
