"""Images as a person would read them on a terminal.

row 0 · chunk 0, its row 0 · cats/a.jpg
  ················   as displayed  640 × 480
  ▒▒▒▓▓▓███▓▓▒▒▒░░   on 448 × 448  448 × 336 at 0, 56
  ················   tags          cat, outdoors
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay.cli.drawing.pieces import facts, title
from forebay.cli.records import ImagePeek, ImageSheet, PeekedImage
from forebay.cli.words import counted, printable

SHOWN_METADATA = 300


def draw_images(peek: ImagePeek) -> RenderableType:
    head = title(peek.root, f"generation {peek.generation}", counted(peek.rows, "row"))
    return Group(head, *(part for image in peek.shown for part in _image(image, peek.size)))


def draw_image_sheet(sheet: ImageSheet) -> RenderableType:
    tokens = f"tokens of {sheet.patch} × {sheet.patch} that are ignored in red" if sheet.patch else "no tokens drawn"
    head = title(sheet.root, f"generation {sheet.generation}", counted(sheet.rows, "row"))
    return Group(head, facts([("sheet", f"{printable(sheet.path)}, {counted(len(sheet.drawn), 'image')}, {tokens}")]))


def _image(image: PeekedImage, size: int) -> Iterator[RenderableType]:
    place = f"chunk {image.chunk}, its row {image.row_in_chunk}"
    yield title(f"row {image.row:,}", place, printable(image.id))
    grid = Table.grid(padding=(0, 1))
    grid.add_row(Text("\n".join(image.picture), no_wrap=True), _facts(image, size))
    yield Padding(grid, (0, 0, 0, 2), expand=False)


def _facts(image: PeekedImage, size: int) -> RenderableType:
    left, top, width, height = image.box
    return facts(
        [
            ("as displayed", f"{image.original_size[0]:,} × {image.original_size[1]:,}"),
            (f"on {size} × {size}", f"{width} × {height} at {left}, {top}"),
            ("padding", f"{100 * image.padding:.1f} %"),
            ("tags", printable(", ".join(image.tags)) or "none"),
            ("metadata", _metadata(image.metadata)),
        ]
    )


def _metadata(metadata: dict[str, Any]) -> str:
    if not metadata:
        return ""
    text = printable(msgspec.json.encode(metadata).decode())
    return text if len(text) <= SHOWN_METADATA else f"{text[:SHOWN_METADATA]}…"
