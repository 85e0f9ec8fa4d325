"""How much longer a tokenizer may make a text before it is encoded, found in its `tokenizer.json` without running it.

    normalizer      Replace "a" -> "aa", forty times in a row      every "a" becomes a million million of them
    post-processor  a template that holds the text a thousand times

What Unicode decides (NFKC, lower case) is bounded by Unicode; only what the file itself chooses is counted.
"""

import base64
import binascii
from collections.abc import Mapping
from math import prod
from typing import Any

MOST_EXPANSION = 64  # tokenizers in use stay below 10
MOST_AFFIX_BYTES = 1024
_AFFIXES = (
    "prepend",
    "prefix",
    "suffix",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "pad_token",
    "replacement",
)
_STEPS = ("normalizers", "pretokenizers", "decoders", "processors")
_PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor", "model")
_CHARSMAP_HEAD = 4


def expansion_problem(document: Mapping[str, Any]) -> str | None:
    """Why texts would become too long, None where they do not."""
    for part in _PARTS:
        found = document.get(part)
        if not isinstance(found, Mapping):
            continue
        factor = _factor(found)
        if factor > MOST_EXPANSION:
            return f"its {part} may make a text {factor:,.0f} times as long; at most {MOST_EXPANSION} times is accepted"
        affix = _longest_affix(found)
        if affix > MOST_AFFIX_BYTES:
            return f"its {part} puts {affix:,} bytes before or behind a text; at most {MOST_AFFIX_BYTES:,} are accepted"
    return None


def _factor(step: Mapping[str, Any]) -> float:
    """By how much one step, with all that it consists of, may lengthen a text."""
    inner = [each for name in _STEPS for each in _list(step.get(name)) if isinstance(each, Mapping)]
    return prod(map(_factor, inner)) * max(1.0, _own_factor(step))


def _own_factor(step: Mapping[str, Any]) -> float:
    match step.get("type"):
        case "Replace":
            return _replaced(step.get("pattern"), str(step.get("content", "")))
        case "Precompiled":
            return _longest_mapped(str(step.get("precompiled_charsmap") or ""))
        case "TemplateProcessing":
            return sum(isinstance(piece, Mapping) and "Sequence" in piece for piece in _list(step.get("single")))
    return 1.0


def _replaced(pattern: Any, content: str) -> float:
    """A fixed text is replaced where it stands; a regular expression may match before every character."""
    size = len(content.encode("utf-8", "surrogatepass"))
    fixed = pattern.get("String") if isinstance(pattern, Mapping) else pattern
    if isinstance(fixed, str) and fixed:
        return size / len(fixed.encode("utf-8", "surrogatepass"))
    return 1.0 + size


def _longest_mapped(charsmap: str) -> float:
    """The longest text that a map of characters has in place of one: behind a trie, texts that end with a zero."""
    try:
        content = base64.b64decode(charsmap)
    except binascii.Error:
        return 1.0  # the library refuses it
    texts = content[_CHARSMAP_HEAD + int.from_bytes(content[:_CHARSMAP_HEAD], "little") :]
    return float(max(map(len, texts.split(b"\0"))))


def _longest_affix(step: Mapping[str, Any]) -> int:
    inner = [each for name in _STEPS for each in _list(step.get(name)) if isinstance(each, Mapping)]
    own = [step[name] for name in _AFFIXES if isinstance(step.get(name), str)]
    sizes = [len(affix.encode("utf-8", "surrogatepass")) for affix in own]
    return max([*sizes, *map(_longest_affix, inner)], default=0)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
