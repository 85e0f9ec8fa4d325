"""`forebay demo`: estimate, build, interrupt, resume, damage and repair, on Python's standard library."""

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
from forebay.cli.verb import complete_folder, is_json, local_only, verb
from forebay.columns import Ragged
from forebay.errors import ForebayError
from forebay.format import layout
from forebay.preview.console import console_for
from forebay.preview.row_records import DemoReport, DemoStep
from forebay.preview.words import command_line
from forebay.read.cache import open_cache

# A truncated line, which the build must report with its line number.
BROKEN_LINE = '{"text": "a line that was cut o\n'


def write_library(path: str, names: str) -> str:
    """Write JSON lines: a broken one, then one for every module that matches `names`, sorted by path."""
    library = sysconfig.get_path("stdlib")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(BROKEN_LINE)
        for module in sorted(_modules(library, names)):
            with open(os.path.join(library, module), encoding="utf-8", errors="replace") as source:
                file.write(json.dumps({"module": module, "text": source.read()}) + "\n")
    return path


def _modules(library: str, names: str) -> set[str]:
    """Every module that is not empty, relative to the library."""
    found = set()
    for top in glob.iglob(os.path.join(library, names)):
        below = glob.iglob(os.path.join(top, "**", "*.py"), recursive=True) if os.path.isdir(top) else [top]
        found |= {path for path in below if path.endswith(".py") and os.path.getsize(path)}
    return {os.path.relpath(path, library) for path in found}


LAYER = "tokens"
POLL_SECONDS = 0.01
STOPPED = 130
TRIES = 5


class DemoRun:
    """One run of the demo; raises `ForebayError` if a step does not do what it should."""

    def __init__(self, root: str, source: Sequence[str], as_json: bool) -> None:
        self._root = root
        self._source = list(source)
        self._stream = sys.stderr if as_json else sys.stdout
        self._console = console_for(self._stream)
        self._steps: list[DemoStep] = []

    def run(self) -> DemoReport:
        started = time.monotonic()
        build = ["build", *self._source, "--into", self._root]
        self._say(f"This demo works in {self._root}; everything is real.")
        self._act("What will it take?", ["estimate", *self._source, "--into", self._root])
        self._interrupt("Build it, and interrupt it part-way (Ctrl-C).", build)
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
        self._act("Rebuild that chunk from the source.", ["repair", self._root])
        self._check(_digest(path) == before, "the repaired chunk differs from the original")
        self._act("Check again.", ["verify", self._root])

    def _act(self, heading: str, words: list[str], expected: int = 0) -> None:
        code = self._run(heading, words, lambda process: None)
        self._check(code == expected, f"`forebay {words[0]}` ended with exit code {code} instead of {expected}")

    def _interrupt(self, heading: str, words: list[str]) -> None:
        """Stop a build part-way; where it was done before the signal came, as on a busy machine, do it all again."""
        for _ in range(TRIES):
            code = self._run(heading, words, self._stop_part_way)
            gaps = self._gaps()
            if code == STOPPED and gaps is not None and 0 < gaps.present < gaps.planned:
                return
            self._check(code in (0, STOPPED), f"`forebay {words[0]}` ended with exit code {code} instead of {STOPPED}")
            heading = "It was done before the signal came. Once more, from the beginning."
            shutil.rmtree(self._root)
            self._steps.pop()
        self._check(False, "the build was not stopped part-way")

    def _run(self, heading: str, words: list[str], meanwhile: Callable[[subprocess.Popen[bytes]], None]) -> int:
        self._say(heading)
        self._console.print(Text(f"$ {command_line(*words)}", style="bold cyan"), soft_wrap=True)
        started = time.monotonic()
        with subprocess.Popen(_command(words), stdout=self._stream) as process:
            meanwhile(process)
            code = process.wait()
        seconds = time.monotonic() - started
        self._steps.append(DemoStep(command=command_line(*words), exit_code=code, seconds=seconds))
        return code

    def _stop_part_way(self, process: subprocess.Popen[bytes]) -> None:
        """Send SIGINT once a third of the chunks is there, and the first one, whose bad line `status` shows."""
        while process.poll() is None:
            gaps = self._gaps()
            if gaps is not None and gaps.present > gaps.planned // 3 and 0 not in gaps.missing:
                process.send_signal(signal.SIGINT)
                return
            time.sleep(POLL_SECONDS)

    def _gaps(self) -> Gaps | None:
        """The progress of the build; None if there is no plan yet."""
        with suppress(ForebayError):
            found = api.gaps(self._root, layer=LAYER)[0]
            return found if found.planned else None
        return None

    def _telling_rows(self) -> list[int]:
        """The row with the most pieces and the row with the most padding in the first chunk."""
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
        self._say(f"Flip one bit in byte {position:,} of {path}.")
        return path, position, before

    def _bad(self) -> VerifyReport:
        found = subprocess.run(_command(["verify", self._root, "--json"]), stdout=subprocess.PIPE, check=False)
        return msgspec.convert(msgspec.json.decode(found.stdout)["result"], VerifyReport)

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise ForebayError(f"the demo failed: {problem}; its files are in '{self._root}'")

    def _say(self, line: str) -> None:
        self._console.print()
        self._console.print(Text(line, style="bold"), soft_wrap=True)


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "forebay.cli", *words]


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_found(report: VerifyReport, name: str, position: int) -> bool:
    """Whether the only problem is in the chunk, in a range that contains the byte."""
    return [bad.key.endswith(name) and bad.start <= position < bad.stop for bad in report.bad] == [True]


# Modules and packages from `abc` to `html`: some 5 MB of Python on every machine, without site-packages.
NAMES = "[a-h]*"


@verb()
@click.option(
    "-o",
    "--into",
    metavar="DIR",
    shell_complete=complete_folder,
    callback=local_only,
    help="Folder to work in, new or empty.  [default: a temporary one]",
)
@click.option("--keep", is_flag=True, help="Keep the temporary folder and print its path.")
@click.option("--names", default=NAMES, hidden=True, help="Modules of the standard library to use.")
@click.option("--chunk-size", default=150, hidden=True)
def demo(into: str | None, keep: bool, names: str, chunk_size: int) -> DemoReport:
    """Run a full demo: Python's standard library as packed tokens.

    Estimates, builds, interrupts, resumes, verifies, damages, repairs and shows a cache. Prints every command as you
    would type it for your own data. Exits 1 if a step does not do what it should, and keeps its files then.

    Example: forebay demo --into demo
    """
    if into is not None and os.path.exists(into) and os.listdir(into):
        raise click.BadParameter(f"'{into}' is not empty; name a new folder", param_hint="'--into'")
    folder = into or tempfile.mkdtemp(prefix="forebay-demo-")
    library = write_library(os.path.join(folder, "library.jsonl"), names)
    source = ["tokens", library, "--chunk-size", str(chunk_size), "--level", "max", "--deduplicate"]
    report = DemoRun(os.path.join(folder, "cache"), source, is_json()).run()
    if into is None and not keep:
        shutil.rmtree(folder)
        report = msgspec.structs.replace(report, kept=False)
    return report
