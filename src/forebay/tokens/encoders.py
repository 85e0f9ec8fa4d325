"""Encode texts with `fastokens` if it matches Hugging Face `tokenizers`, the reference.

token recipe   control=False   the text of a control token is text: a document may quote `<|endoftext|>`
chat recipe    control=True    it becomes the token: templates write control tokens
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import numpy as np

from forebay.columns import Array
from forebay.errors import ForebayError, LibraryMissing, ModelUnusable, RecipeInvalid
from forebay.tokens.expansion import expansion_problem
from forebay.tokens.vocabulary import Vocabulary, tokenizer_unusable

MOST_SECONDS = 20  # for a call that usually takes milliseconds
LEAVE_SECONDS = 2.0  # to wait for one after Ctrl-C or SIGTERM
TRIAL = ("It's a trial: 1,024 words, don't you think?\n\n  for i in range(10): print(i)\n" * 8, "a" * 500, " " * 500)
T = TypeVar("T")
EncoderName = Literal["fastokens", "tokenizers"]
EncoderChoice = Literal["auto", "fastokens", "tokenizers"]
ENCODERS: tuple[EncoderName, ...] = ("fastokens", "tokenizers")


class Encoder:
    """Encodes batches of texts with one of the two libraries."""

    def __init__(self, library: EncoderName, vocabulary: Vocabulary, *, control: bool = False) -> None:
        self._library, self._name, self._control = library, vocabulary.name, control
        self._tokenizer = load_fast(vocabulary) if library == "fastokens" else _load_reference(vocabulary, control)

    def encode(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """The ids of all texts, concatenated (uint32), and the offsets of each text in them (int64, one more)."""
        with library_errors(self._name, f"{self._library} fails on a text"):
            if self._library == "fastokens":  # no Python object for each token
                flat = self._tokenizer.encode_batch_flat(list(texts), split_special_tokens=not self._control)
                return np.frombuffer(flat[0], "<u4"), np.frombuffer(flat[1], "<u8").astype(np.int64)
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(one.ids, np.uint32) for one in encoded]
        offsets = np.zeros(len(ids) + 1, np.int64)
        np.cumsum([len(one) for one in ids], out=offsets[1:])
        return np.concatenate([np.zeros(0, np.uint32), *ids]), offsets


@lru_cache(maxsize=4)
def open_encoder(library: EncoderName, vocabulary: Vocabulary, *, control: bool = False) -> Encoder:
    check_installed(library, "this encoder")
    encoder = Encoder(library, vocabulary, control=control)
    in_time(vocabulary.name, "encode", sum(map(len, TRIAL)), lambda: encoder.encode(TRIAL))
    return encoder


def is_installed(library: str) -> bool:
    return find_spec(library) is not None


def check_installed(library: str, user: str) -> None:
    extra = "fast" if library == "fastokens" else "tokens"
    if not is_installed(library):
        message = f"{user} needs '{library}', which is not installed"
        raise LibraryMissing(message, hint=f"pip install 'forebay[{extra}]'", extra=extra)


def encoder_version(library: str) -> str:
    return _version(library) if is_installed(library) else ""


_version = lru_cache(version)  # which parses all metadata of a package


def reference_tokenizer(vocabulary: Vocabulary) -> Any:
    """The Hugging Face tokenizer, with control tokens as plain text and without truncation or padding."""
    check_installed("tokenizers", "reading and checking a tokenizer")
    return _load_reference(vocabulary, False)


def _loadable(vocabulary: Vocabulary) -> str:
    """The file as text for a library to load; raises `ModelUnusable` if it may expand texts too much."""
    if problem := expansion_problem(vocabulary.document):
        raise tokenizer_unusable(vocabulary.name, problem, "use another tokenizer")
    return vocabulary.json.decode()


@lru_cache(maxsize=4)
def _load_reference(vocabulary: Vocabulary, control: bool) -> Any:
    library: Any = import_module("tokenizers")
    text = _loadable(vocabulary)
    with library_errors(vocabulary.name, "it cannot be loaded"):
        tokenizer = library.Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = not control
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@lru_cache(maxsize=4)
def load_fast(vocabulary: Vocabulary) -> Any:
    """The tokenizer of `fastokens`, without truncation."""
    library: Any = import_module("fastokens")
    text = _loadable(vocabulary)
    with library_errors(vocabulary.name, "fastokens does not support it"):
        tokenizer = library.Tokenizer.from_json_str(text)
        tokenizer.no_truncation()
    return tokenizer


@contextmanager
def library_errors(name: str, what: str) -> Iterator[None]:
    """Raise `ModelUnusable` for any error of a library."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, ForebayError):
        raise
    except BaseException as error:  # a panic in Rust is not an `Exception`
        raise tokenizer_unusable(name, f"{what}: {error}") from error


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
    left to a daemon thread. Raises `ModelUnusable`, also for an error of the library.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            with library_errors(name, f"it fails to {verb}"):
                outcome.set_result(call())
        except (ForebayError, MemoryError) as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="forebay-tokenizer", daemon=True)
    try:
        thread.start()
        return outcome.result(MOST_SECONDS)
    except KeyboardInterrupt:
        # A call that comes back while the interpreter ends aborts the process, which then has the wrong exit code.
        if thread.is_alive():
            thread.join(LEAVE_SECONDS)
        raise
    except TimeoutError:
        unit = "characters" if verb == "encode" else "ids"
        raise tokenizer_unusable(
            name, f"it takes more than {MOST_SECONDS} s to {verb} {count:,} {unit}", hint="use another tokenizer"
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


def first_difference(one: tuple[Array, Array], other: tuple[Array, Array], texts: Sequence[str]) -> str | None:
    """The first text that two encoders have encoded differently."""
    (left, left_offsets), (right, right_offsets) = one, other
    if np.array_equal(left_offsets, right_offsets) and np.array_equal(left, right):
        return None
    for at, text in enumerate(texts):
        mine, theirs = left[left_offsets[at] : left_offsets[at + 1]], right[right_offsets[at] : right_offsets[at + 1]]
        if not np.array_equal(mine, theirs):
            return text
    return None


SHOWN_CHARS = 60


def choose_encoder(
    wanted: EncoderChoice, vocabulary: Vocabulary, texts: Iterable[str], *, planned: bool, control: bool = False
) -> tuple[EncoderName, tuple[str, ...]]:
    """The encoder to use, and notes about the choice for the user.

    If the user or a `planned` cache wants `fastokens`, it must be installed and match the reference; with `auto` it is
    used if it does. `texts` are taken once, and only where two are compared.
    """
    if wanted == "tokenizers":
        open_encoder("tokenizers", vocabulary, control=control)
        return "tokenizers", ()
    problem = _fastokens_problem(vocabulary, texts, control)
    if problem is None:
        return "fastokens", ()
    if wanted == "fastokens":
        check_installed("fastokens", "this cache, planned with it," if planned else "the recipe")
        hint = "pass encoder='auto' or encoder='tokenizers'"
        if planned:
            hint = "install the fastokens version that `forebay info` shows, or build a new cache"
        raise RecipeInvalid(f"{problem} (tokenizer '{vocabulary.name}')", hint=hint)
    return "tokenizers", (f"{problem}; using the reference `tokenizers`, which is about 50 times slower",)


def _fastokens_problem(vocabulary: Vocabulary, texts: Iterable[str], control: bool) -> str | None:
    """Why `fastokens` cannot be used for this vocabulary and these texts, None if it can."""
    if not is_installed("fastokens"):
        return "fastokens is not installed (pip install 'forebay[fast]')"
    compared = [*hard_strings(vocabulary), *texts]  # before anything is loaded: to read them may take much memory
    with ThreadPoolExecutor(2) as pool:  # `fastokens` loads without the GIL; the reference encodes meanwhile
        loading = pool.submit(open_encoder, "fastokens", vocabulary, control=control)
        expected = pool.submit(open_encoder("tokenizers", vocabulary, control=control).encode, compared)
        # Ctrl-C while a thread is joined has Python take it for ended: then the process aborts, with the wrong code.
        both: tuple[Future[Any], ...] = (loading, expected)
        wait(both)
    try:
        differing = first_difference(loading.result().encode(compared), expected.result(), compared)
    except ModelUnusable as error:
        return error.message
    if differing is None:
        return None
    shown = differing if len(differing) <= SHOWN_CHARS else differing[:SHOWN_CHARS] + "…"
    return f"fastokens {encoder_version('fastokens')} returns other ids than the reference for {shown!r}"
