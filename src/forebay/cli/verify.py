"""`forebay verify`: hold every published byte against its digest."""

import click

from forebay import api
from forebay.cli.options import cache_argument, json_option
from forebay.cli.progress import shown_progress
from forebay.cli.show import show


@click.command()
@cache_argument
@click.option("--full", is_flag=True, help="Also decode every row, and hash the source again.")
@json_option
@click.pass_context
def verify(ctx: click.Context, cache: str, full: bool, as_json: bool) -> None:
    """Check every published byte, and say exactly what is wrong.

    Lists bad chunks with layer, column, block and byte range, missing chunks, foreign files and stale sources. Exit
    code 1 when something is damaged or stale.

    Example: forebay verify caches/edu --full
    """
    with shown_progress(as_json) as on_progress:
        report = api.verify(cache, full=full, on_progress=on_progress)
    show(report, as_json)
    ctx.exit(int(not report.sound))
