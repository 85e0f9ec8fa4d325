"""Every command has help with an example, and docs/cli.md says what help says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.cli.running import run, run_process

from forebay.cli.legacy import FLAGS
from forebay.cli.main import cli
from forebay.cli.reference import REFRESH, helps, reference
from forebay.cli.settings import KINDS

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
VERBS = (
    "build", "import", "status", "gaps", "verify", "repair", "refresh", "grow", "estimate", "info", "peek", "clean",
    "copy", "rekey", "warm", "tier", "demo",
)  # fmt: skip
HELPS = dict(helps())


def test_every_verb_is_there():
    assert set(cli.commands) == set(VERBS)


@pytest.mark.parametrize("name", HELPS)
def test_every_command_has_a_summary_an_example_and_json(name: str):
    text = run(*name.split()[1:], "--help").out
    assert text.rstrip("\n") == HELPS[name]
    assert f"\n  Example: {' '.join(name.split()[:2])} " in text
    if "Commands:" not in text:
        assert "--json" in text
    assert max(map(len, text.splitlines())) <= 96


def test_examples_parse_as_commands_of_theirs():
    for text in HELPS.values():
        for example in re.findall(r"(?:Example:|^ {11}) (forebay .*)$", text, re.MULTILINE):
            verb = shlex.split(example)[1]
            assert verb in cli.commands


def test_the_summary_of_a_verb_fits_on_a_line_of_help():
    for line in run("--help").out.partition("Commands:")[2].splitlines():
        assert not line.endswith("..."), line


def test_the_reference_is_what_help_says():
    assert DOCS.read_text() == reference(), f"docs/cli.md is not what --help says; refresh it: {REFRESH}"


def test_the_reference_can_be_refreshed_by_the_command_it_names():
    module = REFRESH.split()[2]
    made = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, check=True)
    assert made.stdout == DOCS.read_text()


def test_help_does_not_depend_on_the_terminal():
    assert (
        run_process("build", "raw", "--help", env={"COLUMNS": "40", "PATH": ""}).out
        == HELPS["forebay build raw"] + "\n"
    )


def test_the_pages_name_only_options_that_there_are():
    known = {flag for text in HELPS.values() for flag in re.findall(r"--[a-z-]+", text)} | set(FLAGS)
    known |= {"--long", "--flips"}  # of zstd, and of a benchmark
    for page in (DOCS.parent / "guide-tokens.md", DOCS.parent / "guide-images.md", DOCS.parents[1] / "README.md"):
        assert set(re.findall(r"(?<![-\w])--[a-z][a-z-]*", page.read_text())) <= known


def test_the_version_is_said():
    assert run("--version").out.startswith("forebay, version ")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["frobnicate"], "No such command"),
        (["status"], "Missing argument 'CACHE'"),
        (["build", "raw", "data"], "Missing option '--into'"),
        (["build", "raw", "--into", "cache"], "Missing argument 'SOURCE...'"),
        (["build", "rwa", "data"], "or a cache. Did you mean: forebay build raw data\n"),
        (["estimate", "token", "a b.txt"], "or a cache. Did you mean: forebay estimate tokens 'a b.txt'\n"),
        (
            ["build", "data/*.jsonl", "--into", "cache"],
            "is not a kind of data (tokens, images, raw), a settings file or a cache. Did you mean: "
            "forebay build tokens 'data/*.jsonl' --into cache\n",
        ),
        (["build", "raw", "-", "--into", "cache"], "save it first"),
        (["estimate", "raw", "/dev/stdin"], "save it first"),
        (["grow", "cache", "-"], "save it first"),
        (["build", "raw", "a", "--into", "c", "--memory-limit", "lots"], "use 600MB"),
        (["build", "raw", "a", "--into", "c", "--memory-limit", "0"], "at least one byte"),
        (["build", "raw", "a", "--into", "c", "--max-failures", "200%"], "a share like 1%"),
        (["build", "raw", "a", "--into", "c", "--max-failures", "-1"], "a share like 1%"),
        (["build", "raw", "a", "--into", "c", "--start-chunk", "4", "--end-chunk", "3"], "comes after"),
        (["build", "raw", "a", "--into", "c", "--unit", "lines", "--suffix", ".py"], "pass a glob like"),
        (["build", "raw", "a", "--into", "c", "--codec", "zip"], "not one of"),
        (["clean", "cache", "--keep-generations", "0"], "x>=1"),
        (["repair", "cache", "--from", "nowhere"], "does not exist"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_hint(words: list[str], hint: str):
    ran = run(*words, code=2)
    assert hint in ran.err
    assert ran.out == ""


def test_every_option_of_a_kind_is_a_field_of_its_source_its_recipe_or_a_build():
    command = cli.commands["build"]
    assert isinstance(command, click.Group)
    for kind in KINDS:
        run("build", kind, "--help")
        assert {"paths", "into", "codec", "level"} <= {parameter.name for parameter in command.commands[kind].params}
