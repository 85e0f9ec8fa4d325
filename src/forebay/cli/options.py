"""Options and arguments that several verbs share, and what a person may write for them."""

import re
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

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


Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """For TAB: the shell itself lists what is there."""
    return [CompletionItem(incomplete, type="file")]


def complete_folder(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


cache_argument: Decorator = click.argument("cache", shell_complete=complete_folder)
json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the record as JSON on standard output, and no progress."
)
source_option: Decorator = click.option(
    "--check-source", is_flag=True, help="Contact a remote source or model that the cache names."
)
workers_option: Decorator = click.option(
    "--workers", type=click.IntRange(min=0), help="Worker processes; 0 works in this one. [default: one per core]"
)
memory_option: Decorator = click.option(
    "--memory-limit", type=SizeType(), help="Most memory that builder and workers may hold, like 16GB."
)
failures_option: Decorator = click.option(
    "--max-failures",
    type=AllowedType(),
    help="Fail when more samples fail than a count (20) or a share (1%); 100% allows all. [default: stop at a chunk of "
    "which all samples fail]",
)
skip_option: Decorator = click.option(
    "--skip-unreadable", is_flag=True, default=None, help="Leave out damaged files of the source, and list them."
)


def decorated(command: Command, *decorators: Decorator) -> Command:
    """A command with options in the order in which help shows them."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


REVISION_OPTION: Decorator = click.option(
    "--revision", help="Which commit, tag or branch on the hub.  [default: the newest]"
)
DOWNLOAD_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--spool",
        metavar="DIR",
        shell_complete=complete_folder,
        help="Keep shards in DIR/forebay-shards while they are read.",
    ),
    click.option(
        "--download-retries",
        type=click.IntRange(min=0),
        help="How often to ask again for data (not for a tokenizer).  [default: 5]",
    ),
    click.option(
        "--download-timeout",
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds without a byte before asking again for data.  [default: 300]",
    ),
)
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


STANDARD_INPUT = ("-", "/dev/stdin")
HUB = "hub:"


def is_on_hub(path: str) -> bool:
    """
    >>> is_on_hub("hub:HuggingFaceFW/fineweb-edu"), is_on_hub("data/hub.jsonl")
    (True, False)
    """
    return path.startswith(HUB)


def refuse_standard_input(ctx: click.Context, param: click.Parameter, paths: tuple[str, ...]) -> tuple[str, ...]:
    """A source is planned first and read again for repair, which a stream cannot be."""
    for path in paths:
        if path in STANDARD_INPUT:
            raise click.BadParameter(
                f"'{path}' is standard input, which cannot be read twice; save it first: `… > data.jsonl`, then name "
                "that file",
                ctx=ctx,
                param=param,
            )
    return paths
