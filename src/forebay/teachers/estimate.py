"""The size of teacher layers, before they are built."""

from collections.abc import Iterator, Mapping
from math import prod

import msgspec

from forebay.fields import checked_whole
from forebay.records import Record
from forebay.teachers.prompt_columns import EMPTY
from forebay.teachers.recipe import FITTING_CHUNK_BYTES, MOST_CHUNK_BYTES, TeacherRecipe


class ColumnSize(Record, frozen=True, kw_only=True):
    """The size of one column; for columns stored once per distinct prompt, an upper bound."""

    layer: str
    column: str
    shape: tuple[int, ...]  # of one row
    dtype: str
    row_bytes: int
    bytes: int


class TeacherEstimate(Record, frozen=True, kw_only=True):
    """The size of the layers of some teachers."""

    rows: int
    columns: tuple[ColumnSize, ...]
    row_bytes: int
    bytes: int
    free_bytes: int | None = None
    fits: bool = True
    largest_chunk_bytes: int = 0  # of one layer in the largest chunk of the cache, which is made in memory
    notes: tuple[str, ...] = ()  # also the errors of interpolation, where the teacher was run


def estimate_teachers(
    recipes: Mapping[str, TeacherRecipe], rows: int, *, free_bytes: int | None = None, chunk_rows: int = 0
) -> TeacherEstimate:
    """Return the size of every column of the layers for a number of rows, and their sum.

    `chunk_rows` are the rows of the largest chunk of the cache, which bounds the memory of a build.
    """
    checked_whole("rows", rows)
    checked_whole("chunk_rows", chunk_rows)
    sizes = tuple(size for layer, recipe in recipes.items() for size in _sizes(layer, recipe, rows))
    total = sum(size.bytes for size in sizes)
    layers = {size.layer: sum(one.row_bytes for one in sizes if one.layer == size.layer) for size in sizes}
    largest = max(layers.values(), default=0) * chunk_rows
    return TeacherEstimate(
        rows=rows,
        columns=sizes,
        row_bytes=sum(size.row_bytes for size in sizes),
        bytes=total,
        free_bytes=free_bytes,
        fits=(free_bytes is None or total <= free_bytes) and largest <= MOST_CHUNK_BYTES,
        largest_chunk_bytes=largest,
        notes=tuple(_chunk_notes(recipes, layers, chunk_rows)),
    )


def _chunk_notes(recipes: Mapping[str, TeacherRecipe], layers: Mapping[str, int], chunk_rows: int) -> Iterator[str]:
    """Yield hints on chunks that need much memory, or are expensive to make again."""
    for layer, row_bytes in layers.items():
        if row_bytes * chunk_rows > 4 * FITTING_CHUNK_BYTES:
            too_large = row_bytes * chunk_rows > MOST_CHUNK_BYTES
            yield (
                f"a chunk of {chunk_rows:,} rows makes {row_bytes * chunk_rows:,} bytes of '{layer}' in memory"
                f"{f', more than the limit of {MOST_CHUNK_BYTES:,}' if too_large else ''}; build the base layer in "
                f"chunks of about {recipes[layer].fitting_rows():,} rows"
            )


def _sizes(layer: str, recipe: TeacherRecipe, rows: int) -> list[ColumnSize]:
    stored = [
        ColumnSize(
            layer=layer,
            column=column.name,
            shape=column.shape,
            dtype=column.dtype,
            row_bytes=recipe.most_bytes(column),
            bytes=recipe.most_bytes(column) * rows,
        )
        for column in recipe.columns()
    ]
    constant = [
        ColumnSize(
            layer=layer,
            column=name,
            shape=tuple(values.shape),
            dtype=str(values.dtype),
            row_bytes=0,
            bytes=values.dtype.itemsize * prod(values.shape),
        )
        for name, values in recipe.known_constants().items()
    ]
    empty = [
        msgspec.structs.replace(size, column=f"{size.column}{EMPTY}", row_bytes=0, bytes=size.row_bytes)
        for size in stored
        if recipe.empty_prompt and size.column in {output.name for output in recipe.model.outputs()}
    ]
    return stored + constant + empty
