"""`forebay info`: what a cache is."""

import click

from forebay import api
from forebay.cli.options import cache_argument, json_option
from forebay.cli.show import show


@click.command()
@cache_argument
@json_option
def info(cache: str, as_json: bool) -> None:
    """Draw a cache as a tree: source, recipes, columns, counts, fingerprints.

    Example: forebay info caches/edu
    """
    show(api.summarize(cache), as_json)
