"""The terminal in the README shows what commands print today: `make record` draws it again."""

import html
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = runpy.run_path(str(ROOT / "tools" / "record.py"), run_name="record")
NUMBER = re.compile(r"[0-9a-f]{32,}|\d[\d,.]*")
UNIT = re.compile(r"# [kMG]?B\b")
BY_CHANCE = re.compile(r"[━╺╸]+|ETA # s|# failed|, # per second")  # of a progress bar, and of a build of a second
RATES = re.compile(r"(?:read|memory) \d")  # the line below a bar has the rates that are known by then


def lines_of(picture: str) -> list[str]:
    """The text in an SVG, from top to bottom."""
    rows: dict[float, str] = {}
    for height, inside in re.findall(r'<text [^>]*?y="([\d.]+)"[^>]*>(.*?)</text>', picture):
        rows[float(height)] = f"{rows.get(float(height), '')} {html.unescape(inside)}"
    return [" ".join(rows[height].split()) for height in sorted(rows)]


def words_by_command(picture: str) -> dict[str, set[str]]:
    """The commands in a picture, and the words that each printed, in all its runs; `#` stands for a number."""
    words: dict[str, set[str]] = {}
    for line in lines_of(picture):
        if line.startswith("$"):
            command = line
            words.setdefault(command, set())
        elif words and not RATES.match(line):
            masked = UNIT.sub("# B", NUMBER.sub("#", line))
            words[command] |= set(BY_CHANCE.sub("", masked).split())
    return words


@pytest.mark.slow
def test_the_session_shows_what_commands_print_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pictured = words_by_command((ROOT / "docs" / "pictures" / "session.svg").read_text())
    today: dict[str, set[str]] = {command: set() for command in pictured}
    for attempt in range(4):  # where the build is stopped decides which lines its report has
        (tmp_path / str(attempt)).mkdir()
        monkeypatch.chdir(tmp_path / str(attempt))
        session = words_by_command(RECORD["session"]("[a-d]*", stop_at=4))
        assert list(session) == list(pictured)
        today = {command: words | session[command] for command, words in today.items()}
        if all(words <= today[command] for command, words in pictured.items()):
            break
    assert [line.split()[2] for line in pictured] == ["build", "verify", "repair"]
    for command, words in pictured.items():
        assert words <= today[command], f"run `make record`: {command} does not print {sorted(words - today[command])}"
