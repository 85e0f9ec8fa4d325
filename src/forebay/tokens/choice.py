"""Which encoder a cache is made with: the fast one where it gives the reference's ids, else the reference."""

from collections.abc import Sequence
from typing import Literal

from forebay.errors import EncodersDiffer, LibraryMissing, TokenizerUnusable
from forebay.tokens.agreement import first_difference, hard_strings
from forebay.tokens.encoders import EncoderName, encoder_version, is_installed, open_encoder
from forebay.tokens.vocabulary import Vocabulary

SHOWN_MARKS = 60


def choose_encoder(
    wanted: Literal["auto", "fastokens", "tokenizers"], vocabulary: Vocabulary, texts: Sequence[str], planned: bool
) -> tuple[EncoderName, tuple[str, ...]]:
    """The encoder to use, and what a user should know about the choice.

    Asked for, or kept by a cache that was `planned`, `fastokens` must be there and agree; left open, it is used where
    it does.
    """
    if wanted == "tokenizers":
        open_encoder("tokenizers", vocabulary)
        return "tokenizers", ()
    trouble = _trouble_with_fastokens(vocabulary, texts)
    if trouble is None:
        return "fastokens", ()
    if wanted == "fastokens":
        if not is_installed("fastokens"):
            raise LibraryMissing("fastokens", "this cache, planned with it," if planned else "the recipe", "fast")
        raise EncodersDiffer(vocabulary.name, trouble, planned)
    return "tokenizers", (f"{trouble}; the reference `tokenizers` is used, which is about 50 times slower",)


def _trouble_with_fastokens(vocabulary: Vocabulary, texts: Sequence[str]) -> str | None:
    """Why `fastokens` cannot be trusted with this vocabulary and these texts."""
    if not is_installed("fastokens"):
        return "fastokens is not installed (pip install 'forebay[fast]')"
    reference = open_encoder("tokenizers", vocabulary)
    try:
        fast = open_encoder("fastokens", vocabulary)
        differing = first_difference(fast, reference, [*hard_strings(vocabulary), *texts])
    except TokenizerUnusable as error:
        return error.problem
    if differing is None:
        return None
    shown = differing if len(differing) <= SHOWN_MARKS else differing[:SHOWN_MARKS] + "…"
    return f"fastokens {encoder_version('fastokens')} gives other ids than the reference for {shown!r}"
