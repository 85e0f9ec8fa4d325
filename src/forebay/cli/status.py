"""`forebay status`: how far a cache is."""

import click

from forebay import api
from forebay.cache.records import Status
from forebay.cli.options import cache_argument, json_option
from forebay.cli.show import show


@click.command()
@cache_argument
@json_option
@click.pass_context
def status(ctx: click.Context, cache: str, as_json: bool) -> None:
    """Show how far a cache is, and what stands in its way.

    Chunks present, missing, suspect and claimed by whom; failed samples by reason; stale sources. Exit code 1 when a
    chunk is suspect, a claim failed or a source is stale.

    Example: forebay status caches/edu
    """
    found = api.status(cache)
    show(found, as_json)
    ctx.exit(int(_is_troubled(found)))


def _is_troubled(found: Status) -> bool:
    suspect = any(layer.suspect for layer in found.layers)
    return suspect or bool(found.stale) or any(claim.state == "failed" for claim in found.claims)
