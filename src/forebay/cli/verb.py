"""What every verb has: options in groups, `--json`, `--quiet`, progress on standard error, and a result that is printed
when it returns. Options are generated from the fields of recipes, sources and settings; those that several verbs share
are here too.

This is the only module that prints: results on standard output, everything else on standard error. With `--json`,
standard output has one document: {"ok": true, "result": …}, or {"ok": false, "error": {…}}.

Output is escaped here, because names and texts from caches and sources may contain control characters that a terminal
would execute. In JSON they become \\uXXXX, which reads back as the same text.
"""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from rich.text import Text

from forebay.cache.records import OnProgress, as_json
from forebay.errors import ForebayError, LibraryMissing, RangeInvalid, closest
from forebay.fields import Field, declared, parse_size
from forebay.preview.console import console_for
from forebay.preview.console import shown_progress as drawn_progress
from forebay.preview.words import clear_first_sign, printable
from forebay.store.base import is_url

GROUPS = {
    "Source": "Source options",
    "Recipe": "Recipe options (a new value needs a new cache)",
    "Teachers": "Teachers (each adds a layer)",
    "Layer": "Layer options (a new value needs --replace)",
    "Build": "Build options",
    "Options": "Options",
    "Output": "Output options",
}
HELP_WIDTH = 96
_JSON, _QUIET, _STDOUT = "forebay.json", "forebay.quiet", "forebay.stdout"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a verb that ran and found a problem: it is shown, and the exit code is 1.

    `command` repairs it. The result as text names the problem itself, unless `is_said` is set.
    """

    record: Any
    type: str
    message: str
    command: str = ""
    is_said: bool = False


class Option(click.Option):
    """An option in one of the groups of help."""

    def __init__(self, *names: Any, group: str = "Options", **others: Any) -> None:
        super().__init__(*names, **others)
        self.group = group


class Verb(click.Command):
    """A command whose result is shown: it returns a record, a list of records, or a `Finding`."""

    def __init__(self, *names: Any, **others: Any) -> None:
        super().__init__(*names, **others)
        self.params += [
            _output_option("--json", _JSON, "Print one JSON document: the result, or the error."),
            _output_option("-q", "--quiet", _QUIET, "Print errors only: no progress, no notes, no result as text."),
        ]

    def invoke(self, ctx: click.Context) -> None:
        # What a library prints, such as Ray when a node dies, must not be in the document.
        ctx.meta[_STDOUT] = sys.stdout
        with redirect_stdout(sys.stderr) if is_json() else nullcontext():
            found = super().invoke(ctx)
        show_result(found)
        ctx.exit(int(isinstance(found, Finding)))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                group = param.group if isinstance(param, Option) else "Options"
                lines["Output" if "--help" in param.opts else group].append(record)
        for group, records in lines.items():
            if records:
                with formatter.section(GROUPS[group]):
                    formatter.write_dl(records)


def show_now(found: Any) -> None:
    """Show a result before the verb ends."""
    with redirect_stdout(click.get_current_context().meta[_STDOUT]):
        show_result(found)


class Verbs(click.Group):
    """A group that imports a command when it is used, and names the command that was probably meant."""

    command_class = Verb
    homes: dict[str, str] = {}  # noqa: RUF012 — name -> module:attribute of a command, or of a function that makes one

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys([*self.homes, *self.commands]))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.commands and name in self.homes:
            module, _, attribute = self.homes[name].partition(":")
            found = getattr(import_module(module), attribute)
            self.add_command(found if isinstance(found, click.Command) else found(), name)
        return self.commands.get(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the whole one-line summary of every command, which click would shorten."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._summary(ctx, name)) for name in self.list_commands(ctx)])

    def _summary(self, ctx: click.Context, name: str) -> str:
        try:
            command = self.get_command(ctx, name)
        except LibraryMissing as error:
            return f"(not installed: pip install 'forebay[{error.extra}]')"
        except Exception as error:  # of another package
            return f"(cannot be imported: {type(error).__name__}: {error})"
        return command.get_short_help_str(limit=2 * HELP_WIDTH) if command is not None else ""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] in known or ctx.resilient_parsing or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        near = closest(args[0], known)
        hint = f"Did you mean '{near}'?" if near else f"Known: {', '.join(known)}."
        raise click.UsageError(f"No such command '{args[0]}'. {hint}", ctx)


def verb(name: str | None = None, **others: Any) -> Callable[[Callable[..., Any]], Verb]:
    """Decorate a function as the command of a verb."""
    return click.command(name, cls=Verb, **others)


def is_json() -> bool:
    """Whether the running command prints JSON."""
    return _is_set(_JSON)


def is_quiet() -> bool:
    return _is_set(_QUIET)


def _is_set(name: str) -> bool:
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(name))


def _output_option(*words: str) -> Option:
    *flags, key, text = words

    def keep(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta[key] = value

    return Option(flags, is_flag=True, expose_value=False, is_eager=True, callback=keep, help=text, group="Output")


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """A function to call with every `Progress` of one job."""
    if is_json() or is_quiet():
        yield lambda progress: None
    else:
        with drawn_progress() as on_progress:
            yield on_progress


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
        hidden=len(field.choices) == 1,  # there is nothing to choose
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


def _complete_from_cache(
    names: Callable[[Any], list[str]], ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete names that a cache on this machine has; a bucket is not asked, and a damaged cache offers nothing."""
    root = ctx.params.get("cache") or next(
        iter(ctx.args), ""
    )  # click parses no argument while an option lacks its value
    if not root or is_url(root):
        return []
    try:
        found = names(import_module("forebay.api").summarize(root))
    except (ForebayError, OSError):
        return []
    return [CompletionItem(name) for name in found if name.startswith(incomplete) and _SHELL_SAFE.fullmatch(name)]


_SHELL_SAFE = re.compile(r"[\w.-]+")
complete_layer = partial(_complete_from_cache, lambda summary: [layer.layer for layer in summary.layers])
complete_added_layer = partial(
    _complete_from_cache,
    lambda summary: [layer.layer for layer in summary.layers if layer.layer != summary.base],
)
complete_column = partial(
    _complete_from_cache,
    lambda summary: [column.partition(":")[0] for layer in summary.layers for column in layer.columns],
)


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


_NUMBERS = re.compile(r"\[\n\s+([-+.\deE]+(?:,\n\s+[-+.\deE]+)*)\n\s*\]")


def show_result(found: Any) -> None:
    """Print what a verb returned: a record, a list of records, or a `Finding`."""
    clear_first_sign()
    record = found.record if isinstance(found, Finding) else found
    if is_json():
        document = {"ok": not isinstance(found, Finding), "result": record}
        if isinstance(found, Finding):
            document["error"] = error_document(found.type, found.message, found.command)
        _written(lambda: _print_json(document))
    elif not is_quiet() and record is not None:
        _written(lambda: _print_text(record))
    if isinstance(found, Finding) and found.is_said:
        say_error(found.message)


def show_error(error: Mapping[str, Any]) -> None:
    """Print an error as JSON."""
    _written(lambda: _print_json({"ok": False, "error": error}))


def error_document(
    kind: str, message: str, command: str = "", details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """An error in JSON: its type, its message, the next command if there is one, and what else is known."""
    found = {"type": kind, "message": message, "command": command, "details": dict(details or {})}
    return {name: value for name, value in found.items() if value}


def _written(write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader closed the pipe
        raise ForebayError(
            f"cannot write the result to standard output: {error.strerror}; the command itself succeeded, redirect its "
            "output"
        ) from error


def _print_json(document: Any) -> None:
    click.echo(_escaped(_numbers_on_one_line(as_json(document, indent=2).decode())))


def _print_text(record: Any) -> None:
    console = console_for(sys.stdout, wanted_width())
    with console.capture() as picture:
        console.print(import_module("forebay.cli.render").draw(record))
    click.echo("\n".join(line.rstrip() for line in picture.get().splitlines()), color=True)


def wanted_width() -> int | None:
    """The width that COLUMNS asks for, also in a pipe."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else None


def _escaped(text: str) -> str:
    r"""JSON with control characters in strings escaped; its meaning stays the same.

    >>> _escaped('{"name": "\u202egnp.\x9b\x7f\U000e0001 \u00e4"}')
    '{"name": "\\u202egnp.\\u009b\\u007f\\udb40\\udc01 ä"}'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else _by_number(char) for char in text)


def _by_number(char: str) -> str:
    raw = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{raw[at : at + 4]}" for at in range(0, len(raw), 4))


def _numbers_on_one_line(text: str) -> str:
    r"""Indented JSON with every list of numbers on one line; strings contain no newlines.

    >>> _numbers_on_one_line('{\n  "ids": [\n    1,\n    -2.5\n  ],\n  "of": [\n    "a"\n  ]\n}')
    '{\n  "ids": [1, -2.5],\n  "of": [\n    "a"\n  ]\n}'
    """
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def say(line: str) -> None:
    """Print a line on standard error."""
    clear_first_sign()
    console_for(sys.stderr).print(Text(line), soft_wrap=True)


def say_error(line: str) -> None:
    """Print an error on one line of standard error."""
    clear_first_sign()
    console_for(sys.stderr).print(Text.assemble(("forebay: ", "bold red"), printable(line)), soft_wrap=True)
