"""Nothing that a cache, a source or a path holds reaches a terminal as a control character."""

import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import msgspec
import pytest
from rich.table import Table
from rich.text import Text
from tests.cli.running import build_lines, build_tokens, run
from tests.row_cache.pictures import write_pictures

import forebay as fb
from forebay.cache.reports import ClaimStatus, FailedSample, Progress, Status
from forebay.cli.output import say, say_error, show_result
from forebay.cli.verb import Verb
from forebay.preview.console import console_for
from forebay.preview.progress import Lines
from forebay.preview.words import harmless, printable

EVIL = "red\x1b[31m\x1b]0;title\x07 c1\x9b2J bidi\u202egnp.\u2066 cr\rback\x08 del\x7f nul\x00"


def is_harmless(text: str) -> bool:
    return all(mark in "\n\t" or unicodedata.category(mark) not in ("Cc", "Cf", "Cs") for mark in text)


def test_both_ways_to_print_text_escape_all_that_a_terminal_obeys():
    assert not is_harmless(EVIL)
    assert is_harmless(printable(EVIL))
    assert is_harmless(harmless(EVIL))
    assert harmless("a\tb\n∎ ä") == "a\tb\n∎ ä"
    assert "\\x1b[31m" in harmless(EVIL)
    assert "\\u202e" in harmless(EVIL)


def test_whatever_is_printed_goes_through_one_console(capsys: pytest.CaptureFixture[str]):
    """Also where a drawing forgot: in a table, a styled text, a line, an error."""
    table = Table.grid()
    table.add_row(EVIL, Text(EVIL, style="bold"))
    console_for(sys.stderr).print(table)
    say(EVIL)
    say_error(EVIL)
    Lines(console_for(sys.stderr))(Progress(phase="building", done=1, total=2, note=EVIL))
    said = capsys.readouterr().err
    assert is_harmless(said)
    assert said.count("\\x1b[31m") == 5


def test_ids_claims_reasons_and_roots_of_a_status_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root, _ = build_lines(tmp_path)
    claim = ClaimStatus(layer=EVIL, chunk=0, host=EVIL, pid=1, state=EVIL)
    failed = FailedSample(layer=EVIL, chunk=0, sample=EVIL, reason=EVIL, detail=EVIL)
    found = fb.status(root)
    layers = tuple(msgspec.structs.replace(layer, layer=EVIL, failures=1, reasons={EVIL: 1}) for layer in found.layers)
    evil = msgspec.structs.replace(
        found, root=EVIL, layers=layers, claims=(claim,), failed_samples=(failed,), stale={EVIL: EVIL},
        grown=(EVIL,), source_note=EVIL,
    )  # fmt: skip
    show_result(evil)
    assert is_harmless(capsys.readouterr().out)
    Verb("status", callback=lambda: evil).main(["--json"], standalone_mode=False)
    told = capsys.readouterr().out
    assert is_harmless(told)
    assert msgspec.convert(msgspec.json.decode(told)["result"], Status) == evil


def test_a_path_with_escapes_is_printed_escaped_in_results_errors_and_usage(tmp_path: Path):
    evil = tmp_path / "[bold]\x1b[31mRED\u202e"
    root, _ = build_lines(evil)
    for words, code in (
        (["status", root], 0),
        (["verify", root], 0),
        (["info", root], 0),
        (["peek", root], 0),
        (["status", evil / "none"], 1),
        (["build", evil / "data"], 2),
        (["build", "raw", "--into", root], 2),
        ([f"--{evil}"], 2),
        ([str(evil)], 2),
        (["peek", root, "--row", 999], 2),
    ):
        ran = run(*words, code=code)
        assert is_harmless(ran.out + ran.err), (words, ran)
        assert words[0] not in ("status", "verify", "info", "peek") or code == 2 or "[bold]" in ran.out + ran.err


def test_texts_of_rows_are_escaped_and_keep_their_lines(tmp_path: Path):
    root, _ = build_tokens(tmp_path, [f"first\tline\n{EVIL}"])
    shown = run("peek", root).out
    assert is_harmless(shown)
    assert "first   line\n" in shown
    assert "\\x1b[31m" in shown


def test_warnings_are_escaped(tmp_path: Path):
    code = (
        "import sys, warnings; from forebay.cli import main; sys.argv = ['forebay', '--version'];"
        "warnings.simplefilter('always'); main.escape_warnings();"
        f"warnings.warn({EVIL!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert "\\x1b[31m" in done.stderr
    assert is_harmless(done.stderr)


def test_names_in_images_are_escaped(tmp_path: Path):
    photos = write_pictures(tmp_path / "photos", 2)
    (photos / "00001.json").write_text(json.dumps({"tags": [EVIL], "caption": EVIL}))
    (photos / f"{EVIL.replace(chr(0), '').replace('/', '')}.png").write_bytes(b"no image")
    root = tmp_path / "cache"
    said = [run("build", "images", photos, "--into", root, "--size", 8, "--workers", 0)]
    for words, code in (
        (["peek", root], 0),
        (["info", root], 0),
        (["status", root], 0),
    ):
        said += [run(*words, code=code)]
        said += [run(*words, "--json", code=code)]
    for ran in said:
        assert is_harmless(ran.out + ran.err), ran
    assert any("\\x1b[31m" in ran.out for ran in said)
