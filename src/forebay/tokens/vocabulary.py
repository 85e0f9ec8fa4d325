"""Which `tokenizer.json` a name stands for, and the ids in it."""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from forebay.errors import Damaged, TokenizerUnusable
from forebay.format.tensors import parse_header
from forebay.tokens.expansion import expansion_problem
from forebay.tokens.gpt2 import gpt2_json

# What publishers call the token that ends a document, in the order in which one is taken.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")
PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")
TOKENIZER_FILE = "tokenizer.json"
CONSTANTS_SUFFIX = ".safetensors"
GPT2 = "gpt2"
MOST_BYTES = 256 * 1024 * 1024  # the largest that are in use have 35 MB
CONSTANT = "tokenizer"  # under this name a token cache keeps the file among its constants
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}
    dropout: float | None = None
    unk_token: str | None = None
    unk_id: int | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Document(msgspec.Struct, frozen=True):
    """What of a `tokenizer.json` is looked at here."""

    model: _Model
    added_tokens: list[_AddedToken] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of a `tokenizer.json`, and what they say of its ids."""

    name: str
    json: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.json).hexdigest()

    @property
    def text(self) -> str:
        """The file as text, for a library to load: it holds nothing that makes texts explode."""
        parts = {name: value for name, value in msgspec.structs.asdict(self._document).items() if name != "model"}
        problem = expansion_problem({**parts, "model": msgspec.structs.asdict(self._document.model)})
        if problem:
            raise TokenizerUnusable(self.name, f"{problem}; use another tokenizer")
        return self.json.decode()

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Every token of the model and every added one."""
        found = self._document.model.vocab
        known = dict(found) if isinstance(found, dict) else {piece: at for at, (piece, _) in enumerate(found)}
        return known | {token.content: token.id for token in self._added}

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values(), default=-1) + 1

    @cached_property
    def special(self) -> tuple[str, ...]:
        """The texts that a tokenizer would turn into control tokens, if it were let."""
        return tuple(token.content for token in self._added if token.special)

    def control_ids(self, chosen: Iterable[int]) -> frozenset[int]:
        """The ids that no text may have: those of control tokens, and of `chosen` marks of a document's ends.

        An ordinary token that is chosen for that stays one. The token for what is unknown comes of text, so it is none.
        """
        model = self._document.model
        unknown = {self.ids.get(model.unk_token or "", -1), model.unk_id}
        marks = {token.id for token in self._added} | {self.ids[token] for token in END_TOKENS if token in self.ids}
        return frozenset(({self.ids[token] for token in self.special} | marks.intersection(chosen)) - unknown)

    def id_of(self, token: str | int, role: str) -> int:
        """The id of a token given by text or number, if the vocabulary has it."""
        number = self.ids.get(token, -1) if isinstance(token, str) else token
        if not 0 <= number < self.size:
            raise TokenizerUnusable(
                self.name, f"it has no token {token!r} for '{role}' (its {self.size:,} ids start at 0); name another"
            )
        return number

    def end_of_document(self) -> int:
        """The id that ends a document by the publisher's own custom."""
        found = next((self.ids[token] for token in END_TOKENS if token in self.ids), None)
        if found is None:
            raise TokenizerUnusable(
                self.name, "none of its tokens is known to end a document; give eos='<the token>', or eos=None for none"
            )
        return found

    def padding(self) -> int:
        """The id for padding by the publisher's own custom, else 0."""
        return next((self.ids[token] for token in PAD_TOKENS if token in self.ids), 0)

    @property
    def _added(self) -> Sequence[_AddedToken]:
        return self._document.added_tokens or ()

    @cached_property
    def _document(self) -> _Document:
        try:
            document = msgspec.json.decode(self.json, type=_Document)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TokenizerUnusable(self.name, f"its tokenizer.json is of no use: {error}") from error
        if document.model.dropout:
            raise TokenizerUnusable(self.name, "its model draws ids at random ('dropout'); set that to null")
        return document


def load_vocabulary(name: str) -> Vocabulary:
    """`"gpt2"`, a path to a `tokenizer.json` (or its folder), or a name on the Hugging Face hub.

    The constants of a token cache will do as well: the file lies among them. A name without a slash is a file only if
    it has a suffix, as `tokenizer.json` has: `"gpt2"` means the vocabulary also beside a folder of that name.
    """
    if name == GPT2:
        return _gpt2()
    if is_on_hub(name):
        return _from_hub(name)
    if is_path(name) and os.path.exists(name):
        return _at(os.path.join(name, TOKENIZER_FILE) if os.path.isdir(name) else name)
    if os.path.exists(name):
        raise TokenizerUnusable(name, f"it is not a known vocabulary; for the file or folder here, write './{name}'")
    raise TokenizerUnusable(name, "there is no such file; name 'gpt2', a tokenizer.json or a hub's org/name")


def is_on_hub(name: str) -> bool:
    """Whether a tokenizer of that name would be fetched: it can be a hub's, and nothing here has that name."""
    is_place = name.endswith(".json") or name.startswith((".", "/", "~"))
    return not is_place and _HUB_NAME.fullmatch(name) is not None and not os.path.exists(name)


def is_path(name: str) -> bool:
    """Whether a name may be one of a file or folder.

    >>> is_path("gpt2"), is_path("./gpt2"), is_path("tokenizer.json"), is_path("org/name")
    (False, True, True, True)
    """
    return os.sep in name or bool(os.path.splitext(name)[1])


def _at(path: str) -> Vocabulary:
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        folder, name = os.path.split(path)
        raise TokenizerUnusable(folder, f"the folder has no {name}; name a folder that has one, or the file") from error
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
    """Read again when the file changed."""
    if path.endswith(CONSTANTS_SUFFIX):
        found = vocabulary_in(path)
        if found is None:
            raise TokenizerUnusable(path, "no tokenizer is kept in it")
        return found
    with open(path, "rb") as file:
        return Vocabulary(path, file.read())


def vocabulary_in(constants: str) -> Vocabulary | None:
    """The tokenizer among the constants of a token cache, None where it cannot be read; it is not checked here."""
    try:
        view = np.memmap(constants, np.uint8, "r").data
        return Vocabulary(constants, parse_header(view, constants).tensors[CONSTANT].array(view).tobytes())
    except (OSError, ValueError, Damaged, KeyError):  # an empty file cannot be mapped: a ValueError
        return None


@lru_cache(maxsize=4)
def _from_hub(name: str) -> Vocabulary:
    hub: Any = import_module("forebay.hub")  # only a name on the hub needs its library
    return Vocabulary(name, hub.tokenizer_json(name))
