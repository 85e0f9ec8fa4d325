"""Draw rows on a terminal.

row 0 (chunk 0, row 0) · ███████████████████▉ 99.6% in use
  ▌ a.jsonl@0 · 312 tokens                 a color for every piece
  ▌ Once upon a time …∎                    ∎ ends a document
  ▌ b.jsonl@77 · 198 tokens, from 512 on   the rest of a split document
  ▌ … and so on
  ░ 2 tokens of padding

row 0 (chunk 0, row 0) · cats/a.jpg
  as displayed  640 × 480
  on 448 × 448  448 × 336 at 0, 56
  tags          cat, outdoors
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from forebay.cli.render.drawing import draw
from forebay.preview.console import facts, next_command, title
from forebay.preview.row_records import (
    Cell,
    ImagePeek,
    PackedPeek,
    PackedPiece,
    PackedRow,
    PackedSpan,
    Peek,
    PeekedImage,
    PeekedRow,
    Viewing,
)
from forebay.preview.words import command_line, counted, printable

TEXT_LINES = 8
TEXT_CHARS = 600
SHOWN_VALUES = 12


@draw.register
def draw_peek(peek: Peek) -> RenderableType:
    head = title(peek.root, f"generation {peek.generation}", counted(peek.rows, "row"))
    return Group(head, *(part for row in peek.shown for part in _row(row)))


def _row(row: PeekedRow) -> tuple[RenderableType, ...]:
    return title(_row_name(row)), facts((name, _cell(cell)) for name, cell in row.columns.items())


def _row_name(row: PeekedRow | PackedRow | PeekedImage) -> str:
    return f"row {row.row:,} (chunk {row.chunk}, row {row.row_in_chunk})"


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
    """The beginning of a text, and the number of characters that are not shown."""
    shown = "\n".join(text.expandtabs(4).splitlines()[:TEXT_LINES])[:TEXT_CHARS]
    hidden = len(text) - len(shown)
    return Text.assemble(shown, (f"\n… {hidden:,} more characters" if hidden > 1 else "", "dim"))


COLORS = ("cyan", "yellow", "magenta", "green")
HEAD_CHARS, TAIL_CHARS = 360, 120
SPAN_CHARS = 2400  # of a conversation
SPAN_COLORS = {
    "prompt": "cyan", "response": "green", "thinking": "magenta", "tool_call": "yellow", "tool_result": "blue",
    "header": "dim", "stop": "bold red",
}  # fmt: skip
SHOWN_IDS = 24
BAR_CELLS = 20
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@draw.register
def draw_packed_rows(peek: PackedPeek) -> RenderableType:
    head = title(peek.root, f"generation {peek.generation}", counted(peek.rows, "row"))
    note = [Text(f"ids, not text: {printable(peek.note)}", style="yellow")] if peek.note else []
    if any(piece.spans for row in peek.shown for piece in row.pieces):
        note.append(Text.assemble("spans: ", *((f"{kind} ", color) for kind, color in SPAN_COLORS.items())))
    return Group(head, *note, *(line for row in peek.shown for line in _packed_row(row)))


def _packed_row(row: PackedRow) -> Iterator[RenderableType]:
    head = title(_row_name(row))
    share = f"{100 * row.utilization:.1f}% in use" if row.padding else "full"
    yield Text.assemble(head, " · ", (share_bar(row.utilization), "green"), f" {share}")
    start = 0
    for number, piece in enumerate(row.pieces):
        color = COLORS[number % len(COLORS)]
        yield _Marked("▌", color, Text(_origin(piece), style="dim"))
        yield _Marked("▌", color, _content(piece, row.tokens[start : start + piece.tokens], color))
        start += piece.tokens
    if row.padding:
        yield _Marked("░", "dim", Text(f"{counted(row.padding, 'token')} of padding", style="dim"))


def share_bar(share: float, cells: int = BAR_CELLS) -> str:
    """
    >>> share_bar(0.55, cells=4), share_bar(0.0, 2), share_bar(0.99, 2), share_bar(1.0, 2)
    ('██▏ ', '  ', '█▉', '██')
    """
    eighths = int(share * cells * 8)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(cells)


def _origin(piece: PackedPiece) -> str:
    name = printable(piece.source) if piece.source else f"document {piece.document:,} of the chunk"
    onward = f", from token {piece.offset:,} on" if piece.offset else ""
    return f"{name} · {counted(piece.tokens, 'token')}{onward}"


def _content(piece: PackedPiece, tokens: list[int], color: str) -> Text:
    """The text of a piece, with glyphs for begin and end tokens, and dots if the document continues."""
    if piece.text is None:
        return Text(_ids(tokens), style=color)
    if piece.spans:
        return _conversation(piece.spans)
    before = "▸" if piece.bos else "…" if piece.offset else ""
    after = "∎" if piece.eos else "…" if piece.goes_on else ""
    return Text.assemble((before, "dim"), (_shortened(_visible(piece.text)), color), (after, "dim"))


def _conversation(spans: tuple[PackedSpan, ...]) -> Text:
    """A conversation with a color for every kind of span; headers are dim."""
    room = max(24, SPAN_CHARS // max(1, len(spans)))
    shown = Text()
    for span in spans:
        text = "\n".join(printable(line.expandtabs(4)) for line in (span.text or "").split("\n"))
        cut = text if len(text) <= room else f"{text[: room - room // 4]}⟨{len(text) - room:,}⟩{text[-room // 4 :]}"
        shown.append(cut, style=SPAN_COLORS.get(span.kind, ""))
    return shown


def _ids(ids: list[int]) -> str:
    more = " …" if len(ids) > SHOWN_IDS else ""
    return " ".join(map(str, ids[:SHOWN_IDS])) + more


def _shortened(text: str) -> str:
    hidden = len(text) - HEAD_CHARS - TAIL_CHARS
    if hidden <= HEAD_CHARS // 4:
        return text
    return f"{text[:HEAD_CHARS]} ⟨{hidden:,} more characters⟩ {text[-TAIL_CHARS:]}"


def _visible(text: str) -> str:
    """Text with control characters escaped and runs of empty lines joined."""
    lines = [printable(line.expandtabs(4)) for line in text.split("\n")]
    return "\n".join(line for at, line in enumerate(lines) if line or at == 0 or lines[at - 1])


@dataclass(frozen=True, slots=True)
class _Marked:
    """A text with a glyph before every line, for any width of the terminal."""

    glyph: str
    style: str
    content: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.content.wrap(console, max(20, options.max_width - 4)):
            line.rstrip()
            yield Text.assemble("  ", (self.glyph, self.style), " ", line)


SHOWN_METADATA = 300


@draw.register
def draw_images(peek: ImagePeek) -> RenderableType:
    head = title(peek.root, f"generation {peek.generation}", counted(peek.rows, "row"))
    images = (part for image in peek.shown for part in (title(_row_name(image), image.id), _facts(image, peek.size)))
    return Group(head, *images, next_command(command_line("peek", peek.root, "--png", "sheet.png")))


def _facts(image: PeekedImage, size: int) -> RenderableType:
    left, top, width, height = image.box
    return facts(
        [
            ("as displayed", f"{image.original_size[0]:,} × {image.original_size[1]:,}"),
            (f"on {size} × {size}", f"{width} × {height} at {left}, {top}"),
            ("padding", f"{100 * image.padding:.1f}%"),
            ("tags", printable(", ".join(image.tags)) or "none"),
            ("metadata", _metadata(image.metadata)),
        ]
    )


def _metadata(metadata: dict[str, Any]) -> str:
    if not metadata:
        return ""
    text = printable(json.dumps(metadata, ensure_ascii=False, separators=(",", ":")))
    return text if len(text) <= SHOWN_METADATA else f"{text[:SHOWN_METADATA]}…"


@draw.register
def draw_viewing(viewing: Viewing) -> RenderableType:
    shown = Text.assemble("viewing ", (", ".join(map(printable, viewing.caches)), "bold"))
    return Group(shown, Text.assemble("open ", (viewing.url, "cyan"), " in a browser; Ctrl-C stops"))
