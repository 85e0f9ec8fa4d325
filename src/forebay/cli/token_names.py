"""How a user names a token: by its text, by its id, or `none`."""

from typing import Any

import click

NO_TOKEN = "none"


def named_token(written: str | int) -> str | int | None:
    """A token as a recipe has it.

    >>> named_token("none"), named_token("</s>"), named_token(50256)
    (None, '</s>', 50256)
    """
    return None if written == NO_TOKEN else written


class TokenNameType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A token on the command line; digits are an id."""

    name = "token"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        return int(value) if isinstance(value, str) and value.isdecimal() else value
