"""`forebay peek`: a few rows as a person would read them."""

from typing import Any

import click
import numpy as np

from forebay.cache.reader import Cache, open_cache
from forebay.cli.options import cache_argument, json_option
from forebay.cli.packed_rows import KIND, peek_packed
from forebay.cli.records import Cell, Peek, PeekedRow
from forebay.cli.show import show
from forebay.columns import Array, Column

KEPT_VALUES = 64


@click.command()
@cache_argument
@click.option("--rows", "count", type=click.IntRange(min=1), default=3, show_default=True, help="How many, from row 0.")
@click.option("--row", "chosen", type=click.IntRange(min=0), multiple=True, help="This row; can be given again.")
@click.option("--column", "columns", multiple=True, help="Only this column, of any layer; can be given again.")
@json_option
def peek(cache: str, count: int, chosen: tuple[int, ...], columns: tuple[str, ...], as_json: bool) -> None:
    """Show a few rows: text and tokens as text, arrays by their first values.

    Packed tokens are shown as the documents they are from, with what is padding; --column shows the ids themselves,
    --json every token and all of the text.

    Example: forebay peek caches/edu --row 17
    """
    opened = open_cache(cache)
    beyond = [row for row in chosen if row >= len(opened)]
    if beyond:
        raise click.BadParameter(f"there is no row {beyond[0]:,}; '{cache}' has {len(opened):,}", param_hint="'--row'")
    rows = list(chosen) or list(range(min(count, len(opened))))
    show(peek_packed(opened, rows) if _is_packed(opened, columns) else _peeked(opened, rows, columns), as_json)


def _is_packed(cache: Cache, columns: tuple[str, ...]) -> bool:
    return not columns and cache.recipe(cache.generation.base).kind == KIND


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
