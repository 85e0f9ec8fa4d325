"""Every command that forebay advises, in errors, notes, help and after `next:`, is one that its own parser knows."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from tests.helpers.statements import parsed

import forebay
from forebay.cli.main import cli
from forebay.failure_reasons import _ADVICE, Reasons
from forebay.source import Failure

pytestmark = pytest.mark.slow

SOURCES = sorted(Path(forebay.__file__).parent.rglob("*.py"))
QUOTED = re.compile(r"`forebay ([^`]+)`")
PLAIN = re.compile(r"(?:run|with|try|next:|Example:|list them:) forebay ([a-z][^`;\n]*)")
HOLE = "HOLE"  # stands for what is filled in when the text is shown


def texts(path: Path) -> Iterator[str]:
    """The strings of a module, each with its adjacent ones, and with holes for what is filled in."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command_line":
            words = [one.value if isinstance(one, ast.Constant) else HOLE for one in node.args]
            yield "`forebay " + " ".join(map(str, words)) + "`"


def commands(path: Path) -> set[str]:
    found = {one for text in texts(path) for pattern in (QUOTED, PLAIN) for one in pattern.findall(text)}
    return {one for one in found if not re.search(r"[?^]", one)}  # a pattern that recognises advice is none


@cache
def advised() -> list[tuple[str, str]]:
    """Every command, and the module that has it."""
    return sorted({(command, path.name) for path in SOURCES for command in commands(path)})


def known_options(command: click.Command) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


def problem(command_words: str) -> str:
    """What the parser would not know in a command, empty where it knows all of it."""
    words = [word.strip("'\"().,:") for word in command_words.split()]
    command: click.Command = cli
    options: set[str] = {"--version"}
    context = click.Context(cli, info_name="forebay")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if words[0] == HOLE or not re.fullmatch(r"[a-z-]+", words[0]):
            # A cache, a kind or a settings file: what follows may be an option of any command of the group.
            below = [command.get_command(context, name) for name in command.list_commands(context)]
            options |= {name for one in below if one is not None for name in known_options(one)}
            break
        inner = command.get_command(context, words[0])
        if inner is None:
            return f"{words[0]} is not a command"
        command, context = inner, click.Context(inner, info_name=words.pop(0))
    options |= known_options(command)
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]
    return f"{', '.join(unknown)} is not an option" if unknown else ""


def test_advice_is_found() -> None:
    verbs = {command.split()[0] for command, _ in advised()}
    assert {"build", "repair", "verify", "update", "clean", "status", "copy"} <= verbs
    assert len(advised()) > 60


def test_every_command_that_is_advised_parses() -> None:
    wrong = [f"`forebay {command}` in {where}: {problem(command)}" for command, where in advised() if problem(command)]
    assert not wrong


def test_the_options_that_are_advised_about_failed_samples_are_options_of_a_build() -> None:
    build = cli.get_command(click.Context(cli, info_name="forebay"), "build")
    assert isinstance(build, click.Group)
    context = click.Context(build, info_name="build")  # by which it makes the command of a kind
    kinds = [build.get_command(context, name) for name in build.list_commands(context)]
    known = {name for kind in kinds if kind is not None for name in known_options(kind)}
    advised = {option for text in _ADVICE.values() for option in re.findall(r"--[a-z-]+", text)}
    assert {"--text", "--root", "--names"} <= advised <= known
    assert "--names messages=" in Reasons([Failure("a", "no-messages", "")]).advice()


def test_a_wrong_verb_and_a_wrong_option_are_noticed() -> None:
    assert problem("mend HOLE") == "mend is not a command"
    assert problem("repair HOLE --unpublished") == "--unpublished is not an option"
    assert not problem("clean HOLE --unpublished")
