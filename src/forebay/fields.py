r"""Fields of recipes and settings, each declared once: type, bounds, default and help.

    sequence_length: Annotated[int, Meta(ge=1, description="Tokens per row.")] = 512

Python checks it when a recipe is made (`check_fields` of `recipe.py`); settings files and the command line read it by
the same declaration. Keys of `Meta(extra=…)`, all optional:

    format    how it is written as text: size (16MB), color (#727272), names (cat,dog or @file or none), escaped (\n is
              a newline), share (20 or 1%), pairs (a=x,b=y), values (a=1,b=false), file, folder
    default   the default as help shows it, if its value says little
    flags     the option's names, if they are not --sequence-length
    metavar   the word for its value in help

Sizes in bytes are read here too, as users write them: 64MB.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, is_dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import lru_cache
from math import inf, isfinite
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta

from forebay.errors import closest

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgtp", 1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgtp", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """
    >>> parse_size("16GB"), parse_size("1.5 MiB"), parse_size("4096")
    (16000000000, 1572864, 4096)
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; use 600MB, 16GB or 1GiB")
    size = int(float(match[1]) * unit)
    if size < 1:
        raise ValueError(f"{text!r} is not a size; it must be at least one byte")
    return size


def parse_bandwidth(text: str) -> float:
    """The bytes per second of a bandwidth in bits or bytes.

    >>> parse_bandwidth("1Gbit"), parse_bandwidth("100 MB/s")
    (125000000.0, 100000000.0)
    """
    rate = text.strip().lower().removesuffix("/s").removesuffix("ps").strip()
    try:
        return parse_size(rate.removesuffix("it")) / 8 if rate.endswith("bit") else float(parse_size(rate))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a bandwidth; use 1Gbit or 100MB") from error


def as_bytes(size: int | str) -> int:
    """The number of bytes of a size that is an integer or a text like "16GB".

    >>> as_bytes(0), as_bytes("256MB")
    (0, 256000000)
    """
    if isinstance(size, str):
        return parse_size(size)
    if isinstance(size, Integral) and not isinstance(size, bool) and size >= 0:
        return int(size)
    raise ValueError(f"{size!r} is not a size; use a whole number of bytes, or a text like '16GB'")


def checked_whole(option: str, number: object, least: int = 0) -> int:
    """A whole number; NumPy integers are accepted, True and 2.0 are not.

    >>> checked_whole("workers", 2)
    2
    """
    if isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= least:
        return int(number)
    raise ValueError(f"{option} must be a whole number of at least {least} (got {number!r})")


def checked_number(option: str, number: object, least: float | None = None, most: float = inf) -> float:
    """A finite number above 0, or within bounds."""
    value = float(number) if isinstance(number, Real) and not isinstance(number, bool) else -1.0
    if isfinite(value) and value <= most and (value > 0 if least is None else value >= least):
        return value
    bounds = "above 0" if least is None else f"of at least {least:g}"
    bounds += f" and at most {most:,.0f}" if isfinite(most) else ""
    raise ValueError(f"{option} must be a number {bounds} (got {number!r})")


def checked_failures(limit: object) -> int | float:
    """A limit of failed samples: a count, or a share.

    >>> checked_failures(3), checked_failures(0.5)
    (3, 0.5)
    """
    if isinstance(limit, Integral) and not isinstance(limit, bool) and int(limit) >= 0:
        return int(limit)
    if isinstance(limit, Real) and not isinstance(limit, Integral) and 0 <= float(limit) <= 1:
        return float(limit)
    raise ValueError(f"max_failures must be a count of at least 0, or a share from 0.0 to 1.0 (got {limit!r})")


def check_flags(**flags: object) -> None:
    for option, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{option} must be True or False (got {value!r})")


Size = Annotated[int, Meta(ge=1, extra={"format": "size"})]
Finite = Annotated[float, Meta(ge=-1e9, le=1e9)]
_HEX = re.compile(r"#([0-9a-fA-F]{2})([0-9a-fA-F]{2})([0-9a-fA-F]{2})")
_WHOLE = re.compile(r"-?\d+")
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?")
_NONE = "none"
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "True or False",
    NoneType: "None",
}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a struct."""

    name: str
    type: Any  # with its bounds
    default: Any
    types: tuple[Any, ...]  # the members of a union, or one type; without bounds
    help: str = ""
    least: float | None = None
    most: float | None = None
    extra: Mapping[str, Any] | None = None

    def hint(self, key: str) -> Any:
        return (self.extra or {}).get(key)

    @property
    def is_required(self) -> bool:
        return self.default is NODEFAULT

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(choice for one in self.types if get_origin(one) is Literal for choice in get_args(one))

    @property
    def items(self) -> Any:
        """The type of the values of a field that holds several; None for other fields."""
        items = (get_args(one)[0] for one in self.types if get_origin(one) is tuple and get_args(one)[-1] is ...)
        return next(items, None)

    @property
    def is_repeated(self) -> bool:
        """Whether each of several values is written separately."""
        return self.items is not None and self.hint("format") != "names"

    @property
    def is_writable(self) -> bool:
        """Whether a value can be written as text."""
        plain = all(one in _WORDS or get_origin(one) is Literal or self._is_list(one) for one in self.types)
        return plain or self.hint("format") is not None

    @staticmethod
    def _is_list(one: Any) -> bool:
        return get_origin(one) is tuple and get_args(one)[-1] is ... and get_args(one)[0] in (int, float, str)

    def check(self, value: Any) -> None:
        """Raise ValueError with the allowed values, unless the value is valid."""
        try:
            msgspec.convert(value, self.type)
        except msgspec.ValidationError as error:
            raise ValueError(self.refusal(value, error)) from error

    def refusal(self, value: Any, error: msgspec.ValidationError) -> str:
        """Return the allowed values of a field, for a value that is not valid."""
        expected = self._expected(value)
        return f"it must be {expected}" if expected else str(error)

    def parse(self, text: str) -> Any:
        """The value as text on the command line; of several values, one."""
        value = self._parsed(text)
        one = replace(self, type=self.items, types=(self.items,)) if self.is_repeated else self
        one._check_written(value, text)
        return value

    def read(self, value: Any) -> Any:
        """The value that a settings file has: typed, or text as on the command line."""
        if isinstance(value, str) and (self.hint("format") in _FORMATS or (value == _NONE and self._knows_none)):
            return self.parse(value)
        self._check_written(value, value)
        return msgspec.convert(value, self.type)

    def _check_written(self, value: Any, written: Any) -> None:
        try:
            self.check(value)
        except ValueError as error:
            raise ValueError(f"{repr(written)[:80]} is not valid; {error}") from error

    def shown_default(self) -> str:
        """The default as help shows it; empty if there is none."""
        shown, value = self.hint("default"), self.default
        if shown is not None or value in (NODEFAULT, None, msgspec.UNSET, (), {}) or isinstance(value, bool):
            return str(shown or "")
        if self.hint("format") == "size":
            return _written_size(value)
        if isinstance(value, float):
            return f"{value:g}"
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    @property
    def _knows_none(self) -> bool:
        """Whether the text `none` means None, or nothing that is valid; elsewhere a name may be `none`."""
        is_name_or_number = {int, str} <= {*self.types}
        return is_name_or_number or (NoneType in self.types and self.default is not None and self.items is None)

    def _parsed(self, text: str) -> Any:
        if form := _FORMATS.get(self.hint("format") or ""):
            return form(text)
        if text == _NONE and self._knows_none:
            return None
        types = (self.items,) if self.items else self.types
        if int in types and _WHOLE.fullmatch(text):
            return int(text)
        if float in types and _NUMBER.fullmatch(text):
            return float(text)
        return text

    def _expected(self, value: Any) -> str:
        if self.choices:
            near = closest(str(value), self.choices)
            return f"one of {', '.join(map(repr, self.choices))}" + (f"; did you mean '{near}'?" if near else "")
        words = [_in_words(one) for one in self.types if one is not NoneType or self._knows_none]
        return " or ".join(words) + _bounds(self.least, self.most) if all(words) else ""


def _in_words(one: Any) -> str:
    if get_origin(one) is tuple:
        inner = _in_words(get_args(one)[0])
        return f"a list, each {inner}" if get_args(one)[-1] is ... else f"{len(get_args(one))} values, each {inner}"
    return _WORDS.get(one, "")


def _bounds(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f" from {least:,} to {most:,}"
    return f" of at least {least:,}" if least is not None else ""


def declared(struct: Any) -> dict[str, Field]:
    """The fields of a msgspec.Struct or a dataclass, by name."""
    return _declared(struct)


@lru_cache(maxsize=64)
def _declared(struct: Any) -> dict[str, Field]:
    if not is_dataclass(struct):
        return {field.name: _field(field, field.type, NODEFAULT) for field in msgspec.structs.fields(struct)}
    hints = get_type_hints(struct, include_extras=True)
    return {field.name: _field(field, hints[field.name], MISSING) for field in dataclass_fields(struct)}


def _field(info: Any, declared_type: Any, nothing: Any) -> Field:
    """Return a field; `nothing` as its default means that it has none."""
    types, metas = _unwrapped(declared_type)
    default = info.default if info.default_factory is nothing else info.default_factory()
    bounds = {name: [getattr(meta, name) for meta in metas if getattr(meta, name) is not None] for name in ("ge", "le")}
    return Field(
        name=info.name,
        type=declared_type,
        default=NODEFAULT if default is nothing else default,
        types=types,
        help=next((meta.description for meta in reversed(metas) if meta.description), ""),
        least=max(bounds["ge"], default=None),
        most=min(bounds["le"], default=None),
        extra={key: value for meta in metas for key, value in (meta.extra or {}).items()},
    )


def _unwrapped(declared_type: Any) -> tuple[tuple[Any, ...], tuple[Meta, ...]]:
    """The members of a union, and all that is said about them."""
    if get_origin(declared_type) is Annotated:
        inner, *metas = get_args(declared_type)
        types, below = _unwrapped(inner)
        return types, (*below, *(meta for meta in metas if isinstance(meta, Meta)))
    if get_origin(declared_type) in (Union, UnionType):
        parts = [_unwrapped(one) for one in get_args(declared_type) if one is not msgspec.UnsetType]
        return tuple(one for types, _ in parts for one in types), tuple(meta for _, metas in parts for meta in metas)
    return (declared_type,), ()


def parse_share(text: str) -> int | float:
    """A count, or a share.

    >>> parse_share("20"), parse_share("1%")
    (20, 0.01)
    """
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if 0 <= share <= 1:
                return share
        elif int(text) >= 0:
            return int(text)
    except ValueError:
        pass
    raise ValueError(f"{text!r} is not a number of failures; use a count like 20 or a share like 1%")


def parse_color(text: str) -> tuple[int, ...]:
    """
    >>> parse_color("114,114,114"), parse_color("#ff8000")
    ((114, 114, 114), (255, 128, 0))
    """
    if match := _HEX.fullmatch(text):
        return tuple(int(part, 16) for part in match.groups())
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 3 and all(part.isdecimal() and int(part) < 256 for part in parts):
        return tuple(map(int, parts))
    raise ValueError(f"{text!r} is not a color; use 114,114,114 or #727272")


def parse_names(text: str) -> tuple[str, ...]:
    """Names between commas, or one on each line of a file; `none` for no names.

    >>> parse_names("cat, looking left"), parse_names("none")
    (('cat', 'looking left'), ())
    """
    if text == _NONE:
        return ()
    if text.startswith("@"):
        try:
            with open(text[1:], encoding="utf-8-sig") as file:
                written = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read '{text[1:]}': {error}") from error
    else:
        written = text.split(",")
    names = tuple(name for part in written if (name := part.strip()))
    if not names:
        raise ValueError(f"'{text}' has no names; pass {_NONE} for an empty list")
    return names


def parse_escaped(text: str) -> str:
    r"""Text typed in a shell, where \n is two characters.

    >>> parse_escaped(r"\n---\n")
    '\n---\n'
    """
    if not text:
        raise ValueError("it needs at least one character, e.g. ',' or '\\n'")
    return text.replace(r"\n", "\n").replace(r"\r", "\r").replace(r"\t", "\t")


def parse_pairs(text: str) -> dict[str, str]:
    """
    >>> parse_pairs("messages=dialog, tools=functions")
    {'messages': 'dialog', 'tools': 'functions'}
    """
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and is_pair and value.strip() for name, is_pair, value in pairs):
        raise ValueError(f"{text!r} is not a list of pairs; use NAME=VALUE,NAME=VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_values(text: str) -> dict[str, Any]:
    """Pairs whose values are JSON, or else text.

    >>> parse_values("enable_thinking=false,style=brief")
    {'enable_thinking': False, 'style': 'brief'}
    """
    values: dict[str, Any] = {}
    for name, value in parse_pairs(text).items():
        try:
            values[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            values[name] = value
    return values


_FORMATS: dict[str, Callable[[str], Any]] = {
    "size": parse_size,
    "share": parse_share,
    "color": parse_color,
    "names": parse_names,
    "escaped": parse_escaped,
    "pairs": parse_pairs,
    "values": parse_values,
}


def _written_size(size: int) -> str:
    """
    >>> _written_size(64 << 20), _written_size(1000)
    ('64MiB', '1000')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << power) == 0:
            return f"{size >> power}{unit}"
    return str(size)
