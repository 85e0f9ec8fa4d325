"""`forebay demo`: the whole thing on data every machine has."""

import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import click
import msgspec
from rich.text import Text

from forebay import api
from forebay.cache.records import Gaps, VerifyReport
from forebay.cli.options import complete_folder, json_option
from forebay.cli.show import show
from forebay.columns import Ragged
from forebay.errors import ForebayError
from forebay.format import layout
from forebay.preview.progress import console_for
from forebay.preview.row_records import DemoReport, DemoStep
from forebay.preview.words import command_line
from forebay.read.cache import open_cache

# As a careless export leaves it: to be counted, named with its line, and survived.
BROKEN_LINE = '{"text": "a line that was cut o\n'


def write_library(path: str, names: str) -> str:
    """A broken line, and one for every module below the names passed, in the order of their paths."""
    library = sysconfig.get_path("stdlib")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(BROKEN_LINE)
        for module in sorted(_modules(library, names)):
            with open(os.path.join(library, module), encoding="utf-8", errors="replace") as source:
                file.write(json.dumps({"module": module, "text": source.read()}) + "\n")
    return path


def _modules(library: str, names: str) -> set[str]:
    """Every module that is not an empty file, relative to the library."""
    found = set()
    for top in glob.iglob(os.path.join(library, names)):
        below = glob.iglob(os.path.join(top, "**", "*.py"), recursive=True) if os.path.isdir(top) else [top]
        found |= {path for path in below if path.endswith(".py") and os.path.getsize(path)}
    return {os.path.relpath(path, library) for path in found}


LAYER = "tokens"
POLL_SECONDS = 0.01
STOPPED = 130


class Rehearsal:
    """One performance of the demo on one source; it fails where a step does not do what it should."""

    def __init__(self, root: str, source: Sequence[str], as_json: bool) -> None:
        self._root = root
        self._source = list(source)
        self._stream = sys.stderr if as_json else sys.stdout
        self._console = console_for(self._stream)
        self._steps: list[DemoStep] = []

    def perform(self) -> DemoReport:
        started = time.monotonic()
        build = ["build", *self._source, "--into", self._root]
        self._say(f"This demo works in {self._root}; everything is real.")
        self._act("What will it take?", ["estimate", *self._source, "--into", self._root])
        self._interrupt("Build it, and pull the plug part-way (Ctrl-C).", build)
        self._act("How far did it get, and which documents could not be read?", ["status", self._root])
        self._act("The same command resumes where it stopped.", build)
        self._act("Check every byte.", ["verify", self._root])
        self._damage_and_repair()
        rows = [word for row in self._telling_rows() for word in ("--row", str(row))]
        self._act("What is in it?", ["peek", self._root, *rows])
        self._act("What is it?", ["info", self._root])
        return DemoReport(root=self._root, steps=tuple(self._steps), seconds=time.monotonic() - started)

    def _damage_and_repair(self) -> None:
        path, position, before = self._flip_a_bit()
        self._act("Will it be found?", ["verify", self._root], expected=1)
        self._check(_is_found(self._bad(), os.path.basename(path), position), "verify did not name the flipped byte")
        self._act("Make that chunk again from the source.", ["repair", self._root])
        self._check(_digest(path) == before, "the repaired chunk is not byte for byte what it was")
        self._act("Check again.", ["verify", self._root])

    def _act(self, heading: str, words: list[str], expected: int = 0) -> None:
        self._run(heading, words, expected, lambda process: None)

    def _interrupt(self, heading: str, words: list[str]) -> None:
        self._run(heading, words, STOPPED, self._stop_part_way)
        gaps = self._gaps()
        self._check(gaps is not None and 0 < gaps.present < gaps.planned, "the build was not stopped part-way")

    def _run(
        self, heading: str, words: list[str], expected: int, meanwhile: Callable[[subprocess.Popen[bytes]], None]
    ) -> None:
        self._say(heading)
        self._console.print(Text(f"$ {command_line(*words)}", style="bold cyan"), soft_wrap=True)
        started = time.monotonic()
        with subprocess.Popen(_command(words), stdout=self._stream) as process:
            meanwhile(process)
            code = process.wait()
        seconds = time.monotonic() - started
        self._steps.append(DemoStep(command=command_line(*words), exit_code=code, seconds=seconds))
        self._check(code == expected, f"`forebay {words[0]}` ended with exit code {code} instead of {expected}")

    def _stop_part_way(self, process: subprocess.Popen[bytes]) -> None:
        """Send what Ctrl-C sends once about a third is there, and the first chunk, whose bad line the status shows."""
        while process.poll() is None:
            gaps = self._gaps()
            if gaps is not None and gaps.present > gaps.planned // 3 and 0 not in gaps.missing:
                process.send_signal(signal.SIGINT)
                return
            time.sleep(POLL_SECONDS)

    def _gaps(self) -> Gaps | None:
        """How far the build is; None while there is no plan."""
        with suppress(ForebayError):
            found = api.gaps(self._root, layer=LAYER)[0]
            return found if found.planned else None
        return None

    def _telling_rows(self) -> list[int]:
        """The row with the most pieces and the one with the most padding, of the first chunk."""
        cache = open_cache(self._root)
        pieces = next(cache.chunks(["seq_lens"]))["seq_lens"]
        assert isinstance(pieces, Ragged)
        used = [int(pieces[row].sum()) for row in range(len(pieces))]
        return [int(pieces.lengths.argmax()), used.index(min(used))]

    def _flip_a_bit(self) -> tuple[str, int, str]:
        gaps = self._gaps()
        assert gaps is not None
        path = os.path.join(self._root, layout.chunk(LAYER, gaps.planned // 2))
        before, position = _digest(path), os.path.getsize(path) // 2
        with open(path, "r+b") as file:
            file.seek(position)
            flipped = file.read(1)[0] ^ 1
            file.seek(position)
            file.write(bytes([flipped]))
        self._say(f"Now one bit of {path} is flipped, in byte {position:,}.")
        return path, position, before

    def _bad(self) -> VerifyReport:
        found = subprocess.run(_command(["verify", self._root, "--json"]), stdout=subprocess.PIPE, check=False)
        return msgspec.json.decode(found.stdout, type=VerifyReport)

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise ForebayError(f"the demo failed: {problem}; what it made is in '{self._root}'")

    def _say(self, line: str) -> None:
        self._console.print()
        self._console.print(Text(line, style="bold"), soft_wrap=True)


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "forebay.cli", *words]


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_found(report: VerifyReport, name: str, position: int) -> bool:
    """Whether the one bad thing is the chunk, in a range that holds the byte."""
    return [bad.key.endswith(name) and bad.start <= position < bad.stop for bad in report.bad] == [True]


# Modules and packages from `abc` to `html`: some 5 MB of Python on every machine, without site-packages.
NAMES = "[a-h]*"


@click.command()
@click.option(
    "--into",
    metavar="DIR",
    shell_complete=complete_folder,
    help="Work in this folder, new or empty.  [default: a temporary one]",
)
@click.option("--keep", is_flag=True, help="Leave the temporary folder; the cache's place is printed.")
@click.option("--names", default=NAMES, hidden=True, help="Which names of the standard library to take.")
@click.option("--chunk-size", default=150, hidden=True)
@json_option
def demo(into: str | None, keep: bool, names: str, chunk_size: int, as_json: bool) -> None:
    """Do a real job end to end: Python's standard library as packed tokens.

    Estimate, build, interrupt, resume, verify, damage, repair, look: every command is printed as you would type it for
    data of your own. Exit code 1 when a step does not do what it should; what was made is left there then.

    Example: forebay demo --into demo
    """
    if into is not None and os.path.exists(into) and os.listdir(into):
        raise click.BadParameter(f"'{into}' is not empty; name a new folder", param_hint="'--into'")
    folder = into or tempfile.mkdtemp(prefix="forebay-demo-")
    library = write_library(os.path.join(folder, "library.jsonl"), names)
    source = ["tokens", library, "--chunk-size", str(chunk_size), "--level", "max", "--deduplicate"]
    report = Rehearsal(os.path.join(folder, "cache"), source, as_json).perform()
    if into is None and not keep:
        shutil.rmtree(folder)
        report = msgspec.structs.replace(report, kept=False)
    show(report, as_json)
