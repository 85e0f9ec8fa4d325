"""What every verb has: options in groups, `--json`, `--quiet`, progress on standard error, and a result that is shown
when it returns.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from forebay.cache.records import OnProgress
from forebay.errors import LibraryMissing, closest
from forebay.preview.progress import shown_progress as drawn_progress

GROUPS = {
    "Source": "Source options",
    "Recipe": "Recipe options (they define the cache: another value needs a new cache)",
    "Teachers": "Teachers (each adds a layer)",
    "Layer": "Layer options (they define the layers: another value needs --replace)",
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
        import_module("forebay.cli.show").show_result(found)
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
        import_module("forebay.cli.show").show_result(found)


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
