"""`fb.peek` and `fb.contact_sheet`: a few rows of any cache as records, images as a picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.columns import Array, Column
from forebay.preview.packed_rows import KINDS as PACKED
from forebay.preview.packed_rows import PREFERENCES, peek_packed
from forebay.preview.pictures import KIND as IMAGES
from forebay.preview.pictures import peek_images, sheet_of
from forebay.preview.row_records import Cell, ImagePeek, PackedPeek, Peek, PeekedRow
from forebay.read.cache import Cache, open_cache
from forebay.source import Source
from forebay.store import Root

if TYPE_CHECKING:
    from forebay.masks.draw import Picture  # which needs pillow

KEPT_VALUES = 64
PEEKED_ROWS, SHEET_ROWS = 3, 24


def peek(
    cache: Cache | Root,
    rows: int | Sequence[int] = PEEKED_ROWS,
    *,
    columns: Sequence[str] | None = None,
    source: Source | None = None,
) -> Peek | PackedPeek | ImagePeek:
    """The first `rows` rows, or those of a list: tokens as text, images in characters, arrays by their first values.

    `columns` shows only these, as values. `source` is read for the names of documents in packed tokens.
    """
    opened, numbers = _opened(cache, rows)
    kind = opened.recipe(opened.generation.base).kind
    if columns is None and kind in (*PACKED, PREFERENCES):
        return peek_packed(opened, numbers, source)
    return peek_images(opened, numbers) if columns is None and kind == IMAGES else _peeked(opened, numbers, columns)


def contact_sheet(
    cache: Cache | Root, rows: int | Sequence[int] = SHEET_ROWS, *, patch: int | None = None
) -> "Picture":
    """The first `rows` images of a cache, or those of a list, with their boxes and the tokens that a model ignores.

    `patch` is the side of a token, 16 where that divides the canvas. A notebook shows the picture; `save` writes a PNG.
    """
    opened, numbers = _opened(cache, rows)
    return sheet_of(opened, numbers, patch)[0]


def _opened(cache: Cache | Root, rows: int | Sequence[int]) -> tuple[Cache, list[int]]:
    opened = cache if isinstance(cache, Cache) else open_cache(cache)
    count = len(opened)
    wanted = range(min(rows, count)) if isinstance(rows, int) else [row + count * (row < 0) for row in map(int, rows)]
    return opened, list(wanted)


def _peeked(cache: Cache, rows: list[int], columns: Sequence[str] | None) -> Peek:
    read = cache.read(np.array(rows, np.int64), columns)
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
    """Bytes as text, None if they are not UTF-8 or contain control characters."""
    try:
        text = value.tobytes().decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in "\n\r\t" for char in text) else None
