"""Texts that people read are plain English: no calques in help, errors, comments, docstrings and docs.

Identifiers are nouns.

`CALQUES` has phrases that are grammatical but not what an engineer would write, with the plain word.
"""

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from forebay.cli.main import cli

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "forebay"
CALQUES = {
    r"(?<!there )\bis no (?!longer|more|such|sidecar\b)\w+": "is not a",
    r"(?<!there )\bare no (?!longer|more|such)\w+": "are not",
    r"\bgo(?:es)? on (?:with|where|from)\b": "resume, continue",
    r"\b(?:is|are|was|were|be) told\b": "is reported, is returned",
    r"\bmend(?:s|ed|ing)?\b": "repair, fix",
    r"\bh(?:eld|old|olds|olding) (?:\w+ ){0,3}against\b": "compare with",
    r"\bso many\b": "n",
    r"\boutright\b": "explicitly",
    r"\bof (?:its|their|his|one's) own\b": "its own, separate",
    r"\bmarks\b": "characters",
    r"\btroubles?\b": "problem, error",
    r"\bjudg(?:e|es|ed|ing)\b": "estimate, decide",
    r"\btheir own words\b": "their output",
    r"\bof ours\b": "of forebay",
    r"\bas a person\b": "human-readable",
    r"\blets? go\b": "release",
    r"\bsays? of (?:it|them|him|her)self\b": "contains",
    r"\bpassed over\b": "skipped",
    r"\bcolou?rs? of its\b": "its color",
    r"\bwhat is there\b": "existing",
    r"\bat rest\b": "stored",
    r"\bthere is none of that name\b": "it does not exist",
    r"\b(?:is|are|was|were) refused\b": "raises, is an error, is rejected",
    r"\bfor ever\b": "forever",
    r"\bbeside\b": "next to, in addition to",
    r"\bwhoever\b": "anybody who, the builder",
    r"\bstrangers?\b": "untrusted",
    r"\bnothing but\b": "only",
    r"\bbut for\b": "except",
    r"\bat work\b": "running, in use",
    r"\bwhich is there\b|\bthat are there\b|\bthat is there\b": "existing",
    r"\bwhat is (?:missing|left|wanted)\b": "missing chunks, the rest",
    r"\b(?:dead builders?|hand-me-down|out of doors)\b": "stale builder",
    r"\bin (?:its|their) way\b": "that prevents it",
    r"\btoo dear\b": "too expensive",
    r"\bwhole or not at all\b": "atomically",
    r"\bwhat (?:stands|goes|moves) (?:in|with)\b": "its problem, the rest of it",
    r"\bdoes? not do what (?:it|they) should\b": "fails",
    r"\b(?:some|any)body's\b": "another user's",
    r"\bof which (?:nothing|none)\b": "without any",
    r"\bthat (?:only )?the cache names\b": "recorded in the cache",
    r"\d %(?!\w)": "a number and % without a space",
}
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(ROOT / name for name in ("Makefile", ".pre-commit-config.yaml")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / ".github").rglob("*.*ml")),
    *sorted((ROOT / "tools").glob("*.py")),
]
BRITISH = {
    r"\bcolour\w*\b": "color",
    r"\bgrey\b": "gray",
    r"\blicence\b": "license",
    r"\bcent(?:red|res?)\b": "centered, center",
    r"\b(?:neighbour|behaviour|favour|honour)\w*": "-or",
    r"\b(?:label|model|travel)l(?:ed|ing)\b": "-eled, -eling",
    r"\b(?:learnt|mis-?spelt|whilst|amongst|artefacts?|judgement|analyse[sd]?)\b": "learned, misspelled, while, among",
    r"\b(?:normal|recogn|serial|token|summar|organ|optim|initial|util|random)is(?:e|ed|es|ing|ation)\b": "-ize",
}
WORDS = {re.compile(pattern, re.IGNORECASE): plain for pattern, plain in (CALQUES | BRITISH).items()}


def written_in(path: Path) -> Iterator[str]:
    """Every text and every comment of a module: docstrings, errors, notes, and what is drawn."""
    yield from texts_in(ast.parse(path.read_text()))
    with tokenize.open(path) as file:
        yield from (token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT)


def texts_in(node: ast.AST) -> Iterator[str]:
    """The string literals in an expression; of an f-string, its fixed parts with a placeholder between."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for inner in ast.iter_child_nodes(node):
            yield from texts_in(inner)


def prose(path: Path) -> str:
    """The text of a page without code."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "``", text)


def hits(text: str) -> list[str]:
    """The calques in a text, wherever its lines break.

    >>> hits("'x' is no size; it is held against its digest")
    ['is no size', 'held against']
    """
    flat = " ".join(text.split())
    return [match[0] for pattern in WORDS for match in pattern.finditer(flat)]


def test_calques_are_reported_in_texts_and_comments(tmp_path):
    assert hits("'x' is no size; it is held\n    against its digest") == ["is no size", "held against"]
    assert hits("'x' is not a size; it is compared with its digest") == []
    module = tmp_path / "module.py"
    module.write_text('"""It goes on with x."""\nnote = f"{note} is told"  # of ours\n')
    assert [hit for text in written_in(module) for hit in hits(text)] == ["goes on with", "is told", "of ours"]


def package_of(path: Path) -> str:
    """The package of a module, or the module at the top."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def hits_in(path: Path) -> list[str]:
    texts = [prose(path)] if path in PAGES else dict.fromkeys(written_in(path))
    return [f"{path.relative_to(ROOT)}: {hit}" for text in texts for hit in hits(text)]


MODULES: dict[str, list[Path]] = {}
for module in sorted(SOURCE.rglob("*.py")):
    MODULES.setdefault(package_of(module), []).append(module)
FILES = {str(path.relative_to(ROOT)): [path] for path in PAGES} | MODULES
FILES["examples"] = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", sorted(FILES))
def test_texts_comments_and_docs_have_no_calques(name: str) -> None:
    hits_by_count = Counter(hit for path in FILES[name] for hit in hits_in(path))
    assert not hits_by_count, "say it plainly:\n" + "\n".join(f"{hit}  x{n}" for hit, n in hits_by_count.most_common())


# Participles and vague words where a noun says what a thing is: record, batch, stored, arguments, message, location.
VAGUE = {"found", "kept", "made", "given", "place", "places", "said", "tally", "terms", "beside"}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """The names that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@pytest.mark.parametrize("package", sorted(MODULES))
def test_identifiers_are_nouns(package: str) -> None:
    vague = [
        f"{path.relative_to(SOURCE)}: {name}"
        for path in MODULES[package]
        for name in identifiers(ast.parse(path.read_text()))
        if name.strip("_").lower() in VAGUE
    ]
    assert vague == []


def commands(command: click.Command, name: str = "forebay") -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        yield from commands(inner, f"{name} {inner.name}")


HELPED = dict(commands(cli))


@pytest.mark.parametrize("name", HELPED)
def test_help_is_plain_english(name):
    command = HELPED[name]
    texts = [command.help or "", *(getattr(option, "help", None) or "" for option in command.params)]
    assert [hit for text in texts for hit in hits(text)] == []


@pytest.mark.parametrize("name", HELPED)
def test_help_of_an_option_is_an_imperative_or_a_noun_phrase(name):
    """Not a fragment of another sentence: "Of all noise.", "How hard.", "What is stored."."""
    fragments = re.compile(r"(?:Of|What|Who|Which|How (?:hard|many|often|large)|Where|Their|Its)\b")
    helps = [getattr(option, "help", None) or "" for option in HELPED[name].params]
    assert [text for text in helps if fragments.match(text)] == []
