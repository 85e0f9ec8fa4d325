"""`forebay status`: how far a cache is."""

from typing import Any

import click

from forebay import api
from forebay.cache.records import Status
from forebay.cache.status import SHOWN_FAILURES
from forebay.cli.options import cache_argument, json_option, source_option
from forebay.cli.show import show

ALL = "all"


class ShownType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """How many to list: a count, or all."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        if value == ALL:
            return ALL
        if not str(value).isdecimal():
            self.fail(f"'{value}' is neither a count nor '{ALL}'", param, ctx)
        return int(value)


@click.command()
@cache_argument
@click.option(
    "--failures",
    type=ShownType(),
    default=SHOWN_FAILURES,
    show_default=True,
    metavar=f"N|{ALL}",
    help="How many failed samples to list.",
)
@source_option
@json_option
@click.pass_context
def status(ctx: click.Context, cache: str, failures: int | str, check_source: bool, as_json: bool) -> None:
    """Show how far a cache is, and what stands in its way.

    Chunks present, missing, suspect, lost and claimed by whom; failed samples by reason; stale sources. Exit code 1
    when a chunk is suspect or lost, a claim failed, or a source file changed, or is gone before all of it was built.

    \b
    Example: forebay status caches/edu
             forebay status caches/edu --failures all
    """
    found = api.status(cache, check_source=check_source, failures=None if isinstance(failures, str) else failures)
    show(found, as_json)
    ctx.exit(int(_is_troubled(found)))


def _is_troubled(found: Status) -> bool:
    damaged = any(layer.suspect or layer.lost for layer in found.layers)
    return damaged or found.needs_source or any(claim.state == "failed" for claim in found.claims)
