"""Options and arguments that several verbs share, and their types."""

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
    raise ValueError(f"{text!r} is not a number of failures; use a count like 20 or a share like 1%")


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
    """Complete file names, by the shell."""
    return [CompletionItem(incomplete, type="file")]


def complete_folder(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


cache_argument: Decorator = click.argument("cache", shell_complete=complete_folder)
json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON, without progress."
)
source_option: Decorator = click.option(
    "--check-source", is_flag=True, help="Contact a remote source or model that the cache names."
)
workers_option: Decorator = click.option(
    "--workers", type=click.IntRange(min=0), help="Worker processes; 0 uses this process.  [default: one per core]"
)
memory_option: Decorator = click.option(
    "--memory-limit", type=SizeType(), help="Memory limit for the builder and its workers together, e.g. 16GB."
)
failures_option: Decorator = click.option(
    "--max-failures",
    type=AllowedType(),
    help="Failed samples to allow: a count (20) or a share (1%); 100% allows all.  [default: stop at a chunk of which "
    "all samples fail]",
)
skip_option: Decorator = click.option(
    "--skip-unreadable", is_flag=True, default=None, help="Skip damaged source files, and list them."
)


def decorated(command: Command, *decorators: Decorator) -> Command:
    """Add decorators to a command in the order in which help lists them."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


REVISION_OPTION: Decorator = click.option("--revision", help="Commit, tag or branch on the hub.  [default: the newest]")
DOWNLOAD_OPTIONS: tuple[Decorator, ...] = (
    click.option(
        "--spool",
        metavar="DIR",
        shell_complete=complete_folder,
        help="Directory for downloaded shards while they are read (DIR/forebay-shards).",
    ),
    click.option(
        "--download-retries",
        type=click.IntRange(min=0),
        help="Retries per download of data.  [default: 5]",
    ),
    click.option(
        "--download-timeout",
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds without a byte before a download is retried.  [default: 300]",
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
    raise ValueError(f"{text!r} is not a color; use 114,114,114 or #727272")


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
    """A color on the command line."""

    name = "r,g,b"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Color:
        try:
            return value if isinstance(value, tuple) else parse_color(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class TagsType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A vocabulary on the command line; `none` is kept as text, because an empty value means "not passed"."""

    name = "tags"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...] | str:
        if isinstance(value, tuple) or value == NO_TAGS:
            found: tuple[str, ...] | str = value
            return found
        try:
            tags = parse_tags(value)
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"cannot read the tags in '{value[1:]}': {error}", param, ctx)
        return tags or self.fail(f"'{value}' has no tags; pass {NO_TAGS} for an empty vocabulary", param, ctx)


class SeparatorType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A separator of tags; a newline is typed as a backslash and an n."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        found = str(value).replace("\\n", "\n").replace("\\t", "\t")
        return found or self.fail("a separator needs at least one character, e.g. ',' or ' '", param, ctx)


NO_TOKEN = "none"


def named_token(written: str | int) -> str | int | None:
    """A token as a recipe field.

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
    """Reject standard input: a source is read again for building and repair."""
    for path in paths:
        if path in STANDARD_INPUT:
            raise click.BadParameter(
                f"'{path}' is standard input, which cannot be read twice; save it first (`… > data.jsonl`) and pass "
                "that file",
                ctx=ctx,
                param=param,
            )
    return paths
