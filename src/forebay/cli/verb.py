"""Verbs and groups of verbs: their help, what they return, and the command or option that was probably meant."""

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from typing import Any

import click

from forebay.cli.options import GROUPS, Option, WrongUsage
from forebay.cli.output import JSON, QUIET, STDOUT, Finding, is_json, show_result
from forebay.errors import LibraryMissing, closest

HELP_WIDTH = 96
FEW_OPTIONS = 10  # of which help shows all
HELP_ALL = "forebay.help-all"


class Verb(click.Command):
    """A command whose result is shown: it returns a record, a list of records, or a `Finding`."""

    def __init__(self, *names: Any, **others: Any) -> None:
        super().__init__(*names, **others)
        self.params += [
            _flag("--json", key=JSON, help="Print one JSON document: the result, or the error."),
            _flag("-q", "--quiet", key=QUIET, help="Print errors only."),
            Option(["--help-all"], is_flag=True, expose_value=False, is_eager=True, callback=_show_all, group="Output",
                   help="Show all options.", hidden=not self.rare_options()),
        ]  # fmt: skip

    def rare_options(self) -> list[click.Parameter]:
        """The options that only `--help-all` shows."""
        shown = [param for param in self.params if isinstance(param, click.Option) and not param.hidden]
        rare: list[click.Parameter] = [one for one in shown if isinstance(one, Option) and one.rare]
        return rare if len(shown) > FEW_OPTIONS and len(rare) > 2 else []

    def invoke(self, ctx: click.Context) -> None:
        # What a library prints, such as Ray when a node dies, must not be in the document.
        ctx.meta[STDOUT] = sys.stdout
        with redirect_stdout(sys.stderr) if is_json() else nullcontext():
            result = super().invoke(ctx)
        show_result(result)
        ctx.exit(int(isinstance(result, Finding)))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rare = [] if ctx.meta.get(HELP_ALL) else self.rare_options()
        lines: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None and param not in rare:
                group = param.group if isinstance(param, Option) else "Options"
                lines["Output" if "--help" in param.opts else group].append(record)
        for group, records in lines.items():
            if records:
                with formatter.section(GROUPS[group]):
                    formatter.write_dl(records)
        if rare:
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} --help-all` shows {len(rare)} more options.")


def verb(name: str | None = None, **others: Any) -> Callable[[Callable[..., Any]], Verb]:
    """Decorate a function as the command of a verb."""
    return click.command(name, cls=Verb, **others)


def _flag(*flags: str, key: str, help: str) -> Option:
    """A flag of every verb, kept in the context."""

    def keep(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        ctx.meta[key] = value

    return Option(flags, is_flag=True, expose_value=False, is_eager=True, callback=keep, help=help, group="Output")


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        click.echo(ctx.get_help())
        ctx.exit()


class Verbs(click.Group):
    """A group that imports a command when it is used, and suggests the command that was probably meant."""

    command_class = Verb
    homes: dict[str, str] = {}  # noqa: RUF012 — name -> module:attribute of a command, or of a function that makes one
    sections: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 — heading -> commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(dict.fromkeys([*self.homes, *self.commands]))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.commands and name in self.homes:
            module, _, attribute = self.homes[name].partition(":")
            loaded = getattr(import_module(module), attribute)
            self.add_command(loaded if isinstance(loaded, click.Command) else loaded(), name)
        return self.commands.get(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the whole one-line summary of every command, which click would shorten."""
        for heading, names in (self.sections or {"Commands": tuple(self.list_commands(ctx))}).items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<8}", self._summary(ctx, name)) for name in names])

    def _summary(self, ctx: click.Context, name: str) -> str:
        try:
            command = self.get_command(ctx, name)
        except LibraryMissing as error:
            return f"(not installed: pip install 'forebay[{error.facts['extra']}]')"
        except Exception as error:  # a plug-in may raise anything while it is imported; the other commands still work
            return f"(cannot be imported: {type(error).__name__}: {error})"
        return command.get_short_help_str(limit=2 * HELP_WIDTH) if command is not None else ""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args[0] in known or ctx.resilient_parsing or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        raise WrongUsage(f"no command '{args[0]}' (known: {', '.join(known)})", meant_command(args[0], known))


# Verbs and options of other tools, and ours for them; or a hint where there is no such verb.
COMMANDS = {
    "rm": "delete the folder of a cache to remove it; `forebay drop CACHE LAYER` removes a layer",
    "ls": "see `forebay status CACHE`, or `forebay tier list` for a tier",
    "help": "`forebay VERB --help` shows the help of a verb",
    "train": "caches are read from Python: from forebay.torch import Loader",
    "cat": "peek", "head": "peek", "check": "verify", "validate": "verify", "fsck": "verify", "fix": "repair",
    "grow": "update", "append": "update", "add": "update", "refresh": "update", "gaps": "status", "progress": "status",
    "describe": "info", "serve": "view", "open": "view", "cp": "copy", "export": "copy", "rekey": "copy", "gc": "clean",
    "prune": "clean", "create": "build", "make": "build", "tokenize": "build", "pack": "build", "run": "build",
    "resume": "build", "plan": "estimate", "warm": "tier", "fetch": "tier", "cache": "tier",
}  # fmt: skip
COMMANDS |= dict.fromkeys(("delete", "remove", "destroy"), COMMANDS["rm"])
COMMANDS |= dict.fromkeys(("list", "show"), COMMANDS["ls"])
OPTIONS = {
    "--output": "--into", "--out": "--into", "--dest": "--into", "--cache": "--into", "--jobs": "--workers",
    "--threads": "--workers", "--num-workers": "--workers", "--procs": "--workers", "--max-length": "--sequence-length",
    "--block-size": "--sequence-length", "--context": "--sequence-length", "--ctx": "--sequence-length",
    "--chunk-rows": "--chunk-bytes", "--chunk-bytes": "--chunk-rows",
    "--chunk-size": "--chunk-rows", "--shard-size": "--chunk-rows", "--long-documents": "--long", "--deep": "--full",
    "--field": "--text", "--column": "--text", "--vocab": "--tokenizer", "--model": "--tokenizer",
    "--config": "--subset", "--dedup": "--deduplicate", "--check-source": "--allow-network", "--limit": "--rows",
    "--resolution": "--size", "--compression": "--codec", "--compress": "--codec", "--memory": "--memory-limit",
    "--skip-errors": "--max-failures", "--dry": "--dry-run", "--silent": "--quiet", "--reverse": "--mode",
    "--parallel-workers": "--workers", "--compression-level": "--level",
    "--resume": "leave it out: a build always resumes",
}  # fmt: skip


def meant_command(word: str, known: Iterable[str]) -> str:
    """The hint for a command that does not exist."""
    names = list(known)
    near = COMMANDS.get(word.lower(), "") or closest(word, names) or ""
    return f"did you mean '{near}'?" if near in names else near if " " in near else ""


def meant_option(typed: str, known: Iterable[str]) -> str:
    """The probable option for another tool's word, a typo or an abbreviation; or a hint; or "".

    >>> meant_option("--seqlen", ["--sequence-length", "--separator"]), meant_option("--out", ["--into"])
    ('--sequence-length', '--into')
    """
    names = sorted(name for name in known if name.startswith("--"))
    ours = OPTIONS.get(typed, "")
    if ours in names or " " in ours:
        return ours
    word = typed.strip("-")
    near = closest(word, [name.strip("-") for name in names])
    if near is not None:
        return f"--{near}"
    short = [name for name in names if len(word) > 2 and name[2:3] == word[:1] and _abbreviates(word, name)]
    return min(short, key=len, default="")


def _abbreviates(word: str, name: str) -> bool:
    """True if a name contains the letters of a word in order."""
    letters = iter(name)
    return all(letter in letters for letter in word.replace("-", ""))
