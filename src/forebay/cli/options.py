"""Options and arguments of verbs: made from the fields of recipes, sources and settings, or shared by several verbs.

An option has a group in help. `--help` shows those in `COMMON`, those that are required, and all of a verb that has
few; `--help-all` shows the rest.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from msgspec import Meta

from forebay.errors import NotFound, SourceInvalid
from forebay.fields import Field, declared, parse_bandwidth, parse_size
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
COMMON = {
    "into", "workers", "dry_run", "start_chunk", "end_chunk", "max_failures", "memory_limit", "reuse",
    "format", "text", "suffix", "unit", "subset", "split",
    "tokenizer", "template", "sequence_length", "long", "deduplicate", "size", "tags", "storage", "codec",
    "chunk_rows", "chunk_bytes",
    "pipeline", "only", "vae", "t5", "clip", "lune", "sol", "buckets", "replace",
}  # fmt: skip
Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class WrongUsage(click.UsageError):
    """A wrong command line: a message and one hint."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, click.get_current_context(silent=True))
        self.hint = hint


class Option(click.Option):
    """An option in one of the groups of help; a rare one is only in `--help-all`."""

    def __init__(self, *names: Any, group: str = "Options", rare: bool = False, **others: Any) -> None:
        super().__init__(*names, **others)
        self.group, self.rare = group, rare and not self.required


option: Callable[..., Decorator] = partial(click.option, cls=Option)


class Parsed(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A value that a function reads from text; its ValueError is wrong usage."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = Parsed("size", parse_size)
BANDWIDTH = Parsed("bandwidth", parse_bandwidth)


def whole(least: int, most: int | None = None) -> Parsed:
    """Whole numbers of at least `least`, and of at most `most` if it is passed."""
    kind = Annotated[int, Meta(ge=least, le=most)]
    return Parsed("n", Field(name="", type=kind, default=least, types=(int,), least=least, most=most).parse)


def field_option(field: Field, group: str, *flags: str, **others: Any) -> Decorator:
    """The option that sets a field: its type, choices, default and help are those of the field."""
    flag = f"--{field.name.replace('_', '-')}"
    names = flags or tuple(field.hint("flags") or (f"{flag}/--no{flag[1:]}" if bool in field.types else flag,))
    target = others.pop("param", field.name)
    others = {"help": _help(field), "group": group, "rare": not (field.is_required or target in COMMON), **others}
    if bool in field.types:
        return option(*names, field.name, is_flag=True, default=None, **others)
    return option(
        *names,
        target,
        type=Parsed(_metavar(field), field.parse),
        metavar=_metavar(field),
        multiple=field.is_repeated,
        callback=partial(_joined, field),
        hidden=len(field.choices) == 1,  # there is nothing to choose
        shell_complete=partial(_complete_field, field),
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


_METAVARS = {int: "N", float: "X", str: "TEXT"}
_FORMS = {"size": "SIZE", "share": "N|P%", "file": "FILE", "folder": "FOLDER", "pairs": "A=B,…", "values": "A=B,…"}


def _metavar(field: Field) -> str:
    if field.hint("metavar"):
        return str(field.hint("metavar"))
    if field.choices:
        return f"[{'|'.join(field.choices)}]"
    types = (field.items,) if field.items else field.types
    word = next((word for kind, word in reversed(_METAVARS.items()) if kind in types), "VALUE")
    return _FORMS.get(field.hint("format") or "", word)


def _help(field: Field) -> str:
    default = field.shown_default()
    return field.help + (f"  [default: {default}]" if default else "")


def _complete_field(field: Field, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    if field.hint("format") in ("file", "folder"):
        return [CompletionItem(incomplete, type="file" if field.hint("format") == "file" else "dir")]
    return [CompletionItem(choice) for choice in field.choices if choice.startswith(incomplete)]


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete file names, by the shell."""
    return [CompletionItem(incomplete, type="file")]


def complete_folder(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def existing_copy(ctx: click.Context, param: click.Parameter, copy: str | None) -> str | None:
    """A folder that exists, or a URL."""
    if copy is not None and not is_url(copy):
        click.Path(exists=True, file_okay=False)(copy, param, ctx)
    return copy


def local_only(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """A file or a folder of this machine."""
    if path is not None and is_url(path):
        raise click.BadParameter(f"'{path}' is a URL; name a path on this machine", ctx, param)
    return path


def check_destination(root: str) -> None:
    """Reject files, and a cache in the memory of this process, which would be lost when the command ends."""
    if root.lower().startswith("memory:/"):
        raise WrongUsage(f"'{root}' would be lost when this command ends", "name a folder or a bucket")
    if os.path.isfile(root):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder", root)


def _refuse_standard_input(ctx: click.Context, param: click.Parameter, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Reject standard input: a source is read again for building and repair."""
    for path in paths:
        if path in ("-", "/dev/stdin"):
            raise WrongUsage(
                f"'{path}' is standard input, which cannot be read twice",
                "save it first (`… > data.jsonl`) and pass that file",
            )
    return paths


@contextmanager
def checked_range(start_chunk: int | None, end_chunk: int | None) -> Iterator[None]:
    """Report a range that is empty, or that begins beyond the plan, as wrong usage."""
    if start_chunk is not None and end_chunk is not None and start_chunk > end_chunk:
        raise WrongUsage(f"--start-chunk {start_chunk} comes after --end-chunk {end_chunk}")
    try:
        yield
    except NotFound as error:
        if "start_chunk" not in error.message:
            raise
        raise WrongUsage(f"--{error.message.replace('_', '-', 1)}", error.hint) from error


@contextmanager
def wrong_source_as_usage() -> Iterator[None]:
    """Report arguments that are not a source as wrong usage."""
    try:
        yield
    except SourceInvalid as error:
        raise WrongUsage(error.message, error.hint) from error


def source_argument(required: bool) -> Decorator:
    return click.argument(
        "paths",
        nargs=-1,
        required=required,
        metavar="SOURCE...",
        callback=_refuse_standard_input,
        shell_complete=complete_file,
    )


cache_argument: Decorator = click.argument("cache", shell_complete=complete_folder)
network_option: Decorator = option(
    "--allow-network",
    is_flag=True,
    rare=True,
    group="Source",
    help="Contact a remote source or model that is recorded in the cache.",
)


def decorated(command: Command, *decorators: Decorator) -> Command:
    """Add decorators to a command in the order in which help lists them."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
