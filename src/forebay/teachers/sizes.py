"""What layers of teachers take, from their shapes alone: no model is loaded and nothing is sampled."""

from collections.abc import Mapping
from math import prod

import msgspec

from forebay.teachers.recipe import TeacherRecipe


class ColumnSize(msgspec.Struct, frozen=True, kw_only=True):
    """What one column takes; of what is stored once for equal prompts, at most."""

    layer: str
    column: str
    shape: tuple[int, ...]  # of one row
    dtype: str
    row_bytes: int
    bytes: int


class TeacherEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What the layers of some teachers take for so many rows."""

    rows: int
    columns: tuple[ColumnSize, ...]
    row_bytes: int
    bytes: int
    free_bytes: int | None = None
    fits: bool = True


def estimate_teachers(
    recipes: Mapping[str, TeacherRecipe], rows: int, *, free_bytes: int | None = None
) -> TeacherEstimate:
    """The table of a cache of teachers: every column with its bytes, and their sum."""
    found = tuple(size for layer, recipe in recipes.items() for size in _sizes(layer, recipe, rows))
    total = sum(size.bytes for size in found)
    return TeacherEstimate(
        rows=rows,
        columns=found,
        row_bytes=sum(size.row_bytes for size in found),
        bytes=total,
        free_bytes=free_bytes,
        fits=free_bytes is None or total <= free_bytes,
    )


def _sizes(layer: str, recipe: TeacherRecipe, rows: int) -> list[ColumnSize]:
    stored = [
        ColumnSize(
            layer=layer,
            column=column.name,
            shape=column.shape,
            dtype=column.dtype,
            row_bytes=column.item_bytes,
            bytes=column.item_bytes * rows,
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
        for name, values in recipe.constants().items()
    ]
    return stored + constant
