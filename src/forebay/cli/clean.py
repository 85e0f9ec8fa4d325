"""`forebay clean`: remove what nobody needs any more."""

import click

from forebay import api
from forebay.cli.options import cache_argument, json_option
from forebay.cli.show import show


@click.command()
@cache_argument
@click.option(
    "--keep-generations", type=click.IntRange(min=1), metavar="N", help="Also drop all generations but the newest N."
)
@json_option
def clean(cache: str, keep_generations: int | None, as_json: bool) -> None:
    """Remove leftovers of dead builders and replaced chunks, never data in use.

    A claim that another machine left is watched for a minute before it is judged.

    Example: forebay clean caches/edu --keep-generations 3
    """
    show(api.clean(cache, keep_generations=keep_generations), as_json)
