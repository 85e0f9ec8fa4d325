"""Records of previews, the viewer and the demo."""

from typing import Any

from forebay.records import Record


class Cell(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One value of a row: bytes that are UTF-8 as `text`, anything else as its first `values`."""

    dtype: str
    shape: tuple[int, ...]
    text: str | None = None
    values: list[object] | None = None


class CacheRows(Record, frozen=True, kw_only=True):
    """The first fields of every record of rows."""

    root: str
    generation: int
    rows: int


class RowPosition(Record, frozen=True, kw_only=True):
    """The first fields of every record of one row."""

    row: int
    chunk: int
    row_in_chunk: int


class PeekedRow(RowPosition, frozen=True, kw_only=True):
    columns: dict[str, Cell]


class Peek(CacheRows, frozen=True, kw_only=True):
    """A few rows of any cache."""

    shown: tuple[PeekedRow, ...]


class PackedSpan(Record, frozen=True, kw_only=True):
    """Tokens of a conversation with one role and one kind; `text` has control tokens too."""

    role: str
    kind: str
    message: int
    tokens: int
    text: str | None  # None if the tokenizer is not available


class PackedPiece(Record, frozen=True, kw_only=True):
    """A document, or a part of one, in a row; `text` is without begin and end tokens."""

    document: int  # number of the document in its chunk
    offset: int  # offset in the document, in tokens
    tokens: int
    bos: bool
    eos: bool
    goes_on: bool  # the document continues, in another row or truncated
    source: str  # the document's id; empty if the source is not available
    text: str | None  # None if the tokenizer is not available
    spans: tuple[PackedSpan, ...] = ()  # of a conversation


class PackedRow(RowPosition, frozen=True, kw_only=True):
    utilization: float
    padding: int
    text: str | None
    pieces: tuple[PackedPiece, ...]
    tokens: list[int]
    seq_lens: list[int]
    documents: list[list[int]]


class PackedPeek(CacheRows, frozen=True, kw_only=True):
    """A few rows of packed tokens as text."""

    shown: tuple[PackedRow, ...]
    note: str = ""


class PeekedImage(RowPosition, frozen=True, kw_only=True):
    id: str
    original_size: tuple[int, int]  # width, height, as displayed
    box: tuple[int, int, int, int]  # left, top, width, height on the canvas
    padding: float  # share of the canvas
    tags: tuple[str, ...]
    metadata: dict[str, Any]  # without the tags


class ImagePeek(CacheRows, frozen=True, kw_only=True):
    """A few rows of images."""

    size: int
    shown: tuple[PeekedImage, ...]


class ImageSheet(CacheRows, frozen=True, kw_only=True):
    """A contact sheet; `patch` is None if no tokens are drawn."""

    path: str
    patch: int | None
    drawn: tuple[int, ...]


class DemoStep(Record, frozen=True, kw_only=True):
    command: str
    exit_code: int
    seconds: float


class DemoReport(Record, frozen=True, kw_only=True):
    root: str
    steps: tuple[DemoStep, ...]
    seconds: float
    exists: bool = True  # whether the cache was left on the disk


class Viewing(Record, frozen=True, kw_only=True):
    """The caches that a viewer server shows, and its address."""

    url: str
    caches: tuple[str, ...]
