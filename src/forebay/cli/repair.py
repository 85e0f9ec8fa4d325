"""`forebay repair`: put back exactly what is bad or missing."""

import click

from forebay import api
from forebay.cli.options import cache_argument, json_option, source_option, workers_option
from forebay.cli.progress import shown_progress
from forebay.cli.show import show


@click.command()
@cache_argument
@click.option("--from", "copy", type=click.Path(exists=True, file_okay=False), help="Take chunks from this copy first.")
@source_option
@workers_option
@json_option
@click.pass_context
def repair(
    ctx: click.Context, cache: str, copy: str | None, check_source: bool, workers: int | None, as_json: bool
) -> None:
    """Put back what verify finds bad: from a copy, or made again from the source.

    A file goes back in place only when it is, to the byte, what was published. Exit code 1 when something could not be
    put back.

    Example: forebay repair caches/edu --from backup/edu
    """
    with shown_progress(as_json) as on_progress:
        report = api.repair(cache, copy=copy, check_source=check_source, workers=workers, on_progress=on_progress)
    show(report, as_json)
    ctx.exit(int(bool(report.failed)))
