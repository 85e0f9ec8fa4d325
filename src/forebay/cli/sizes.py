"""What a person writes for a number of bytes or for allowed failures, as numbers."""

import re
from typing import Any

import click

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
        raise ValueError(f"{text!r} is no size; write it as 600MB, 16GB or 1GiB")
    size = int(float(match[1]) * unit)
    if size < 1:
        raise ValueError(f"{text!r} is no size; it must be at least one byte")
    return size


def parse_allowed(text: str) -> int | float:
    """Allowed failures: a count, or a share of the samples.

    >>> parse_allowed("20"), parse_allowed("1%")
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
    raise ValueError(f"{text!r} is no number of failures; write a count like 20 or a share like 1%")


class SizeType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A number of bytes on the command line."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class AllowedType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A count or a share on the command line."""

    name = "N|P%"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        try:
            return value if isinstance(value, (int, float)) else parse_allowed(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
