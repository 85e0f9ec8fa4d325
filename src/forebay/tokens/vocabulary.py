"""Load the `tokenizer.json` of a name, and read its ids."""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forebay.errors import Damaged, ModelUnusable
from forebay.format.tensors import parse_header

GPT2_FILES = Path(__file__).with_name("gpt2")  # as OpenAI published them, with their license
SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
END_OF_TEXT = "<|endoftext|>"


def gpt2_json() -> bytes:
    """A `tokenizer.json` for GPT-2, written key by key so that its hash does not depend on a library."""
    vocabulary: dict[str, int] = msgspec.json.decode(_file("encoder.json"))
    merges = [line for line in _file("vocab.bpe").decode().split("\n")[1:] if line]  # pairs as text load fastest
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[END_OF_TEXT], "content": END_OF_TEXT, **flags, "special": True}],
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


def _file(name: str) -> bytes:
    """One of the two published GPT-2 files."""
    path = GPT2_FILES / name
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHA256[name]:
        problem = f"'{path}' has the SHA-256 {digest}, not {SHA256[name]}"
        raise tokenizer_unusable(GPT2, problem, "reinstall forebay")
    return data


# Usual names of the token that ends a document; the first that exists is used.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")
PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")
TOKENIZER_FILE = "tokenizer.json"
CONSTANTS_SUFFIX = ".safetensors"
GPT2 = "gpt2"
MOST_BYTES = 256 * 1024 * 1024  # the largest real ones have 35 MB
CONSTANT = "tokenizer"  # the name of the file among the constants of a token cache
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


Step = dict[str, Any]  # of a normalizer, a pre-tokenizer or a decoder


def steps_of(part: Step | None, inner: str) -> list[Step]:
    """The steps of a part in order; an invalid step is empty."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    listed = part.get(inner)
    steps = listed if isinstance(listed, list) else [{}]
    return [each for step in steps for each in steps_of(step if isinstance(step, dict) else {}, inner)]


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


class TokenizerFile(msgspec.Struct, frozen=True):
    """The parts of a `tokenizer.json` that are read here."""

    model: _Model
    added_tokens: list[AddedToken] | None = None
    normalizer: Step | None = None
    pre_tokenizer: Step | None = None
    post_processor: Step | None = None
    decoder: Step | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of a `tokenizer.json`, and its ids. Two with the same bytes are equal: they are loaded once."""

    name: str = field(compare=False)
    json: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.json).hexdigest()

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """The ids of all tokens of the model and all added tokens."""
        vocab = self.document.model.vocab
        known = dict(vocab) if isinstance(vocab, dict) else {piece: at for at, (piece, _) in enumerate(vocab)}
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
            raise tokenizer_unusable(
                self.name,
                f"it has no token {token!r} for '{role}' (its {self.size:,} ids start at 0)",
                hint="pass another",
            )
        return number

    def end_of_document(self) -> int:
        """The id of the token that ends a document, found by its usual names."""
        number = next((self.ids[token] for token in END_TOKENS if token in self.ids), None)
        if number is None:
            raise tokenizer_unusable(
                self.name,
                "none of its tokens is known to end a document",
                hint="pass eos='<the token>', or eos=None for none",
            )
        return number

    def padding(self) -> int:
        """The id of the padding token, found by its usual names, else 0."""
        return next((self.ids[token] for token in PAD_TOKENS if token in self.ids), 0)

    @property
    def _added(self) -> Sequence[AddedToken]:
        return self.document.added_tokens or ()

    @cached_property
    def document(self) -> TokenizerFile:
        try:
            document = msgspec.json.decode(self.json, type=TokenizerFile)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise tokenizer_unusable(self.name, f"its tokenizer.json is invalid: {error}") from error
        if document.model.dropout:
            raise tokenizer_unusable(self.name, "its model uses random merges ('dropout')", hint="set that to null")
        return document


def tokenizer_unusable(name: str, problem: str, hint: str = "") -> ModelUnusable:
    return ModelUnusable(f"the tokenizer '{name}' cannot be used: {problem}", hint=hint)


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
        raise tokenizer_unusable(
            name, "it is not a known vocabulary", hint=f"for the local file or folder, write './{name}'"
        )
    raise tokenizer_unusable(
        name, "there is no such file", hint="pass 'gpt2', the path of a tokenizer.json, or org/name on the hub"
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
        raise tokenizer_unusable(
            folder, f"the folder has no {name}", hint="pass a folder that has one, or the file"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise tokenizer_unusable(path, "it is not a regular file")
    if status.st_size > MOST_BYTES and not path.endswith(CONSTANTS_SUFFIX):
        raise tokenizer_unusable(path, f"it has {status.st_size:,} bytes; a tokenizer.json has at most {MOST_BYTES:,}")
    return _from_file(os.path.abspath(path), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1)
def _gpt2() -> Vocabulary:
    return Vocabulary("gpt2", gpt2_json())


@lru_cache(maxsize=4)
def _from_file(path: str, size: int, mtime_ns: int) -> Vocabulary:
    """Cached by size and time, so that a changed file is read again."""
    if path.endswith(CONSTANTS_SUFFIX):
        vocabulary = vocabulary_in(path)
        if vocabulary is None:
            raise tokenizer_unusable(path, "it contains no tokenizer")
        return vocabulary
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
