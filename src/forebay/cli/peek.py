"""`forebay peek`: a few rows as a person would read them."""

from typing import Any

import click
import numpy as np

from forebay.cache.reader import Cache, open_cache
from forebay.cli.options import cache_argument, complete_file, json_option
from forebay.cli.packed_rows import KIND as TOKENS
from forebay.cli.packed_rows import peek_packed
from forebay.cli.peeked_images import KIND as IMAGES
from forebay.cli.peeked_images import draw_sheet, peek_images
from forebay.cli.peeked_teachers import draw_taught, timed_layers
from forebay.cli.records import Cell, Peek, PeekedRow
from forebay.cli.show import show
from forebay.cli.sources_again import source_like_before
from forebay.columns import Array, Column

KEPT_VALUES = 64
ROWS, SHEET_ROWS = 3, 24


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
    rows = _rows(cache, len(opened), count or (SHEET_ROWS if sheet and not taught else ROWS), chosen)
    if sheet and taught:
        show(draw_taught(opened, rows, taught, sheet), as_json)
    elif sheet:
        show(draw_sheet(opened, rows, sheet, patch), as_json)
    elif columns or kind not in (TOKENS, IMAGES):
        show(_peeked(opened, rows, columns), as_json)
    elif kind == TOKENS:
        show(peek_packed(opened, rows, source_like_before(cache, paths, {}) if paths else None), as_json)
    else:
        show(peek_images(opened, rows), as_json)


def _rows(root: str, there: int, count: int, chosen: tuple[int, ...]) -> list[int]:
    beyond = [row for row in chosen if row >= there]
    if beyond:
        raise click.BadParameter(f"there is no row {beyond[0]:,}; '{root}' has {there:,}", param_hint="'--row'")
    return list(chosen) or list(range(min(count, there)))


def _peeked(cache: Cache, rows: list[int], columns: tuple[str, ...]) -> Peek:
    read = cache.read(np.array(rows, np.int64), columns or None)
    shown = tuple(
        PeekedRow(
            row=row,
            chunk=name.chunk,
            row_in_chunk=name.row,
            columns={column: _cell(cache.column(column), values[at]) for column, values in read.items()},
        )
        for at, (row, name) in enumerate(zip(rows, cache.row_ids(np.array(rows, np.int64)), strict=True))
    )
    return Peek(root=cache.root, generation=cache.generation.number, rows=len(cache), shown=shown)


def _cell(column: Column, value: Array) -> Cell:
    value = np.asarray(value)
    if column.ragged and column.dtype == "uint8" and not column.shape and (text := _text(value)) is not None:
        return Cell(dtype=column.dtype, shape=value.shape, text=text)
    first: Any = value.reshape(-1)[:KEPT_VALUES]
    plain = first.astype(np.float32) if column.dtype == "bfloat16" else first
    return Cell(dtype=column.dtype, shape=value.shape, values=plain.tolist())


def _text(value: Array) -> str | None:
    """Bytes as text, None where they are none or hold what a terminal would obey."""
    try:
        text = value.tobytes().decode()
    except UnicodeDecodeError:
        return None
    return text if all(mark.isprintable() or mark in "\n\r\t" for mark in text) else None
