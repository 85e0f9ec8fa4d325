"""The vocabulary that most processes of tests read, loaded before they are forked."""

from contextlib import suppress

from forebay.errors import ForebayError
from forebay.tokens.encoders import load_fast, reference_tokenizer
from forebay.tokens.vocabulary import load_vocabulary


def load_gpt2() -> None:
    """Half a second for each process that makes tokens. Nothing is encoded: that would start threads."""
    with suppress(ForebayError, ModuleNotFoundError):
        vocabulary = load_vocabulary("gpt2")
        reference_tokenizer(vocabulary)
        load_fast(vocabulary)
        assert vocabulary.ids
