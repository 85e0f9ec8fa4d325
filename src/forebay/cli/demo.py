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
from forebay.cache.reports import LayerStatus, VerifyReport
from forebay.cli.options import complete_folder, local_only, option
from forebay.cli.output import is_json
from forebay.cli.verb import verb
from forebay.columns import Ragged
from forebay.errors import ForebayError
from forebay.format import layout
from forebay.preview.console import console_for
from forebay.preview.row_records import DemoReport, DemoStep
from forebay.preview.words import command_line
from forebay.read.opening import open_cache

# A truncated line, which the build must report with its line number.
BROKEN_LINE = '{"text": "a line that was cut o\n'
SOURCE, CACHE, LAYER = "library.jsonl", "cache", "tokens"  # names in the folder of the demo
POLL_SECONDS = 0.01
STOPPED = 130
TRIES = 5


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
    paths: set[str] = set()
    for top in glob.iglob(os.path.join(library, names)):
        below = glob.iglob(os.path.join(top, "**", "*.py"), recursive=True) if os.path.isdir(top) else [top]
        paths |= {path for path in below if path.endswith(".py") and os.path.getsize(path)}
    return {os.path.relpath(path, library) for path in paths}


class DemoRun:
    """One run of the demo in a folder; raises `ForebayError` if a step fails."""

    def __init__(self, folder: str, build_options: Sequence[str], as_json: bool) -> None:
        self._folder, self._root = folder, os.path.join(folder, CACHE)
        self._target = [LAYER, SOURCE, *build_options, "--into", CACHE]
        self._stream = sys.stderr if as_json else sys.stdout
        self._console = console_for(self._stream)
        self._steps: list[DemoStep] = []

    def run(self) -> DemoReport:
        started = time.monotonic()
        self._say(f"This demo works in {self._folder}; nothing is simulated.")
        self._act("What will it take?", ["estimate", *self._target])
        self._interrupt("Build it, and interrupt it part-way (Ctrl-C).", ["build", *self._target])
        self._act("How far did it get, and which documents could not be read?", ["status", CACHE])
        self._act("The same command resumes where it stopped.", ["build", *self._target])
        self._act("Check every byte.", ["verify", CACHE])
        self._damage_and_repair()
        rows = [word for row in self._telling_rows() for word in ("--row", str(row))]
        self._act("Look at two rows.", ["peek", CACHE, *rows])
        self._act("Show what the cache is.", ["info", CACHE])
        return DemoReport(root=self._root, steps=tuple(self._steps), seconds=time.monotonic() - started)

    def _damage_and_repair(self) -> None:
        path, position, before = self._flip_a_bit()
        self._act("Verify finds it.", ["verify", CACHE], expected=1)
        self._check(
            _reports_byte(self._bad(), os.path.basename(path), position), "verify did not report the flipped byte"
        )
        self._act("Rebuild that chunk from the source.", ["repair", CACHE])
        self._check(_digest(path) == before, "the repaired chunk differs from the original")
        self._act("Check again.", ["verify", CACHE])

    def _act(self, heading: str, words: list[str], expected: int = 0) -> None:
        code = self._run(heading, words)
        self._check(code == expected, f"`forebay {words[0]}` ended with exit code {code} instead of {expected}")

    def _interrupt(self, heading: str, words: list[str]) -> None:
        """Stop a build part-way; if it ended before the signal came, as on a busy machine, build again."""
        for _ in range(TRIES):
            code = self._run(heading, words, self._stop_part_way)
            layer = self._layer()
            if code == STOPPED and layer is not None and 0 < layer.present < layer.planned:
                return
            self._check(code in (0, STOPPED), f"`forebay {words[0]}` ended with exit code {code} instead of {STOPPED}")
            heading = "It ended before the signal came. Once more, from the beginning."
            shutil.rmtree(self._root)
            self._steps.pop()
        self._check(False, "the build was not stopped part-way")

    def _run(
        self, heading: str, words: list[str], meanwhile: Callable[["subprocess.Popen[bytes]"], None] | None = None
    ) -> int:
        self._say(heading)
        self._console.print(Text(f"$ {command_line(*words)}", style="bold cyan"), soft_wrap=True)
        started = time.monotonic()
        with subprocess.Popen(_command(words), stdout=self._stream, cwd=self._folder) as process:
            if meanwhile is not None:
                meanwhile(process)
            code = process.wait()
        seconds = time.monotonic() - started
        self._steps.append(DemoStep(command=command_line(*words), exit_code=code, seconds=seconds))
        return code

    def _stop_part_way(self, process: "subprocess.Popen[bytes]") -> None:
        """Send SIGINT once a third of the chunks exist, and the first one, whose bad line `status` shows."""
        while process.poll() is None:
            layer = self._layer()
            if layer is not None and layer.present > layer.planned // 3 and 0 not in layer.missing:
                process.send_signal(signal.SIGINT)
                return
            time.sleep(POLL_SECONDS)

    def _layer(self) -> LayerStatus | None:
        """The progress of the build; None if there is no plan yet."""
        with suppress(ForebayError):
            layers = [one for one in api.status(self._root, depth="index").layers if one.layer == LAYER]
            return layers[0] if layers and layers[0].planned else None
        return None

    def _telling_rows(self) -> list[int]:
        """The row with the most pieces and the row with the most padding in the first chunk."""
        pieces = next(open_cache(self._root).chunks(["seq_lens"]))["seq_lens"]
        assert isinstance(pieces, Ragged)
        used = [int(pieces[row].sum()) for row in range(len(pieces))]
        return [int(pieces.lengths.argmax()), used.index(min(used))]

    def _flip_a_bit(self) -> tuple[str, int, str]:
        cache = open_cache(self._root)
        key = layout.chunk(cache.generation.folder(LAYER), len(cache.chunk_starts) // 2)
        path = os.path.join(self._root, key)
        before, position = _digest(path), os.path.getsize(path) // 2
        with open(path, "r+b") as file:
            file.seek(position)
            flipped = file.read(1)[0] ^ 1
            file.seek(position)
            file.write(bytes([flipped]))
        self._say(f"Flip one bit in byte {position:,} of {CACHE}/{key}.")
        return path, position, before

    def _bad(self) -> VerifyReport:
        done = subprocess.run(_command(["verify", self._root, "--json"]), stdout=subprocess.PIPE, check=False)
        return msgspec.convert(msgspec.json.decode(done.stdout)["result"], VerifyReport)

    def _check(self, holds: bool, problem: str) -> None:
        if not holds:
            raise ForebayError(f"the demo failed: {problem}", hint=f"look at its files in '{self._folder}'")

    def _say(self, line: str) -> None:
        self._console.print()
        self._console.print(Text(line, style="bold"), soft_wrap=True)


def _command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "forebay.cli", *words]


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reports_byte(report: VerifyReport, name: str, position: int) -> bool:
    """Whether the only problem is in the chunk, in a range that contains the byte."""
    return [bad.key.endswith(name) and bad.start <= position < bad.stop for bad in report.bad] == [True]


# Modules and packages from `abc` to `html`: some 5 MB of Python on every machine, without site-packages.
NAMES = "[a-h]*"


@verb()
@option(
    "-o",
    "--into",
    metavar="DIR",
    shell_complete=complete_folder,
    callback=local_only,
    help="Folder to work in, new or empty, which is kept.  [default: a temporary one]",
)
@option("--names", default=NAMES, hidden=True, help="Modules of the standard library to use.")
@option("--chunk-rows", default=150, hidden=True)
def demo(into: str | None, names: str, chunk_rows: int) -> DemoReport:
    """Run a full demo: Python's standard library as packed tokens.

    Estimates, builds, interrupts, resumes, verifies, damages, repairs and shows a cache. Prints every command as you
    would type it for your own data. Exits 1 and keeps its files if a step fails.

    Example: forebay demo --into demo
    """
    if into is not None and os.path.exists(into) and os.listdir(into):
        raise click.BadParameter(f"'{into}' is not empty; choose a new folder", param_hint="'--into'")
    folder = into or tempfile.mkdtemp(prefix="forebay-demo-")
    write_library(os.path.join(folder, SOURCE), names)
    build_options = ["--chunk-rows", str(chunk_rows), "--level", "max", "--deduplicate"]
    report = DemoRun(folder, build_options, is_json()).run()
    if into is None:
        shutil.rmtree(folder)
        report = msgspec.structs.replace(report, exists=False)
    return report
