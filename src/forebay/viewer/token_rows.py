"""Rows of packed tokens for the browser: text, position and label of every token.

Documents, positions, labels and blocks come from the functions that training uses (`forebay.masks`).
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numpy as np

from forebay.building.update import named_alike
from forebay.cache.catalog import presence_name
from forebay.cache.plan import load_plan
from forebay.columns import Array
from forebay.errors import LibraryMissing, ModelUnusable, message_of
from forebay.kinds import WRONG
from forebay.masks import documents as masks
from forebay.masks.train_on import GENERATED, KINDS, ROLES, SPAN_FIELDS, TrainOn, candidate_weights, token_weights
from forebay.preview.peek import COLUMNS, RowReader
from forebay.preview.row_records import PackedPiece
from forebay.read.cache import Cache
from forebay.records import Record
from forebay.tokens import Vocabulary
from forebay.tokens.encoders import in_time, reference_tokenizer
from forebay.viewer.chunk_detail import SourcePart, chunk_parts
from forebay.viewer.shown_cache import Query, ShownCache

CONTEXT = 6  # tokens before one that decide how it is written
MOST_SHOWN = 16_384  # tokens of one answer; a longer row is shown in parts
MOST_PIECES = 200
FAR = 256 << 20  # bytes of a source file that are read to number its lines
_UNFINISHED = "\ufffd"  # a character of which a token has only some bytes
NO_TEXT = (LibraryMissing, ModelUnusable, *WRONG)


class KindSpan(Record, frozen=True, kw_only=True):
    """Tokens of one kind: prompt, response, tool_call …"""

    start: int
    stop: int
    role: str
    kind: str
    message: int
    trained: bool


class Policy(Record, frozen=True, kw_only=True):
    """A choice of `train_on`, and whether it trains each span."""

    name: str
    code: str
    trained: list[bool]


class TokenRow(Record, frozen=True, kw_only=True):
    row: int
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
    lines: list[int | None]  # of these documents in their files; None where samples are not lines, or without a source
    scores: list[float] | None  # of a preference's candidates: its documents are the prompt and the candidates
    spans: tuple[KindSpan, ...]  # places in the whole row
    policies: tuple[Policy, ...]  # of a conversation or a preference
    parts: tuple[SourcePart, ...]  # of source files that the chunk was made from
    note: str = ""  # why there is no text


def token_row(shown: ShownCache, query: Query) -> TokenRow:
    """A row of packed tokens, or a preference; a long row begins at `token`."""
    cache, row = shown.at(), query.whole("row", 0)
    (name,) = cache.row_ids([row])
    at = int(cache.chunk_numbers.searchsorted(name.chunk))
    make = _preference if "candidates" in cache.columns else _packed
    columns = make(shown, cache, row, name.chunk, name.row, query.whole("token", 0))
    return TokenRow(
        row=row,
        generation=cache.generation.number,
        chunk=name.chunk,
        row_in_chunk=name.row,
        chunk_rows=int(cache.chunk_starts[at + 1] - cache.chunk_starts[at]),
        parts=chunk_parts(shown, name.chunk),
        **columns,
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
        "lines": _lines(shown, [piece.source for piece in pieces]),
        "scores": None,
        "spans": spans,
        "policies": _policies(partial(_packed_weights, cache, row, whole, size), spans),
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
        "lines": [],
        "scores": scores.astype(np.float64).tolist(),
        "spans": spans,
        "policies": _policies(partial(_preference_weights, cache, row, len(prompt), lens), spans),
        "note": note,
    }


def _part(first: int, size: int) -> slice:
    """The tokens of a row that one answer shows."""
    start = min(first, max(0, size - 1)) // MOST_SHOWN * MOST_SHOWN
    return slice(start, min(size, start + MOST_SHOWN))


def _log_probs(cache: Cache, row: int, trained: Array, part: slice) -> dict[str, list[float]]:
    """The values of layers that have one number per label, each at the token that it is about."""
    log_probs = {}
    for layer in cache.generation.recipes:
        names = [one.name for one in cache.recipe(layer).columns if one.ragged and one.dtype.startswith(("f", "bf"))]
        if layer == cache.generation.base or not names:
            continue
        bits = presence_name(layer)
        read = cache.read([row], [*names, bits])
        is_present = np.asarray(read.pop(bits))[0]
        for name, values in read.items() if is_present else ():
            own = np.asarray(values[0], np.float32)
            if own.shape == (int(trained.sum()),):
                spread = np.full(len(trained), np.nan, np.float32)
                spread[trained] = own
                log_probs[name] = spread[part].round(4).tolist()
    return log_probs


def check_lengths(tokens: Array, lengths: Array) -> None:
    """Raise if documents are longer than their row: an untrusted cache could exhaust memory."""
    if int(lengths.sum(dtype=np.uint64)) > len(tokens):
        raise ValueError(f"the documents of the row are longer than its {len(tokens):,} tokens")


def _pieces(
    reader: RowReader, row: int, chunk: int, row_in_chunk: int, columns: dict[str, Any]
) -> tuple[tuple[PackedPiece, ...], str]:
    """The first documents of a row, as many as can be shown, and why they have no text."""
    stops = np.cumsum(columns["seq_lens"], dtype=np.int64)
    count = min(MOST_PIECES, int(np.searchsorted(stops, 4 * MOST_SHOWN, side="right")))
    if not count:
        return (), ""
    some = {
        "tokens": columns["tokens"][: int(stops[count - 1])],
        "seq_lens": columns["seq_lens"][:count],
        "documents": columns["documents"][:count],
    }
    try:
        return reader.row(row, chunk, row_in_chunk, some).pieces, reader.note
    except NO_TEXT as error:
        return (), f"the row has no text: {message_of(error)}"


def _texts(cache: Cache, tokens: Array, lengths: Array, part: slice) -> tuple[list[str], str]:
    try:
        return token_texts(vocabulary_of(cache), tokens, lengths, part), ""
    except NO_TEXT as error:
        return [], f"the row has no text: {message_of(error)}"


@lru_cache(maxsize=4)
def row_reader(shown: ShownCache, cache: Cache) -> RowReader:
    """A reader that is kept, as it parses the whole vocabulary once."""
    return RowReader(cache, shown.source)


@lru_cache(maxsize=4)
def vocabulary_of(cache: Cache) -> Vocabulary:
    """The tokenizer that a cache keeps."""
    return Vocabulary(*cache.kept_tokenizer())


def token_texts(vocabulary: Vocabulary, tokens: Array, lengths: Array, part: slice | None = None) -> list[str]:
    """The text that each token of a part of a row adds to its document.

    A token is decoded with a few before it, so that spaces which a decoder drops at a beginning are kept; a character
    of several tokens belongs to the last of them.
    """
    part = part or slice(0, len(tokens))
    starts = np.full(len(tokens), int(lengths.sum()), np.int64)  # padding is one more piece
    starts[: int(lengths.sum())] = np.repeat(np.cumsum(lengths, dtype=np.int64) - lengths, lengths)
    low = max(0, part.start - CONTEXT)
    ids, ends = tokens[low : part.stop].tolist(), range(part.start - low, part.stop - low)
    begins = np.maximum(starts[part] - low, np.arange(part.start, part.stop) - low - CONTEXT).clip(0).tolist()
    before = [ids[begin:at] for at, begin in zip(ends, begins, strict=True)]
    both = before + [ids[begin : at + 1] for at, begin in zip(ends, begins, strict=True)]
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
    whole = old.rstrip(_UNFINISHED)
    return new[len(whole) :].rstrip(_UNFINISHED) if new.startswith(whole) else new[len(old) :]


def _spans(cache: Cache, row: int) -> tuple[KindSpan, ...]:
    """The spans of a row of a chat cache; none where the cache has no such column."""
    if "spans" not in cache.columns or cache.column("spans").shape != (SPAN_FIELDS,):
        return ()
    spans = cache.read([row], ["spans"])["spans"][0].tolist()
    return tuple(
        KindSpan(
            start=start,
            stop=stop,
            role=_named(ROLES, role),
            kind=_named(KINDS, kind),
            message=message,
            trained=_named(KINDS, kind) in GENERATED,
        )
        for start, stop, role, kind, message in spans
    )


POLICIES = (
    ("all that an assistant writes", "", TrainOn()),
    ("answers", 'train_on=["response", "stop"]', TrainOn.of(("response", "stop"))),
    ("last turn", 'train_on=TrainOn(turns="last")', TrainOn(turns="last")),
    ("every token", f"train_on={list(KINDS)}".replace("'", '"'), TrainOn.of(KINDS)),
)


def _policies(weights: Callable[[TrainOn], Array], spans: Sequence[KindSpan]) -> tuple[Policy, ...]:
    """The tokens that each choice trains, by the loader's functions; empty if they reject the spans."""
    if not spans:
        return ()
    starts = [span.start for span in spans]
    try:
        return tuple(
            Policy(name=name, code=code, trained=(weights(policy)[starts] > 0).tolist())
            for name, code, policy in POLICIES
        )
    except (ValueError, IndexError):  # an untrusted cache
        return ()


def _packed_weights(cache: Cache, row: int, lengths: Array, size: int, policy: TrainOn) -> Array:
    read: Any = cache.read([row], ["spans", "last_turn"])
    spans, last = read["spans"], read["last_turn"]
    weights: Array = token_weights(spans.values, spans.offsets, lengths, last.values, size, policy)[0]
    return weights


def _preference_weights(cache: Cache, row: int, prompt: int, lens: Array, policy: TrainOn) -> Array:
    spans = np.asarray(cache.read([row], ["spans"])["spans"][0])
    return np.concatenate([np.zeros(prompt), *candidate_weights(spans, prompt, lens, policy)])


def _lines(shown: ShownCache, samples: Sequence[str]) -> list[int | None]:
    """The lines of samples that are named `path@offset`; None where their file is not plain text on this machine."""
    source = shown.source
    if source is None or source.unit != "bytes":
        return [None] * len(samples)
    plan = load_plan(shown.store)
    root = str(named_alike(source, plan).describe().get("root", ""))
    offsets: defaultdict[str, list[int]] = defaultdict(list)
    for path, _, offset in (sample.rpartition("@") for sample in samples):
        if path in plan.files and not plan.files[path].stream and offset.isdecimal() and int(offset) < FAR:
            offsets[path].append(int(offset))
    numbers = {f"{path}@{at}": line for path in offsets for at, line in _lines_at(root, path, offsets[path])}
    return [numbers.get(sample) for sample in samples]


def _lines_at(root: str, path: str, offsets: list[int]) -> Iterator[tuple[int, int]]:
    """Each offset with the number of its line, counted from 1."""
    line, position = 1, 0
    with suppress(OSError), open(os.path.join(root, path), "rb") as file:
        for offset in sorted(offsets):
            while position < offset and (block := file.read(min(1 << 20, offset - position))):
                line, position = line + block.count(b"\n"), position + len(block)
            yield offset, line


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
