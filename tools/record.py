"""Record terminal sessions as SVG, and pictures of the tutorials: `python tools/record.py [docs/pictures]`.

    session.svg            build, Ctrl-C, resume, flip a bit, verify, repair, verify: modules of the standard library
    packed-text.svg        one packed row as `peek` shows it: docstrings of the standard library
    chat-spans.svg         a row of docs/tutorial-chat.md as `peek` shows it
    tutorial-sheet.png     the contact sheet of docs/tutorial-images.md

Every command really runs, in a pseudo-terminal. The picture is what the terminal showed at the end of each.
"""

import ast
import fcntl
import glob
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from forebay.cli.demo import write_library

DOCS = Path(__file__).parents[1] / "docs"
WIDTH = 112
BUILD = ["build", "tokens", "library.jsonl", "--into", "cache", "--chunk-rows", "100"]
STOP_AT = 15  # chunks of about 44
FLIPPED = 3
FONTS = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # rich fetches one from the network: the picture needs none
CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)")


def main(pictures: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="session") as folder:
        os.chdir(folder)
        (pictures / "session.svg").write_text(session())
        (pictures / "packed-text.svg").write_text(packed_text())
        (pictures / "chat-spans.svg").write_text(chat_spans())
        follow("tutorial-images.md")
        shutil.copy("sheet.png", pictures / "tutorial-sheet.png")


def session(modules: str = "[a-h]*", stop_at: int = STOP_AT) -> str:
    """Modules of the standard library in a cache that is stopped at a chunk, resumed, damaged and repaired."""
    write_library(os.path.abspath("library.jsonl"), modules)
    console = recording()
    act(console, BUILD, 130, partial(interrupt_part_way, stop_at))
    act(console, BUILD)
    (chunk,) = chunk_paths(FLIPPED)
    console.print(Text(f"# one bit of {chunk} is flipped, in byte {flip(chunk):,}", "italic bright_black"))
    console.print()
    act(console, ["verify", "cache"], 1)
    act(console, ["repair", "cache"])
    act(console, ["verify", "cache"])
    return svg_of(console, "session")


def packed_text() -> str:
    with open("docstrings.jsonl", "w") as file:
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
            text = ast.get_docstring(ast.parse(path.read_text()))
            if text is not None and len(text) < 400:
                file.write(json.dumps({"text": text}) + "\n")
    run(["build", "tokens", "docstrings.jsonl", "--into", "docs", "--sequence-length", "128"])
    console = recording()
    act(console, ["peek", "docs", "--row", "11"])
    return svg_of(console, "packed")


def chat_spans() -> str:
    follow("tutorial-chat.md")
    console = recording()
    act(console, ["peek", "chats", "--row", "0"])
    return svg_of(console, "chat")


def follow(page: str) -> None:
    """Do what a page of the docs says, in an empty folder that becomes the current one."""
    os.chdir(tempfile.mkdtemp(dir="."))
    names: dict[str, object] = {"__name__": "page"}
    text = (DOCS / page).read_text()
    for language, block in re.findall(r"^```(python|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(block, names)
        else:
            for command in re.findall(r"^\$ forebay (.*)$", block, re.MULTILINE):
                run(shlex.split(command, comments=True))


def recording() -> Console:
    return Console(record=True, width=WIDTH, file=io.StringIO())


def svg_of(console: Console, name: str) -> str:
    return FONTS.sub("", console.export_svg(title="forebay", unique_id=name))


def act(
    console: Console, words: list[str], expected: int = 0, meanwhile: Callable[[int], None] = lambda pid: None
) -> None:
    screen, code = run(words, meanwhile)
    if code != expected:
        raise SystemExit(f"forebay {' '.join(words)} ended with {code}, not {expected}:\n{screen}")
    console.print(Text.assemble(("$ ", "bold green"), (f"forebay {' '.join(words)}", "bold")))
    console.print(Text.from_ansi(screen))
    console.print()


def run(words: list[str], meanwhile: Callable[[int], None] = lambda pid: None) -> tuple[str, int]:
    """What the terminal shows after a command, and its exit code."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": str(WIDTH)}
    command = [sys.executable, "-m", "forebay.cli", *words]
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        threading.Thread(target=meanwhile, args=(process.pid,), daemon=True).start()
        shown = b"".join(iter(lambda: read(master), b""))
    os.close(master)
    return screen_of(shown.decode()), process.returncode


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: the other end is closed
        return b""


def screen_of(shown: str) -> str:
    """The lines that are left once a progress display has gone up and erased itself; colors stay."""
    lines, row = [""], 0
    for piece in CONTROL.split(shown):
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece.startswith("\x1b[") and piece.endswith("A"):
            row = max(0, row - int(piece[2:-1] or 1))
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif piece != "\r" and not piece.startswith("\x1b[?"):
            lines[row] += piece
    return "\n".join(lines).strip("\n")


def interrupt_part_way(stop_at: int, pid: int) -> None:
    """Send what Ctrl-C sends once a chunk is there."""
    while not chunk_paths(stop_at):
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)


def chunk_paths(chunk: int) -> list[str]:
    """The file of a chunk; none if it is not built yet."""
    return glob.glob(f"cache/layers/tokens.*/{chunk:06d}.safetensors")


def flip(path: str) -> int:
    position = os.path.getsize(path) // 2
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    return position


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures").absolute())
