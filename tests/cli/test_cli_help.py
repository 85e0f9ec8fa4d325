"""Every command has help with an example, and the pages of docs/commands have the same text."""

import os
import re
import shlex
import subprocess
import sys

import click
import pytest
from tests.cli.running import run, run_process
from tools.cli_reference import DOCS, REFRESH, helps, pages

from forebay.cli.main import cli
from forebay.cli.settings import FAMILIAR, ON_OTHER_LAYERS, kind_names, kind_of
from forebay.fields import declared
from forebay.kinds import RECIPES, recipe_class

VERBS = (
    "demo", "estimate", "build", "view", "status", "info", "peek", "verify", "repair", "update", "copy", "clean",
    "drop", "import", "tier", "doctor",
)  # fmt: skip
HELPS = dict(helps())


@pytest.mark.parametrize("name", HELPS)
def test_every_command_has_a_summary_an_example_and_json(name: str):
    text = run(*name.split()[1:], "--help").out
    assert f"\n  Example: {name}" in text or name == "forebay"
    if "Commands:" not in text and name != "forebay":
        assert "--json" in text
        assert "-q, --quiet" in text
    assert max(map(len, text.splitlines())) <= 96


def test_examples_parse_as_commands_of_theirs():
    for text in HELPS.values():
        for example in re.findall(r"(?:Example:|^ {11}) (forebay .*)$", text, re.MULTILINE):
            verb = shlex.split(example)[1]
            assert verb in VERBS


def test_the_reference_has_the_text_of_help():
    for path, text in pages().items():
        assert path.read_text() == text, f"{path.name} differs from --help; refresh it: {REFRESH}"
    assert {path.stem for path in (DOCS / "commands").iterdir()} == set(VERBS)


@pytest.mark.slow
def test_help_in_a_pipe_is_as_wide_as_the_reference_unless_columns_says_otherwise():
    unset = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    assert run_process("build", "raw", "--help-all", env=unset).out == HELPS["forebay build raw"] + "\n"
    narrow = run_process("build", "raw", "--help", env={**unset, "COLUMNS": "60"}).out
    assert max(map(len, narrow.splitlines())) <= 60


def test_the_pages_name_only_options_that_there_are():
    known = {flag for text in HELPS.values() for flag in re.findall(r"--[a-z-]+", text)}
    known |= {"--flips", "--megabytes"}  # of benchmarks
    known |= {"--cleanup", "--estimate-space", "--repair", "--resume", "--validate"}  # of the script in guide-tokens.md
    for page in (DOCS / "guide-tokens.md", DOCS / "guide-images.md", DOCS.parent / "README.md"):
        assert set(re.findall(r"(?<![-\w])--[a-z][a-z-]*", page.read_text())) <= known


@pytest.mark.parametrize("words", [[], ["build"], ["tier"]])
def test_a_group_without_a_command_shows_its_help(words: list[str]):
    ran = run(*words, code=2)
    assert ran.err.startswith(f"Usage: {' '.join(['forebay', *words])} [OPTIONS]")
    assert "\nCommands:\n" in ran.err or "\nStart:\n" in ran.err


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


def test_help_shows_common_options_and_help_all_the_rest():
    short, whole = (run("build", "tokens", flag).out for flag in ("--help", "--help-all"))
    assert "--sequence-length" in short
    assert "--download-retries" not in short
    assert "--download-retries" in whole
    hidden = whole.count("\n  -") - short.count("\n  -")
    assert short.endswith(f"`forebay build tokens --help-all` shows {hidden} more options.\n")
    assert "--help-all" not in run("info", "--help").out


def test_groups_of_verbs_are_those_of_the_list():
    sections = re.findall(r"^(\w[\w ]*):\n((?:  \w.*\n)+)", HELPS["forebay"], re.MULTILINE)
    assert [name for name, _ in sections] == ["Start", "Look", "Keep right", "Move", "Machine"]
    assert tuple(line.split()[0] for _, lines in sections for line in lines.splitlines()) == VERBS


def test_python_dash_m_forebay_is_the_command_line():
    ran = subprocess.run([sys.executable, "-m", "forebay", "-V"], capture_output=True, text=True, check=True)
    assert ran.stdout == run("--version").out
    assert ran.stdout.startswith("forebay, version ")


@pytest.mark.slow
def test_help_of_builds_imports_no_torch():
    script = (
        "import sys; from click.testing import CliRunner; from forebay.cli.main import cli; "
        "print(CliRunner().invoke(cli, ['build', '--help']).output, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert "Usage: " in done.stdout
    assert done.stdout.endswith("False\n")


def test_kinds_that_no_source_makes_are_known_without_their_modules():
    kinds = {name: recipe_class(name) for name in RECIPES}
    from_a_source = {name for name, kind in kinds.items() if "chunk_target" in dir(kind) and kind.source_settings}
    assert set(kinds) - from_a_source == ON_OTHER_LAYERS
