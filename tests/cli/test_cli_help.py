"""Every command has help with an example, and docs/cli.md says what help says."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from tests.cli.running import run, run_process
from tools.cli_reference import REFRESH, helps, reference

from forebay.cli.legacy import FLAGS
from forebay.cli.main import cli
from forebay.cli.settings import FAMILIAR, ON_OTHER_LAYERS, kind_names, kind_of
from forebay.fields import declared
from forebay.kinds import RECIPES, own_kinds, recipe_class

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"
VERBS = (
    "build", "import", "status", "gaps", "verify", "repair", "refresh", "grow", "estimate", "info", "peek", "view",
    "clean", "drop", "copy", "rekey", "warm", "tier", "doctor", "demo", "help",
)  # fmt: skip
HELPS = dict(helps())


def test_every_verb_is_there():
    assert set(cli.list_commands(click.Context(cli))) == set(VERBS)


@pytest.mark.parametrize("name", HELPS)
def test_every_command_has_a_summary_an_example_and_json(name: str):
    text = run(*name.split()[1:], "--help").out
    assert text.rstrip("\n") == HELPS[name]
    assert re.search(rf"\n  Example: {' '.join(name.split()[:2])}( |$)", text, re.MULTILINE)
    if "Commands:" not in text and name != "forebay help":
        assert "--json" in text
        assert "-q, --quiet" in text
    assert max(map(len, text.splitlines())) <= 96


def test_examples_parse_as_commands_of_theirs():
    for text in HELPS.values():
        for example in re.findall(r"(?:Example:|^ {11}) (forebay .*)$", text, re.MULTILINE):
            verb = shlex.split(example)[1]
            assert verb in VERBS


def test_the_summary_of_a_verb_fits_on_a_line_of_help():
    for line in run("--help").out.partition("Commands:")[2].splitlines():
        assert not line.endswith("..."), line


def test_the_reference_is_what_help_says():
    assert DOCS.read_text() == reference(), f"docs/cli.md is not what --help says; refresh it: {REFRESH}"


def test_the_reference_can_be_refreshed_by_the_command_it_names():
    script = DOCS.parents[1] / REFRESH.split()[1]
    made = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert made.stdout == DOCS.read_text()


def test_help_in_a_pipe_is_as_wide_as_the_reference_unless_columns_says_otherwise():
    unset = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    assert run_process("build", "raw", "--help", env=unset).out == HELPS["forebay build raw"] + "\n"
    narrow = run_process("build", "raw", "--help", env={**unset, "COLUMNS": "60"}).out
    assert max(map(len, narrow.splitlines())) <= 60


def test_the_pages_name_only_options_that_there_are():
    known = {flag for text in HELPS.values() for flag in re.findall(r"--[a-z-]+", text)} | set(FLAGS)
    known |= {"--long", "--flips", "--megabytes"}  # of zstd, and of benchmarks
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
            "is not a kind of data, a settings file or a cache. The kind of data (tokens, images, raw, chat, "
            "preferences, teachers) comes first: forebay build tokens 'data/*.jsonl' --into cache\n",
        ),
        (["build", "data"], "comes first: forebay build tokens data\n"),
        (["--json", "status", "cache"], "Put '--json' after the verb and its arguments: forebay status CACHE --json\n"),
        (["build", "-q", "raw"], "Put '-q' after the verb and its arguments: forebay status CACHE -q\n"),
        (["build", "teachers", "cache", "--into", "x"], "No such option '--into'.\n"),
        (["build", "raw", "a", "--codex", "x"], "No such option '--codex'. Did you mean '--codec'?\n"),
        (["build", "raw", "-", "--into", "cache"], "save it first"),
        (["estimate", "raw", "/dev/stdin"], "save it first"),
        (["grow", "cache", "-"], "save it first"),
        (["build", "raw", "a", "--into", "c", "--memory-limit", "lots"], "use 600MB"),
        (["build", "raw", "a", "--into", "c", "--memory-limit", "0"], "at least one byte"),
        (["build", "raw", "a", "--into", "c", "--max-failures", "200%"], "a share like 1%"),
        (["build", "raw", "a", "--into", "c", "--max-failures", "-1"], "a share like 1%"),
        (["build", "raw", "a", "--into", "c", "--start-chunk", "4", "--end-chunk", "3"], "comes after"),
        (["build", "raw", "a", "--into", "c", "--unit", "lines", "--suffix", ".py"], "pass a glob like"),
        (["build", "raw", "a", "--into", "c", "--codec", "zip"], "it must be one of 'none', 'lz4', 'zstd'"),
        (["clean", "cache", "--keep-generations", "0"], "x>=1"),
        (["repair", "cache", "--from", "nowhere"], "does not exist"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_hint(words: list[str], hint: str):
    ran = run(*words, code=2)
    assert hint in ran.err
    assert "--json" in words or ran.out == ""


def test_every_field_of_a_kind_is_an_option_with_its_choices_its_default_and_its_help():
    build = cli.get_command(click.Context(cli), "build")
    assert isinstance(build, click.Group)
    for name in kind_names():
        kind = kind_of(name)
        command = build.get_command(click.Context(build, info_name="build"), name)
        assert kind is not None
        assert command is not None
        options = {param.name: param for param in command.params if isinstance(param, click.Option)}
        text = " ".join(HELPS[f"forebay build {name}"].split())
        for field in (*declared(kind.source).values(), *declared(kind.recipe).values()):
            if field.name == "paths" or not field.is_writable or len(field.choices) == 1:
                continue
            assert field.help or name not in FAMILIAR, f"{name}: {field.name} has no help"
            assert field.name in options
            assert "|".join(field.choices) in text
            assert " ".join(field.help.split()) in text


def test_help_groups_options_in_source_recipe_build_and_output():
    headings = [line for line in HELPS["forebay build tokens"].splitlines() if re.match(r"[A-Z].*:$", line)]
    assert [line.split(" options")[0] for line in headings] == ["Source", "Recipe", "Build", "Output"]


def test_the_four_questions_about_a_cache_are_one_line_each():
    text = HELPS["forebay"]
    for verb, question in {
        "info": "What is this cache?",
        "status": "How far is the build, and does it need attention?",
        "gaps": "Which chunks are missing, and which command builds them?",
        "verify": "Is every published byte intact?",
    }.items():
        assert f"\n  {verb:<8}  {question}" in text
        assert f"| `{verb}` | {question} |" in DOCS.read_text()


def test_help_is_a_command_too():
    assert run("help").out.rstrip("\n") == HELPS["forebay"]
    assert run("help", "build", "tokens").out.rstrip("\n") == HELPS["forebay build tokens"]
    assert "Did you mean 'verify'?" in run("help", "verfy", code=2).err
    assert "'forebay status' has no commands" in run("help", "status", "x", code=2).err


def test_python_dash_m_forebay_is_the_command_line():
    ran = subprocess.run([sys.executable, "-m", "forebay", "-V"], capture_output=True, text=True, check=True)
    assert ran.stdout == run("--version").out


def test_help_of_builds_imports_no_torch():
    script = (
        "import sys; from click.testing import CliRunner; from forebay.cli.main import cli; "
        "print(CliRunner().invoke(cli, ['build', '--help']).output, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert "Usage: " in done.stdout
    assert done.stdout.endswith("False\n")


def test_kinds_that_no_source_makes_are_known_without_their_modules():
    kinds = {name: recipe_class(name) for name in own_kinds(RECIPES)}
    from_a_source = {name for name, kind in kinds.items() if "chunk_target" in dir(kind) and kind.source_settings}
    assert set(kinds) - from_a_source == ON_OTHER_LAYERS
