"""The entry point. Here, and nowhere else, an error becomes a line on stderr and an exit code.

0  fine
1  failure, or damage found
2  wrong usage
130  stopped by Ctrl-C or SIGTERM
"""

import errno
import io
import shlex
import shutil
import signal
import sys
import traceback
from typing import Any, NoReturn

import click

import forebay
from forebay import api
from forebay.cli.build import build
from forebay.cli.clean import clean
from forebay.cli.copy import copy
from forebay.cli.demo import demo
from forebay.cli.estimate import estimate
from forebay.cli.gaps import gaps
from forebay.cli.grow import grow
from forebay.cli.import_old import import_old
from forebay.cli.info import info
from forebay.cli.peek import peek
from forebay.cli.refresh import refresh
from forebay.cli.repair import repair
from forebay.cli.show import say, say_error
from forebay.cli.status import status
from forebay.cli.tier import tier
from forebay.cli.verify import verify
from forebay.cli.warm import warm
from forebay.errors import BuildStopped, ForebayError

FAILURE = 1
STOPPED = 130
HELP_WIDTH = 96
_TYPED = "forebay.typed"


class Forebay(click.Group):
    """The group of all verbs, which turns errors into lines and exit codes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_TYPED] = shlex.join(["forebay", *args])
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
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
        except Exception:
            say(traceback.format_exc().rstrip())
            say_error("this is a bug in forebay; please report it with the lines above")
        ctx.exit(FAILURE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of a cache's life


@click.group(
    cls=Forebay,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": HELP_WIDTH},
    epilog="Exit codes: 0 fine, 1 failure or damage found, 2 wrong usage, 130 stopped by Ctrl-C or SIGTERM.",
)
@click.version_option(forebay.__version__, prog_name="forebay")
def cli() -> None:
    """Turn raw training data once into a verified cache.

    Example: forebay build tokens 'data/*.jsonl' --into caches/edu
    """


for verb in (
    estimate, build, import_old, status, gaps, verify, repair, refresh, grow, info, peek, copy, clean, warm, tier, demo,
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a picture on an old terminal is no reason to fail
    cli(prog_name="forebay", terminal_width=_help_width())
    raise AssertionError("click ends the process")


def _help_width() -> int:
    """What a terminal has, where it is narrower than help is made for."""
    return min(HELP_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else HELP_WIDTH


def _stop(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _say_stopped(stop: KeyboardInterrupt, typed: str) -> None:
    if isinstance(stop, BuildStopped):
        counts = ", ".join(f"{gaps.layer} {gaps.present:,} of {gaps.planned:,}" for gaps in api.gaps(stop.root))
        say_error(f"stopped: what '{stop.root}' has is published and safe (chunks: {counts}); go on with:")
    else:
        say_error("stopped before it was done; nothing is lost, start it again with:")
    say(f"  {typed}")


def _words_of(error: OSError) -> str:
    where = f"'{error.filename}': " if error.filename else ""
    return f"{where}{error.strerror or error}; check the path, its permissions and the disk"


if __name__ == "__main__":
    main()
