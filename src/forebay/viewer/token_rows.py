"""Rows of packed tokens for the page of tokens: what every token is, where it stands, and what it is trained on.

Documents, positions, labels and blocks come from the functions that training uses (`forebay.masks`).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from forebay.cache.catalog import presence_name
from forebay.cache.plan import load_plan
from forebay.cache.records import Record
from forebay.columns import Array
from forebay.errors import ForebayError, LibraryMissing, TokenizerUnusable
from forebay.kinds import WRONG
from forebay.masks import documents as masks
from forebay.masks.spans import block_ranges, document_spans
from forebay.masks.train_on import GENERATED, KINDS, ROLES, SPAN_FIELDS
from forebay.preview.peek import COLUMNS, RowReader
from forebay.preview.row_records import PackedPiece
from forebay.read.cache import Cache
from forebay.tokens import Vocabulary
from forebay.tokens.vocabulary import decode, in_time, reference_tokenizer
from forebay.viewer.overview import SourcePart
from forebay.viewer.shown_cache import Query, ShownCache

CONTEXT = 6  # tokens before one that decide how it is written
BLOCK = 128
MOST_SHOWN = 16_384  # tokens of one answer; a longer row is shown in parts
MOST_PIECES = 200
_UNFINISHED = "\ufffd"  # a character of which a token has only some bytes
NO_TEXT = (LibraryMissing, TokenizerUnusable, *WRONG)


class KindSpan(Record, frozen=True, kw_only=True):
    """Tokens of one kind: prompt, response, tool_call …"""

    start: int
    stop: int
    role: str
    kind: str
    trained: bool


class Blocks(Record, frozen=True, kw_only=True):
    """FlexAttention's blocks of a row: per row of blocks, where keys begin, are all seen, and end."""

    size: int
    start: list[int]
    full_start: list[int]
    full_stop: list[int]
    stop: list[int]


class Candidate(Record, frozen=True, kw_only=True):
    """An answer to the prompt of a preference."""

    tokens: int
    score: float
    text: str


class TokenRow(Record, frozen=True, kw_only=True):
    row: int
    rows: int
    generation: int
    chunk: int
    row_in_chunk: int
    chunk_rows: int
    length: int  # of the whole row, in tokens
    first: int  # the place in the row of the first token below
    tokens: list[int]
    texts: list[str]  # one per token; empty where its bytes belong to the character of a later token
    documents: list[int]  # number of the document in the row, per token
    positions: list[int]
    labels: list[int]  # as the loader makes them: the next token, -100 where the loss ignores it
    padding: int
    log_probs: dict[str, list[float]]  # column of a layer -> log-prob of each token; NaN where there is none
    seq_lens: list[int]
    pieces: tuple[PackedPiece, ...]  # the first documents
    candidates: tuple[Candidate, ...]  # of a preference, whose documents are the prompt and its candidates
    spans: tuple[KindSpan, ...]  # places in the whole row
    blocks: Blocks | None  # None of a preference, which is not packed
    parts: tuple[SourcePart, ...]  # of source files that the chunk was made from
    note: str = ""  # why there is no text


def token_row(shown: ShownCache, query: Query) -> TokenRow:
    """A row of packed tokens, or a preference; of a long row, the tokens from `token` on."""
    cache, row = shown.at(query.some("generation")), query.whole("row", 0)
    (name,) = cache.row_ids([row])
    at = int(cache.chunk_numbers.searchsorted(name.chunk))
    parts = _parts_of(cache, name.chunk)
    make = _preference if "candidates" in cache.columns else _packed
    made = make(shown, cache, row, name.chunk, name.row, query.whole("token", 0))
    return TokenRow(
        row=row,
        rows=len(cache),
        generation=cache.generation.number,
        chunk=name.chunk,
        row_in_chunk=name.row,
        chunk_rows=int(cache.chunk_starts[at + 1] - cache.chunk_starts[at]),
        parts=parts,
        **made,
    )


def _packed(shown: ShownCache, cache: Cache, row: int, chunk: int, row_in_chunk: int, first: int) -> dict[str, Any]:
    read = cache.read(np.array([row]), COLUMNS)
    columns = {column: np.asarray(read[column][0]) for column in COLUMNS}
    tokens, lengths = columns["tokens"], columns["seq_lens"]
    check_lengths(tokens, lengths)
    size, whole = len(tokens), np.atleast_2d(lengths).astype(np.int64)
    part = _part(first, size)
    pieces, note = _pieces(row_reader(shown, cache), row, chunk, row_in_chunk, columns)
    texts, no_text = _texts(cache, tokens, lengths, part) if not note else ([], note)
    spans = _spans(cache, row)
    labels = _trained_labels(masks.labels(tokens[None], whole)[0], spans)
    return {
        "length": size,
        "first": part.start,
        "tokens": tokens[part].tolist(),
        "texts": texts,
        "documents": masks.document_ids(whole, size)[0][part].tolist(),
        "positions": masks.positions(whole, size)[0][part].tolist(),
        "labels": labels[part].tolist(),
        "padding": size - int(lengths.sum()),
        "log_probs": _log_probs(cache, row, masks.label_mask(whole, size, "unshifted")[0], part),
        "seq_lens": lengths.tolist(),
        "pieces": pieces,
        "candidates": (),
        "spans": spans,
        "blocks": _blocks(whole, size),
        "note": no_text,
    }


def _preference(shown: ShownCache, cache: Cache, row: int, chunk: int, row_in_chunk: int, first: int) -> dict[str, Any]:
    """The prompt, then every candidate; each candidate continues the prompt, and no candidate sees another."""
    read = cache.read([row], ["prompt", "candidates", "candidate_lens", "scores"])
    prompt, candidates, lens, scores = (np.asarray(read[name][0]) for name in read)
    tokens = np.concatenate([prompt, candidates])
    lengths = np.array([len(prompt), *lens.tolist()], np.int64)
    check_lengths(tokens, lengths)
    part, size, begins = _part(first, len(tokens)), len(tokens), np.cumsum(lengths) - lengths
    documents = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(documents)) - begins[documents] + len(prompt) * (documents > 0)
    spans = _spans(cache, row)
    labels = np.append(tokens[1:].astype(np.int64), masks.IGNORED_LABEL)
    labels[begins[2:] - 1] = masks.IGNORED_LABEL  # the last token of a candidate predicts nothing
    texts, note = _texts(cache, tokens, lengths, part)
    of_answers = np.arange(size) >= len(prompt)
    return {
        "length": size,
        "first": part.start,
        "tokens": tokens[part].tolist(),
        "texts": texts,
        "documents": documents[part].tolist(),
        "positions": positions[part].tolist(),
        "labels": _trained_labels(labels, spans)[part].tolist(),
        "padding": 0,
        "log_probs": _log_probs(cache, row, of_answers, part),
        "seq_lens": lengths.tolist(),
        "pieces": (),
        "candidates": tuple(_candidates(cache, candidates, lens, scores)),
        "spans": spans,
        "blocks": None,
        "note": note,
    }


def _candidates(cache: Cache, tokens: Array, lens: Array, scores: Array) -> Iterator[Candidate]:
    stops = np.cumsum(lens, dtype=np.int64).tolist()
    for at, (stop, length) in enumerate(zip(stops, lens.tolist(), strict=True)):
        score = float(scores[at]) if at < len(scores) else float("nan")
        yield Candidate(tokens=length, score=score, text=_text(cache, tokens[stop - length : stop][:MOST_SHOWN]))


def _part(first: int, size: int) -> slice:
    """The tokens of a row that one answer shows."""
    start = min(first, max(0, size - 1)) // MOST_SHOWN * MOST_SHOWN
    return slice(start, min(size, start + MOST_SHOWN))


def _log_probs(cache: Cache, row: int, places: Array, part: slice) -> dict[str, list[float]]:
    """The values of layers that have one number per label, each at the token that it is about."""
    found = {}
    for layer in cache.generation.recipes:
        names = [one.name for one in cache.recipe(layer).columns if one.ragged and one.dtype.startswith(("f", "bf"))]
        if layer == cache.generation.base or not names or not _is_present(cache, layer, row):
            continue
        for name, values in cache.read([row], names).items():
            own = np.asarray(values[0], np.float32)
            if own.shape == (int(places.sum()),):
                spread = np.full(len(places), np.nan, np.float32)
                spread[places] = own
                found[name] = spread[part].round(4).tolist()
    return found


def _is_present(cache: Cache, layer: str, row: int) -> bool:
    bits = presence_name(layer)
    return bool(np.asarray(cache.read([row], [bits])[bits])[0])


def check_lengths(tokens: Array, lengths: Array) -> None:
    """Raise where documents are longer than their row: a stranger's cache could ask for any amount of memory."""
    if int(lengths.sum(dtype=np.uint64)) > len(tokens):
        raise ValueError(f"the documents of the row are longer than its {len(tokens):,} tokens")


def _blocks(lengths: Array, size: int) -> Blocks:
    side = BLOCK if size >= 4 * BLOCK else max(1, size // 8)
    ranges = block_ranges(document_spans(lengths, size), (side, side))
    return Blocks(
        size=side,
        start=ranges.start[0].tolist(),
        full_start=ranges.full_start[0].tolist(),
        full_stop=ranges.full_stop[0].tolist(),
        stop=ranges.stop[0].tolist(),
    )


def _pieces(
    reader: RowReader, row: int, chunk: int, row_in_chunk: int, columns: dict[str, Any]
) -> tuple[tuple[PackedPiece, ...], str]:
    """The first documents of a row, as many as can be shown, and why they have no text."""
    stops = np.cumsum(columns["seq_lens"], dtype=np.int64)
    kept = min(MOST_PIECES, int(np.searchsorted(stops, 4 * MOST_SHOWN, side="right")))
    if not kept:
        return (), ""
    some = {
        "tokens": columns["tokens"][: int(stops[kept - 1])],
        "seq_lens": columns["seq_lens"][:kept],
        "documents": columns["documents"][:kept],
    }
    try:
        return reader.row(row, chunk, row_in_chunk, some).pieces, reader.note
    except NO_TEXT as error:
        return (), f"the row has no text: {error}"


def _texts(cache: Cache, tokens: Array, lengths: Array, part: slice) -> tuple[list[str], str]:
    try:
        return token_texts(vocabulary_of(cache), tokens, lengths, part), ""
    except NO_TEXT as error:
        return [], f"the row has no text: {error}"


def _text(cache: Cache, tokens: Array) -> str:
    try:
        return decode(vocabulary_of(cache), tokens)
    except NO_TEXT:
        return ""


@lru_cache(maxsize=4)
def row_reader(shown: ShownCache, cache: Cache) -> RowReader:
    """A reader that is kept, as it parses the whole vocabulary once."""
    return RowReader(cache, shown.source)


@lru_cache(maxsize=4)
def vocabulary_of(cache: Cache) -> Vocabulary:
    """The tokenizer that a cache keeps."""
    return Vocabulary(*cache.kept_tokenizer())


def token_texts(vocabulary: Vocabulary, tokens: Array, lengths: Array, part: slice | None = None) -> list[str]:
    """What each token of a part of a row adds to the text of its document.

    A token is decoded with a few before it, so that spaces which a decoder drops at a beginning are kept; a character
    of several tokens belongs to the last of them.
    """
    part = part or slice(0, len(tokens))
    starts = np.full(len(tokens), int(lengths.sum()), np.int64)  # padding is one more piece
    starts[: int(lengths.sum())] = np.repeat(np.cumsum(lengths, dtype=np.int64) - lengths, lengths)
    low = max(0, part.start - CONTEXT)
    ids, places = tokens[low : part.stop].tolist(), range(part.start - low, part.stop - low)
    begins = np.maximum(starts[part] - low, np.arange(part.start, part.stop) - low - CONTEXT).clip(0).tolist()
    before = [ids[begin:at] for at, begin in zip(places, begins, strict=True)]
    both = before + [ids[begin : at + 1] for at, begin in zip(places, begins, strict=True)]
    tokenizer = reference_tokenizer(vocabulary)
    decoded = in_time(
        vocabulary.name, "decode", len(before), lambda: tokenizer.decode_batch(both, skip_special_tokens=False)
    )
    return [_added(old, new) for old, new in zip(decoded[: len(before)], decoded[len(before) :], strict=True)]


def _added(old: str, new: str) -> str:
    """
    >>> _added("a b", "a bc"), _added("a\\ufffd", "a\\u00e9"), _added("a", "a\\ufffd")
    ('c', 'é', '')
    """
    kept = old.rstrip(_UNFINISHED)
    return new[len(kept) :].rstrip(_UNFINISHED) if new.startswith(kept) else new[len(old) :]


def _spans(cache: Cache, row: int) -> tuple[KindSpan, ...]:
    """The spans of a row of a chat cache; none where the cache has no such column."""
    if "spans" not in cache.columns or cache.column("spans").shape != (SPAN_FIELDS,):
        return ()
    found = cache.read([row], ["spans"])["spans"][0].tolist()
    return tuple(
        KindSpan(
            start=start,
            stop=stop,
            role=_named(ROLES, role),
            kind=_named(KINDS, kind),
            trained=_named(KINDS, kind) in GENERATED,
        )
        for start, stop, role, kind, _ in found
    )


def _named(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else f"number {number}"


def _trained_labels(labels: Array, spans: Sequence[KindSpan]) -> Array:
    """Labels of a chat row: the loss counts tokens that a model generates, each predicted by the one before it."""
    if not spans:
        return labels
    trained = np.zeros(len(labels) + 1, np.bool_)
    for span in spans:
        trained[span.start : span.stop] = span.trained
    return np.where(trained[1:], labels, masks.IGNORED_LABEL)


def _parts_of(cache: Cache, chunk: int) -> tuple[SourcePart, ...]:
    try:
        parts = load_plan(cache.store).first(len(cache.generation.plan)).parts(chunk)
    except (ForebayError, OSError):
        return ()
    return tuple(SourcePart(path=part.file.path, start=part.start, stop=part.stop) for part in parts[:100])
