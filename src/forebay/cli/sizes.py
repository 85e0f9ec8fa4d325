"""Numbers of bytes and allowed failures on the command line."""

from typing import Any

import click

from forebay.sizes import parse_size


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
    raise ValueError(f"{text!r} is not a number of failures; write a count like 20 or a share like 1%")


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
