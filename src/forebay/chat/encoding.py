"""Encode rendered conversations, and find the token that each character begins in, byte by byte.

Control tokens stand in the rendered text and become their ids, as at inference. Every token is a string of bytes (of
byte-level models, or of SentencePiece models with byte fallback), so the tokens of a text, one behind the other, must
be its bytes: other texts are an error. The byte at which a token begins decides the span that it is in.

    text    …assistant⏎│Hello│<|im_end|>
    tokens  … assistant ⏎ Hel lo <|im_end|>          a token that crosses a border belongs to the span it begins in
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from forebay import kernels
from forebay.chat.dissect import Document
from forebay.chat.labels import CONTENT, HEADER
from forebay.chat.token_bytes import TokenBytes, offsets_of
from forebay.chat.turns import first_difference
from forebay.columns import Array
from forebay.errors import ModelUnusable
from forebay.tokens.encoders import Encoder

SHOWN_BYTES = 40


@dataclass(frozen=True, slots=True)
class Encoded:
    """Documents as tokens with spans, one behind the other."""

    ids: Array
    lengths: Array  # (documents,) int64, tokens
    spans: Array  # (spans, 5) uint32: start and stop in the document, role, kind, message
    span_counts: Array  # (documents,) int64
    problems: dict[int, tuple[str, str]]  # document -> reason and detail
    straddling: int  # tokens that cross the border of a span
    headers: int  # tokens of generated headers


def encode_documents(documents: Sequence[Document], encoder: Encoder, tokens: TokenBytes) -> Encoded:
    """Encode documents and map their parts to tokens. Documents with problems have their tokens all the same."""
    ids, ends = encoder.encode([document.text for document in documents])
    if len(ids) and int(ids.max()) >= len(tokens.table):
        raise ModelUnusable(f"the tokenizer returned the id {int(ids.max()):,}, which its vocabulary does not have")
    raw = [document.raw for document in documents]
    text, edges = b"".join(raw), offsets_of(list(map(len, raw)))
    skipped = _skipped(ids, ends, tokens, text, edges)
    begins = token_begins(ids, skipped, tokens, text)
    problems: dict[int, tuple[str, str]] = {}
    if begins is None or not np.array_equal(np.append(begins, len(text))[ends], edges):
        begins, problems = _one_by_one(documents, ids, ends, edges, skipped, tokens)
    stops = np.cumsum(np.fromiter(chain.from_iterable(document.sizes for document in documents), np.int64))
    labels = np.concatenate([np.zeros((0, 4), np.uint32), *(document.labels for document in documents)])
    control = np.flatnonzero(tokens.control[ids])
    control_ends = begins[control] + tokens.lengths[ids[control]] - skipped[control]
    _find_control_tokens(
        raw, ids, ends, begins, control, control_ends, stops, labels[:, 3] == CONTENT, tokens, problems
    )
    part_ends = np.searchsorted(begins, stops)  # the first token that begins in a later part
    before = part_ends[part_ends > 0] - 1
    reaches = begins[before] + tokens.lengths[ids[before]] - skipped[before]
    straddling = len(np.unique(before[reaches > stops[part_ends > 0]]))
    part_counts = np.array([len(document.sizes) for document in documents], np.int64)
    headers = int(np.diff(part_ends, prepend=0)[labels[:, 3] == HEADER].sum())
    return _with_spans(ids, ends, part_ends, part_counts, labels[:, :3].astype(np.int64), problems, straddling, headers)


def _skipped(ids: Array, ends: Array, tokens: TokenBytes, text: bytes, edges: Array) -> Array:
    """How many bytes at the beginning of each token are not in the text: the space before it, or none (uint8)."""
    skipped = np.zeros(len(ids), np.uint8)
    if tokens.prefix == "never":
        return skipped
    added = tokens.is_added[ids]
    begins = ends[:-1][np.diff(ends) > 0]
    if tokens.prefix != "unspaced text":
        skipped[1:] = added[:-1]
    skipped[begins] = 1
    skipped[added] = 0
    if tokens.prefix == "stretch":
        return skipped
    document = np.searchsorted(ends, np.flatnonzero(skipped), side="right") - 1
    passed = np.cumsum(tokens.lengths[ids]) - tokens.lengths[ids]
    left_out, last = 0, -1
    for token, at in zip(np.flatnonzero(skipped).tolist(), document.tolist(), strict=True):
        left_out = 0 if at != last else left_out
        byte = int(edges[at] + passed[token] - passed[ends[at]]) - left_out
        if text[byte : byte + 1] == b" ":
            skipped[token] = 0
        left_out += int(skipped[token])
        last = at
    return skipped


def token_begins(ids: Array, skipped: Array, tokens: TokenBytes, text: bytes) -> Array | None:
    """The byte offset of each token in a text; None if the tokens together are not its bytes."""
    flat, offsets = tokens.flat
    begins = np.empty(len(ids), np.int64)
    return begins if kernels.token_places(begins, np.ascontiguousarray(ids), skipped, offsets, flat, text) else None


def _one_by_one(
    documents: Sequence[Document], ids: Array, ends: Array, edges: Array, skipped: Array, tokens: TokenBytes
) -> tuple[Array, dict[int, tuple[str, str]]]:
    """Where tokens begin, and the documents that they do not spell: all tokens of such a one are at its beginning."""
    begins, problems = np.repeat(edges[:-1], np.diff(ends)), {}
    for at, document in enumerate(documents):
        own = slice(int(ends[at]), int(ends[at + 1]))
        in_document = token_begins(ids[own], skipped[own], tokens, document.raw)
        if in_document is not None:
            begins[own] += in_document
            continue
        pairs = zip(ids[own].tolist(), skipped[own].tolist(), strict=True)
        came_back = b"".join(tokens.table[number][left_out:] for number, left_out in pairs).decode(errors="replace")
        at_char = first_difference(document.text, came_back)
        shown = f"{document.text[at_char : at_char + 40]!r} became {came_back[at_char : at_char + 40]!r}"
        shown += _stripped(document, at_char, tokens)
        problems[at] = "not-reversible", f"its tokens do not decode back: {shown}"
    return begins, problems


def _stripped(document: Document, at_char: int, tokens: TokenBytes) -> str:
    """A hint for a token that removed adjacent white space."""
    around = [document.text[:at_char].rstrip(), document.text[at_char:].lstrip()]
    for token in tokens.stripping:
        if around[0].endswith(token) or around[1].startswith(token):
            return (
                f"; the token {token!r} removes white space next to it: write the template without it, or set lstrip "
                "and rstrip of the token to false in tokenizer.json, for training and for inference"
            )
    return ""


def _find_control_tokens(
    raw: Sequence[bytes], ids: Array, ends: Array, begins: Array, control: Array, control_ends: Array, stops: Array,
    is_content: Array, tokens: TokenBytes, problems: dict[int, tuple[str, str]],
) -> None:  # fmt: skip
    """Add a problem for every document with a control token that has a part of a content in it."""
    first = np.searchsorted(stops, begins[control], side="right")
    last_byte = np.minimum(np.maximum(control_ends - 1, begins[control]), stops[-1:] - 1)
    last = np.searchsorted(stops, last_byte, side="right")
    firsts = np.cumsum([0, *map(len, raw)])
    contents = np.cumsum(is_content)
    for token_at in control[is_content[first] | (contents[last] > contents[first])].tolist():
        at = int(np.searchsorted(ends, token_at, side="right")) - 1
        token = tokens.table[int(ids[token_at])].decode(errors="replace")
        in_document = int(begins[token_at] - firsts[at])
        shown = raw[at][max(0, in_document - SHOWN_BYTES) : in_document + SHOWN_BYTES].decode(errors="ignore")
        problems.setdefault(at, ("control-token", f"a content has the text of the control token {token!r}: {shown!r}"))


def _with_spans(
    ids: Array, ends: Array, part_ends: Array, part_counts: Array, labels: Array, problems: dict[int, tuple[str, str]],
    straddling: int, headers: int,
) -> Encoded:  # fmt: skip
    """Make spans of parts: neighboring ones of a document that have one label are joined."""
    count = len(part_counts)
    has_tokens = np.diff(part_ends, prepend=0) > 0
    document = np.repeat(np.arange(count), part_counts)[has_tokens]
    stop, label = part_ends[has_tokens], labels[has_tokens]
    last = np.ones(len(stop), np.bool_)
    last[:-1] = (label[1:] != label[:-1]).any(axis=1) | (document[1:] != document[:-1])
    stop, label, document = stop[last], label[last], document[last]
    start = np.concatenate([[0], stop[:-1]])[: len(stop)]
    base = ends[document]
    spans = np.column_stack([start - base, stop - base, label]).astype(np.uint32)
    return Encoded(ids, np.diff(ends), spans, np.bincount(document, minlength=count), problems, straddling, headers)
