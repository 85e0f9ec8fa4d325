"""Find a tokenizer's chat template, and render it in a sandbox with limits on time, steps and size.

A template comes from whoever published the tokenizer, so it is treated as hostile code. Jinja's immutable sandbox
keeps it away from Python; the limits here keep it from running or growing without end:

    loops and macros    every iteration and call is counted, with the time and the size of the text in it
    {{ … }}             every value that is written is counted
    + * ** % ~          results are bounded before they are computed
    filters, methods    only those of `_FILTERS` and `_METHODS`; what they copy is counted before they run
    text[1:], list[1:]  as a copy

The helpers are those of `transformers`: `raise_exception`, `tojson`, `strftime_now`, `{% generation %}`, `break` and
`continue`. `strftime_now` returns the recipe's `date`; without one, a template that asks for it is refused.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from datetime import date as Date
from functools import cached_property, lru_cache, wraps
from typing import Any

import msgspec
import numpy as np

from forebay.chat.conversations import BadConversation
from forebay.errors import Damaged, LibraryMissing, TemplateUnusable
from forebay.format.tensors import parse_header
from forebay.tokens.vocabulary import CONSTANTS_SUFFIX, TOKENIZER_FILE

try:
    import jinja2
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.filters import do_round
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace
    from jinja2.visitor import NodeTransformer

    from forebay.chat.content_uses import is_generation, uses_of_contents
except ModuleNotFoundError as missing:
    raise LibraryMissing("jinja2", "rendering chat templates", "chat") from missing

CONFIG, JINJA_FILE, TOKENS_FILE = "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"
TEMPLATE, TOKENS = "template", "special_tokens"  # their names among the constants of a chat cache
MOST_TEMPLATE_BYTES = 256 << 10
MOST_CONFIG_BYTES = 64 << 20
SHOWN_MESSAGES, SHOWN_CHARS = 6, 40
MOST_STEPS = 200_000
MOST_CHARS = 64 << 20
MOST_SECONDS = 20
MOST_BITS = 256
MOST_DIGITS = 32
# Private characters that tell where a `generation` block begins and ends.
GENERATION_OPEN, GENERATION_CLOSE = "\U00100000", "\U00100001"
_TOKEN_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_METHODS = frozenset(
    [
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "rsplit",
        "splitlines",
        "startswith",
        "endswith",
        "upper",
        "lower",
        "title",
        "capitalize",
        "replace",
        "find",
        "rfind",
        "count",
        "index",
        "join",
        "removeprefix",
        "removesuffix",
        "partition",
        "rpartition",
        "isdigit",
        "isalpha",
        "isalnum",
        "isspace",
        "isupper",
        "islower",
        "isnumeric",
        "casefold",
        "swapcase",
    ]
)
_FILTERS = frozenset(
    [
        "abs",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "int",
        "items",
        "join",
        "last",
        "length",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "round",
        "safe",
        "select",
        "selectattr",
        "sort",
        "string",
        "title",
        "tojson",
        "trim",
        "unique",
        "upper",
        "wordcount",
    ]
)
# Those that make a text of any value.
_TEXT_FILTERS = ("capitalize", "e", "escape", "lower", "string", "title", "trim", "upper", "wordcount")
_LIST_FILTERS = frozenset(
    [
        "dictsort",
        "items",
        "list",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "sort",
        "unique",
    ]
)
_SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))  # all that there are, and all that end lines
_ITEM_CHARS = 64  # that an item of a list counts as


@dataclass(frozen=True)
class TemplateSource:
    """The text of a template and the special tokens it may write."""

    name: str
    text: str
    tokens: tuple[tuple[str, str], ...] = ()

    @cached_property
    def sha256(self) -> str:
        """Of the text and the tokens: both decide what is rendered."""
        return hashlib.sha256(self.text.encode() + b"\0" + self.tokens_json).hexdigest()

    @property
    def tokens_json(self) -> bytes:
        return json.dumps(dict(self.tokens), sort_keys=True, separators=(",", ":")).encode()


def load_template(tokenizer: str, template: str = "") -> TemplateSource:
    """The template in a file, or else that of a tokenizer's folder; the constants of a chat cache have one as well.

    In a folder, `chat_template.jinja` counts before `chat_template` in `tokenizer_config.json`, as in `transformers`.
    """
    if (template or tokenizer).endswith(CONSTANTS_SUFFIX):
        found = template_in(template or tokenizer)
        if found is None:
            raise TemplateUnusable(template or tokenizer, "it contains no chat template")
        return found
    folder = tokenizer if os.path.isdir(tokenizer) else os.path.dirname(tokenizer) or "."
    own = os.path.isdir(tokenizer) or os.path.basename(tokenizer) == TOKENIZER_FILE
    config = _json(os.path.join(folder, CONFIG)) if own else {}
    tokens = _tokens({**(_json(os.path.join(folder, TOKENS_FILE)) if own else {}), **config})
    path = template or os.path.join(folder, JINJA_FILE)
    if template or (own and os.path.isfile(path)):
        return TemplateSource(path, _text(path), tokens)
    text = _configured(config.get("chat_template"))
    if text is None:
        raise TemplateUnusable(tokenizer, f"its folder has neither {JINJA_FILE} nor a `chat_template` in {CONFIG}")
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
        found = msgspec.json.decode(_bytes(path, MOST_CONFIG_BYTES))
    except (msgspec.DecodeError, RecursionError) as error:
        raise TemplateUnusable(path, f"it is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _text(path: str) -> str:
    try:
        return _bytes(path, MOST_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise TemplateUnusable(path, f"it is not UTF-8: {error.reason} at byte {error.start}") from error


def _bytes(path: str, most: int) -> bytes:
    try:
        if not os.path.isfile(path):
            raise TemplateUnusable(path, "there is no such file")
        with open(path, "rb") as file:
            found = file.read(most + 1)
    except OSError as error:
        raise TemplateUnusable(path, f"it cannot be read: {error.strerror}") from error
    if len(found) > most:
        raise TemplateUnusable(path, f"it has more than {most:,} bytes")
    return found


def _configured(found: Any) -> str | None:
    """The template of a configuration: a text, or the one named `default` of a list."""
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) and len(found) <= MOST_TEMPLATE_BYTES else None


def _tokens(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """`bos_token`, `eos_token` and the like, each a text or an object with its `content`."""
    named: dict[str, Any] = {name: config[name] for name in _TOKEN_NAMES if name in config}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return tuple(sorted((name, text) for name, text in texts.items() if isinstance(text, str)))


@dataclass(slots=True)
class _Limits:
    """What one rendering may still use."""

    steps: int = 0
    uses: int = 0
    chars: int = 0
    stop: float = field(default_factory=lambda: time.monotonic() + MOST_SECONDS)
    marked: bool = False

    def step(self, chars: int) -> None:
        self.steps += 1
        self.use(chars)
        if self.steps > MOST_STEPS:
            raise TemplateUnusable("", f"it takes more than {MOST_STEPS:,} steps for one conversation")

    def use(self, chars: int) -> None:
        """Count what a call, a filter or a step copies, and look at the clock from time to time."""
        self.uses += 1
        self.write(chars)
        if not self.uses % 64 and time.monotonic() > self.stop:
            raise TemplateUnusable("", f"it takes more than {MOST_SECONDS} s for one conversation")

    def items(self, values: Any) -> Any:
        """What a filter makes a list of, each item counted before or while it is taken."""
        if isinstance(values, str | list | tuple | dict):
            self.use(_ITEM_CHARS * len(values))
            return values
        return map(self._item, values) if isinstance(values, Iterator) else values

    def _item(self, value: Any) -> Any:
        self.use(_ITEM_CHARS)
        return value

    def text(self, value: Any) -> str:
        """A value as text. Lists in lists, each of them twice in the next, are counted before they are written."""
        if isinstance(value, str):
            return value
        self.walk(value)
        return str(value)

    def walk(self, value: Any) -> None:
        """Count the values in nested lists, tuples and objects."""
        left = [value]
        while left:
            one = left.pop()
            if isinstance(one, dict):
                left += one.values()
            elif isinstance(one, list | tuple | ItemsView | ValuesView):
                left += one
            elif isinstance(one, Namespace):
                raise SecurityError("a namespace cannot be written")
            self.step(0)

    def write(self, chars: int) -> None:
        self.chars += chars
        if self.chars > MOST_CHARS:
            raise TemplateUnusable("", f"it writes more than {MOST_CHARS:,} characters for one conversation")


class _Bounds(Extension):
    """`{% generation %}`, and the counters that are called from every loop, macro and concatenation."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.limits = _Limits()

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("generation"), [], [], body).set_lineno(line)

    def generation(self, caller: Callable[[], str]) -> str:
        text = caller()
        return f"{GENERATION_OPEN}{text}{GENERATION_CLOSE}" if self.limits.marked else text

    def __getattr__(self, name: str) -> None:
        """Count a step: `step_120` for one that writes 120 characters. An attribute is cheaper than a call."""
        if not name.startswith("step_"):
            raise AttributeError(name)
        self.limits.step(int(name[5:]))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        part = slice(start, stop, step)
        if isinstance(value, str | list | tuple):
            count = len(range(*part.indices(len(value))))
            self.limits.use(count if isinstance(value, str) else _ITEM_CHARS * count)
        return value[part]

    def concatenate(self, *values: Any) -> str:
        texts = [self.limits.text(value) for value in values]
        self.limits.write(sum(map(len, texts)))
        return "".join(texts)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _METHODS
        if isinstance(obj, int | float | bytes):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """`str.format` is not in `_METHODS`."""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            self.limits.write(_size(left) + _size(right))
            return left + right
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            bits = left.bit_length() if isinstance(left, int) else 1
            if not (isinstance(right, int | float) and bits * abs(right) <= MOST_BITS):
                raise SecurityError("the power is too large")
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("`%` formats a text; use ~ instead")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        name, text = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if name in ("copy", "fromkeys") or isinstance(__obj, type):  # `big.copy()`, `dict(big)`
            args = tuple(map(__self.counted, args))
            __self.counted(text)
        if not isinstance(text, str):
            __self.limits.use(0)
            return super().call(__context, __obj, *args, **kwargs)
        if name == "replace":
            return __self.replaced(text, *args)
        if name == "join" and args:
            args = (list(__self.limits.items(args[0])),)
            __self.limits.write(len(text) * len(args[0]) + sum(map(len, args[0])))
        elif name in ("split", "rsplit", "splitlines"):
            ends = args[0] if args and isinstance(args[0], str) and args[0] else None
            parts = sum(map(text.count, _SPACES)) if ends is None else text.count(ends)
            __self.limits.write(_ITEM_CHARS * (parts + 1))
        __self.limits.use(len(text))
        return super().call(__context, __obj, *args, **kwargs)

    def counted(self, value: Any) -> Any:
        """Count the items of a value that is about to be copied, and return it."""
        self.limits.use(_ITEM_CHARS * len(value) if isinstance(value, list | tuple | dict | range) else _size(value))
        return map(self.limits._item, value) if isinstance(value, Iterator) else value

    def replaced(self, text: Any, old: Any, new: Any, count: int = -1) -> str:
        text, old, new = map(self.limits.text, (text, old, new))
        found = text.count(old) if count is None or count < 0 else min(text.count(old), count)
        self.limits.write(len(text) + found * len(new))
        made: str = text.replace(old, new, -1 if count is None else count)
        return made

    def written(self, value: Any) -> Any:
        """Called with every value of a `{{ … }}`."""
        text = self.limits.text(value)
        self.limits.write(len(text))
        return text

    def joined(self, values: Any, separator: str = "", attribute: Any = None) -> str:
        listed = list(self.limits.items(values))
        if attribute is not None:
            listed = [self.getitem(value, attribute) for value in listed]
        texts = [self.limits.text(value) for value in listed]
        self.limits.write(sum(map(len, texts)) + len(texts) * len(separator))
        return separator.join(texts)

    def json(self, value: Any, *arguments: Any, **named: Any) -> str:
        self.limits.walk(value)
        made = _tojson(value, *arguments, **named)
        self.limits.write(len(made))
        return made

    def rounded(self, value: Any, precision: int = 0, method: str = "common") -> Any:
        if not isinstance(precision, int) or abs(precision) > MOST_DIGITS:
            raise SecurityError("the precision is too large")
        return do_round(value, precision, method)  # type: ignore[arg-type]

    def of_text(self, made: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that makes a text of its value."""
        return lambda value, *arguments: made(self.limits.text(value), *arguments)

    def bounded(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose value is counted before it runs; Jinja passes some of them the environment first."""
        first = int(hasattr(made, "jinja_pass_arg"))

        @wraps(made)
        def counted(*arguments: Any, **named: Any) -> Any:
            before, value, after = arguments[:first], arguments[first], arguments[first + 1 :]
            if name in _LIST_FILTERS:
                value = self.limits.items(value)
            else:
                self.limits.use(_size(value))
            found = made(*before, value, *after, **named)
            self.limits.write(_size(found))
            return found

        return counted

    def _check_product(self, left: Any, right: Any) -> None:
        for one, other in ((left, right), (right, left)):
            if isinstance(other, int):
                self.limits.write(_size(one) * max(0, other))
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MOST_BITS:
            raise SecurityError("the product is too large")

    limits = _Limits()  # of the running rendering


def _size(value: Any) -> int:
    """How much of the limit on characters a value takes."""
    return len(value) if isinstance(value, str) else _ITEM_CHARS * len(value) if isinstance(value, list | tuple) else 0


class _Counting(NodeTransformer):
    """Puts a step into every loop and macro, and replaces `~` by a bounded concatenation."""

    def __init__(self, bounds: _Bounds) -> None:
        self._bounds = bounds

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        part = node.arg
        if not isinstance(part, nodes.Slice):
            return node
        ends = [end or nodes.Const(None) for end in (part.start, part.stop, part.step)]
        return self._bounds.call_method("sliced", [node.node, *ends], lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._bounds.call_method("concatenate", list(node.nodes), lineno=node.lineno)

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        texts = [found.data for found in node.find_all(nodes.TemplateData)]
        texts += [found.value for found in node.find_all(nodes.Const) if isinstance(found.value, str)]
        step = self._bounds.attr(f"step_{sum(map(len, texts))}", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


class ChatTemplate:
    """A compiled template."""

    def __init__(
        self, source: TemplateSource, arguments: Mapping[str, Any] | None = None, date: str | None = None
    ) -> None:
        self.source = source
        self._variables = {**dict(source.tokens), **(arguments or {})}
        self.eos = self._variables.get("eos_token")
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Bounds, loopcontrols])
        environment.finalize = environment.written
        self._environment = environment
        filters = {name: environment.filters[name] for name in _FILTERS}
        filters |= {name: environment.of_text(filters[name]) for name in _TEXT_FILTERS}
        filters = {name: environment.bounded(name, made) for name, made in filters.items()}
        environment.filters = {
            **filters, "tojson": environment.json, "replace": environment.replaced, "join": environment.joined,
            "round": environment.rounded,
        }  # fmt: skip
        environment.globals = {
            "range": environment.globals["range"],
            "dict": environment.globals["dict"],
            "namespace": environment.globals["namespace"],
            "raise_exception": _raise,
            "strftime_now": _clock(date),
        }
        self._bounds: _Bounds = environment.extensions[_Bounds.identifier]  # type: ignore[assignment]
        try:
            parsed = environment.parse(source.text)
            self.uses = uses_of_contents(parsed)
            self.has_generation = any(map(is_generation, parsed.find_all(nodes.CallBlock)))
            names = {name.name for name in parsed.find_all(nodes.Name)}
            code = environment.compile(_Counting(self._bounds).visit(parsed))
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError, MemoryError) as error:
            raise TemplateUnusable(source.name, f"it is not a valid template: {error}") from error
        unnamed = sorted(names.intersection(_TOKEN_NAMES) - self._variables.keys())
        if unnamed and not source.tokens:
            raise TemplateUnusable(
                source.name,
                f"it writes {unnamed[0]}, and no {CONFIG} says what that is; pass the folder of the tokenizer, with "
                f"that file in it, or template_arguments={{'{unnamed[0]}': …}}",
            )
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[Any] | None,
        *,
        prompt: bool = False,
        marked: bool = False,
    ) -> str:
        """Return the text of messages, with the generation prompt behind them if `prompt`.

        Raises `BadConversation` where the template refuses these messages, `TemplateUnusable` at a limit.
        """
        self._bounds.limits = self._environment.limits = _Limits(marked=marked)
        try:
            text: str = self._template.render(
                self._variables, messages=messages, tools=tools, documents=None, add_generation_prompt=prompt
            )
        except TemplateUnusable as error:
            raise TemplateUnusable(self.source.name, error.problem) from None
        except SecurityError as error:
            raise TemplateUnusable(self.source.name, f"the sandbox refuses it: {error}") from error
        except Exception as error:  # a template may fail in any way
            said = " ".join(str(error).split())[:200] or type(error).__name__
            raise BadConversation("template", f"the template refuses {_shown(messages)}: {said}") from error
        return text


@lru_cache(maxsize=8)
def open_template(source: TemplateSource, arguments: bytes, date: str | None) -> ChatTemplate:
    return ChatTemplate(source, json.loads(arguments), date)


def _shown(messages: Sequence[Mapping[str, Any]]) -> str:
    listed = [f"{each.get('role')} {str(each.get('content'))[:SHOWN_CHARS]!r}" for each in messages[:SHOWN_MESSAGES]]
    return "the messages " + ", ".join(listed) + ("…" if len(messages) > SHOWN_MESSAGES else "")


def _raise(message: object) -> None:
    raise jinja2.TemplateError(message if isinstance(message, str) else "no message")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(indent, int) and indent > 16:
        raise SecurityError("the indent is too large")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _clock(date: str | None) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if date is None:
            raise TemplateUnusable("", "it asks for the current date; pass a fixed one: date='2026-01-31'")
        return Date.fromisoformat(date).strftime(str(form)[:100])

    return strftime_now
