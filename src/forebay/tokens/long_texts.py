"""Encode long texts piece by piece: an encoder takes up to 450 bytes of memory for each byte that it gets at once.

    text     … the lazy dog| jumps over. The next|, with a comma …      "|": a place to cut
    pieces   … the lazy dog    jumps over. The next    , with a comma …

A text is only cut where its tokens are the same as without the cut: the tokenizer splits every text into words before
it merges, and with the patterns below, a letter or digit ends a word if a space or a mark of punctuation follows.
No match of such a pattern continues there, and none looks behind itself. Added tokens such as "<tool_call>" are found
before words are: no text of one is cut.

With tokenizers that split words at spaces, and those of SentencePiece, which write "▁" for a space and have no token
with one behind a letter, texts are cut before a single space between letters or digits. Llama 2 puts "▁" before every
text:

    text     the lazy dog| |jumps over      the space between two pieces is left out, and comes back as that "▁"

Other tokenizers get every text whole.
"""

import re
import string
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np

from forebay.columns import Array
from forebay.tokens.vocabulary import (
    AddedToken,
    Encoder,
    EncoderName,
    Vocabulary,
    is_installed,
    reference_tokenizer,
)

PIECE_CHARS = 1 << 18
CALL_BYTES = 1 << 20  # of one call of the encoder
LARGE_CALL_BYTES = 4_000_000  # the same, for an encoder that may get a text of so many bytes uncut
# A tokenizer that splits texts in two steps takes up to 450 bytes for each byte in `tokenizers`, 60 in `fastokens`.
MAX_UNCUT_BYTES: Mapping[EncoderName, int] = {"fastokens": 4_000_000, "tokenizers": 1_500_000}
# One emoji makes every character of a text take four bytes: it may take this much, or more with a higher limit.
WIDE_BYTES, WIDE_SHARE = 128_000_000, 32
# Letters and digits of every version of Unicode, and what ends a word after them: not "'", which may continue it.
_LETTERS = (
    "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01f5\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea\u0621-\u063a\u0641-\u064a"
    "\u0e01-\u0e30\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_ENDS = r" \t\r\n!\"#$%&()*+,./:;<=>?@[\\\]^_`{|}~\-\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
_CUT = re.compile(f"(?<=[{_LETTERS}])(?=[{_ENDS}])")
# In the NFD form of a text, if `_CUT` cuts a text that is equal in NFC.
_MAY_BE_CUT = re.compile(f"[^{_ENDS}][{_ENDS}]")
_SAME_IN_NFC = re.compile("[ -:<-JL-_a-~]*")  # no other character becomes one of these: not ";", "K" and "`"
# Between two letters and a third: a mark before one letter alone could be one character with it.
_BEFORE_SPACE = re.compile("(?<=[A-Za-z0-9]{2})(?= [A-Za-z0-9])")
_AT_SPACE = re.compile("(?<=[A-Za-z0-9]{2}) (?=[A-Za-z0-9])")
# An added token that `_AT_SPACE` could cut, or find beside it.
_BESIDE_SPACE = re.compile(r"^\w|\w$|\w[\s▁]|[\s▁]\w|^ $")
_ACROSS_SPACE = re.compile(r"(?:^|\w)[\s▁](?:$|\w)")  # one that `_AT_SPACE` could cut, with letters before or behind it
_SPACE_IN_WORDS = re.compile(r"\w▁")
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
    """An encoder that gets long texts in pieces, and few texts at once. It returns the same ids.

    Texts of up to `call_chars` characters together are encoded by one call, whatever they are.
    """

    def __init__(self, encoder: Encoder, vocabulary: Vocabulary, max_uncut_bytes: int) -> None:
        self._encoder = encoder
        self._places = places_to_cut(vocabulary)
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
        where = (
            "a part of it that cannot be cut has"
            if self._places
            else "the tokenizer does not allow to cut it, and it has"
        )
        return f"{where} {longest:,} bytes, more than max_uncut_bytes {self._most:,}"

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        characters = sum(map(len, texts))
        if characters <= self.call_chars or (characters <= CALL_BYTES and sum(map(_size, texts)) <= CALL_BYTES):
            return self._encoder.encode(texts)
        ids = _Ids(characters)  # one for each character, most often fewer
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
        return pieces(text, self._piece_chars, self._places) if self._places else iter((text,))


def _calls(given: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Pieces in groups of at most `CALL_BYTES`, or one piece."""
    call: list[tuple[int, str]] = []
    total = 0
    for at, piece in given:
        size = _size(piece)
        if call and total + size > CALL_BYTES:
            yield call
            call, total = [], 0
        call.append((at, piece))
        total += size
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
        if wide != self._found.dtype:
            wider = np.empty(max(len(self._found), end), wide)
            wider[: self._end] = self.all
            self._found = wider
        elif end > len(self._found):  # in its place: a copy would take as much again
            self._found.resize(end + end // 8, refcheck=False)
        self._found[self._end : end] = ids
        self._end = end

    @property
    def all(self) -> Array:
        return self._found[: self._end]


def pieces(text: str, characters: int = PIECE_CHARS, places: re.Pattern[str] = _CUT) -> Iterator[str]:
    """A text cut at `places`, between words, into pieces of about `characters`, or more where it has none of them.

    >>> list(pieces("one two, three-four", 6))
    ['one two', ', three', '-four']
    """
    start = 0
    while len(text) - start > characters:
        found = places.search(text, start + 1 + characters // 2)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.end()
    yield text[start:] if start else text


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=2)
def places_to_cut(vocabulary: Vocabulary) -> re.Pattern[str] | None:
    """Where `pieces` may cut a text so that its tokens stay those of the whole one; None where that is not known."""
    return _between_words(vocabulary) or _at_spaces(vocabulary)


def _between_words(vocabulary: Vocabulary) -> re.Pattern[str] | None:
    """The places between the words of known patterns."""
    document = vocabulary.document
    steps, normalizers = _steps(document.pre_tokenizer, "pretokenizers"), _steps(document.normalizer, "normalizers")
    if not (
        all(step.get("type") == "NFC" for step in normalizers)
        and all(map(_is_local, steps))
        and any(map(_ends_words, steps))
        and all(step.get("type") != "ByteLevel" for step in steps[:-1])  # patterns after it see other letters
    ):
        return None
    added = document.added_tokens or ()
    if any(token.lstrip or token.rstrip or token.single_word for token in added if not token.special):
        return None  # it depends on what is beside it
    whole = [token.content for token in added if not token.special]
    special = [token.content for token in added if token.special]
    # The text of a special token becomes words, but no other token is found inside of it.
    while hiding := [text for text in special if any(_overlap(text, other) for other in whole)]:
        whole += hiding
        special = [text for text in special if text not in hiding]
    if normalizers and not all(map(_is_found_as_written, whole)):
        return None
    return _cut_outside(whole)


_WHOLE_CHARACTERS = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled")
_WORDS = ("WhitespaceSplit", "Whitespace", "BertPreTokenizer")
_PARTS_OF_WORDS = (*_WORDS, "Metaspace", "Punctuation", "Digits")
_MAKES_SPACES = ("Nmt", "Precompiled")  # of "▁"
_PREPENDED = {"type": "Prepend", "prepend": "▁"}
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_RUNS_OF_SPACES = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": one} for one in (" ", "▁")]


def _at_spaces(vocabulary: Vocabulary) -> re.Pattern[str] | None:
    """Single spaces between letters or digits, where words end, or no token has "▁" behind a letter."""
    document = vocabulary.document
    steps, normalizers = _steps(document.pre_tokenizer, "pretokenizers"), _steps(document.normalizer, "normalizers")
    prepends = _PREPENDED in normalizers
    if prepends:  # only the two steps of Llama 2, in any order, leave it beside what was a space
        normalizers.remove(_PREPENDED)  # a second one would put "▁▁" there
        is_local = normalizers == [_SPACES] and not steps
    else:
        is_local = all(map(_is_of_characters, normalizers))
    if not (
        is_local
        and (_splits_at_spaces(steps, _SPACES in normalizers) or _merges_no_spaces(vocabulary, steps, normalizers))
        and _are_apart(document.added_tokens or (), normalizers)
        and (all(step.get("type") != "Precompiled" for step in normalizers) or _keeps_letters(vocabulary))
    ):
        return None
    return _AT_SPACE if prepends else _BEFORE_SPACE


def _is_of_characters(step: dict[str, Any]) -> bool:
    """Whether a normalizer changes characters one by one, or only texts without a single space."""
    match step.get("type"):
        case "Strip":
            return not step.get("strip_left", True)  # a piece begins with a space, and none ends with one
        case "Replace":
            pattern = step.get("pattern")
            fixed = pattern.get("String") if isinstance(pattern, dict) else None
            is_mark = (
                isinstance(fixed, str) and fixed != "" and not re.search(r"[\w\s▁]", fixed + str(step.get("content")))
            )
            return is_mark or step == _SPACES or step in _RUNS_OF_SPACES
    return step.get("type") in _WHOLE_CHARACTERS


def _splits_at_spaces(steps: list[dict[str, Any]], are_replaced: bool) -> bool:
    """Whether words are split at spaces, or at the "▁" that they are replaced by."""
    if not all(step.get("type") in _PARTS_OF_WORDS and step.get("replacement", "▁") == "▁" for step in steps):
        return False
    at_marks = any(step.get("type") == "Metaspace" and step.get("split", True) for step in steps)
    before_marks = takewhile(lambda step: step.get("type") != "Metaspace", steps)  # which leaves no space
    return at_marks or (not are_replaced and any(step.get("type") in _WORDS for step in before_marks))


def _merges_no_spaces(vocabulary: Vocabulary, steps: list[dict[str, Any]], normalizers: list[dict[str, Any]]) -> bool:
    """Whether a text is one word for the merges, and none of them joins a letter and the "▁" behind it.

    No two parts beside such a place ever become one, so both sides are merged as if they were alone. Of a Unigram
    model this is not known: of two ways that are equally likely, rounding of the sum so far chooses one.
    """
    model = vocabulary.document.model
    without_effect = {"type": "Split", "pattern": {"String": " "}}  # where no space is left
    marks = [step for step in steps if step.get("type") == "Metaspace"]
    rest = [step for step in steps if step.get("type") != "Metaspace"]
    later = takewhile(lambda step: step != _SPACES, reversed(normalizers))
    are_replaced = _SPACES in normalizers and all(step.get("type") not in _MAKES_SPACES for step in later)
    return (
        model.type == "BPE"
        and isinstance(model.vocab, dict)
        and "▁" in model.vocab  # unknown characters beside each other are one token
        and not (model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix)
        and (are_replaced or steps[:1] == marks[:1] != [])
        and all(step.get("replacement") == "▁" for step in marks)
        and all({name: step.get(name) for name in without_effect} == without_effect for step in rest)
        and _SPACE_IN_WORDS.search("\0".join(model.vocab)) is None
    )


def _are_apart(added: Iterable[AddedToken], normalizers: list[dict[str, Any]]) -> bool:
    """Whether no added token is found across or beside a single space between letters."""
    whole = [token for token in added if not token.special]
    if not whole:
        return True
    texts = [text for token in whole for text in _forms(token)]
    special = [text for token in added if token.special for text in _forms(token)]  # in which no other one is found
    return (
        not any(token.lstrip or token.rstrip or token.single_word for token in whole)
        and all(step.get("type") in ("NFC", "NFKC", "Replace") for step in normalizers)
        and not any(map(_BESIDE_SPACE.search, texts))
        and not any(map(_ACROSS_SPACE.search, special))
    )


def _forms(token: AddedToken) -> tuple[str, str]:
    return token.content, unicodedata.normalize("NFKC", token.content)


def _keeps_letters(vocabulary: Vocabulary) -> bool:
    """Whether every letter and digit stays one beside a space, whatever map of characters a tokenizer has."""
    if not is_installed("tokenizers"):
        return False
    normalizer = reference_tokenizer(vocabulary).normalizer
    letters = string.ascii_letters + string.digits
    return all(re.fullmatch(r"▁?\w+[ ▁]\w+", normalizer.normalize_str(f"{one}{one} {one}")) for one in letters)


def _cut_outside(contents: Iterable[str]) -> re.Pattern[str]:
    """Places to cut that are not inside of any of these texts.

    >>> list(pieces("a <tool_call> b", 1, _cut_outside(["<tool_call>"])))
    ['a', ' <tool_call> b']
    """
    inside = [(each[: place.start()], each[place.start() :]) for each in contents for place in _CUT.finditer(each)]
    if not inside:
        return _CUT
    beside = "|".join(f"(?<={re.escape(before)}){re.escape(after)}" for before, after in dict.fromkeys(inside))
    return re.compile(f"{_CUT.pattern}(?!{beside})")


def _is_found_as_written(content: str) -> bool:
    """Whether a token that may be cut is in a text before NFC wherever it is in the text after it."""
    decomposed = unicodedata.normalize("NFD", content)
    return _MAY_BE_CUT.search(decomposed) is None or _SAME_IN_NFC.fullmatch(content) is not None


def _overlap(one: str, other: str) -> bool:
    """Whether two texts may be found in a third one so that they share characters.

    >>> _overlap("<|im_end|>", "_end"), _overlap("<|a|>", "><"), _overlap("<|a|>", "  ")
    (True, True, False)
    """
    one, other = unicodedata.normalize("NFD", one), unicodedata.normalize("NFD", other)
    return (one[:1] in other or other[:1] in one) and any(
        one[max(0, at) : at + len(other)] == other[max(0, -at) : len(one) - at]
        for at in range(1 - len(other), len(one))
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


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    listed = part.get(inner)
    found = listed if isinstance(listed, list) else [{}]
    return [each for step in found for each in _steps(step if isinstance(step, dict) else {}, inner)]
