"""Encode long texts piece by piece: an encoder takes up to 450 bytes of memory for each byte that it gets at once.

    text     … the lazy dog| jumps over. The next|, with a comma …      "|": a place to cut
    pieces   … the lazy dog    jumps over. The next    , with a comma …

A text is only cut where its tokens are the same as without the cut: the tokenizer splits every text into words before
it merges, and with the patterns below, a letter or digit ends a word if a space or a mark of punctuation follows.
No match of such a pattern goes on there, and none looks behind itself. Other tokenizers get every text whole.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from forebay.columns import Array
from forebay.tokens.vocabulary import Encoder, EncoderName, Vocabulary

PIECE_CHARS = 1 << 18
CALL_CHARS = 1 << 20  # of one call of the encoder
# A tokenizer that splits texts in two steps takes up to 450 bytes for each byte in `tokenizers`, 60 in `fastokens`.
MAX_UNCUT_BYTES: Mapping[EncoderName, int] = {"fastokens": 4_000_000, "tokenizers": 1_500_000}
# Letters and digits of every version of Unicode, and what ends a word after them: not "'", which may continue it.
_LETTERS = (
    "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01f5\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea\u0621-\u063a\u0641-\u064a"
    "\u0e01-\u0e30\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_ENDS = r" \t\r\n!\"#$%&()*+,./:;<=>?@[\\\]^_`{|}~\-\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
_CUT = re.compile(f"(?<=[{_LETTERS}])[{_ENDS}]")
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ANY_CASE = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2, as in ByteLevel
        *(
            short + _WORD + numbers + _REST  # Qwen 2 and 3 have single digits, Llama 3 up to three
            for short in (_SHORT, _ANY_CASE)
            for numbers in (r"|\p{N}", r"|\p{N}{1,3}")
        ),
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # GPT-4o, Llama 4
    }
)


class PiecewiseEncoder:
    """An encoder that gets long texts in pieces, and few texts at once. It returns the same ids."""

    def __init__(self, encoder: Encoder, vocabulary: Vocabulary, max_uncut_bytes: int) -> None:
        self._encoder = encoder
        self._cuts = cuts_between_words(vocabulary)
        self._most = max_uncut_bytes
        self._piece_chars = min(PIECE_CHARS, max(1, max_uncut_bytes // 4))  # a character has four bytes at most

    def are_short(self, texts: Sequence[str]) -> bool:
        """Whether texts are so short that none can have a problem."""
        return 4 * len(max(texts, key=len, default="")) <= self._most

    def problem(self, text: str) -> str | None:
        """Why a text would take too much memory; None if it does not."""
        if self.are_short((text,)):
            return None
        longest = max(map(_size, self._pieces(text)))
        if longest <= self._most:
            return None
        where = (
            "a part of it that cannot be cut has"
            if self._cuts
            else "the tokenizer does not allow to cut it, and it has"
        )
        return f"{where} {longest:,} bytes, more than max_uncut_bytes {self._most:,}"

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        if sum(map(len, texts)) <= CALL_CHARS:
            return self._encoder.encode(texts)
        ids = _Ids(sum(map(len, texts)))  # one for each character, most often fewer
        lengths: list[Array] = [np.zeros(0, np.int64)]
        owners: list[int] = []
        for call in _calls((at, piece) for at, text in enumerate(texts) for piece in self._pieces(text)):
            found, offsets = self._encoder.encode([piece for _, piece in call])
            ids.add(found)
            lengths.append(np.diff(offsets))
            owners += [at for at, _ in call]
        counts: Array = np.zeros(len(texts), np.int64)
        np.add.at(counts, owners, np.concatenate(lengths))
        return ids.all, np.concatenate([[0], np.cumsum(counts)])

    def _pieces(self, text: str) -> Iterator[str]:
        return pieces(text, self._piece_chars) if self._cuts else iter((text,))


def _calls(given: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Pieces in groups of at most `CALL_CHARS`, or one piece."""
    call: list[tuple[int, str]] = []
    characters = 0
    for at, piece in given:
        if call and characters + len(piece) > CALL_CHARS:
            yield call
            call, characters = [], 0
        call.append((at, piece))
        characters += len(piece)
    if call:
        yield call


class _Ids:
    """Ids one behind the other, in as few bytes as they need. Memory that no id is in yet is not used."""

    def __init__(self, expected: int) -> None:
        self._found: Array = np.empty(expected, np.uint16)
        self._end = 0

    def add(self, ids: Array) -> None:
        wide = np.result_type(self._found, np.min_scalar_type(ids.max(initial=0)))
        end = self._end + len(ids)
        if wide != self._found.dtype or end > len(self._found):
            grown = np.empty(max(len(self._found), 2 * end), wide)
            grown[: self._end] = self.all
            self._found = grown
        self._found[self._end : end] = ids
        self._end = end

    @property
    def all(self) -> Array:
        return self._found[: self._end]


def pieces(text: str, characters: int = PIECE_CHARS) -> Iterator[str]:
    """A text cut between words, into pieces of about `characters`, or more where it has no place to cut.

    >>> list(pieces("one two, three-four", 6))
    ['one two', ', three', '-four']
    """
    start = 0
    while len(text) - start > characters:
        found = _CUT.search(text, start + 1 + characters // 2)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:] if start else text


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def cuts_between_words(vocabulary: Vocabulary) -> bool:
    """Whether a tokenizer is known to give a text cut by `pieces` the tokens of the whole one."""
    document = vocabulary.document
    steps = _steps(document.pre_tokenizer, "pretokenizers")
    return (
        all(step.get("type") == "NFC" for step in _steps(document.normalizer, "normalizers"))
        and all(map(_is_local, steps))
        and any(map(_ends_words, steps))
        and all(step.get("type") != "ByteLevel" for step in steps[:-1])  # patterns after it see other letters
        and not any(_reaches_beyond(token) for token in document.added_tokens or () if not token.special)
    )


def _is_local(step: dict[str, Any]) -> bool:
    match step.get("type"):
        case "ByteLevel":
            return not step.get("add_prefix_space", True)
        case "Split":
            return _ends_words(step)
        case "Digits":
            return True
    return False


def _ends_words(step: dict[str, Any]) -> bool:
    if step.get("type") == "ByteLevel":
        return bool(step.get("use_regex", True))
    pattern = step.get("pattern")
    known = isinstance(pattern, dict) and pattern.get("Regex") in PATTERNS
    return step.get("type") == "Split" and known and step.get("behavior") == "Isolated" and not step.get("invert")


def _reaches_beyond(token: Any) -> bool:
    """Whether an added token may be found across a place to cut, or depends on what is beside it."""
    return token.lstrip or token.rstrip or token.single_word or _CUT.search(token.content) is not None


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    listed = part.get(inner)
    found = listed if isinstance(listed, list) else [{}]
    return [each for step in found for each in _steps(step if isinstance(step, dict) else {}, inner)]
