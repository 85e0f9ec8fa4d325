"""The presence bits that every layer above the base carries beside its own columns, and the names columns go by."""

from collections.abc import Mapping
from typing import NamedTuple

from forebay.columns import Column

PRESENT = Column(name="present", dtype="bool")


class Home(NamedTuple):
    """The layer a column is in, and its declaration there."""

    layer: str
    column: Column


def layer_columns(columns: tuple[Column, ...], is_base: bool) -> tuple[Column, ...]:
    """The columns that a layer's chunks hold: those of its recipe and, above the base, the presence bits."""
    return columns if is_base else (*columns, PRESENT)


def presence_name(layer: str) -> str:
    """How a layer's presence bits are asked for."""
    return f"{layer}.{PRESENT.name}"


def column_homes(declared: Mapping[str, tuple[Column, ...]], base: str) -> dict[str, Home]:
    """Every name that a column can be asked for by, the base layer's first; `declared` are columns of recipes."""
    found: dict[str, Home] = {}
    for layer in sorted(declared, key=lambda name: (name != base, name)):
        found |= {column.name: Home(layer, column) for column in declared[layer]}
        if layer != base:
            found[presence_name(layer)] = Home(layer, PRESENT)
    return found
