"""The kinds of data, and the settings of a build: from a settings file, a cache or flags (flags win).

Read settings of a build from TOML; errors name the key, its line and the nearest valid name.

[source]                         [recipe]                     [build]
paths = ["data/*.jsonl"]         kind = "tokens"              into = "caches/edu"
text = "text"                    sequence_length = 512        workers = 2
"""

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import cleandoc
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, NoReturn, cast

import click
import msgspec
from msgspec import Meta

from forebay.building.begin import begun_plan, check_kept_texts, constants_file, source_for
from forebay.building.layer_build import ray_engine
from forebay.cache.catalog import layers_of, read_cache_document, read_recipe_document
from forebay.cli.legacy import Refused, modernized
from forebay.cli.verb import say
from forebay.engine.base import Engine
from forebay.errors import LayerNotFound, SettingsInvalid, SourceInvalid, UnknownKind, nearest
from forebay.fields import Field, Size, declared
from forebay.kinds import is_known, known_kinds, recipe_class, reopen_recipe
from forebay.preview.words import command_line
from forebay.recipe import Recipe, RecipeDocument, fields_of, hooks_of
from forebay.source import Source
from forebay.sources.source_settings import SourceSettings, is_on_hub
from forebay.store import open_store
from forebay.store.base import is_url
from forebay.tokens.vocabulary import is_path

TEACHER = "teacher"
Count = Annotated[int, Meta(ge=0)]
FAMILIAR = ("tokens", "images", "raw")
ON_OTHER_LAYERS = frozenset({"imported", "imported-rows", TEACHER})  # not from a source; their modules need torch


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of data as a subcommand of `build` and `estimate`: the structs of its source and of its recipe.

    Every option has the name of the field that it sets, so that flags and settings files use the same names.
    """

    name: str
    recipe: type[Any]
    source: type[SourceSettings]

    def help(self, verb: str) -> str:
        """The first line of the recipe's docstring, what SOURCE may be, and an example."""
        summary = cleandoc(self.recipe.__doc__ or self.name).partition("\n")[0]
        details = cleandoc(self.source.__doc__ or "").partition("\n")[2].strip()
        example = f"Example: forebay {verb} {self.name} {self.source.example} --into caches/{self.name}"
        return f"{summary}\n\n{details}\n\n{example}"


@cache
def kind_of(name: str) -> Kind | None:
    """The kind of a recipe that is built from a source; None for layers on top of others."""
    if name in ON_OTHER_LAYERS:
        return None
    recipe = recipe_class(name)
    place = hooks_of(recipe).source_settings if "chunk_target" in dir(recipe) else ""
    return Kind(name, recipe, resolve_name(place)) if place else None


def kind_names() -> list[str]:
    """The kinds that `forebay build` takes: the most used, then others by name."""
    names = sorted(known_kinds(), key=lambda name: ((*FAMILIAR, name).index(name), name))
    return [name for name in names if is_offered(name)]


def is_offered(name: str) -> bool:
    """Whether `forebay build` takes a kind. Only its own module is imported: those of other kinds may need torch."""
    try:
        return is_known(name) and kind_of(name) is not None
    except Exception:  # of another package, or a library is missing
        return True  # help and use report it


class BuildSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[build]`: how to run a build. Only the name of the layer affects the bytes of a cache."""

    into: Annotated[
        str | None,
        Meta(
            description="Folder of the cache, new or existing.",
            extra={"format": "folder", "metavar": "CACHE", "flags": ["-o", "--into"]},
        ),
    ] = None
    layer: Annotated[str | None, Meta(description="Name of the layer.", extra={"default": "the kind"})] = None
    workers: Annotated[
        Count | None,
        Meta(
            description="Worker processes; 0 uses this process.",
            extra={"default": "one per core", "flags": ["-w", "--workers"]},
        ),
    ] = None
    start_chunk: Annotated[Count | None, Meta(description="First chunk to build.", extra={"metavar": "A"})] = None
    end_chunk: Annotated[Count | None, Meta(description="Last chunk to build, inclusive.", extra={"metavar": "B"})] = (
        None
    )
    mode: Annotated[
        Literal["forward", "inverse"],
        Meta(description="inverse: check existing chunks first, then fill gaps from the end."),
    ] = "forward"
    engine: Annotated[
        Literal["inline", "local", "ray"],
        Meta(description="Engine that builds the chunks; inline: in this process, ray: on a Ray cluster."),
    ] = "local"
    address: Annotated[str | None, Meta(description="Ray cluster: HOST:PORT, or auto for the one of this machine.")] = (
        None
    )
    num_cpus: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="CPUs per chunk on Ray.", extra={"default": "1"})
    ] = None
    num_gpus: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="GPUs per chunk on Ray.", extra={"default": "0"})
    ] = None
    memory_limit: Annotated[
        Size | None, Meta(description="Memory limit for the builder and its workers together, e.g. 16GB.")
    ] = None
    max_failures: Annotated[
        Count | Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description="Failed samples to allow: a count (20) or a share (1%); 100% allows all.",
            extra={"format": "share", "default": "stop at a chunk of which all samples fail"},
        ),
    ] = None
    skip_unreadable: Annotated[
        bool, Meta(description="Skip damaged source files, and list them.", extra={"flags": ["--skip-unreadable"]})
    ] = False


_GOLDEN = (5**0.5 - 1) / 2  # of its multiples, however many, none are close together


def place_in_plan(environment: Mapping[str, str]) -> float | None:
    """The share of the plan at which this builder begins, if a launcher started it as one of many; else None.

    It says only where to begin: whoever is there makes all that is missing. The number of builders is not needed.

    >>> [round(place_in_plan({"RANK": str(rank)}), 2) for rank in range(4)]
    [0.0, 0.62, 0.24, 0.85]
    """
    names = ("RANK", "SLURM_ARRAY_TASK_ID", "SLURM_NTASKS", "SLURM_PROCID", "JOB_COMPLETION_INDEX")
    found = {name: int(value) for name in names if (value := environment.get(name, "")).isascii() and value.isdecimal()}
    if "RANK" in found:
        number = found["RANK"]
    elif "SLURM_ARRAY_TASK_ID" in found or "SLURM_PROCID" in found:
        number = found.get("SLURM_ARRAY_TASK_ID", 0) * found.get("SLURM_NTASKS", 1) + found.get("SLURM_PROCID", 0)
    elif "JOB_COMPLETION_INDEX" in found:
        number = found["JOB_COMPLETION_INDEX"]
    else:
        return None
    return number % (1 << 32) * _GOLDEN % 1


RAY_NOISE = "Raylet is terminated|has been marked dead|A worker died or was killed"  # they are reported as deaths


def engine_of(build: BuildSettings) -> str | Engine:
    """The engine that options name, with those of its options that belong to it."""
    named = {name: getattr(build, name) for name in ("address", "num_cpus", "num_gpus")}
    options = {name: value for name, value in named.items() if value is not None}
    if build.engine == "ray" and build.memory_limit is not None:
        raise click.UsageError("--memory-limit bounds processes of this machine; leave it out with --engine ray.")
    if build.engine == "ray" and build.workers == 0:
        raise click.UsageError("--workers 0 makes chunks in this process; leave it out with --engine ray.")
    if build.engine == "inline" and (build.workers or 0) > 1:
        raise click.UsageError("--engine inline has one worker, this process; leave out --workers.")
    if build.engine == "ray":
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RAY_NOISE)  # which Ray reads when it is imported
        return ray_engine(**options)
    if options:
        flag = next(iter(options)).replace("_", "-")
        raise click.UsageError(f"--{flag} belongs to a Ray cluster; add --engine ray.")
    return build.engine


@dataclass(frozen=True, slots=True)
class Settings:
    source: Source
    recipe: Recipe
    build: BuildSettings


def from_words(kind: Kind, flags: Mapping[str, Any]) -> Settings:
    """`forebay build tokens SOURCE…`"""
    if "paths" not in flags:
        raise click.UsageError("Missing argument 'SOURCE...'.")
    source, recipe, build = _sorted(kind, flags)
    return _settings(kind, source, _placed(kind, "", recipe), build)


def from_file(kind: Kind, path: str, flags: Mapping[str, Any]) -> Settings:
    """`forebay build settings.toml`; paths in the file are relative to its folder."""
    file = read_settings_file(path)
    for note in file.notes:
        say(f"note: {note}")
    folder = os.path.dirname(path)
    structs: dict[str, type[Any]] = {"source": kind.source, "recipe": kind.recipe, "build": BuildSettings}
    source, recipe, build = _sorted(kind, flags)
    return _settings(
        kind,
        {**_paths_from(folder, checked_section(file, "source", structs)), **source},
        {
            **_placed(kind, folder, checked_section(file, "recipe", structs)),
            **_placed(kind, "", recipe),
        },
        {**_paths_from(folder, checked_section(file, "build", structs)), **build},
    )


def from_cache(kind: Kind, root: str, flags: Mapping[str, Any]) -> Settings:
    """`forebay build CACHE`: the source and the recipe of the cache."""
    check_kept_texts(open_store(root))
    kept = kept_recipe(root, flags.get("layer"))
    source, recipe, build = _sorted(kind, flags)
    if source or "into" in build:
        raise click.UsageError(f"'{root}' is a cache and has its own source; use `forebay grow` to add data.")
    plan = begun_plan(open_store(root))
    verb, is_allowed = click.get_current_context().command_path.split()[1], bool(flags.get("check_source"))
    reopened_source = source_for(open_store(root), None, is_allowed, plan, verb)
    constants = constants_file(open_store(root), kept.layer)
    reopened = cast(Recipe, reopen_recipe(kept, constants, root=root, verb=verb, check_source=is_allowed))
    return Settings(
        reopened_source,
        _changed(kind, reopened, _placed(kind, "", recipe)),
        msgspec.convert({**build, "into": root, "layer": kept.layer}, BuildSettings),
    )


def _changed(kind: Kind, reopened: Recipe, given: dict[str, Any]) -> Recipe:
    """The recipe of a cache with the fields that the user passed."""
    if not given:
        return reopened
    changed: Recipe = msgspec.convert({**fields_of(reopened), **given}, kind.recipe)
    return changed


def kept_recipe(root: str, layer: str | None) -> RecipeDocument:
    """The recipe of a layer, by default the base layer."""
    store = open_store(root)
    name = layer or read_cache_document(store).base
    kept = read_recipe_document(store, name)
    if kept is None:
        raise LayerNotFound(root, name, layers_of(store))
    if kept.kind == TEACHER:
        raise click.UsageError(
            f"layer '{name}' is a teacher layer; resume with: {command_line('build', 'teachers', root)}"
        )
    if kind_of(kept.kind) is None:
        raise UnknownKind("recipe", kept.kind, kind_names())
    return kept


def _settings(kind: Kind, source: dict[str, Any], recipe: dict[str, Any], build: dict[str, Any]) -> Settings:
    for name, option in declared(kind.recipe).items():
        if option.is_required and name not in recipe:
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}', which a recipe of {kind.name} needs.")
    try:
        opened = msgspec.convert(source, kind.source).open()
    except SourceInvalid as error:
        raise click.UsageError(f"{error}.") from error
    return Settings(opened, msgspec.convert(recipe, kind.recipe), msgspec.convert(build, BuildSettings))


def _sorted(kind: Kind, flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split flags by their section."""
    structs = (kind.source, kind.recipe, BuildSettings)
    source, recipe, build = ({name: flags[name] for name in declared(struct) if name in flags} for struct in structs)
    return source, recipe, build


def _paths_from(folder: str, section: dict[str, Any]) -> dict[str, Any]:
    """A section with its paths relative to a folder, except URLs and hub: names."""

    def below(path: str) -> str:
        return path if is_on_hub(path) or is_url(path) else os.path.join(folder, path)

    if "paths" in section:
        section = {**section, "paths": tuple(map(below, section["paths"]))}
    return {**section, **{name: below(section[name]) for name in ("into", "spool", "root") if section.get(name)}}


def _placed(kind: Kind, folder: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe with absolute paths; a name like `gpt2` is not a path."""
    found = {
        name: os.path.abspath(os.path.join(folder, recipe[name]))
        for name in hooks_of(kind.recipe).located
        if isinstance(recipe.get(name), str)
        and is_path(recipe[name])
        and os.path.exists(os.path.join(folder, recipe[name]))
    }
    return {**recipe, **found}


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


def checked_section(file: SettingsFile, section: str, structs: Mapping[str, type[Any]]) -> dict[str, Any]:
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
