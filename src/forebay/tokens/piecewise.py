"""Encode long texts in pieces: an encoder takes up to 450 bytes of memory for each byte that it gets at once."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from forebay.columns import Array
from forebay.tokens.cut_points import WORD_END, cut_points
from forebay.tokens.encoders import Encoder, EncoderName
from forebay.tokens.vocabulary import Vocabulary

PIECE_CHARS = 1 << 18
CALL_BYTES = 1 << 20  # of one call of the encoder
LARGE_CALL_BYTES = 4_000_000  # the same, for an encoder that may get a text of this length uncut
# A tokenizer that splits texts in two steps takes up to 450 bytes for each byte in `tokenizers`, 60 in `fastokens`.
MAX_UNCUT_BYTES: Mapping[EncoderName, int] = {"fastokens": 4_000_000, "tokenizers": 1_500_000}
# One emoji makes every character of a text take four bytes: it may take this much, or more with a higher limit.
WIDE_BYTES, WIDE_SHARE = 128_000_000, 32


class PiecewiseEncoder:
    """An encoder that gets long texts in pieces, and few texts at once. It returns the same ids.

    Texts of up to `call_chars` characters together are encoded by one call, whatever they are.
    """

    def __init__(self, encoder: Encoder, vocabulary: Vocabulary, max_uncut_bytes: int) -> None:
        self._encoder = encoder
        self._cut_points = cut_points(vocabulary)
        self._most = max_uncut_bytes
        self._piece_chars = min(PIECE_CHARS, max(1, max_uncut_bytes // 4))  # a character has four bytes at most
        self.call_chars = (CALL_BYTES if max_uncut_bytes < LARGE_CALL_BYTES else LARGE_CALL_BYTES) // 4

    def are_short(self, texts: Sequence[str]) -> bool:
        """Whether texts are so short that none can have a problem."""
        return 4 * len(max(texts, key=len, default="")) <= self._most

    def problem(self, text: str) -> str | None:
        """Why a text would take too much memory; None if it does not."""
        if self.are_short((text,)):
            return None
        taken = sys.getsizeof(text)
        if taken > 3 * len(text) and taken > max(WIDE_BYTES, WIDE_SHARE * self._most):
            return (
                f"its {len(text):,} characters take {taken:,} bytes of memory, since one at least needs four, as an "
                f"emoji does; remove those, or set max_uncut_bytes to {-(-taken // WIDE_SHARE):,} or more"
            )
        longest = max(map(_size, self._pieces(text)))
        if longest <= self._most:
            return None
        whole = "the tokenizer does not allow to cut it, and it has"
        part = "a part of it that cannot be cut has" if self._cut_points else whole
        return f"{part} {longest:,} bytes, more than max_uncut_bytes {self._most:,}"

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        characters = sum(map(len, texts))
        if characters <= self.call_chars or (characters <= CALL_BYTES and sum(map(_size, texts)) <= CALL_BYTES):
            return self._encoder.encode(texts)
        ids: list[Array] = [np.zeros(0, np.uint16)]
        lengths: list[Array] = [np.zeros(0, np.int64)]
        owners: list[int] = []
        for call in _calls((at, piece) for at, text in enumerate(texts) for piece in self._pieces(text)):
            piece_ids, offsets = self._encoder.encode([piece for _, piece in call])
            ids.append(piece_ids.astype(np.min_scalar_type(piece_ids.max(initial=0))))  # a copy of half the size
            lengths.append(np.diff(offsets))
            owners += [at for at, _ in call]
        counts: Array = np.zeros(len(texts), np.int64)
        np.add.at(counts, owners, np.concatenate(lengths))
        return np.concatenate(ids), np.concatenate([[0], np.cumsum(counts)])

    def _pieces(self, text: str) -> Iterator[str]:
        return pieces(text, self._piece_chars, self._cut_points) if self._cut_points else iter((text,))


def _calls(numbered: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Pieces in groups of at most `CALL_BYTES`, or one piece."""
    call: list[tuple[int, str]] = []
    total = 0
    for at, piece in numbered:
        size = _size(piece)
        if call and total + size > CALL_BYTES:
            yield call
            call, total = [], 0
        call.append((at, piece))
        total += size
    if call:
        yield call


def pieces(text: str, characters: int = PIECE_CHARS, cuts: re.Pattern[str] = WORD_END) -> Iterator[str]:
    """A text cut at cut points into pieces of about `characters`, or more where it has no cut point.

    >>> list(pieces("one two, three-four", 6))
    ['one two', ', three', '-four']
    """
    start = 0
    while len(text) - start > characters:
        cut = cuts.search(text, start + 1 + characters // 2)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.end()
    yield text[start:] if start else text


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
