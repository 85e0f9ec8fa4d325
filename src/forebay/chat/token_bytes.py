"""The bytes of every token: of byte-level models, and of SentencePiece models with byte fallback."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from forebay.columns import Array
from forebay.errors import ModelUnusable
from forebay.tokens.vocabulary import TokenizerFile, Vocabulary, steps_of, tokenizer_unusable

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


def _byte_of_char() -> dict[str, int]:
    """The bytes behind the characters of byte-level vocabularies: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_of_char()


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
    stripping: tuple[str, ...] = ()  # tokens that remove white space next to them

    @cached_property
    def lengths(self) -> Array:
        return np.array([len(each) for each in self.table], np.int64)

    @cached_property
    def flat(self) -> tuple[Array, Array]:
        """All tokens one behind the other as bytes, and where each begins, and the last one ends (int64)."""
        return np.frombuffer(b"".join(self.table), np.uint8), offsets_of(self.lengths)

    @cached_property
    def is_added(self) -> Array:
        by_id = np.zeros(len(self.table), np.bool_)
        by_id[list(self.added)] = True
        return by_id


@lru_cache(maxsize=4)
def token_bytes(vocabulary: Vocabulary, named: frozenset[str] = frozenset()) -> TokenBytes:
    """The bytes of every token; raises `ModelUnusable` for a vocabulary whose tokens are not strings of bytes.

    Added tokens among the `named` ones are control tokens, whether the vocabulary says so or not.
    """
    file = vocabulary.document
    added_tokens = file.added_tokens or []
    stripping = tuple(token.content for token in added_tokens if token.lstrip or token.rstrip)
    if words := [token.content for token in added_tokens if token.single_word]:
        raise _unusable(vocabulary, f"its token {words[0]!r} is found only between words (single_word)")
    steps = [*steps_of(file.pre_tokenizer, "pretokenizers"), *steps_of(file.decoder, "decoders")]
    by_byte = any(step.get("type") == "ByteLevel" for step in steps)
    prefix, nfc = _normalizing(vocabulary, file, by_byte)
    table = [b""] * vocabulary.size
    for token, number in vocabulary.ids.items():
        table[number] = _byte_level(token) if by_byte else _sentence_piece(token)
    for added in added_tokens:
        table[added.id] = added.content.encode()
    control = np.zeros(vocabulary.size, np.bool_)
    texts = {*vocabulary.special, *(added.content for added in added_tokens if added.content in named)}
    control[[vocabulary.ids[token] for token in texts]] = True
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    cut_out = frozenset(token.id for token in added_tokens)
    return TokenBytes(table, cut_out, control, special, prefix, nfc, stripping)


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:  # an added token, which is set after, or one that no text produces
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _normalizing(vocabulary: Vocabulary, file: TokenizerFile, by_byte: bool) -> tuple[Prefix, bool]:
    """Where a tokenizer puts a space before texts, and whether it normalizes them to NFC."""
    prefix: Prefix = "never"
    nfc = False
    for step in steps_of(file.normalizer, "normalizers"):
        match step.get("type"):
            case "NFC":
                nfc = True
            case "Prepend" if step.get("prepend") == _SPACE and not by_byte:
                prefix = "stretch"
            case "Replace" if step.get("pattern") == {"String": " "} and step.get("content") == _SPACE and not by_byte:
                pass
            case other:
                raise _unusable(vocabulary, f"its normalizer {other} changes texts")
    for step in steps_of(file.pre_tokenizer, "pretokenizers"):
        adds = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        if step.get("type") == "Metaspace" and adds != "never":
            if prefix != "never" or by_byte or step.get("replacement") != _SPACE:
                raise _unusable(vocabulary, f"it adds a space before texts (Metaspace, {adds})")
            prefix = "unspaced text" if adds == "first" else "unspaced stretch"
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            raise _unusable(vocabulary, "it adds a space before texts (ByteLevel, add_prefix_space)")
    known = by_byte or any(
        step.get("type") in ("ByteFallback", "Replace", "Metaspace", "Fuse")
        for step in steps_of(file.decoder, "decoders")
    )
    if not known:
        raise _unusable(vocabulary, f"its model {file.model.type} does not store tokens as bytes")
    return prefix, nfc


def _unusable(vocabulary: Vocabulary, problem: str) -> ModelUnusable:
    return tokenizer_unusable(
        vocabulary.name,
        f"{problem}, so tokens cannot be compared with the text byte by byte",
        hint="use another tokenizer",
    )


def offsets_of(lengths: Sequence[int] | Array) -> Array:
    """The start of each part, and the end of the last one (int64)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
