"""Encode text with `fastokens` if it matches Hugging Face `tokenizers`, the reference.

Neither turns the *text* of a special token into its id: a document may quote `<|endoftext|>` without ending there.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from forebay.columns import Array
from forebay.errors import EncodersDiffer, LibraryMissing, TokenizerUnusable
from forebay.tokens.vocabulary import Vocabulary

MOST_SECONDS = 20  # for a call that usually takes milliseconds
TRIAL = ("It's a trial: 1,024 words, don't you think?\n\n  for i in range(10): print(i)\n" * 8, "a" * 500, " " * 500)
T = TypeVar("T")
EncoderName = Literal["fastokens", "tokenizers"]


class Encoder(Protocol):
    """Encodes batches of texts."""

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """The ids of all texts, concatenated (uint32), and the offsets of each text in them (int64, one more)."""


class FastEncoder:
    """`fastokens`, through its flat interface: no Python object per token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        native: Any = import_module("fastokens")
        self._name = vocabulary.name
        text = vocabulary.text
        with library_errors(self._name, "fastokens does not support it"):
            self._tokenizer = native.Tokenizer.from_json_str(text)
            self._tokenizer.no_truncation()

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        with library_errors(self._name, "fastokens fails on a text"):
            ids, offsets = self._tokenizer.encode_batch_flat(list(texts), split_special_tokens=True)
        return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64)


class ReferenceEncoder:
    """Hugging Face `tokenizers`, the reference that others are compared with."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._name = vocabulary.name
        self._tokenizer = reference_tokenizer(vocabulary)

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        with library_errors(self._name, "tokenizers fails on a text"):
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
        raise LibraryMissing(name, "a cache built with this encoder", extra)
    encoder: Encoder = ENCODERS[name](vocabulary)
    in_time(vocabulary.name, "encode", sum(map(len, TRIAL)), lambda: encoder.encode(TRIAL))
    return encoder


def encoder_version(name: str) -> str:
    return _version(name) if is_installed(name) else ""


_version = lru_cache(version)  # which parses all metadata of a package


@lru_cache(maxsize=2)
def reference_tokenizer(vocabulary: Vocabulary) -> Any:
    """The Hugging Face tokenizer, with special tokens as plain text and without truncation or padding."""
    if not is_installed("tokenizers"):
        raise LibraryMissing("tokenizers", "reading and checking a tokenizer", "tokens")
    library: Any = import_module("tokenizers")
    text = vocabulary.text
    with library_errors(vocabulary.name, "it cannot be loaded"):
        tokenizer = library.Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def library_errors(name: str, what: str) -> Iterator[None]:
    """Raise `TokenizerUnusable` for any error of a library. Rust panics are not an `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise TokenizerUnusable(name, f"{what}: {error}") from error


def decode(vocabulary: Vocabulary, ids: Array, *, control: bool = False) -> str:
    """Decode ids to text, without control tokens unless `control`."""
    tokenizer, batch = reference_tokenizer(vocabulary), [ids.tolist()]
    # `decode` holds the GIL, which would block the timeout; `decode_batch` releases it.
    texts = in_time(
        vocabulary.name, "decode", len(ids), lambda: tokenizer.decode_batch(batch, skip_special_tokens=not control)
    )
    return str(texts[0])


def in_time(name: str, verb: str, count: int, call: Callable[[], T]) -> T:
    """Run a library call with a time limit: a regular expression in a tokenizer may take very long.

    Regex engines limit one match, but not the matches at every character of a text. A call cannot be stopped, so it is
    left to a daemon thread. Raises `TokenizerUnusable`.
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
    """The fixed set, and the special tokens of the vocabulary as text."""
    special = [text for token in vocabulary.special[:64] for text in (token, f"before{token}after", f" {token} ")]
    return [*HARD, *special]


def first_difference(one: Encoder, other: Encoder, texts: Sequence[str]) -> str | None:
    """The first text that two encoders encode differently."""
    left, left_offsets = one.encode(texts)
    right, right_offsets = other.encode(texts)
    if np.array_equal(left_offsets, right_offsets) and np.array_equal(left, right):
        return None
    for at, text in enumerate(texts):
        mine, theirs = left[left_offsets[at] : left_offsets[at + 1]], right[right_offsets[at] : right_offsets[at + 1]]
        if not np.array_equal(mine, theirs):
            return text
    return None


SHOWN_CHARS = 60


def choose_encoder(
    wanted: Literal["auto", "fastokens", "tokenizers"], vocabulary: Vocabulary, texts: Sequence[str], planned: bool
) -> tuple[EncoderName, tuple[str, ...]]:
    """The encoder to use, and notes about the choice for the user.

    If the user or a `planned` cache wants `fastokens`, it must be installed and match the reference; with `auto` it is
    used if it does.
    """
    if wanted == "tokenizers":
        open_encoder("tokenizers", vocabulary)
        return "tokenizers", ()
    problem = _fastokens_problem(vocabulary, texts)
    if problem is None:
        return "fastokens", ()
    if wanted == "fastokens":
        if not is_installed("fastokens"):
            raise LibraryMissing("fastokens", "this cache, planned with it," if planned else "the recipe", "fast")
        raise EncodersDiffer(vocabulary.name, problem, planned)
    return "tokenizers", (f"{problem}; using the reference `tokenizers`, which is about 50 times slower",)


def _fastokens_problem(vocabulary: Vocabulary, texts: Sequence[str]) -> str | None:
    """Why `fastokens` cannot be used for this vocabulary and these texts, None if it can."""
    if not is_installed("fastokens"):
        return "fastokens is not installed (pip install 'forebay[fast]')"
    with ThreadPoolExecutor(1) as pool:  # `fastokens` loads without the GIL
        loading = pool.submit(open_encoder, "fastokens", vocabulary)
        reference = open_encoder("tokenizers", vocabulary)
    try:
        fast = loading.result()
        differing = first_difference(fast, reference, [*hard_strings(vocabulary), *texts])
    except TokenizerUnusable as error:
        return error.problem
    if differing is None:
        return None
    shown = differing if len(differing) <= SHOWN_CHARS else differing[:SHOWN_CHARS] + "…"
    return f"fastokens {encoder_version('fastokens')} returns other ids than the reference for {shown!r}"
