"""Read settings of a build from TOML; errors name the key, its line and the nearest valid name.

[source]                         [recipe]                     [build]
paths = ["data/*.jsonl"]         kind = "tokens"              into = "caches/edu"
text = "text"                    sequence_length = 512        workers = 2
"""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from forebay.cli.legacy import Refused, modernized
from forebay.errors import SettingsInvalid, nearest
from forebay.fields import Field, declared

SECTIONS = ("source", "recipe", "build")
_REQUIRED = ("source", "recipe")
_NAME = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_DOTTED = rf"{_NAME}(?:\s*\.\s*{_NAME})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_DOTTED})\s*\]")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=")
_AT_LINE = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A valid TOML file with the right sections."""

    path: str
    text: str
    sections: dict[str, dict[str, Any]]
    origins: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)  # of translated old keys
    notes: tuple[str, ...] = ()

    def fail(self, problem: str, *names: str) -> NoReturn:
        """Raise `SettingsInvalid` with the line of a section or key."""
        raise SettingsInvalid(self.path, line_of(self.text, self.origins.get(names, names)), problem)


def read_settings_file(path: str) -> SettingsFile:
    text = _read_text(path)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number of 5,000 digits, or 1,000 brackets
        found = _AT_LINE.search(str(error))
        line = int(found[1]) if found and found[1] else text.rstrip("\n").count("\n") + 1
        raise SettingsInvalid(path, line, f"this is not TOML: {_AT_LINE.sub('', str(error))}") from error
    try:
        modern = modernized(document)
    except Refused as error:
        SettingsFile(path, text, {}).fail(error.problem, *error.place.names)
    file = SettingsFile(path, text, modern.sections, modern.origins, tuple(modern.notes))
    for name, section in file.sections.items():
        if name not in SECTIONS:
            file.fail(f"unknown section [{name}]; {nearest(name, SECTIONS)}", name)
        if not isinstance(section, dict):
            file.fail(f"'{name}' is a section; write [{name}] on a separate line", name)
    for name in _REQUIRED:
        if name not in file.sections:
            file.fail(f"the section [{name}] is missing; a build needs [source] and [recipe]")
    return file


def checked_kind(file: SettingsFile, known: Collection[str]) -> str:
    """The kind of data, which decides which other keys are valid."""
    recipe = file.sections["recipe"]
    if "kind" not in recipe:
        file.fail(f'[recipe] has no kind; add kind = "{next(iter(known))}" (known: {", ".join(known)})', "recipe")
    kind = recipe["kind"]
    if not isinstance(kind, str) or kind not in known:
        file.fail(f"unknown kind {kind!r} in [recipe]; {nearest(str(kind), known)}", "recipe", "kind")
    return kind


def checked_section(
    file: SettingsFile, section: str, structs: Mapping[str, type[Any]], defaults: Collection[str] = ()
) -> dict[str, Any]:
    """The values of a section, checked for unknown keys, wrong types and missing keys."""
    fields = declared(structs[section])
    given = {
        key: value for key, value in file.sections.get(section, {}).items() if (section, key) != ("recipe", "kind")
    }
    for key in given:
        if key not in fields:
            file.fail(
                f"unknown key '{key}' in [{section}]; {_home(key, structs) or nearest(key, fields)}", section, key
            )
    for name, known in fields.items():
        if known.is_required and name not in given:
            file.fail(f"[{section}] has no '{name}'", section)
    return {key: _read(file, section, fields[key], value) for key, value in given.items()}


def _read(file: SettingsFile, section: str, known: Field, value: Any) -> Any:
    try:
        return known.read(value)
    except ValueError as error:
        file.fail(f"'{known.name}' in [{section}]: {error}", section, known.name)


def _home(key: str, structs: Mapping[str, type[Any]]) -> str:
    """A hint at the section that a misplaced key belongs to; empty if there is none."""
    homes = [name for name, struct in structs.items() if key in declared(struct)]
    return f"it belongs in [{homes[0]}]" if homes else ""


def line_of(text: str, names: tuple[str, ...]) -> int | None:
    """The line of a section or of a key in it; the line of the section if the key is inside a value."""
    if not names:
        return None
    places = list(_places(text))
    for wanted in (names, names[:1]):
        for line, path in places:
            if path[: len(wanted)] == wanted:
                return line
    return None


def _places(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every line that opens a section or sets a key, with its full name; lines in multi-line strings are skipped."""
    section: tuple[str, ...] = ()
    quote = ""
    for number, line in enumerate(text.splitlines(), 1):
        if quote:
            quote = "" if quote in line else quote
            continue
        if header := _HEADER.match(line):
            section = _names(header[1])
            yield number, section
        elif key := _KEY.match(line):
            yield number, (*section, *_names(key[1]))
        quote = next((quotes for quotes in ('"""', "'''") if line.count(quotes) % 2), "")


def _names(dotted: str) -> tuple[str, ...]:
    return tuple(name.strip("\"'") for name in re.findall(_NAME, dotted))


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise SettingsInvalid(path, None, f"this is not UTF-8 text: {error}") from error
    except OSError as error:
        raise SettingsInvalid(path, None, f"cannot read the file: {error.strerror}; check the path") from error
