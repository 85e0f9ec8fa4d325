"""Options that are generated from the fields of recipes, sources and settings, and those that several verbs share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from forebay.cli.verb import Option
from forebay.errors import RangeInvalid, is_url
from forebay.fields import Field, declared, parse_size

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]
STANDARD_INPUT = ("-", "/dev/stdin")
_PAIRS = ("pairs", "values")
_METAVARS = {int: "N", float: "X", str: "TEXT"}


class FieldType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """The value of a field on the command line."""

    def __init__(self, field: Field) -> None:
        self.field, self.name = field, _metavar(field)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.field.parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def field_option(field: Field, group: str, *flags: str, **others: Any) -> Decorator:
    """The option that sets a field: its type, choices, default and help are those of the field."""
    flag = f"--{field.name.replace('_', '-')}"
    names = flags or tuple(field.said("flags") or (f"{flag}/--no{flag[1:]}" if bool in field.types else flag,))
    others = {"help": _help(field), "group": group, "cls": Option, **others}
    if bool in field.types:
        return click.option(*names, field.name, is_flag=True, default=None, **others)
    return click.option(
        *names,
        others.pop("param", field.name),
        type=FieldType(field),
        metavar=_metavar(field),
        multiple=field.is_repeated,
        callback=partial(_joined, field),
        shell_complete=partial(complete_field, field),
        **others,
    )


def struct_options(struct: type[Any], group: str, *names: str) -> tuple[Decorator, ...]:
    """The options of some fields of a struct; of all that can be written as text, if no name is passed."""
    known = declared(struct)
    return tuple(field_option(known[name], group) for name in names or known if known[name].is_writable)


def passed_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """The options that the user passed, without defaults."""
    ctx = click.get_current_context()
    return {
        name: value for name, value in flags.items() if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def _joined(field: Field, ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    return value[0] if field.is_repeated and str in field.types and len(value) == 1 else value


def _metavar(field: Field) -> str:
    if field.said("metavar"):
        return str(field.said("metavar"))
    if field.choices:
        return f"[{'|'.join(field.choices)}]"
    forms = {"size": "SIZE", "share": "N|P%", "file": "FILE", "folder": "FOLDER"} | dict.fromkeys(_PAIRS, "A=B,…")
    form = forms.get(field.said("format") or "")
    types = (field.items,) if field.items else field.types
    return form or next((word for kind, word in reversed(_METAVARS.items()) if kind in types), "VALUE")


def _help(field: Field) -> str:
    default = field.shown_default()
    return field.help + (f"  [default: {default}]" if default else "")


def complete_field(field: Field, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    if field.said("format") in ("file", "folder"):
        return [CompletionItem(incomplete, type="file" if field.said("format") == "file" else "dir")]
    return [CompletionItem(choice) for choice in field.choices if choice.startswith(incomplete)]


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete file names, by the shell."""
    return [CompletionItem(incomplete, type="file")]


def complete_folder(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


class SizeType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A number of bytes on the command line."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def existing_copy(ctx: click.Context, param: click.Parameter, copy: str | None) -> str | None:
    """A folder that exists, or a URL."""
    if copy is not None and not is_url(copy):
        click.Path(exists=True, file_okay=False)(copy, param, ctx)
    return copy


def refuse_memory(place: str) -> None:
    """Reject a cache in the memory of this process: it would be lost when the command ends."""
    if place.lower().startswith("memory:/"):
        raise click.UsageError(f"'{place}' is the memory of this command and ends with it; name a folder or a bucket.")


def local_only(ctx: click.Context, param: click.Parameter, place: str | None) -> str | None:
    """A file or a folder of this machine."""
    if place is not None and is_url(place):
        raise click.BadParameter(f"'{place}' is a URL; name a place on this machine.", ctx, param)
    return place


@contextmanager
def checked_range(start_chunk: int | None, end_chunk: int | None) -> Iterator[None]:
    """Report a range that is empty, or that begins beyond the plan, as wrong usage."""
    if start_chunk is not None and end_chunk is not None and start_chunk > end_chunk:
        raise click.UsageError(f"--start-chunk {start_chunk} comes after --end-chunk {end_chunk}.")
    try:
        yield
    except RangeInvalid as error:
        raise click.UsageError(f"--{str(error).replace('_', '-', 1)}.") from error


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


def source_argument(required: bool) -> Decorator:
    return click.argument(
        "paths",
        nargs=-1,
        required=required,
        metavar="SOURCE...",
        callback=refuse_standard_input,
        shell_complete=complete_file,
    )


cache_argument: Decorator = click.argument("cache", shell_complete=complete_folder)
SOURCE_HELP = "Contact a remote source or model that the cache names."
source_option: Decorator = click.option("--check-source", is_flag=True, help=SOURCE_HELP)


def decorated(command: Command, *decorators: Decorator) -> Command:
    """Add decorators to a command in the order in which help lists them."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
