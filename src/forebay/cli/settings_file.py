"""Settings of a build from TOML; errors have the section, the key and the nearest valid name.

[source]                         [recipe]                     [build]
paths = ["data/*.jsonl"]         kind = "tokens"              into = "caches/edu"
text = "text"                    sequence_length = 512        workers = 2
"""

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from forebay.errors import RecipeInvalid, nearest
from forebay.fields import Field, declared

SECTIONS = ("source", "recipe", "build")
_REQUIRED = ("source", "recipe")
_AT_LINE = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """A valid TOML file with the right sections."""

    path: str
    sections: dict[str, dict[str, Any]]

    def fail(self, problem: str, section: str = "", key: str = "") -> NoReturn:
        raise RecipeInvalid(f"{self.path}: {problem}", path=self.path, section=section, key=key)


def read_settings_file(path: str) -> SettingsFile:
    text = _read_text(path)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, a number of 5,000 digits, or 1,000 brackets
        match = _AT_LINE.search(str(error))
        line = int(match[1]) if match and match[1] else text.rstrip("\n").count("\n") + 1
        raise RecipeInvalid(f"{path}:{line}: this is not TOML: {_AT_LINE.sub('', str(error))}") from error
    file = SettingsFile(path, document)
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


def checked_section(file: SettingsFile, section: str, structs: Mapping[str, type[Any]]) -> dict[str, Any]:
    """The values of a section, checked for unknown keys, wrong types and missing keys."""
    fields = declared(structs[section])
    values = {
        key: value for key, value in file.sections.get(section, {}).items() if (section, key) != ("recipe", "kind")
    }
    for key in values:
        if key not in fields:
            file.fail(
                f"unknown key '{key}' in [{section}]; {_home(key, structs) or nearest(key, fields)}", section, key
            )
    for name, known in fields.items():
        if known.is_required and name not in values:
            file.fail(f"[{section}] has no '{name}'", section)
    return {key: _read(file, section, fields[key], value) for key, value in values.items()}


def _read(file: SettingsFile, section: str, known: Field, value: Any) -> Any:
    try:
        return known.read(value)
    except ValueError as error:
        file.fail(f"'{known.name}' in [{section}]: {error}", section, known.name)


def _home(key: str, structs: Mapping[str, type[Any]]) -> str:
    """A hint at the section that a misplaced key belongs to; empty if there is none."""
    homes = [name for name, struct in structs.items() if key in declared(struct)]
    return f"it belongs in [{homes[0]}]" if homes else ""


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise RecipeInvalid(f"{path}: this is not UTF-8 text: {error}") from error
    except OSError as error:
        raise RecipeInvalid(f"{path}: cannot read the file: {error.strerror}", hint="check the path") from error
