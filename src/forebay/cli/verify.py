"""`forebay verify`: hold every published byte against its digest."""

from typing import Any

import click

from forebay import api
from forebay.cache.reader import open_cache
from forebay.cli.options import cache_argument, json_option, source_option
from forebay.cli.progress import shown_progress
from forebay.cli.show import show
from forebay.cli.sizes import SizeType
from forebay.format.codec import MAX_BLOCK_BYTES
from forebay.teachers import Alignment, check_alignment


@click.command()
@cache_argument
@click.option("--full", is_flag=True, help="Also decode every row, and hash the source again.")
@click.option("--align", is_flag=True, help="Also check layers of teachers: shapes, buckets, ranges, a few rows again.")
@click.option("--cache-id", metavar="ID", help="Refuse any cache but the one with this id.")
@click.option("--min-generation", type=click.IntRange(min=0), metavar="N", help="Refuse a generation below this one.")
@click.option(
    "--max-block-bytes",
    type=SizeType(),
    default=f"{MAX_BLOCK_BYTES >> 20}MiB",
    show_default=True,
    help="With --full, the most that one compressed block may decode to.",
)
@click.option("--digest", metavar="SHA256", help="Refuse any newest generation but the one with this digest.")
@source_option
@json_option
@click.pass_context
def verify(
    ctx: click.Context, /, cache: str, full: bool, align: bool, check_source: bool, as_json: bool, **pins: Any
) -> None:
    """Check every published byte, and say exactly what is wrong.

    Lists bad chunks with layer, column, block and byte range, missing chunks, foreign files and stale sources. Exit
    code 1 when something is damaged or stale. With --align, also when a layer of a teacher is not what its recipe says;
    where the teacher's files are here, a few rows of each layer are computed again. The id of the cache and the digest
    of its generation are shown; --cache-id, --min-generation and --digest refuse one that was exchanged or rolled back.

    Example: forebay verify caches/edu --full
    """
    with shown_progress(as_json) as on_progress:
        report = api.verify(cache, check_source=check_source, full=full, **pins, on_progress=on_progress)
    if not align:
        show(report, as_json)
        ctx.exit(int(not report.sound))
    found = (
        check_alignment(open_cache(cache), check_source=check_source)
        if report.sound
        else Alignment(root=cache, layers=())
    )
    show([report, found], as_json)
    ctx.exit(int(not (report.sound and found.aligned)))
