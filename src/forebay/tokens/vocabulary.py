"""Which `tokenizer.json` a name stands for, and the ids in it."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from forebay.errors import TokenizerUnusable
from forebay.tokens.gpt2 import gpt2_json

# What publishers call the token that ends a document, in the order in which one is taken.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]", "<|eos|>", "[SEP]")
PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>")
TOKENIZER_FILE = "tokenizer.json"
CONSTANTS_SUFFIX = ".safetensors"
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


class _Document(msgspec.Struct, frozen=True):
    """What of a `tokenizer.json` is looked at here."""

    model: _Model
    added_tokens: list[_AddedToken] | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of a `tokenizer.json`, and what they say of its ids."""

    name: str
    json: bytes

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.json).hexdigest()

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
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TokenizerUnusable(self.name, f"its tokenizer.json is of no use: {error}") from error
        if document.model.dropout:
            raise TokenizerUnusable(self.name, "its model draws ids at random ('dropout'); set that to null")
        return document


def load_vocabulary(name: str) -> Vocabulary:
    """`"gpt2"`, a path to a `tokenizer.json` (or its folder), or a name on the Hugging Face hub.

    The constants of a token cache will do as well: the file lies among them.
    """
    path = os.path.join(name, TOKENIZER_FILE) if os.path.isdir(name) else name
    if os.path.isfile(path):
        status = os.stat(path)
        return _from_file(os.path.abspath(path), status.st_size, status.st_mtime_ns)
    if name == "gpt2":
        return _gpt2()
    if name.endswith(".json") or name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name):
        raise TokenizerUnusable(name, "there is no such file; give 'gpt2', a tokenizer.json or a hub's org/name")
    return _from_hub(name)


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
        with safe_open(constants, "numpy") as tensors:
            return Vocabulary(constants, tensors.get_tensor(CONSTANT).tobytes())
    except (OSError, SafetensorError):
        return None


@lru_cache(maxsize=4)
def _from_hub(name: str) -> Vocabulary:
    hub: Any = import_module("forebay.hub")  # only a name on the hub needs its library
    return Vocabulary(name, hub.tokenizer_json(name))
