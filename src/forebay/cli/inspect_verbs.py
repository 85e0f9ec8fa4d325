"""`forebay info`, `status`, `gaps`, `verify` and `peek`: look at a cache without changing it."""

from typing import Any

import click

from forebay import api
from forebay.cache.records import Status
from forebay.cache.status import SHOWN_FAILURES
from forebay.cli.grow_verbs import source_like_before
from forebay.cli.options import SizeType, cache_argument, complete_file, json_option, source_option
from forebay.cli.progress import shown_progress
from forebay.cli.show import show
from forebay.format.codec import MAX_BLOCK_BYTES
from forebay.preview.packed_rows import KIND as TOKENS
from forebay.preview.peek import PEEKED_ROWS, SHEET_ROWS
from forebay.preview.peek import peek as peek_rows
from forebay.preview.pictures import KIND as IMAGES
from forebay.preview.pictures import draw_sheet, draw_taught, timed_layers
from forebay.read.cache import open_cache
from forebay.teachers import Alignment, check_alignment


@click.command()
@cache_argument
@json_option
def info(cache: str, as_json: bool) -> None:
    """Draw a cache as a tree: source, recipes, columns, counts, fingerprints.

    Example: forebay info caches/edu
    """
    show(api.summarize(cache), as_json)


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


@click.command()
@cache_argument
@click.option("--layer", help="Only this layer.")
@json_option
def gaps(cache: str, layer: str | None, as_json: bool) -> None:
    """List the planned chunks that are missing, and the command that fills them.

    Example: forebay gaps caches/edu
    """
    show(api.gaps(cache, layer=layer), as_json)


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


@click.command()
@cache_argument
@click.option("--rows", "count", type=click.IntRange(min=1), help="How many, from row 0.  [default: 3; 24 on a sheet]")
@click.option("--row", "chosen", type=click.IntRange(min=0), multiple=True, help="This row; can be repeated.")
@click.option("--column", "columns", multiple=True, help="Only this column, of any layer; can be repeated.")
@click.option("--layer", "layers", multiple=True, help="With --png: draw what this teacher said; can be repeated.")
@click.option(
    "--png",
    "sheet",
    metavar="FILE",
    shell_complete=complete_file,
    help="Draw images with boxes and tags, or teachers over timesteps.",
)
@click.option("--patch", type=click.IntRange(min=1), help="Side of a token on the sheet.  [16, where it divides]")
@click.option(
    "--source",
    "paths",
    multiple=True,
    metavar="SOURCE",
    shell_complete=complete_file,
    help="Show the names that this source has for documents.",
)
@json_option
def peek(
    cache: str,
    count: int | None,
    chosen: tuple[int, ...],
    columns: tuple[str, ...],
    layers: tuple[str, ...],
    sheet: str | None,
    patch: int | None,
    paths: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show a few rows: text as text, images drawn, arrays by their first values.

    Packed tokens are shown as the documents they are from, with what is padding; --column shows the ids themselves,
    --json every token and all of the text. With --source, which is read for that, documents have the names that the
    source gives them. Images are shown by what is bright and dark, and --png draws them: the box
    outlined, tokens that a model ignores in red. What teachers said of a row is drawn over timesteps: features as
    strips, Sol's numbers as lines, its maps as heat maps.

    \b
    Example: forebay peek caches/edu --row 17
             forebay peek caches/photos --png sheet.png
             forebay peek caches/art --row 3 --layer lune --layer sol --png taught.png
    """
    opened = open_cache(cache)
    kind = opened.recipe(opened.generation.base).kind
    taught = layers or (timed_layers(opened) if kind != IMAGES else ())
    if layers and not sheet:
        raise click.UsageError("--layer says what --png draws; give --png FILE, or --column to read values.")
    if (sheet and kind != IMAGES and not taught) or (patch and kind != IMAGES):
        raise click.UsageError(
            f"--png draws images and timed teachers, --patch is of images; '{cache}' holds {kind}, see it without them."
        )
    if sheet and columns:
        raise click.UsageError("--png draws whole images, and --column shows one column; choose one of them.")
    if patch and (not sheet or layers):
        raise click.UsageError("--patch is for the sheet of images that --png draws, as in --png sheet.png.")
    if paths and kind != TOKENS:
        raise click.UsageError(f"--source names the documents of packed tokens; '{cache}' holds {kind}.")
    rows = _rows(cache, len(opened), count or (SHEET_ROWS if sheet and not taught else PEEKED_ROWS), chosen)
    if sheet and taught:
        show(draw_taught(opened, rows, taught, sheet), as_json)
    elif sheet:
        try:
            drawn = draw_sheet(opened, rows, sheet, patch)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        show(drawn, as_json)
    else:
        source = source_like_before(cache, paths, {}) if paths else None
        show(peek_rows(opened, rows, columns=columns or None, source=source), as_json)


def _rows(root: str, there: int, count: int, chosen: tuple[int, ...]) -> list[int]:
    beyond = [row for row in chosen if row >= there]
    if beyond:
        raise click.BadParameter(f"there is no row {beyond[0]:,}; '{root}' has {there:,}", param_hint="'--row'")
    return list(chosen) or list(range(min(count, there)))
