"""The group of all verbs. Only here errors become a line on stderr and an exit code.

0  fine
1  failure, or damage found
2  wrong usage
130  stopped by Ctrl-C or SIGTERM
"""

import errno
import io
import os
import shlex
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click

import forebay
from forebay import api
from forebay.cli.build_verbs import build, estimate
from forebay.cli.demo import demo
from forebay.cli.grow_verbs import grow, refresh
from forebay.cli.inspect_verbs import gaps, info, peek, status, verify
from forebay.cli.legacy import naming_places
from forebay.cli.maintain_verbs import clean, copy, import_pt_cache, rekey, repair
from forebay.cli.show import say, say_error
from forebay.cli.tier_verbs import tier, warm
from forebay.errors import BuildStopped, ForebayError
from forebay.preview.words import harmless

FAILURE = 1
STOPPED = 130
HELP_WIDTH = 96
_TYPED = "forebay.typed"


class Forebay(click.Group):
    """The group of all verbs, which turns errors into messages and exit codes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = shlex.join(["forebay", *args])
        with _escaped_usage():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _escaped_usage():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise  # wrong usage: click prints it
        except KeyboardInterrupt as stop:
            _say_stopped(stop, ctx.meta[_TYPED])
            ctx.exit(STOPPED)
        except ForebayError as error:
            say_error(str(error))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader closed the pipe: click handles it
            say_error(_message_of(error))
        except Exception as error:
            known = _known_cause(error)
            if known is None:
                say(traceback.format_exc().rstrip())
            say_error(known or "this is a bug in forebay; please report it with the lines above")
        ctx.exit(FAILURE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of use


@click.group(
    cls=Forebay,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": HELP_WIDTH},
    epilog="Exit codes: 0 fine, 1 failure or damage found, 2 wrong usage, 130 stopped by Ctrl-C or SIGTERM.\n\n"
    'TAB completion: eval "$(_FOREBAY_COMPLETE=bash_source forebay)", or zsh_source, or fish_source.',
)
@click.version_option(forebay.__version__, prog_name="forebay")
@naming_places
def cli() -> None:
    """Preprocess training data once into a verified cache.

    Example: forebay build tokens 'data/*.jsonl' --into caches/edu
    """


for verb in (
    estimate, build, import_pt_cache, status, gaps, verify, repair, refresh, grow, info, peek, copy, clean, rekey, warm,
    tier, demo,
):  # fmt: skip
    cli.add_command(verb)


def _keep_summaries(command: click.Command) -> None:
    """Set full one-line summaries, because click would shorten them."""
    command.short_help = command.get_short_help_str(limit=2 * HELP_WIDTH)
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        _keep_summaries(each)


_keep_summaries(cli)


def main() -> NoReturn:
    # Also if the shell ignores Ctrl-C for this process, as for background jobs of a script, so that a build always
    # stops cleanly.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    open_closed_streams()
    escape_warnings()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old terminal must not make a command fail
    try:
        cli(prog_name="forebay", terminal_width=_help_width())
    except OSError as error:  # while printing help
        say_error(f"cannot write help to standard output: {error.strerror or error}; redirect it")
        sys.exit(FAILURE)
    raise AssertionError("click ends the process")


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


@contextmanager
def _escaped_usage() -> Iterator[None]:
    """Escape control characters in the errors that click prints."""
    try:
        yield
    except click.ClickException as error:
        vars(error)["message"] = harmless(error.message or "")  # declared final, but click prints nothing else
        raise


def _known_cause(error: Exception) -> str | None:
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
        return f"a library is missing, damaged or too old: {message}; run: pip install -U 'forebay[…]'"
    return None


def _help_width() -> int:
    """The width of help: that of the terminal if it is narrower than `HELP_WIDTH`."""
    return min(HELP_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else HELP_WIDTH


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _say_stopped(stop: KeyboardInterrupt, typed: str) -> None:
    if isinstance(stop, BuildStopped):
        counts = ", ".join(f"{gaps.layer} {gaps.present:,} of {gaps.planned:,}" for gaps in api.gaps(stop.root))
        say_error(f"stopped: all finished chunks of '{stop.root}' are published ({counts}); resume with:")
    else:
        say_error("stopped before the end; nothing is lost, run again with:")
    say(f"  {typed}")


def _message_of(error: OSError) -> str:
    where = f"'{error.filename}': " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full; published chunks stay valid: free some space and run the same command again"
    return f"{where}{error.strerror or error}; check the path, its permissions and the disk"


if __name__ == "__main__":
    main()
