"""Find the chat template of a tokenizer, and the special tokens that it may write."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np

from forebay.errors import Damaged, ModelUnusable
from forebay.format.tensors import parse_header
from forebay.tokens.vocabulary import CONSTANTS_SUFFIX, TOKENIZER_FILE

CONFIG, JINJA_FILE, TOKENS_FILE = "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"
TEMPLATE, TOKENS = "template", "special_tokens"  # their names among the constants of a chat cache
MOST_TEMPLATE_BYTES = 256 << 10
MOST_CONFIG_BYTES = 64 << 20
TOKEN_NAMES = frozenset(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True)
class TemplateSource:
    """The text of a template and the special tokens it may write."""

    name: str
    text: str
    tokens: tuple[tuple[str, str], ...] = ()

    @cached_property
    def sha256(self) -> str:
        """Hash of the template text and the control tokens: both affect rendering."""
        return hashlib.sha256(self.text.encode() + b"\0" + self.tokens_json).hexdigest()

    @property
    def tokens_json(self) -> bytes:
        return json.dumps(dict(self.tokens), sort_keys=True, separators=(",", ":")).encode()


def load_template(tokenizer: str, template: str = "") -> TemplateSource:
    """The template in a file, or else that of a tokenizer's folder; the constants of a chat cache have one as well.

    In a folder, `chat_template.jinja` counts before `chat_template` in `tokenizer_config.json`, as in `transformers`.
    """
    if (template or tokenizer).endswith(CONSTANTS_SUFFIX):
        source = template_in(template or tokenizer)
        if source is None:
            raise template_unusable(template or tokenizer, "it contains no chat template")
        return source
    folder = tokenizer if os.path.isdir(tokenizer) else os.path.dirname(tokenizer) or "."
    own = os.path.isdir(tokenizer) or os.path.basename(tokenizer) == TOKENIZER_FILE
    config = _json(os.path.join(folder, CONFIG)) if own else {}
    tokens = _tokens({**(_json(os.path.join(folder, TOKENS_FILE)) if own else {}), **config})
    path = template or os.path.join(folder, JINJA_FILE)
    if template or (own and os.path.isfile(path)):
        return TemplateSource(path, _text(path), tokens)
    text = _configured(config.get("chat_template"))
    if text is None:
        raise template_unusable(tokenizer, f"it has neither a {JINJA_FILE} nor a `chat_template` in a {CONFIG}")
    return TemplateSource(os.path.join(folder, CONFIG), text, tokens)


def template_in(constants: str) -> TemplateSource | None:
    """The template in the constants of a chat cache; None if it cannot be read."""
    if not os.path.isfile(constants):
        return None
    status = os.stat(constants)
    return _template_in(constants, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _template_in(constants: str, size: int, mtime_ns: int) -> TemplateSource | None:
    """Cached by size and time, so that a changed file is read again."""
    try:
        view = np.memmap(constants, np.uint8, "r").data
        tensors = parse_header(view, constants).tensors
        text, tokens = (tensors[name].array(view).tobytes() for name in (TEMPLATE, TOKENS))
        return TemplateSource(constants, text.decode(), _tokens(json.loads(tokens)))
    except (OSError, ValueError, Damaged, KeyError):
        return None


def _json(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        return {}
    try:
        document = msgspec.json.decode(_bytes(path, MOST_CONFIG_BYTES))
    except (msgspec.DecodeError, RecursionError) as error:
        raise template_unusable(path, f"it is not valid JSON: {error}") from error
    return document if isinstance(document, dict) else {}


def _text(path: str) -> str:
    try:
        return _bytes(path, MOST_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise template_unusable(path, f"it is not UTF-8: {error.reason} at byte {error.start}") from error


def _bytes(path: str, most: int) -> bytes:
    try:
        if not os.path.isfile(path):
            raise template_unusable(path, "there is no such file")
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise template_unusable(path, f"it cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise template_unusable(path, f"it has more than {most:,} bytes")
    return content


def _configured(template: Any) -> str | None:
    """The template of a configuration: a text, or the one named `default` of a list."""
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and len(template) <= MOST_TEMPLATE_BYTES else None


def _tokens(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """`bos_token`, `eos_token` and the like, each a text or an object with its `content`."""
    named: dict[str, Any] = {name: config[name] for name in TOKEN_NAMES if name in config}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return tuple(sorted((name, text) for name, text in texts.items() if isinstance(text, str)))


def template_unusable(name: str, problem: str, hint: str = "pass another with --template FILE") -> ModelUnusable:
    return ModelUnusable(f"the chat template '{name}' cannot be used: {problem}", hint=hint, template=name)
