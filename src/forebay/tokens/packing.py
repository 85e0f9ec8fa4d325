"""Encode the documents of a chunk and pack them into rows.

documents   ├── 7 ──┤├─ 3 ─┤├ 2 ┤           capacity 5
pieces      ├ 5 ┤├2┤├─ 3 ─┤├ 2 ┤           a document longer than a row is split
rows        ├ 5 ┤  ├─ 3 ─┤├2┤  ├ 2 ┤···   best fit: every piece goes where it leaves the least room

row     tokens     ┌ document 0 ─────┬ document 4 ┬ padding ┐
        seq_lens   │ 7               │ 3          │         │
        documents  │ (0, 512)        │ (4, 0)     │         │     number of the sample in the chunk, offset of the piece

Long texts are encoded piece by piece: an encoder takes up to 450 bytes of memory for each byte that it gets at once.

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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from forebay.columns import Array, Ragged
from forebay.compiled import native
from forebay.errors import DocumentTooLong, TokenizerUnusable
from forebay.source import BatchedSamples, Failure, Sample, SampleBatch, TextBatch
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
LARGE_CALL_BYTES = 4_000_000  # the same, for an encoder that may get a text of this length uncut
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
    """Ids in one growing array, in as few bytes as they need; room without ids takes no memory."""

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


BATCH_DOCUMENTS = 1024
# Not in a library that was built before they were written.
_native_best_fit, _native_copy_runs = getattr(native, "best_fit", None), getattr(native, "copy_runs", None)
_native_frame = getattr(native, "frame_documents", None)


@dataclass(frozen=True, slots=True)
class Frame:
    """The begin and end tokens of a document, and the range of ids."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    size: int  # ids are below it
    dtype: np.dtype[Any]
    control: frozenset[int] = frozenset()  # ids that text must not produce

    def around(self, ids: Array, offsets: Array) -> tuple[Array, Array]:
        """The ids of documents with begin and end tokens, and the length of each."""
        inner = np.diff(offsets)
        lengths = inner + len(self.begin) + len(self.end)
        framed = np.empty(int(lengths.sum()), self.dtype)
        if _native_frame is not None and ids.dtype == np.uint32:
            begin, end = (number[0] if number else -1 for number in (self.begin, self.end))
            _native_frame(framed, framed.itemsize, np.ascontiguousarray(ids), offsets, begin, end)
            return framed, lengths
        if len(lengths) == 1:  # it may be long
            framed[: len(self.begin)], framed[len(framed) - len(self.end) :] = self.begin, self.end
            framed[len(self.begin) : len(framed) - len(self.end)] = ids
            return framed, lengths
        stops = np.cumsum(lengths)
        starts = stops - lengths
        copy_runs(framed, ids.astype(self.dtype), starts + len(self.begin), offsets[:-1], inner)
        for edge, number in [(starts, self.begin), (stops - 1, self.end)]:
            if number:
                framed[edge] = number[0]
        return framed, lengths


@dataclass(slots=True)
class Documents:
    """The encoded documents of a chunk."""

    ids: Sequence[Array]  # parts, one behind the other; no document is in two of them
    lengths: Array  # (documents,) int64
    numbers: Array  # (documents,) int64, the number of the sample in the chunk
    names: list[str]  # (documents,) the ids of the samples
    starts: Array | None = None  # (documents,) int64, where each begins in `ids`; one behind the other if None
    failed: list[tuple[int, Failure]] = field(default_factory=list)  # sample number, failure
    characters: int = 0

    @property
    def failures(self) -> tuple[Failure, ...]:
        """In the order of the samples."""
        return tuple(failure for _, failure in sorted(self.failed, key=lambda each: each[0]))


def encode_documents(samples: Iterable[Sample], encoder: PiecewiseEncoder, frame: Frame) -> Documents:
    """Encode all samples. What is not text, is empty, too large, becomes no token, or forges a control token fails."""
    ids: list[Array] = [np.zeros(0, frame.dtype)]
    lengths: list[Array] = [np.zeros(0, np.int64)]
    numbers: list[int] = []
    found = Documents(ids, lengths[0], lengths[0], [])
    for batch in _batches(samples, encoder, found, numbers):
        encoded = encoder.encode(batch)
        refused = _refused(*encoded, frame)
        if refused:
            encoded = encoder.encode(_without_refused(refused, batch, found, numbers))
        del batch  # before more memory is taken, and before the next one is read
        framed, each = frame.around(*encoded)
        del encoded
        ids.append(framed)
        lengths.append(each)
    found.lengths = np.concatenate(lengths)
    found.numbers = np.array(numbers, np.int64)
    return found


def _batches(
    samples: Iterable[Sample], encoder: PiecewiseEncoder, found: Documents, numbers: list[int]
) -> Iterator[list[str]]:
    """The texts of the samples in batches for the encoder; failures and the names of the others go to `found`."""
    batch: list[str] = []
    number = characters = 0
    for given in _texts_together(samples, encoder):
        if isinstance(given, TextBatch):
            batch += given.texts
            found.names += given.ids
            numbers.extend(range(number, number := number + len(given.texts)))
            added = sum(map(len, given.texts))
        else:
            text, added = _text(given, encoder), 0
            if isinstance(text, Failure):
                found.failed.append((number, text))
            else:
                batch.append(text)
                found.names.append(given.id)
                numbers.append(number)
                added = len(text)
            del text
            number += 1
        del given
        characters += added
        if characters + 2 * added > encoder.call_chars or len(batch) >= BATCH_DOCUMENTS:  # the next may be longer
            found.characters += characters
            full, batch, characters = [batch], [], 0
            yield full.pop()  # no reference to it stays here
    if batch:
        found.characters += characters
        yield batch


def _texts_together(samples: Iterable[Sample], encoder: PiecewiseEncoder) -> Iterator[Sample | TextBatch]:
    for found in samples.batches() if isinstance(samples, BatchedSamples) else samples:
        if isinstance(found, SampleBatch) and not (isinstance(found, TextBatch) and encoder.are_short(found.texts)):
            yield from found.samples()
        else:
            given = [found]
            del found
            yield given.pop()  # no reference to it stays here: it may be large


def _text(sample: Sample, encoder: PiecewiseEncoder) -> str | Failure:
    data = sample.data
    if isinstance(data, bytes):
        try:
            data = data.decode()
        except UnicodeDecodeError as error:
            return Failure(sample.id, "not-utf8", f"byte {error.start:,} of the document: {error.reason}")
    if not isinstance(data, str):
        return Failure(sample.id, "not-text", f"it is of type {type(data).__name__}")
    if not data:
        return Failure(sample.id, "empty", "the document has no text")
    problem = encoder.problem(data)
    return data if problem is None else Failure(sample.id, "too-large", problem)


_NO_TOKEN = ("empty", "the tokenizer makes no token of its text")  # of blanks, where it strips them
_FORGED = ("control-token", "the tokenizer makes a control token of its text")


def _refused(ids: Array, offsets: Array, frame: Frame) -> dict[int, tuple[str, str]]:
    """The texts without a token, and those with a control token: some models encode its text like any other word."""
    largest = int(ids.max(initial=0))
    if len(ids) and largest >= frame.size:
        raise TokenizerUnusable("", f"it returned the id {largest:,}, but its vocabulary has {frame.size:,} ids")
    found = dict.fromkeys(np.flatnonzero(offsets[1:] == offsets[:-1]).tolist(), _NO_TOKEN)
    if frame.control and largest >= min(frame.control):
        places = np.flatnonzero(np.isin(ids, list(frame.control)))
        found |= dict.fromkeys(np.unique(np.searchsorted(offsets, places, side="right") - 1).tolist(), _FORGED)
    return found


def _without_refused(
    refused: Mapping[int, tuple[str, str]], batch: list[str], found: Documents, numbers: list[int]
) -> list[str]:
    """The batch, which is the end of `found`, without the texts that are refused, which become failures."""
    first = len(numbers) - len(batch)
    for at in sorted(refused, reverse=True):
        name, number = found.names.pop(first + at), numbers.pop(first + at)
        found.failed.append((number, Failure(name, *refused[at])))
        found.characters -= len(batch[at])
    return [text for at, text in enumerate(batch) if at not in refused]


@dataclass(frozen=True, slots=True, eq=False)
class DocumentPieces:
    """Documents or parts of them that fit a row, in the order of documents."""

    document: Array  # (pieces,) int64, the index of the document
    offset: Array  # (pieces,) int64, the offset of the piece in its document
    length: Array  # (pieces,) int64


def split_documents(lengths: Array, capacity: int) -> DocumentPieces:
    """Cut documents longer than `capacity` into full pieces and a rest.

    >>> split_documents(np.array([7, 3]), 5).length.tolist()
    [5, 2, 3]
    """
    lengths = np.asarray(lengths, np.int64)
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts
    offset = (np.arange(len(document)) - first[document]) * capacity
    return DocumentPieces(document, offset, np.minimum(lengths[document] - offset, capacity))


def pack_best_fit(lengths: Array, capacity: int) -> Array:
    """The bin of every item, best fit decreasing; of equally full bins, the oldest is used.

    Bins are numbered by their first item, in the order of items.

    >>> pack_best_fit(np.array([5, 2, 4, 3]), 7).tolist()
    [0, 0, 1, 1]
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths must be 1 to {capacity} (got {lengths.min()} to {lengths.max()})")
    # A stable sort of small integers is a radix sort: linear in the items.
    order = np.argsort((capacity - lengths).astype(np.min_scalar_type(capacity)), kind="stable")
    bins = np.empty(len(lengths), np.int64)
    bins[order] = _bins_of_descending(lengths[order], capacity)
    return _numbered_by_first_item(bins)


def _bins_of_descending(lengths: Array, capacity: int) -> Array:
    if _native_best_fit is not None:
        found = np.empty(len(lengths), np.int64)
        _native_best_fit(found, lengths, capacity)
        return found
    counts = np.bincount(lengths, minlength=capacity + 1)
    full = int(counts[capacity])  # each fills one bin
    values = np.flatnonzero(counts[:capacity])[::-1]
    return np.concatenate([np.arange(full), full + _fill(values.tolist(), counts[values].tolist(), capacity)])


def _fill(values: list[int], counts: list[int], capacity: int) -> Array:
    """The bin of every item, for descending lengths.

    Items of one length are placed together: the fullest bin that fits one takes as many as it can, because each leaves
    even less room. So the work grows with the number of different rooms, not of items.
    """
    rooms: defaultdict[int, list[int]] = defaultdict(list)  # room -> the bins that have it, oldest first
    open_rooms = 0  # bit r is set if rooms[r] has a bin
    bins: list[int] = []
    takes: list[int] = []
    opened = 0
    for value, count in zip(values, counts, strict=True):
        while count:
            fitting = open_rooms >> value
            if fitting:
                room = value + (fitting & -fitting).bit_length() - 1
                here = rooms[room]
            else:
                room = capacity
                here = list(range(opened, opened - (-count // (capacity // value))))
                opened += len(here)
            each = room // value
            whole = min(len(here), count // each)
            rest = min(count - whole * each, each - 1) if whole < len(here) else 0
            used = whole + (rest > 0)
            bins += here[:used]
            takes += [each] * whole
            if rest:
                takes.append(rest)
            count -= whole * each + rest
            left = room - each * value
            if whole and left:
                rooms[left] += here[:whole]
                open_rooms |= 1 << left
            if rest:
                rooms[room - rest * value].append(here[whole])
                open_rooms |= 1 << (room - rest * value)
            if fitting:
                del here[:used]
                if not here:
                    del rooms[room]
                    open_rooms &= ~(1 << room)
    return np.repeat(np.array(bins, np.int64), np.array(takes, np.int64))


def _numbered_by_first_item(bins: Array) -> Array:
    """The same grouping, with bins numbered in the order of their first items."""
    first = np.empty(bins.max() + 1 if len(bins) else 0, np.int64)
    first[bins[::-1]] = np.arange(len(bins))[::-1]  # of several writes to one index, the last one counts
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbered: Array = rank[bins]
    return numbered


LongDocuments = Literal["split", "truncate", "drop", "error"]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The columns of a chunk."""

    tokens: Array  # (rows, capacity)
    seq_lens: Ragged  # of uint32
    documents: Ragged  # of uint32 pairs: number of the sample in the chunk, offset in its tokens


@dataclass(frozen=True, slots=True, eq=False)
class DocumentCut:
    """How much of every document is kept, and the failures."""

    lengths: Array  # (documents,) int64, 0 for a dropped document
    failures: tuple[Failure, ...] = ()


def cut_long(documents: Documents, capacity: int, policy: LongDocuments) -> DocumentCut:
    """Apply the policy for documents longer than a row."""
    lengths = documents.lengths
    long = np.flatnonzero(lengths > capacity)
    if policy == "split" or not len(long):
        return DocumentCut(lengths)
    if policy == "truncate":
        return DocumentCut(np.minimum(lengths, capacity))
    named = [(documents.names[at], int(lengths[at])) for at in long.tolist()]
    if policy == "error":
        raise DocumentTooLong(*named[0], capacity)
    kept = lengths.copy()
    kept[long] = 0
    return DocumentCut(
        kept, tuple(Failure(name, "too-long", f"{n:,} tokens, a row holds {capacity:,}") for name, n in named)
    )


def pack_rows(documents: Documents, kept: Array, capacity: int, pad: int) -> Packed:
    """Pack the kept part of every document into rows, best fit."""
    pieces = split_documents(kept, capacity)
    row = pack_best_fit(pieces.length, capacity)
    order = np.argsort(row, kind="stable")  # by row, within it in the order of documents
    placed = DocumentPieces(pieces.document[order], pieces.offset[order], pieces.length[order])
    edges = np.concatenate([[0], np.cumsum(np.bincount(row))]) if len(row) else np.zeros(1, np.int64)
    which = documents.numbers[placed.document]
    return Packed(
        _laid_out(documents, placed, row[order], edges, capacity, pad),
        Ragged(placed.length.astype(np.uint32), edges),
        Ragged(np.stack([which, placed.offset], axis=1).astype(np.uint32), edges),
    )


def _laid_out(documents: Documents, placed: DocumentPieces, row: Array, edges: Array, capacity: int, pad: int) -> Array:
    tokens = np.full((len(edges) - 1, capacity), pad, documents.ids[0].dtype)
    ends = np.cumsum(placed.length)
    begins = ends - placed.length
    first = begins[edges[:-1]] if len(row) else begins
    targets = row * capacity + begins - first[row]
    starts = np.cumsum(documents.lengths) - documents.lengths if documents.starts is None else documents.starts
    sources = starts[placed.document] + placed.offset
    flat, part_start = tokens.reshape(-1), 0
    for ids in documents.ids:
        here = np.flatnonzero((sources >= part_start) & (sources < part_start + len(ids)))
        copy_runs(flat, ids, *_runs(targets[here], sources[here] - part_start, placed.length[here]))
        part_start += len(ids)
    return tokens


def copy_runs(out: Array, ids: Array, targets: Array, starts: Array, lengths: Array) -> None:
    """Runs are long: copying each is several times faster than indexing per token."""
    if _native_copy_runs is not None:
        in_bytes = (each * out.itemsize for each in (targets, starts, lengths))
        _native_copy_runs(out, np.ascontiguousarray(ids, out.dtype), *in_bytes)
        return
    for to, start, length in zip(targets.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        out[to : to + length] = ids[start : start + length]


def _runs(targets: Array, sources: Array, lengths: Array) -> tuple[Array, Array, Array]:
    """Join pieces that are adjacent both in their document and in the rows into one copy."""
    if not len(lengths):
        return targets, sources, lengths
    continues = (targets[1:] == targets[:-1] + lengths[:-1]) & (sources[1:] == sources[:-1] + lengths[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~continues]))
    return targets[first], sources[first], np.add.reduceat(lengths, first)
