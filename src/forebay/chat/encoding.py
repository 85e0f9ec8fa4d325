"""Encode rendered conversations, and find the token that each character begins in, byte by byte.

Control tokens stand in the rendered text and become their ids, as at inference. Every token is a string of bytes (of
byte-level models, or of SentencePiece models with byte fallback), so the tokens of a text, one behind the other, must
be its bytes: a text for which they are not is refused. The byte at which a token begins decides the span that it is in.

    text    …assistant⏎│Hello│<|im_end|>
    tokens  … assistant ⏎ Hel lo <|im_end|>          a token that crosses a border belongs to the span it begins in
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import chain
from typing import Any, Literal

import msgspec
import numpy as np

from forebay.chat.layouts import Document, first_difference
from forebay.columns import Array
from forebay.compiled import native
from forebay.errors import EncodersDiffer, TokenizerUnusable
from forebay.tokens.vocabulary import (
    AddedToken,
    EncoderName,
    SameBytes,
    Vocabulary,
    hard_strings,
    in_time,
    is_installed,
    library_errors,
    load_fast,
    reference_tokenizer,
)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"
TRIAL_CHARS = 4096
SHOWN_BYTES = 40


def _byte_of_char() -> dict[str, int]:
    """The bytes behind the characters of byte-level vocabularies: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_of_char()
_native_places = getattr(native, "token_places", None)  # not in a library that was built before it was written


# Before each stretch of text between added tokens; before each that does not begin with a space; before such a text.
Prefix = Literal["never", "stretch", "unspaced stretch", "unspaced text"]


@dataclass(frozen=True)
class TokenBytes:
    """The bytes of every token of a vocabulary."""

    table: list[bytes]
    added: frozenset[int]  # ids that are cut out of a text before the model sees it
    control: Array  # bool by id: control tokens
    special: re.Pattern[str]  # the text of any control token
    prefix: Prefix  # where the model gets a space that is not in the text
    nfc: bool  # texts are normalized before
    stripping: tuple[str, ...] = ()  # tokens that remove white space beside them

    @cached_property
    def lengths(self) -> Array:
        return np.array([len(each) for each in self.table], np.int64)

    @cached_property
    def flat(self) -> tuple[Array, Array]:
        """All tokens one behind the other as bytes, and where each begins, and the last one ends (int64)."""
        return np.frombuffer(b"".join(self.table), np.uint8), _offsets(self.lengths)

    @cached_property
    def control_range(self) -> tuple[int, int]:
        """The lowest id of a control token, and the highest."""
        ids = np.flatnonzero(self.control)
        return (int(ids[0]), int(ids[-1])) if len(ids) else (len(self.table), len(self.table))

    def control_places(self, ids: Array) -> Array:
        """Where control tokens are. Most vocabularies have them side by side, where a comparison finds them faster."""
        low, high = self.control_range
        if high - low > len(self.table) // 2:
            return np.flatnonzero(self.control[ids])
        near = np.flatnonzero((ids >= low) & (ids <= high))
        found: Array = near[self.control[ids[near]]]
        return found

    @cached_property
    def is_added(self) -> Array:
        found = np.zeros(len(self.table), np.bool_)
        found[list(self.added)] = True
        return found


class _File(msgspec.Struct, frozen=True):
    model: dict[str, Any]
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


@lru_cache(maxsize=4)
def token_bytes(vocabulary: Vocabulary, named: frozenset[str] = frozenset()) -> TokenBytes:
    """The bytes of every token; raises `TokenizerUnusable` for a vocabulary whose tokens are not strings of bytes.

    Added tokens among the `named` ones are control tokens, whether the vocabulary says so or not.
    """
    file = msgspec.json.decode(vocabulary.json, type=_File)
    stripping = tuple(token.content for token in file.added_tokens if token.lstrip or token.rstrip)
    if words := [token.content for token in file.added_tokens if token.single_word]:
        raise _unusable(vocabulary, f"its token {words[0]!r} is found only between words (single_word)")
    steps = [*_steps(file.pre_tokenizer, "pretokenizers"), *_steps(file.decoder, "decoders")]
    by_byte = any(step.get("type") == "ByteLevel" for step in steps)
    prefix, nfc = _normalizing(vocabulary, file, by_byte)
    table = [b""] * vocabulary.size
    for token, number in vocabulary.ids.items():
        table[number] = _byte_level(token) if by_byte else _sentence_piece(token)
    for added in file.added_tokens:
        table[added.id] = added.content.encode()
    control = np.zeros(vocabulary.size, np.bool_)
    texts = {*vocabulary.special, *(added.content for added in file.added_tokens if added.content in named)}
    control[[vocabulary.ids[token] for token in texts]] = True
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    cut_out = frozenset(token.id for token in file.added_tokens)
    return TokenBytes(table, cut_out, control, special, prefix, nfc, stripping)


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:  # an added token, which is set after, or one that no text produces
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(found[1], 16)]) if found else token.replace(_SPACE, " ").encode()


def _normalizing(vocabulary: Vocabulary, file: _File, by_byte: bool) -> tuple[Prefix, bool]:
    """Where a tokenizer puts a space before texts, and whether it normalizes them to NFC."""
    prefix: Prefix = "never"
    nfc = False
    for step in _steps(file.normalizer, "normalizers"):
        match step.get("type"):
            case "NFC":
                nfc = True
            case "Prepend" if step.get("prepend") == _SPACE and not by_byte:
                prefix = "stretch"
            case "Replace" if step.get("pattern") == {"String": " "} and step.get("content") == _SPACE and not by_byte:
                pass
            case other:
                raise _unusable(vocabulary, f"its normalizer {other} changes texts")
    for step in _steps(file.pre_tokenizer, "pretokenizers"):
        adds = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        if step.get("type") == "Metaspace" and adds != "never":
            if prefix != "never" or by_byte or step.get("replacement") != _SPACE:
                raise _unusable(vocabulary, f"it adds a space before texts (Metaspace, {adds})")
            prefix = "unspaced text" if adds == "first" else "unspaced stretch"
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            raise _unusable(vocabulary, "it adds a space before texts (ByteLevel, add_prefix_space)")
    known = by_byte or any(
        step.get("type") in ("ByteFallback", "Replace", "Metaspace", "Fuse")
        for step in _steps(file.decoder, "decoders")
    )
    if not known:
        raise _unusable(vocabulary, f"its model {file.model.get('type')} does not store tokens as bytes")
    return prefix, nfc


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return [each for step in part[inner] for each in _steps(step, inner)] if part.get("type") == "Sequence" else [part]


def _unusable(vocabulary: Vocabulary, problem: str) -> TokenizerUnusable:
    return TokenizerUnusable(
        vocabulary.name, f"{problem}, so tokens cannot be compared with the text byte by byte; use another tokenizer"
    )


class ChatEncoder:
    """Encodes texts that contain control tokens."""

    def __init__(self, name: EncoderName, vocabulary: Vocabulary) -> None:
        self._name = vocabulary.name
        self._fast: Any = None
        if name == "fastokens":
            self._fast = load_fast(vocabulary.content)
        else:
            self._slow = _reference(vocabulary.content)

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """The ids of all texts (uint32), and the offsets of each text in them (int64, one more)."""
        with library_errors(self._name, "it fails on a text"):
            if self._fast is not None:
                ids, offsets = self._fast.encode_batch_flat(list(texts), False, False)
                return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64)
            encoded = self._slow.encode_batch_fast(list(texts), add_special_tokens=False)
        each = [np.array(one.ids, np.uint32) for one in encoded]
        ends = np.zeros(len(each) + 1, np.int64)
        np.cumsum([len(one) for one in each], out=ends[1:])
        return np.concatenate([np.zeros(0, np.uint32), *each]), ends


@lru_cache(maxsize=2)
def _reference(content: SameBytes) -> Any:
    """The reference tokenizer, set to make ids of the texts of control tokens."""
    native: Any = import_module("tokenizers")
    tokenizer = native.Tokenizer.from_str(content.vocabulary.text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = False
    return tokenizer


@lru_cache(maxsize=4)
def open_chat_encoder(name: EncoderName, vocabulary: Vocabulary) -> ChatEncoder:
    reference_tokenizer(vocabulary)  # raises what is wrong with a vocabulary
    encoder = ChatEncoder(name, vocabulary)
    in_time(vocabulary.name, "encode", TRIAL_CHARS, lambda: encoder.encode(["A trial, 1,024 words. " * 64, "a" * 500]))
    return encoder


def choose_chat_encoder(
    wanted: Literal["auto", "fastokens", "tokenizers"], vocabulary: Vocabulary, texts: Sequence[str]
) -> tuple[EncoderName, tuple[str, ...]]:
    """`fastokens` if it returns the ids of the reference for control tokens, hard strings and texts; and notes."""
    if wanted == "tokenizers" or (wanted == "auto" and not is_installed("fastokens")):
        return "tokenizers", ()
    problem = _difference(vocabulary, [*hard_strings(vocabulary), *texts])
    if problem is None:
        return "fastokens", ()
    if wanted == "fastokens":
        raise EncodersDiffer(vocabulary.name, problem, False)
    return "tokenizers", (f"{problem}; using the reference `tokenizers`, which is slower",)


def _difference(vocabulary: Vocabulary, texts: Sequence[str]) -> str | None:
    try:
        (fast, fast_ends), (slow, slow_ends) = (
            open_chat_encoder(name, vocabulary).encode(texts) for name in ("fastokens", "tokenizers")
        )
    except TokenizerUnusable as error:
        return error.problem
    for at, text in enumerate(texts):
        mine, theirs = fast[fast_ends[at] : fast_ends[at + 1]], slow[slow_ends[at] : slow_ends[at + 1]]
        if not np.array_equal(mine, theirs):
            return f"fastokens returns other ids than the reference for {text[:60]!r}"
    return None


@dataclass(frozen=True, slots=True)
class Encoded:
    """Documents as tokens with spans, one behind the other."""

    ids: Array
    lengths: Array  # (documents,) int64, tokens
    spans: Array  # (spans, 5) uint32: start and stop in the document, role, kind, message
    span_counts: Array  # (documents,) int64
    problems: dict[int, tuple[str, str]]  # document -> reason and detail
    straddling: int  # tokens that cross the border of a span


def encode_documents(documents: Sequence[Document], encoder: ChatEncoder, tokens: TokenBytes) -> Encoded:
    """Encode documents and map their parts to tokens. Documents with problems have their tokens all the same."""
    ids, ends = encoder.encode([document.text for document in documents])
    if len(ids) and int(ids.max()) >= len(tokens.table):
        raise TokenizerUnusable("", f"it returned the id {int(ids.max()):,}, which its vocabulary does not have")
    raw = [document.raw for document in documents]
    text, edges = b"".join(raw), _offsets(list(map(len, raw)))
    skipped = _skipped(ids, ends, tokens, text, edges)
    begins = token_places(ids, skipped, tokens, text)
    problems: dict[int, tuple[str, str]] = {}
    if begins is None or not np.array_equal(_begins_at(ends, begins, len(text)), edges):
        begins, problems = _not_reversible(documents, ids, ends, edges, skipped, tokens)
    stops = np.cumsum(np.fromiter(chain.from_iterable(document.sizes for document in documents), np.int64))
    labels = np.concatenate([np.zeros((0, 4), np.uint32), *(document.labels for document in documents)])
    control = tokens.control_places(ids)
    control_ends = begins[control] + tokens.lengths[ids[control]] - skipped[control]
    _find_control_tokens(raw, ids, ends, begins, control, control_ends, stops, labels[:, 3] > 0, tokens, problems)
    part_ends = np.searchsorted(begins, stops)  # the first token that begins in a later part
    before = part_ends[part_ends > 0] - 1
    reaches = begins[before] + tokens.lengths[ids[before]] - skipped[before]
    straddling = len(np.unique(before[reaches > stops[part_ends > 0]]))
    part_counts = np.array([len(document.sizes) for document in documents], np.int64)
    return _with_spans(ids, ends, part_ends, part_counts, labels[:, :3].astype(np.int64), problems, straddling)


def _offsets(lengths: Sequence[int] | Array) -> Array:
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


def _begins_at(places: Array, begins: Array, end: int) -> Array:
    """Where the tokens at some places begin; `end` behind the last one."""
    found = np.full(len(places), end, np.int64)
    inside = places < len(begins)
    found[inside] = begins[places[inside]]
    return found


def _skipped(ids: Array, ends: Array, tokens: TokenBytes, text: bytes, edges: Array) -> Array:
    """How many bytes at the beginning of each token are not in the text: the space before it, or none (uint8)."""
    found = np.zeros(len(ids), np.uint8)
    if tokens.prefix == "never":
        return found
    added = tokens.is_added[ids]
    begins = ends[:-1][np.diff(ends) > 0]
    if tokens.prefix != "unspaced text":
        found[1:] = added[:-1]
    found[begins] = 1
    found[added] = 0
    if tokens.prefix == "stretch":
        return found
    document = np.searchsorted(ends, np.flatnonzero(found), side="right") - 1
    passed = np.cumsum(tokens.lengths[ids]) - tokens.lengths[ids]
    left_out, last = 0, -1
    for token, at in zip(np.flatnonzero(found).tolist(), document.tolist(), strict=True):
        left_out = 0 if at != last else left_out
        place = int(edges[at] + passed[token] - passed[ends[at]]) - left_out
        if text[place : place + 1] == b" ":
            found[token] = 0
        left_out += int(found[token])
        last = at
    return found


def token_places(ids: Array, skipped: Array, tokens: TokenBytes, text: bytes) -> Array | None:
    """The byte of a text at which each token begins, one behind the other; None if the tokens are not its bytes."""
    flat, offsets = tokens.flat
    begins = np.empty(len(ids), np.int64)
    if _native_places is not None:
        return begins if _native_places(begins, np.ascontiguousarray(ids), skipped, offsets, flat, text) else None
    decoded, begins = _decoded(ids, skipped, tokens)
    return begins if decoded.tobytes() == text else None


def _decoded(ids: Array, skipped: Array, tokens: TokenBytes) -> tuple[Array, Array]:
    """The bytes of all tokens, and where each begins in them."""
    flat, offsets = tokens.flat
    lengths = tokens.lengths[ids] - skipped
    begins = np.cumsum(lengths) - lengths
    places = offsets[ids] + skipped - begins
    return flat[np.arange(int(lengths.sum())) + np.repeat(places, lengths)], begins


def _not_reversible(
    documents: Sequence[Document], ids: Array, ends: Array, edges: Array, skipped: Array, tokens: TokenBytes
) -> tuple[Array, dict[int, tuple[str, str]]]:
    """Return where tokens begin in their documents, approximately, and the documents that tokens do not spell."""
    decoded, begins = _decoded(ids, skipped, tokens)
    decoded_edges = np.append(begins, len(decoded))[ends]
    found = {}
    for at, document in enumerate(documents):
        mine = decoded[decoded_edges[at] : decoded_edges[at + 1]].tobytes()
        if mine != document.raw:
            came_back = mine.decode(errors="replace")
            place = first_difference(document.text, came_back)
            shown = f"{document.text[place : place + 40]!r} became {came_back[place : place + 40]!r}"
            found[at] = "not-reversible", f"its tokens do not decode back: {shown}{_stripped(document, place, tokens)}"
    in_document = begins - np.repeat(decoded_edges[:-1], np.diff(ends))
    last = np.repeat(np.maximum(np.diff(edges) - 1, 0), np.diff(ends))
    return np.minimum(in_document, last) + np.repeat(edges[:-1], np.diff(ends)), found


def _stripped(document: Document, place: int, tokens: TokenBytes) -> str:
    """What to do if a token beside a place has removed white space there."""
    beside = [document.text[:place].rstrip(), document.text[place:].lstrip()]
    for token in tokens.stripping:
        if beside[0].endswith(token) or beside[1].startswith(token):
            return (
                f"; the token {token!r} removes white space beside it: write the template without it, or set lstrip "
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
    for place in control[is_content[first] | (contents[last] > contents[first])].tolist():
        at = int(np.searchsorted(ends, place, side="right")) - 1
        token = tokens.table[int(ids[place])].decode(errors="replace")
        in_document = int(begins[place] - firsts[at])
        shown = raw[at][max(0, in_document - SHOWN_BYTES) : in_document + SHOWN_BYTES].decode(errors="ignore")
        problems.setdefault(at, ("control-token", f"a content has the text of the control token {token!r}: {shown!r}"))


def _with_spans(
    ids: Array, ends: Array, part_ends: Array, part_counts: Array, labels: Array, problems: dict[int, tuple[str, str]],
    straddling: int,
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
    return Encoded(ids, np.diff(ends), spans, np.bincount(document, minlength=count), problems, straddling)
