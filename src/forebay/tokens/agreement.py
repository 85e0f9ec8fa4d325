"""Whether two encoders give the same ids, on strings that are hard and on a sample of the corpus."""

from collections.abc import Sequence

import numpy as np

from forebay.tokens.encoders import Encoder
from forebay.tokens.vocabulary import Vocabulary

HARD = (
    "a",
    " ",
    "  leading, trailing and  double  spaces  ",
    "\n\n\n\t\t \r\n\r\n \u00a0\u2003\u3000x",
    "line one\nline two\n\n\n  indented\n\tand a tab\n",
    "it's I'll we've they'd YOU'RE 'sand ''s don\u2019t",
    "1234567890 3.14159e-10 0xDEADBEEF 1,000,000 \u0661\u0662\u0663 \u00b2\u00b3\u00bd",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # ok\n",
    '<div class="a">&nbsp;</div><!-- --><script>if(a<b&&c>d){}</script>',
    "\u00c5ngstr\u00f6m A\u030angstro\u0308m \ufb01ne \u1e9b\u0323 \u212b \ufdfa",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u202eright to left\u202c",
    "\U0001f469\u200d\U0001f4bb\U0001f3fd\u200d\u2695\ufe0f \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f9d1\U0001f3ff",
    "\U00010348\U0001d54f\U00020000\U000e0041\U0010ffff\uffff\ufffe\ufffd",
    "\x00\x01\x07\x08\x1b[31m\x7f\x80\x9f\ufeff",
    "a" * 3000,
    "\u00e9" * 999,
    " " * 1500,
    "\n" * 700,
    "!?" * 800,
    "ab " * 500,
    "https://example.org/a_b-c/d?e=f&g=%20h#i",
)


def hard_strings(vocabulary: Vocabulary) -> list[str]:
    """The fixed set, and the vocabulary's own special tokens as text."""
    special = [text for token in vocabulary.special[:64] for text in (token, f"before{token}after", f" {token} ")]
    return [*HARD, *special]


def first_difference(one: Encoder, other: Encoder, texts: Sequence[str]) -> str | None:
    """The first text that two encoders do not encode alike."""
    left, left_offsets = one.encode(texts)
    right, right_offsets = other.encode(texts)
    if np.array_equal(left_offsets, right_offsets) and np.array_equal(left, right):
        return None
    for at, text in enumerate(texts):
        mine, theirs = left[left_offsets[at] : left_offsets[at + 1]], right[right_offsets[at] : right_offsets[at + 1]]
        if not np.array_equal(mine, theirs):
            return text
    return None
