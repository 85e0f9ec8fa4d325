"""Who turns text into ids: `fastokens` for speed, Hugging Face `tokenizers` as the reference.

Neither lets the *text* of a special token become its id: a document that quotes `<|endoftext|>` ends nowhere.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from forebay.columns import Array
from forebay.errors import LibraryMissing, TokenizerUnusable
from forebay.tokens.vocabulary import Vocabulary

MOST_SECONDS = 20  # for what takes milliseconds
TRIAL = ("It's a trial: 1,024 words, don't you think?\n\n  for i in range(10): print(i)\n" * 8, "a" * 500, " " * 500)
T = TypeVar("T")
EncoderName = Literal["fastokens", "tokenizers"]


class Encoder(Protocol):
    """Texts to ids, all in one go."""

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """The ids of all texts one after the other (uint32), and where each text's begin (int64, one more)."""


class FastEncoder:
    """`fastokens`, through its flat interface: no Python object per token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        native: Any = import_module("fastokens")
        self._name = vocabulary.name
        text = vocabulary.text
        with _told(self._name, "fastokens does not support it"):
            self._tokenizer = native.Tokenizer.from_json_str(text)
            self._tokenizer.no_truncation()

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        with _told(self._name, "fastokens fails on a text"):
            ids, offsets = self._tokenizer.encode_batch_flat(list(texts), split_special_tokens=True)
        return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64)


class ReferenceEncoder:
    """Hugging Face `tokenizers`: what all others are held against."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._name = vocabulary.name
        self._tokenizer = reference_tokenizer(vocabulary)

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        with _told(self._name, "tokenizers fails on a text"):
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(one.ids, np.uint32) for one in encoded]
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(one) for one in ids], out=offsets[1:])
        return np.concatenate([np.zeros(0, np.uint32), *ids]), offsets


ENCODERS: dict[str, type[Any]] = {"fastokens": FastEncoder, "tokenizers": ReferenceEncoder}


def is_installed(name: str) -> bool:
    return find_spec(name) is not None


@lru_cache(maxsize=2)
def open_encoder(name: EncoderName, vocabulary: Vocabulary) -> Encoder:
    if not is_installed(name):
        extra = "fast" if name == "fastokens" else "tokens"
        raise LibraryMissing(name, "a cache that is made with this encoder", extra)
    encoder: Encoder = ENCODERS[name](vocabulary)
    in_time(vocabulary.name, "encode", sum(map(len, TRIAL)), lambda: encoder.encode(TRIAL))
    return encoder


def encoder_version(name: str) -> str:
    return version(name) if is_installed(name) else ""


@lru_cache(maxsize=2)
def reference_tokenizer(vocabulary: Vocabulary) -> Any:
    """The Hugging Face tokenizer, with special tokens as plain text, never truncating or padding."""
    if not is_installed("tokenizers"):
        raise LibraryMissing("tokenizers", "reading and checking a tokenizer", "tokens")
    library: Any = import_module("tokenizers")
    text = vocabulary.text
    with _told(vocabulary.name, "it cannot be loaded"):
        tokenizer = library.Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def _told(name: str, what: str) -> Iterator[None]:
    """Whatever a library raises, in our words. Its panics are no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerUnusable(name, f"{what}: {error}") from error


def decode(vocabulary: Vocabulary, ids: Array) -> str:
    """Ids as text, control tokens left out."""
    tokenizer, batch = reference_tokenizer(vocabulary), [ids.tolist()]
    # Of a batch: `decode` would not let another thread run, so nobody could stop waiting for it.
    texts = in_time(
        vocabulary.name, "decode", len(ids), lambda: tokenizer.decode_batch(batch, skip_special_tokens=True)
    )
    return str(texts[0])


def in_time(name: str, verb: str, count: int, call: Callable[[], T]) -> T:
    """What a library's call returns; `TokenizerUnusable` where it takes too long, as a regular expression may.

    The engines bound one match, but not the matches at every character of a text. A call cannot be stopped, so it is
    left to a thread that ends with the process.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="forebay-tokenizer", daemon=True).start()
    try:
        return outcome.result(MOST_SECONDS)
    except TimeoutError:
        unit = "characters" if verb == "encode" else "ids"
        raise TokenizerUnusable(
            name, f"it takes more than {MOST_SECONDS} s to {verb} {count:,} {unit}; use another tokenizer"
        ) from None
