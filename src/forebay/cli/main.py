"""The group of all verbs. Only here errors become two lines, a JSON document and an exit code.

0  fine
1  failure, or damage found
2  wrong usage
130  stopped by Ctrl-C or SIGTERM
"""

import errno
import io
import logging
import os
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import click

import forebay
from forebay.cli.failures import FAILURE, CommandFailure, failure_of, usage_failure
from forebay.cli.output import say, say_error, show_error, wanted_width
from forebay.cli.verb import HELP_WIDTH, Verbs
from forebay.errors import ForebayError
from forebay.preview.words import harmless, printable

_TYPED = "forebay.typed"
SECTIONS = {
    "Start": {
        "demo": "demo:demo",
        "estimate": "build_verbs:estimate",
        "build": "build_verbs:build",
        "view": "look_verbs:view",
    },
    "Look": {"status": "look_verbs:status", "info": "look_verbs:info", "peek": "look_verbs:peek"},
    "Keep right": {
        "verify": "keep_verbs:verify",
        "repair": "keep_verbs:repair",
        "update": "keep_verbs:update",
        "copy": "keep_verbs:copy",
        "clean": "keep_verbs:clean",
        "drop": "keep_verbs:drop",
    },
    "Move": {"import": "keep_verbs:import_pt_cache"},
    "Machine": {"tier": "machine_verbs:tier", "doctor": "machine_verbs:doctor"},
}


class Forebay(Verbs):
    """The group of all verbs, which turns errors into messages and exit codes."""

    homes = {name: f"forebay.cli.{home}" for homes in SECTIONS.values() for name, home in homes.items()}  # noqa: RUF012
    sections = {heading: tuple(homes) for heading, homes in SECTIONS.items()}  # noqa: RUF012

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
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:  # the top of the command line: every error gets its lines
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader closed the pipe: click handles it
            raise failure_of(error, ctx.meta[_TYPED]) from error


def _shown(error: click.ClickException, is_json: bool) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()  # the help itself
        return error.exit_code
    failure = error if isinstance(error, CommandFailure) else usage_failure(error)
    failure.show()
    if is_json:
        with suppress(ForebayError):  # standard output cannot be written, which is already reported
            show_error(failure.document())
    return failure.exit_code


@click.group(
    cls=Forebay,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": HELP_WIDTH},
    epilog="`forebay VERB --help` shows the options of a verb; every verb takes --json and -q.\n\n"
    "Exit codes: 0 fine, 1 failure or damage found, 2 wrong usage, 130 stopped by Ctrl-C or SIGTERM.\n\n"
    'TAB completion: eval "$(_FOREBAY_COMPLETE=bash_source forebay)", or zsh_source, or fish_source.',
)
@click.version_option(forebay.__version__, "-V", "--version", prog_name="forebay")
def cli() -> None:
    """Preprocess training data once into a verified cache.

    Example: forebay build tokens 'data/*.jsonl' --into caches/edu
    """


def main() -> NoReturn:
    # Also if the shell ignores Ctrl-C for this process, as for background jobs of a script, so that a build always
    # stops cleanly.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    open_closed_streams()
    escape_warnings()
    show_notes()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old terminal must not make a command fail
    try:
        cli.main(prog_name="forebay", terminal_width=_help_width())
    except OSError as error:  # while printing help
        say_error(f"cannot write help to standard output: {error.strerror or error}", "redirect it")
        sys.exit(FAILURE)


def open_closed_streams() -> None:
    """Open /dev/null for standard streams that are closed (`>&-`).

    Otherwise the next file that is opened, for example a chunk, would become standard output. Writing a result to a
    closed standard output fails, as it does on a full disk.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    sys.stdout = sys.stdout or _ClosedStream()
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 — open until the process ends


class _ClosedStream(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def escape_warnings() -> None:
    """Escape control characters in warnings, which may quote names from the data."""
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *words, **others: harmless(plain(*words, **others))


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"note: {printable(record.getMessage())}")


def show_notes() -> None:
    """Print what the library logs, such as a service that does not answer."""
    log = logging.getLogger("forebay")
    log.addHandler(_Notes())
    log.propagate = False


def _help_width() -> int:
    """The width of help: that of the terminal, or of COLUMNS, if it is narrower than `HELP_WIDTH`."""
    wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else wanted_width() or HELP_WIDTH
    return min(HELP_WIDTH, wide)


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
