"""Rows as a person would read them."""

from rich.console import Group, RenderableType
from rich.text import Text

from forebay.cli.drawing.pieces import facts, title
from forebay.cli.records import Cell, Peek, PeekedRow
from forebay.cli.words import counted

TEXT_LINES = 8
TEXT_MARKS = 600
SHOWN_VALUES = 12


def draw_peek(peek: Peek) -> RenderableType:
    head = title(peek.root, f"generation {peek.generation}", counted(peek.rows, "row"))
    return Group(head, *(part for row in peek.shown for part in _row(row)))


def _row(row: PeekedRow) -> tuple[RenderableType, ...]:
    place = f"chunk {row.chunk}, its row {row.row_in_chunk}"
    return title(f"row {row.row:,}", place), facts((name, _cell(cell)) for name, cell in row.columns.items())


def _cell(cell: Cell) -> Text | str:
    if cell.text is not None:
        return _text(cell.text) or "(empty)"
    values = cell.values or []
    shown = " ".join(map(_value, values[:SHOWN_VALUES]))
    count = 1
    for side in cell.shape:
        count *= side
    more = " …" if count > SHOWN_VALUES else ""
    kind = f"{cell.dtype} {list(cell.shape)}  " if cell.shape else ""
    return Text(f"{kind}{shown}{more}")


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(text: str) -> Text:
    """The beginning of a text, and how much of it is not shown."""
    shown = "\n".join(text.expandtabs(4).splitlines()[:TEXT_LINES])[:TEXT_MARKS]
    hidden = len(text) - len(shown)
    return Text.assemble(shown, (f"\n… {hidden:,} more characters" if hidden > 1 else "", "dim"))
