"""Reject tokenizers that could expand texts without bound.

    normalizer      Replace "a" -> "aa", forty times in a row      every "a" becomes 10^12 of them
    post-processor  a template that contains the text a thousand times
    vocabulary      a token of a hundred megabytes, in every place of a row that is decoded

Unicode limits what NFKC and lower-casing can do; only what the file itself defines is counted.
"""

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import msgspec

from forebay.tokens.vocabulary import Step, TokenizerFile, steps_of

MOST_EXPANSION = 64  # real tokenizers stay below 10
MOST_AFFIX_BYTES = 1024
MOST_TOKEN_CHARS = 1024  # the longest of real ones, runs of one character, have 256
_AFFIXES = (
    "prepend",
    "prefix",
    "suffix",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "pad_token",
    "replacement",
)
_PARTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
_CHARSMAP_HEAD = 4
_RUN = re.compile(r"[ \w]\{(?P<least>[1-9]),\}", re.ASCII)  # as " {2,}" of T5, XLM-R and ALBERT


def expansion_problem(document: TokenizerFile) -> str | None:
    """Why a tokenizer may expand texts too much, None if it does not."""
    parts = {part: steps_of(getattr(document, part), inner) for part, inner in _PARTS.items()}
    for part, steps in parts.items():
        if not all(isinstance(step.get("type"), str) for step in steps):
            return f"its {part} has a step without a type"  # which `tokenizers` recognizes by its fields
    for part, steps in {**parts, "model": [msgspec.structs.asdict(document.model)]}.items():
        factor = prod(max(1.0, _own_factor(step)) for step in steps)
        if factor > MOST_EXPANSION:
            return f"its {part} may make a text {factor:,.0f} times as long; at most {MOST_EXPANSION} times is accepted"
        affixes = (step[name] for step in steps for name in _AFFIXES if isinstance(step.get(name), str))
        affix = max((len(text.encode("utf-8", "surrogatepass")) for text in affixes), default=0)
        if affix > MOST_AFFIX_BYTES:
            return f"its {part} adds {affix:,} bytes before or after a text; at most {MOST_AFFIX_BYTES:,} are accepted"
    longest = max(map(len, _tokens(document)), default=0)
    if longest > MOST_TOKEN_CHARS:
        return f"it has a token of {longest:,} characters; at most {MOST_TOKEN_CHARS:,} are accepted"
    return None


def _tokens(document: TokenizerFile) -> Iterator[str]:
    vocab = document.model.vocab
    yield from vocab if isinstance(vocab, dict) else (piece for piece, _ in vocab)
    yield from (token.content for token in document.added_tokens or ())


def _own_factor(step: Step) -> float:
    match step.get("type"):
        case "Replace":
            return _replaced(step.get("pattern"), str(step.get("content", "")))
        case "Precompiled":
            return _longest_mapped(str(step.get("precompiled_charsmap") or ""))
        case "TemplateProcessing":
            pieces = single if isinstance(single := step.get("single"), list) else ()
            return sum(isinstance(piece, Mapping) and "Sequence" in piece for piece in pieces)
    return 1.0


def _replaced(pattern: Any, content: str) -> float:
    """The expansion of a replacement; a regular expression may match before every character, but not a run of one."""
    size = len(content.encode("utf-8", "surrogatepass"))
    fixed = pattern.get("String") if isinstance(pattern, Mapping) else pattern
    if isinstance(fixed, str) and fixed:
        return size / len(fixed.encode("utf-8", "surrogatepass"))
    regex = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    run = _RUN.fullmatch(regex) if isinstance(regex, str) else None
    return size / int(run["least"]) if run else 1.0 + size


def _longest_mapped(charsmap: str) -> float:
    """The longest replacement in a character map: a trie, then zero-terminated texts."""
    try:
        content = base64.b64decode(charsmap)
    except binascii.Error:
        return 1.0  # the library will reject it
    texts = content[_CHARSMAP_HEAD + int.from_bytes(content[:_CHARSMAP_HEAD], "little") :]
    return float(max(map(len, texts.split(b"\0"))))
