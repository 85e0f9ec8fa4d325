"""The kinds of data, and the settings of a build: from a settings file, a cache or flags (flags win)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from inspect import cleandoc
from typing import Annotated, Any, Literal, cast

import click
import msgspec
from msgspec import Meta

from forebay.building.layers import begun_plan, check_tagged, constants_file, source_for
from forebay.building.options import ray_engine
from forebay.cache.catalog import read_cache_document, read_recipe_document, unpublished
from forebay.cli.options import WrongUsage, wrong_source_as_usage
from forebay.cli.settings_file import checked_section, read_settings_file
from forebay.engine.base import Engine
from forebay.errors import LibraryMissing
from forebay.fields import Size, declared
from forebay.format import layout
from forebay.kinds import known_kinds, recipe_class, reopen_recipe
from forebay.named_sources import new_source, settings_class
from forebay.preview.words import command_line
from forebay.recipe import Recipe, RecipeDocument, fields_of, hooks_of
from forebay.source import Source
from forebay.sources.source_settings import SourceSettings, is_on_hub
from forebay.store import open_store
from forebay.store.base import is_url
from forebay.tokens.vocabulary import is_path

Count = Annotated[int, Meta(ge=0)]
FAMILIAR = ("tokens", "images", "raw")
ON_OTHER_LAYERS = frozenset({"imported", "teacher"})  # not from a source; their modules need torch


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
    settings = settings_class(recipe)
    return None if settings is None else Kind(name, recipe, settings)


def kind_names() -> list[str]:
    """The kinds that `forebay build` takes: the most used, then others by name."""
    names = sorted(known_kinds(), key=lambda name: ((*FAMILIAR, name).index(name), name))
    return [name for name in names if name not in ON_OTHER_LAYERS]


class BuildSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[build]`: how to run a build. Only the name of the layer affects the bytes of a cache."""

    into: Annotated[
        str | None,
        Meta(
            description="Folder of the cache, new or existing.",
            extra={"format": "folder", "metavar": "CACHE", "flags": ["-o", "--into"]},
        ),
    ] = None
    reuse: Annotated[
        str | None,
        Meta(
            description="Older cache to take unchanged chunks from.",
            extra={"format": "folder", "metavar": "OLD"},
        ),
    ] = None
    copy: Annotated[bool, Meta(description="With --reuse: copy chunks instead of hard links.")] = False
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
        Literal["forward", "inverse"], Meta(description="inverse: add new files, then fill gaps from the end.")
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
            extra={"format": "share", "default": "1% of each segment, at least 10"},
        ),
    ] = None


RAY_NOISE = "Raylet is terminated|has been marked dead|A worker died or was killed"  # they are reported as deaths


def engine_of(build: BuildSettings) -> str | Engine:
    """The engine that options name, with those of its options that belong to it."""
    named = {name: getattr(build, name) for name in ("address", "num_cpus", "num_gpus")}
    options = {name: value for name, value in named.items() if value is not None}
    if build.engine == "ray" and build.memory_limit is not None:
        raise WrongUsage("--memory-limit bounds processes of this machine", "leave it out with --engine ray")
    if build.engine == "ray" and build.workers == 0:
        raise WrongUsage("--workers 0 makes chunks in this process", "leave it out with --engine ray")
    if build.engine == "inline" and (build.workers or 0) > 1:
        raise WrongUsage("--engine inline has one worker, this process", "leave out --workers")
    if build.engine == "ray":
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RAY_NOISE)  # which Ray reads when it is imported
        return ray_engine(**options)
    if options:
        flag = next(iter(options)).replace("_", "-")
        raise WrongUsage(f"--{flag} belongs to a Ray cluster", "add --engine ray")
    return build.engine


@dataclass(frozen=True, slots=True)
class Settings:
    source: Source
    recipe: Recipe
    build: BuildSettings


def from_words(kind: Kind, flags: Mapping[str, Any]) -> Settings:
    """`forebay build tokens SOURCE…`"""
    if "paths" not in flags:
        raise WrongUsage(
            "missing argument 'SOURCE...'", "pass files, folders, quoted globs, hub:org/name or bucket URLs"
        )
    source, recipe, build = _sorted(kind, flags)
    return _settings(kind, source, _placed(kind, "", recipe), build)


def from_file(kind: Kind, path: str, flags: Mapping[str, Any]) -> Settings:
    """`forebay build settings.toml`; paths in the file are relative to its folder."""
    file = read_settings_file(path)
    folder = os.path.dirname(path)
    structs: dict[str, type[Any]] = {"source": kind.source, "recipe": kind.recipe, "build": BuildSettings}
    source, recipe, build = _sorted(kind, flags)
    return _settings(
        kind,
        {**_paths_from(folder, checked_section(file, "source", structs)), **source},
        {**_placed(kind, folder, checked_section(file, "recipe", structs)), **_placed(kind, "", recipe)},
        {**_paths_from(folder, checked_section(file, "build", structs)), **build},
    )


def from_cache(kind: Kind, root: str, flags: Mapping[str, Any]) -> Settings:
    """`forebay build CACHE`: the source and the recipe of the cache."""
    check_tagged(open_store(root))
    stored = base_recipe(root)
    source, recipe, build = _sorted(kind, flags)
    if build.get("layer", stored.layer) != stored.layer:
        raise WrongUsage(
            f"`build CACHE` resumes the base layer, '{stored.layer}' (got --layer {build['layer']})",
            f"resume teacher layers with: {command_line('build', 'teachers', root)}",
        )
    if source or "into" in build:
        raise WrongUsage(f"'{root}' is a cache and has its own source", "use `forebay update` to add data")
    plan = begun_plan(open_store(root))
    verb, is_allowed = click.get_current_context().command_path.split()[1], bool(flags.get("allow_network"))
    reopened_source = source_for(open_store(root), None, is_allowed, plan, verb)
    constants = constants_file(open_store(root), layout.document_folder(stored))
    reopened = cast(Recipe, reopen_recipe(stored, constants, root=root, verb=verb, allow_network=is_allowed))
    return Settings(
        reopened_source,
        _changed(kind, reopened, _placed(kind, "", recipe)),
        msgspec.convert({**build, "into": root, "layer": stored.layer}, BuildSettings),
    )


def _changed(kind: Kind, reopened: Recipe, passed: dict[str, Any]) -> Recipe:
    """The recipe of a cache with the fields that the user passed."""
    if not passed:
        return reopened
    changed: Recipe = msgspec.convert({**fields_of(reopened), **passed}, kind.recipe)
    return changed


def base_recipe(root: str) -> RecipeDocument:
    """The recipe of the base layer."""
    store = open_store(root)
    stored = read_recipe_document(store, read_cache_document(store).base)
    if stored is None:
        raise unpublished(store)
    if stored.kind not in kind_names():
        raise LibraryMissing(
            f"no recipe of kind '{stored.kind}' is installed (known: {', '.join(kind_names())})",
            hint="install the package that provides it, or pass the recipe itself",
        )
    return stored


def _settings(kind: Kind, source: dict[str, Any], recipe: dict[str, Any], build: dict[str, Any]) -> Settings:
    for name, option in declared(kind.recipe).items():
        if option.is_required and name not in recipe:
            flag = f"--{name.replace('_', '-')}"
            raise WrongUsage(f"missing option '{flag}' (required for {kind.name})", option.help)
    with wrong_source_as_usage():
        opened = new_source(kind.recipe, source["paths"], **{name: source[name] for name in source if name != "paths"})
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
    paths = {
        name: os.path.abspath(os.path.join(folder, recipe[name]))
        for name in hooks_of(kind.recipe).located
        if isinstance(recipe.get(name), str)
        and is_path(recipe[name])
        and os.path.exists(os.path.join(folder, recipe[name]))
    }
    return {**recipe, **paths}
