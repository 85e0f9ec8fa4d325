"""What a person writes for a colour or for a vocabulary of tags."""

import re
from typing import Any

import click

NO_TAGS = "none"
_HEX = re.compile(r"#([0-9a-fA-F]{2})([0-9a-fA-F]{2})([0-9a-fA-F]{2})")
_NUMBERS = re.compile(r"(\d{1,3}),\s*(\d{1,3}),\s*(\d{1,3})")

Color = tuple[int, int, int]


def parse_color(text: str) -> Color:
    """
    >>> parse_color("114,114,114"), parse_color("#ff8000")
    ((114, 114, 114), (255, 128, 0))
    """
    if found := _HEX.fullmatch(text):
        return int(found[1], 16), int(found[2], 16), int(found[3], 16)
    if (found := _NUMBERS.fullmatch(text)) and all(int(value) < 256 for value in found.groups()):
        return int(found[1]), int(found[2]), int(found[3])
    raise ValueError(f"{text!r} is not a colour; write red, green and blue as 114,114,114 or #727272")


def parse_tags(text: str) -> tuple[str, ...]:
    """Tags between commas, or one on each line of a file.

    >>> parse_tags("cat, looking left")
    ('cat', 'looking left')
    """
    if text.startswith("@"):
        with open(text[1:], encoding="utf-8-sig") as file:
            written = file.read().splitlines()
    else:
        written = text.split(",")
    return tuple(tag for part in written if (tag := part.strip()))


class ColorType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A colour on the command line."""

    name = "r,g,b"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Color:
        try:
            return value if isinstance(value, tuple) else parse_color(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class TagsType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A vocabulary on the command line; `none` stays that word, because an empty option is one that was not passed."""

    name = "tags"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...] | str:
        if isinstance(value, tuple) or value == NO_TAGS:
            found: tuple[str, ...] | str = value
            return found
        try:
            tags = parse_tags(value)
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"the tags in '{value[1:]}' cannot be read: {error}", param, ctx)
        return tags or self.fail(f"'{value}' names no tags; for none of them write {NO_TAGS}", param, ctx)


class SeparatorType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """What stands between tags; a line end is written as a backslash and an n."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        found = str(value).replace("\\n", "\n").replace("\\t", "\t")
        return found or self.fail("a separator has at least one character, as ',' or ' '", param, ctx)
