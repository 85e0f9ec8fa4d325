"""The group of all verbs. Only here errors become a line, a JSON document and an exit code.

0  fine
1  failure, or damage found
2  wrong usage
130  stopped by Ctrl-C or SIGTERM
"""

import errno
import io
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import MappingProxyType
from typing import Any, NoReturn

import click
import msgspec
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete, add_completion_class

import forebay
from forebay.cli.legacy import naming_places
from forebay.cli.verb import HELP_WIDTH, Verbs, error_document, say, say_error, show_error, wanted_width
from forebay.errors import BuildStopped, ForebayError, closest
from forebay.preview.words import clear_first_sign, harmless, printable

_TYPED = "forebay.typed"
OF_EVERY_VERB = ("--json", "-q", "--quiet")
HOMES = {
    "estimate": "build_verbs:estimate",
    "build": "build_verbs:build",
    "import": "maintain_verbs:import_pt_cache",
    "status": "inspect_verbs:status",
    "gaps": "inspect_verbs:gaps",
    "info": "inspect_verbs:info",
    "peek": "inspect_verbs:peek",
    "view": "inspect_verbs:view",
    "verify": "inspect_verbs:verify",
    "repair": "maintain_verbs:repair",
    "refresh": "maintain_verbs:refresh",
    "grow": "maintain_verbs:grow",
    "copy": "maintain_verbs:copy",
    "clean": "maintain_verbs:clean",
    "drop": "maintain_verbs:drop",
    "rekey": "maintain_verbs:rekey",
    "warm": "tier_verbs:warm",
    "tier": "tier_verbs:tier",
    "doctor": "inspect_verbs:doctor",
    "demo": "demo:demo",
}  # in the order of use


class Forebay(Verbs):
    """The group of all verbs, which turns errors into messages and exit codes."""

    homes = {name: f"forebay.cli.{place}" for name, place in HOMES.items()}  # noqa: RUF012

    def main(self, args: Sequence[str] | None = None, **others: Any) -> NoReturn:  # type: ignore[override]
        words = list(sys.argv[1:] if args is None else args)
        others.pop("standalone_mode", None)
        is_json = "--json" in words
        try:
            code = super().main(words, standalone_mode=False, **others)
        except click.ClickException as error:
            code = _shown(error, is_json)
        except click.Abort:  # while the words were parsed
            code = _shown(failure_of(KeyboardInterrupt(), shlex.join(["forebay", *words])), is_json)
        sys.exit(code or 0)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = shlex.join(["forebay", *args])
        with _escaped_usage():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _escaped_usage():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader closed the pipe: click handles it
            raise failure_of(error, ctx.meta[_TYPED]) from error


def _shown(error: click.ClickException, is_json: bool) -> int:
    clear_first_sign()
    error.show()
    if is_json:
        with suppress(ForebayError):  # standard output cannot be written: that was said
            show_error(error.document() if isinstance(error, CommandFailure) else usage_document(error))
    return error.exit_code


@click.group(
    cls=Forebay,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": HELP_WIDTH},
    epilog="Every verb takes --json and -q. `forebay help VERB` shows its options; `forebay doctor` checks the "
    "installation.\n\n"
    "Exit codes: 0 fine, 1 failure or damage found, 2 wrong usage, 130 stopped by Ctrl-C or SIGTERM.\n\n"
    'TAB completion: eval "$(_FOREBAY_COMPLETE=bash_source forebay)", or zsh_source, or fish_source.',
)
@click.version_option(forebay.__version__, "-V", "--version", prog_name="forebay")
@naming_places
def cli() -> None:
    """Preprocess training data once into a verified cache.

    Example: forebay build tokens 'data/*.jsonl' --into caches/edu
    """


def _complete_command(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of commands, below those that were typed."""
    inner: click.Command = ctx.find_root().command
    for word in ctx.params.get(str(param.name)) or ():
        found = inner.get_command(ctx, word) if isinstance(inner, click.Group) else None
        if found is None:
            return []
        inner = found
    names = inner.list_commands(ctx) if isinstance(inner, click.Group) else []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@cli.command("help", cls=click.Command, short_help="Show the help of a command.")
@click.argument("words", nargs=-1, metavar="[COMMAND]...", shell_complete=_complete_command)
@click.pass_context
def help_command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command.

    Example: forebay help build tokens
    """
    inner = ctx.find_root()
    for word in words:
        group = inner.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"'{inner.command_path}' has no commands.", inner)
        name, command, _ = group.resolve_command(inner, [word])
        assert command is not None
        inner = click.Context(command, info_name=name, parent=inner)
    click.echo(inner.get_help())


def _split_value(args: list[str], incomplete: str) -> tuple[list[str], str]:
    """Drop the equals sign that bash makes a word of: click takes it for the value.

    >>> _split_value(["build", "raw", "--codec", "="], "z")
    (['build', 'raw', '--codec'], 'z')
    """
    return (args[:-1] if args[-1:] == ["="] else args), incomplete


def _with_option(items: list[CompletionItem], incomplete: str) -> list[CompletionItem]:
    """Complete the whole word where a shell does not split `--codec=z`."""
    option, equals, _ = incomplete.partition("=")
    if not (equals and option.startswith("--")):
        return items
    return [CompletionItem(f"{option}={item.value}", type=item.type, help=item.help) for item in items]


class _Bash(BashComplete):
    def get_completion_args(self) -> tuple[list[str], str]:
        return _split_value(*super().get_completion_args())

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        return _with_option(super().get_completions(args, incomplete), incomplete)


class _Zsh(ZshComplete):
    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        return _with_option(super().get_completions(args, incomplete), incomplete)


class _Fish(FishComplete):
    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        return _with_option(super().get_completions(args, incomplete), incomplete)


for _shell in (_Bash, _Zsh, _Fish):
    add_completion_class(_shell)


def main() -> NoReturn:
    # Also if the shell ignores Ctrl-C for this process, as for background jobs of a script, so that a build always
    # stops cleanly.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    open_closed_streams()
    escape_warnings()
    show_waiting()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old terminal must not make a command fail
    try:
        cli.main(prog_name="forebay", terminal_width=_help_width())
    except OSError as error:  # while printing help
        say_error(f"cannot write help to standard output: {error.strerror or error}; redirect it")
        sys.exit(FAILURE)


def open_closed_streams() -> None:
    """Open /dev/null for standard streams that are closed (`>&-`).

    Otherwise the next file that is opened, for example a chunk, would become standard output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 — open until the process ends
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def escape_warnings() -> None:
    """Escape control characters in warnings, which may quote names from the data."""
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *words, **others: harmless(plain(*words, **others))


class _Waiting(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"forebay: {printable(record.getMessage())}")


def show_waiting() -> None:
    """Print what the library says of services that do not answer."""
    log = logging.getLogger("forebay")
    log.addHandler(_Waiting())
    log.propagate = False


@contextmanager
def _escaped_usage() -> Iterator[None]:
    """Escape control characters in the errors that click prints, and suggest only options that were probably meant."""
    try:
        yield
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            _suggest_option(error)
        vars(error)["message"] = harmless(error.message or "")  # declared final, but click prints nothing else
        raise


def _suggest_option(error: click.NoSuchOption) -> None:
    """Keep the option that was probably meant: click offers others that share few letters."""
    name, ctx = error.option_name, error.ctx
    if ctx is not None and isinstance(ctx.command, Verbs) and name in OF_EVERY_VERB:
        vars(error)["message"] = f"Put '{name}' after the verb and its arguments: forebay status CACHE {name}"
        vars(error)["possibilities"] = []
        return
    near = closest(name.lstrip("-"), [known.lstrip("-") for known in error.possibilities or ()])
    vars(error)["possibilities"] = [known for known in error.possibilities or () if known.lstrip("-") == near]


def _help_width() -> int:
    """The width of help: that of the terminal, or of COLUMNS, if it is narrower than `HELP_WIDTH`."""
    wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else wanted_width() or HELP_WIDTH
    return min(HELP_WIDTH, wide)


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


FAILURE, USAGE, STOPPED = 1, 2, 130
NOTHING: Mapping[str, Any] = MappingProxyType({})
REPORT = (
    "this is a bug in forebay; a report needs the lines above, the command, and what `forebay doctor` prints (how to: "
    'CONTRIBUTING.md of the source, "Report a problem")'
)
_COMMAND = re.compile(r"`(forebay [^`…]*)`")


class CommandFailure(click.ClickException):
    """The end of a command that could not do what it should."""

    def __init__(
        self, message: str, kind: str, code: int = FAILURE, command: str = "", details: Mapping[str, Any] = NOTHING
    ) -> None:
        super().__init__(message)
        vars(self)["exit_code"] = code  # declared a class variable, but click reads it from the instance
        self.kind, self.command, self.details = kind, command, details

    def document(self) -> dict[str, Any]:
        return error_document(self.kind, self.message, self.command, self.details)

    def show(self, file: Any = None) -> None:
        say_error(self.message)
        if self.exit_code == STOPPED:
            say(f"  {self.command}")


def failure_of(error: BaseException, typed: str) -> CommandFailure:
    """The failure that an exception means; `typed` is the command as the user typed it."""
    if isinstance(error, KeyboardInterrupt):
        return _stopped(error, typed)
    kind, message = type(error).__name__, str(error)
    if isinstance(error, ForebayError):
        found = _COMMAND.search(message)
        return CommandFailure(message, kind, command=found[1] if found else "", details=_details(error))
    if isinstance(error, OSError):
        details = {"path": error.filename} if isinstance(error.filename, str) else {}
        return CommandFailure(_message_of(error), kind, details=details)
    known = _known_cause(error)
    if known is None:
        say(traceback.format_exc().rstrip())
    return CommandFailure(known or REPORT, kind)


def usage_document(error: click.ClickException) -> dict[str, Any]:
    """Wrong usage in JSON, with the command that shows the help."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    path = ctx.command_path if ctx is not None else "forebay"
    return error_document("UsageError", harmless(error.format_message()), f"{path} --help")


def _details(error: ForebayError) -> dict[str, Any]:
    """The attributes of an error that can be written as JSON."""
    found: Mapping[str, Any] = vars(error)
    return {name: value for name, value in found.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _stopped(stop: KeyboardInterrupt, typed: str) -> CommandFailure:
    if not isinstance(stop, BuildStopped):
        return CommandFailure("stopped; run the same command to start again", "Interrupted", STOPPED, command=typed)
    found = import_module("forebay.api").gaps(stop.root)
    counts = ", ".join(f"{gaps.layer} {gaps.present:,} of {gaps.planned:,}" for gaps in found)
    message = f"stopped: all finished chunks of '{stop.root}' are published ({counts}); run the same command to resume"
    return CommandFailure(message, "BuildStopped", STOPPED, command=typed, details={"root": stop.root})


def _known_cause(error: BaseException) -> str | None:
    """The message for an error that is not a bug of forebay: memory, a library, data that is nested too deeply."""
    message = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError):
        return (
            f"not enough memory{f' ({message})' if message else ''}; use fewer --workers, smaller chunks, or a machine "
            "with more memory"
        )
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):  # torch's, which is not imported here
        return f"the device does not have enough memory: {message}; use a smaller --batch-size or another --device"
    if isinstance(error, RecursionError):
        return f"the data is nested too deeply ({message}); check the file or the cache that was named"
    if isinstance(error, ImportError) and not (error.name or "").startswith("forebay"):
        return f"a library is missing, damaged or too old: {message}; see what is installed with `forebay doctor`"
    return None


def _message_of(error: OSError) -> str:
    where = f"'{error.filename}': " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full; published chunks stay valid: free some space and run the same command again"
    if error.errno == errno.EROFS:
        return f"{where}{error.strerror}; mount it for writing, or name another folder"
    return f"{where}{error.strerror or error}; check the path, its permissions and the disk"
