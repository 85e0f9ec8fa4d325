"""The presence bits that every layer above the base carries beside its own columns."""

from forebay.columns import Column

PRESENT = Column(name="present", dtype="bool")


def layer_columns(columns: tuple[Column, ...], is_base: bool) -> tuple[Column, ...]:
    """The columns that a layer's chunks hold: those of its recipe and, above the base, the presence bits."""
    return columns if is_base else (*columns, PRESENT)
