"""`fb.peek` and `fb.contact_sheet`: a few rows of any cache as records, images as a picture.

Rows of packed tokens become text: pieces of documents with their names.
The tokenizer is a constant of the layer, so the cache alone is enough. The names of documents come from the source, if
the user passes it and it has not changed and is cheap to read. A source that is only recorded in the cache is never
read: the author of the cache chose its paths.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.building.update import named_alike
from forebay.cache.plan import load_plan
from forebay.cache.segment import LeftOut
from forebay.columns import Array, Column
from forebay.errors import ForebayError, LibraryMissing, ModelUnusable, with_hint
from forebay.fields import checked_whole
from forebay.masks.train_on import KINDS as SPAN_KINDS
from forebay.masks.train_on import ROLES
from forebay.preview.pictures import KIND as IMAGES
from forebay.preview.pictures import cache_rows, peek_images, sheet_of
from forebay.preview.row_records import Cell, ImagePeek, PackedPeek, PackedPiece, PackedRow, PackedSpan, Peek, PeekedRow
from forebay.read.cache import Cache
from forebay.read.opening import open_cache
from forebay.source import Part, Sample, Source, samples_of
from forebay.store import Root
from forebay.tokens import Vocabulary
from forebay.tokens.encoders import decode

if TYPE_CHECKING:
    from PIL.Image import Image

# A compressed file is read from its beginning, which takes too long for deep parts.
DEEPEST_IN_STREAM = 256 * 1024 * 1024


class PieceNames:
    """The ids of documents by their number in a chunk."""

    def __init__(self, cache: Cache, source: Source | None) -> None:
        self._cache, self._source = cache, source
        self._of_chunk = lru_cache(maxsize=2)(self._read)

    def of(self, chunk: int, numbers: Iterable[int]) -> dict[int, str]:
        """Document number -> id, for the documents that are known."""
        names = self._of_chunk(chunk)
        return {number: names[number] for number in numbers if number < len(names)}

    def _read(self, chunk: int) -> tuple[str, ...]:
        if self._source is None:
            return ()
        try:
            plan = load_plan(self._cache.store)
            source, parts = named_alike(self._source, plan), plan.parts(chunk)
            if any(_is_costly(part) or _is_other(source, part) for part in parts):
                return ()
            return tuple(_ids(source, parts, plan.left_out(chunk)))
        except (ForebayError, OSError):
            return ()


def _ids(source: Source, parts: list[Part], left_out: LeftOut | None) -> Iterable[str]:
    """The ids of the samples that the recipe got: without failures and planned duplicates."""
    duplicates = frozenset(left_out.ordinals.tolist()) if left_out is not None else frozenset()
    samples = (sample for part in parts for sample in samples_of(source, part))
    for ordinal, sample in enumerate(samples):
        if isinstance(sample, Sample) and ordinal not in duplicates:
            yield sample.id


def _is_costly(part: Part) -> bool:
    return part.file.stream and part.stop > DEEPEST_IN_STREAM


def _is_other(source: Source, part: Part) -> bool:
    """Whether a file is not the planned one; a file that grew may still begin with it."""
    now = source.look(part.file.path)
    return now.size < part.file.size or (now.size == part.file.size and now.mtime_ns != part.file.mtime_ns)


KINDS = ("tokens", "chat")
COLUMNS = ("tokens", "seq_lens", "documents")
SPANS = "spans"
PREFERENCES = "preferences"
_OF_PAIRS = ("prompt", "candidates", "candidate_lens", "scores", "id", SPANS)


def peek_packed(cache: Cache, rows: list[int], source: Source | None = None) -> PackedPeek:
    """Rows of a token cache as text, with the names of documents from `source`."""
    reader = RowReader(cache, source)
    numbers = np.array(rows, np.int64)
    are_pairs = cache.recipe(cache.generation.base).kind == PREFERENCES
    packed_columns = (*COLUMNS, *([SPANS] if SPANS in cache.columns else []))
    read = cache.read(numbers, _OF_PAIRS if are_pairs else packed_columns)
    shown = []
    for at, (row, name) in enumerate(zip(rows, cache.row_ids(numbers), strict=True)):
        columns = {column: values[at] for column, values in read.items()}
        columns, names = _laid_out(columns) if are_pairs else (columns, None)
        shown.append(reader.row(row, name.chunk, name.row, columns, names))
    return PackedPeek(**cache_rows(cache), shown=tuple(shown), note=reader.note)


def _laid_out(columns: dict[str, Any]) -> tuple[dict[str, Any], dict[int, str]]:
    """A preference row as packed documents: the prompt, then each candidate, with their titles."""
    lengths = np.array([len(columns["prompt"]), *columns["candidate_lens"].tolist()], np.int64)
    scores = columns["scores"].tolist()
    names = {0: f"prompt of {columns['id'].tobytes().decode(errors='replace')}"}
    for number, score in enumerate(scores, 1):
        which = "best" if number == 1 else "worst" if number == len(scores) else str(number)
        names[number] = f"candidate, {which}" + ("" if np.isnan(score) else f", score {score:g}")
    laid = {
        "tokens": np.concatenate([columns["prompt"], columns["candidates"]]),
        "seq_lens": lengths,
        "documents": np.column_stack([np.arange(len(lengths)), np.zeros(len(lengths), np.int64)]),
        SPANS: columns[SPANS],
    }
    return laid, names


@dataclass(frozen=True)
class RowReader:
    """Decodes rows to text."""

    cache: Cache
    source: Source | None = None

    @cached_property
    def note(self) -> str:
        """Why there is no text; empty if there is."""
        try:
            self._text(np.zeros(0, np.uint32))
            return ""
        except (LibraryMissing, ModelUnusable) as error:
            return with_hint(error)

    def row(
        self, row: int, chunk: int, row_in_chunk: int, columns: dict[str, Any], names: dict[int, str] | None = None
    ) -> PackedRow:
        """A row with the names of its documents; by default, those of the source."""
        tokens, lengths, documents = (columns[name] for name in COLUMNS)
        names = self._names.of(chunk, documents[:, 0].tolist()) if names is None else names
        stops = np.cumsum(lengths, dtype=np.int64)
        spans = columns.get(SPANS, np.zeros((0, 5), np.uint32)).astype(np.int64)
        pieces = [
            self._piece(
                tokens[stop - length : stop],
                document,
                offset,
                names.get(document, ""),
                self._spans(tokens, spans[(spans[:, 0] >= stop - length) & (spans[:, 1] <= stop)]),
            )
            for length, stop, (document, offset) in zip(
                lengths.tolist(), stops.tolist(), documents.tolist(), strict=True
            )
        ]
        used = int(stops[-1]) if len(stops) else 0
        return PackedRow(
            row=row,
            chunk=chunk,
            row_in_chunk=row_in_chunk,
            utilization=used / max(1, len(tokens)),  # a forged row may have none
            padding=len(tokens) - used,
            pieces=tuple(pieces),
            text=None if self.note else self._text(tokens[:used]),
            tokens=tokens.tolist(),
            seq_lens=lengths.tolist(),
            documents=documents.tolist(),
        )

    def _spans(self, tokens: Array, spans: Array) -> tuple[PackedSpan, ...]:
        """The spans of one document, as text with control tokens."""
        return tuple(
            PackedSpan(
                role=ROLES[role] if role < len(ROLES) else "?",
                kind=SPAN_KINDS[kind] if kind < len(SPAN_KINDS) else "?",
                message=message,
                tokens=stop - start,
                text=None if self.note else decode(self._vocabulary, tokens[start:stop], control=True),
            )
            for start, stop, role, kind, message in spans.tolist()
        )

    def _piece(
        self, tokens: Array, document: int, offset: int, name: str, spans: tuple[PackedSpan, ...]
    ) -> PackedPiece:
        """One piece; begin and end tokens are flags and not part of its text."""
        begins = offset == 0 and self._begin is not None and int(tokens[0]) == self._begin
        ends = self._end is not None and int(tokens[-1]) == self._end
        inside = tokens[int(begins) : len(tokens) - int(ends)]
        return PackedPiece(
            document=document,
            offset=offset,
            tokens=len(tokens),
            bos=begins,
            eos=ends,
            goes_on=self._end is not None and not ends,
            source=name,
            text=None if self.note else self._text(inside),
            spans=spans,
        )

    def _text(self, ids: Array) -> str:
        return decode(self._vocabulary, ids)

    @cached_property
    def _names(self) -> PieceNames:
        return PieceNames(self.cache, self.source)

    @cached_property
    def _fields(self) -> dict[str, Any]:
        return self.cache.recipe(self.cache.generation.base).fields

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(*self.cache.kept_tokenizer())

    @cached_property
    def _begin(self) -> int | None:
        bos = self._fields.get("bos")
        return None if bos is None else self._vocabulary.id_of(bos, "bos")

    @cached_property
    def _end(self) -> int | None:
        eos = self._fields.get("eos")
        if eos is None:
            return None
        return self._vocabulary.end_of_document() if eos == "auto" else self._vocabulary.id_of(eos, "eos")


SHOWN_VALUES = 64
PEEKED_ROWS, SHEET_ROWS = 3, 24


def peek(
    cache: Cache | Root,
    rows: int | Sequence[int] = PEEKED_ROWS,
    *,
    columns: Sequence[str] | None = None,
    source: Source | None = None,
) -> Peek | PackedPeek | ImagePeek:
    """The first `rows` rows, or those of a list: tokens as text, facts about images, first values of arrays.

    `columns` shows only these, as values. `source` is read for the names of documents in packed tokens.
    """
    opened, numbers = _opened(cache, rows)
    kind = opened.recipe(opened.generation.base).kind
    if columns is None and kind in (*KINDS, PREFERENCES):
        return peek_packed(opened, numbers, source)
    return peek_images(opened, numbers) if columns is None and kind == IMAGES else _peeked(opened, numbers, columns)


def contact_sheet(cache: Cache | Root, rows: int | Sequence[int] = SHEET_ROWS, *, patch: int | None = None) -> "Image":
    """The first `rows` images of a cache, or those of a list, with their boxes and the tokens that a model ignores.

    `patch` is the side of a token, 16 where that divides the canvas. A notebook shows it; `save` writes a file.
    """
    opened, numbers = _opened(cache, rows)
    return sheet_of(opened, numbers, patch)[0]


def _opened(cache: Cache | Root, rows: int | Sequence[int]) -> tuple[Cache, list[int]]:
    opened = cache if isinstance(cache, Cache) else open_cache(cache)
    count = len(opened)
    if isinstance(rows, int | float | np.number):
        return opened, list(range(min(checked_whole("rows", rows), count)))
    return opened, [row + count * (row < 0) for row in map(int, rows)]


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
    return Peek(**cache_rows(cache), shown=shown)


def _cell(column: Column, value: Array) -> Cell:
    value = np.asarray(value)
    if column.ragged and column.dtype == "uint8" and not column.shape and (text := _text(value)) is not None:
        return Cell(dtype=column.dtype, shape=value.shape, text=text)
    first: Any = value.reshape(-1)[:SHOWN_VALUES]
    plain = first.astype(np.float32) if column.dtype == "bfloat16" else first
    return Cell(dtype=column.dtype, shape=value.shape, values=plain.tolist())


def _text(value: Array) -> str | None:
    """Bytes as text, None if they are not UTF-8 or contain control characters."""
    try:
        text = value.tobytes().decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in "\n\r\t" for char in text) else None
