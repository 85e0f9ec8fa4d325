"""The entry point. Here, and nowhere else, an error becomes a line on stderr and an exit code.

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
    """The group of all verbs, which turns errors into lines and exit codes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = shlex.join(["forebay", *args])
        with _escaped_usage():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _escaped_usage():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise  # wrong usage, which click words itself
        except KeyboardInterrupt as stop:
            _say_stopped(stop, ctx.meta[_TYPED])
            ctx.exit(STOPPED)
        except ForebayError as error:
            say_error(str(error))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read our output has enough, which click knows how to take
            say_error(_words_of(error))
        except Exception as error:
            known = _known_cause(error)
            if known is None:
                say(traceback.format_exc().rstrip())
            say_error(known or "this is a bug in forebay; please report it with the lines above")
        ctx.exit(FAILURE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of a cache's life


@click.group(
    cls=Forebay,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": HELP_WIDTH},
    epilog="Exit codes: 0 fine, 1 failure or damage found, 2 wrong usage, 130 stopped by Ctrl-C or SIGTERM.\n\n"
    'TAB completion: eval "$(_FOREBAY_COMPLETE=bash_source forebay)", or zsh_source, or fish_source.',
)
@click.version_option(forebay.__version__, prog_name="forebay")
@naming_places
def cli() -> None:
    """Turn raw training data once into a verified cache.

    Example: forebay build tokens 'data/*.jsonl' --into caches/edu
    """


for verb in (
    estimate, build, import_pt_cache, status, gaps, verify, repair, refresh, grow, info, peek, copy, clean, rekey, warm,
    tier, demo,
):  # fmt: skip
    cli.add_command(verb)


def _keep_summaries(command: click.Command) -> None:
    """Whole, also where a line is too short for one: click cuts those that it makes by itself."""
    command.short_help = command.get_short_help_str(limit=2 * HELP_WIDTH)
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        _keep_summaries(each)


_keep_summaries(cli)


def main() -> NoReturn:
    # Set even where the shell had us ignore Ctrl-C, as it does for a script's background jobs: a build always stops
    # in the one clean way.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    open_closed_streams()
    escape_warnings()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a picture on an old terminal is no reason to fail
    try:
        cli(prog_name="forebay", terminal_width=_help_width())
    except OSError as error:  # of help, which is printed before a verb begins
        say_error(f"help cannot be written to standard output: {error.strerror or error}; send it elsewhere")
        sys.exit(FAILURE)
    raise AssertionError("click ends the process")


def open_closed_streams() -> None:
    """Give a process that was started without a standard stream (`>&-`) one that leads nowhere.

    Without it the next file that is opened, a chunk say, would be standard output for every library that prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 — for as long as the process lives
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def escape_warnings() -> None:
    """A library that warns of a name in the data prints it as it is."""
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *words, **others: harmless(plain(*words, **others))


@contextmanager
def _escaped_usage() -> Iterator[None]:
    """What click says of a wrong word goes to the terminal by itself."""
    try:
        yield
    except click.ClickException as error:
        vars(error)["message"] = harmless(error.message or "")  # click types it as final, and prints nothing else
        raise


def _known_cause(error: Exception) -> str | None:
    """What is the matter, where it is not the fault of forebay: memory, a library, data that is nested too deep."""
    said = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError):
        return (
            f"there is not enough memory{f' ({said})' if said else ''}; use fewer --workers, smaller chunks, or a "
            "machine with more"
        )
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):  # torch's, which is not imported here
        return f"the device has not enough memory: {said}; choose a smaller --batch-size or another --device"
    if isinstance(error, RecursionError):
        return f"something that is read is nested too deep ({said}); look at the file or the cache that was named"
    if isinstance(error, ImportError) and not (error.name or "").startswith("forebay"):
        return (
            f"a library is missing, damaged or too old: {said}; install what forebay needs: pip install -U 'forebay[…]'"
        )
    return None


def _help_width() -> int:
    """What a terminal has, where it is narrower than help is made for."""
    return min(HELP_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else HELP_WIDTH


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _say_stopped(stop: KeyboardInterrupt, typed: str) -> None:
    if isinstance(stop, BuildStopped):
        counts = ", ".join(f"{gaps.layer} {gaps.present:,} of {gaps.planned:,}" for gaps in api.gaps(stop.root))
        say_error(f"stopped: what '{stop.root}' has is published and safe (chunks: {counts}); resume with:")
    else:
        say_error("stopped before it was done; nothing is lost, start it again with:")
    say(f"  {typed}")


def _words_of(error: OSError) -> str:
    where = f"'{error.filename}': " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full; what was published stays valid, make room and run the same command again"
    return f"{where}{error.strerror or error}; check the path, its permissions and the disk"


if __name__ == "__main__":
    main()
