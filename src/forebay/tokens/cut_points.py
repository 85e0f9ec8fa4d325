"""Positions where a text can be cut without changing its tokens.

    text     … the lazy dog| jumps over. The next|, with a comma …      "|": a cut point
    pieces   … the lazy dog    jumps over. The next    , with a comma …

`RULES` lists the tokenizers for which this is known. Texts for other tokenizers are not cut.
"""

import re
import string
import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from forebay.tokens.encoders import is_installed, reference_tokenizer
from forebay.tokens.vocabulary import AddedToken, Step, Vocabulary, steps_of

# Letters and digits of every version of Unicode, and what ends a word after them: not "'", which may continue it.
_LETTERS = (
    "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01f5\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea\u0621-\u063a\u0641-\u064a"
    "\u0e01-\u0e30\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_ENDS = r" \t\r\n!\"#$%&()*+,./:;<=>?@[\\\]^_`{|}~\-\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
WORD_END = re.compile(f"(?<=[{_LETTERS}])(?=[{_ENDS}])")
# In the NFD form of a text, if `WORD_END` cuts a text that is equal in NFC.
_MAY_BE_CUT = re.compile(f"[^{_ENDS}][{_ENDS}]")
_SAME_IN_NFC = re.compile("[ -:<-JL-_a-~]*")  # no other character becomes one of these: not ";", "K" and "`"
# Between two letters and a third: a mark before one letter alone could be one character with it.
_BEFORE_SPACE = re.compile("(?<=[A-Za-z0-9]{2})(?= [A-Za-z0-9])")
_AT_SPACE = re.compile("(?<=[A-Za-z0-9]{2}) (?=[A-Za-z0-9])")
# An added token that `_AT_SPACE` could cut or touch; one that it could cut, with letters before or after it.
_NEXT_TO_SPACE = re.compile(r"^\w|\w$|\w[\s▁]|[\s▁]\w|^ $")
_ACROSS_SPACE = re.compile(r"(?:^|\w)[\s▁](?:$|\w)")
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
_WHOLE_CHARACTERS = ("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled")
_WORDS = ("WhitespaceSplit", "Whitespace", "BertPreTokenizer")
_PARTS_OF_WORDS = (*_WORDS, "Metaspace", "Punctuation", "Digits")
_MAKES_SPACES = ("Nmt", "Precompiled")  # of "▁"
_PREPENDED = {"type": "Prepend", "prepend": "▁"}
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_RUNS_OF_SPACES = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": one} for one in (" ", "▁")]


class _Steps(NamedTuple):
    """A tokenizer as its steps: added tokens are cut out first, then texts are normalized and split into words."""

    vocabulary: Vocabulary
    normalizers: list[Step]
    splits: list[Step]
    added: list[AddedToken]


class CutRule(NamedTuple):
    applies: Callable[[_Steps], bool]
    pattern: Callable[[_Steps], re.Pattern[str]]
    reason: str


@lru_cache(maxsize=2)
def cut_points(vocabulary: Vocabulary) -> re.Pattern[str] | None:
    """A pattern that matches at every cut point; None where no cut is known to be safe."""
    document = vocabulary.document
    normalizers = steps_of(document.normalizer, "normalizers")
    splits = steps_of(document.pre_tokenizer, "pretokenizers")
    steps = _Steps(vocabulary, normalizers, splits, document.added_tokens or [])
    return next((rule.pattern(steps) for rule in RULES if rule.applies(steps)), None)


def _type(step: Step) -> Any:
    return step.get("type")


def _has_known_words(steps: _Steps) -> bool:
    return (
        all(_type(step) == "NFC" for step in steps.normalizers)
        and all(map(_is_local, steps.splits))
        and any(map(_ends_words, steps.splits))
        and all(_type(step) != "ByteLevel" for step in steps.splits[:-1])  # patterns after it see other letters
        and not any(token.lstrip or token.rstrip or token.single_word for token in steps.added if not token.special)
        and (not steps.normalizers or all(map(_is_matched_as_written, _uncut_texts(steps))))
    )


def _is_local(step: Step) -> bool:
    if _type(step) == "ByteLevel":
        return not step.get("add_prefix_space", True)
    return _type(step) == "Digits" or _ends_words(step)


def _ends_words(step: Step) -> bool:
    if _type(step) == "ByteLevel":
        return bool(step.get("use_regex", True))
    pattern = step.get("pattern")
    known = isinstance(pattern, dict) and pattern.get("Regex") in PATTERNS
    return _type(step) == "Split" and known and step.get("behavior") == "Isolated" and not step.get("invert")


def _uncut_texts(steps: _Steps) -> list[str]:
    """The texts of added tokens that no cut may divide.

    The text of a special token becomes words, but no other added token is matched inside it.
    """
    is_matched = any(not token.special for token in steps.added)
    return [token.content for token in steps.added] if is_matched else []


def _is_matched_as_written(content: str) -> bool:
    """True if every cuttable token in the text after NFC is also in the text before NFC."""
    decomposed = unicodedata.normalize("NFD", content)
    return _MAY_BE_CUT.search(decomposed) is None or _SAME_IN_NFC.fullmatch(content) is not None


def _word_ends(steps: _Steps) -> re.Pattern[str]:
    return _outside(_uncut_texts(steps))


def _outside(contents: Iterable[str]) -> re.Pattern[str]:
    """Ends of words that are not inside any of these texts.

    >>> [match.start() for match in _outside(["<tool_call>"]).finditer("a <tool_call> b")]
    [1]
    """
    inside = [(each[: end.start()], each[end.start() :]) for each in contents for end in WORD_END.finditer(each)]
    if not inside:
        return WORD_END
    around = "|".join(f"(?<={re.escape(before)}){re.escape(after)}" for before, after in dict.fromkeys(inside))
    return re.compile(f"{WORD_END.pattern}(?!{around})")


def _is_like_llama_2(steps: _Steps) -> bool:
    """Only its two normalizers, in either order, leave the prepended "▁" next to what was a space."""
    normalizers = [step for step in steps.normalizers if step != _PREPENDED]
    own = steps._replace(normalizers=normalizers)
    is_alone = len(steps.normalizers) == 2 and normalizers == [_SPACES] and not steps.splits
    return is_alone and _merges_no_spaces(own) and _leaves_added_tokens(own)


def _splits_at_spaces(steps: _Steps) -> bool:
    """Whether words are split at spaces, or at the "▁" that replaces them."""
    if not all(_type(step) in _PARTS_OF_WORDS and step.get("replacement", "▁") == "▁" for step in steps.splits):
        return False
    at_marks = any(_type(step) == "Metaspace" and step.get("split", True) for step in steps.splits)
    before_marks = takewhile(lambda step: _type(step) != "Metaspace", steps.splits)  # which leaves no space
    splits = at_marks or (_SPACES not in steps.normalizers and any(_type(step) in _WORDS for step in before_marks))
    return splits and _keeps_single_spaces(steps)


def _is_one_word(steps: _Steps) -> bool:
    return _merges_no_spaces(steps) and _keeps_single_spaces(steps)


def _merges_no_spaces(steps: _Steps) -> bool:
    """True if a text is one word for the merges, and no merge joins a letter and the following "▁"."""
    model = steps.vocabulary.document.model
    without_effect = {"type": "Split", "pattern": {"String": " "}}  # where no space is left
    marks = [step for step in steps.splits if _type(step) == "Metaspace"]
    rest = [step for step in steps.splits if _type(step) != "Metaspace"]
    later = takewhile(lambda step: step != _SPACES, reversed(steps.normalizers))
    are_replaced = _SPACES in steps.normalizers and all(_type(step) not in _MAKES_SPACES for step in later)
    return (
        model.type == "BPE"
        and isinstance(model.vocab, dict)
        and "▁" in model.vocab  # unknown characters next to each other are one token
        and not (model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix)
        and (are_replaced or steps.splits[:1] == marks[:1] != [])
        and all(step.get("replacement") == "▁" for step in marks)
        and all({name: step.get(name) for name in without_effect} == without_effect for step in rest)
        and _SPACE_IN_WORDS.search("\0".join(model.vocab)) is None
    )


def _keeps_single_spaces(steps: _Steps) -> bool:
    """Whether a single space between letters stays one, and no added token is matched across or next to it."""
    return (
        all(map(_is_of_characters, steps.normalizers))
        and _leaves_added_tokens(steps)
        and (all(_type(step) != "Precompiled" for step in steps.normalizers) or _keeps_letters(steps.vocabulary))
    )


def _is_of_characters(step: Step) -> bool:
    """Whether a normalizer changes characters one by one, or only texts without a single space."""
    if _type(step) == "Strip":
        return not step.get("strip_left", True)  # a piece begins with a space, and none ends with one
    if _type(step) == "Replace":
        pattern = step.get("pattern")
        fixed = pattern.get("String") if isinstance(pattern, dict) else None
        is_mark = isinstance(fixed, str) and fixed and not re.search(r"[\w\s▁]", fixed + str(step.get("content")))
        return bool(is_mark) or step == _SPACES or step in _RUNS_OF_SPACES
    return _type(step) in _WHOLE_CHARACTERS


def _leaves_added_tokens(steps: _Steps) -> bool:
    whole = [token for token in steps.added if not token.special]
    if not whole:
        return True
    special = [token for token in steps.added if token.special]  # in which no other one is matched
    return (
        not any(token.lstrip or token.rstrip or token.single_word for token in whole)
        and all(_type(step) in ("NFC", "NFKC", "Replace") for step in steps.normalizers)
        and not any(_NEXT_TO_SPACE.search(text) for token in whole for text in _forms(token))
        and not any(_ACROSS_SPACE.search(text) for token in special for text in _forms(token))
    )


def _forms(token: AddedToken) -> tuple[str, str]:
    return token.content, unicodedata.normalize("NFKC", token.content)


def _keeps_letters(vocabulary: Vocabulary) -> bool:
    """True if the tokenizer's character map keeps every letter and digit next to a space."""
    if not is_installed("tokenizers"):
        return False
    normalizer = reference_tokenizer(vocabulary).normalizer
    letters = string.ascii_letters + string.digits
    return all(re.fullmatch(r"▁?\w+[ ▁]\w+", normalizer.normalize_str(f"{one}{one} {one}")) for one in letters)


RULES = (
    CutRule(
        _has_known_words,
        _word_ends,
        "The tokenizer splits texts into words before it merges. With these patterns a letter or digit ends a word if "
        "a space or punctuation follows: no match continues there, and none looks behind itself.",
    ),
    CutRule(
        _is_like_llama_2,
        lambda steps: _AT_SPACE,
        'Llama 2 puts "▁" before every text: the space between two pieces is left out, and comes back as that "▁".',
    ),
    CutRule(_splits_at_spaces, lambda steps: _BEFORE_SPACE, "Words end at spaces."),
    CutRule(
        _is_one_word,
        lambda steps: _BEFORE_SPACE,
        'SentencePiece BPE: no merge joins a letter and the "▁" after it, so both sides merge as if they were alone. '
        "Of a Unigram model this is not known: of two equally likely ways, rounding of the sum so far chooses one.",
    ),
)
