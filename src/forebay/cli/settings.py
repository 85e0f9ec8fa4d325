"""The settings of a build, from a settings file, flags, or the cache itself (flags win), and the table of kinds."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import click
import msgspec

from forebay.api import check_kept_texts
from forebay.building.begin import begun_plan
from forebay.cache.catalog import layers_of, read_cache_document, read_recipe_document
from forebay.cli.kind_images import IMAGES
from forebay.cli.kind_options import RAW, Kind
from forebay.cli.kind_tokens import TOKENS
from forebay.cli.options import is_on_hub
from forebay.cli.settings_file import checked_kind, checked_section, read_settings_file
from forebay.cli.show import say
from forebay.errors import LayerNotFound, SourceNotContacted, UnknownKind
from forebay.format import layout
from forebay.kinds import remote_source, reopen_recipe, reopen_source
from forebay.preview.words import command_line
from forebay.recipe import Recipe, RecipeDocument, fields_of, hooks_of
from forebay.source import Source
from forebay.store import open_store
from forebay.teachers import TeacherRecipe
from forebay.tokens.vocabulary import is_path

__all__ = ["KINDS", "Kind"]
KINDS: dict[str, Kind] = {kind.name: kind for kind in (TOKENS, IMAGES, RAW)}
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(gt=0)]


class BuildSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to run a build; nothing of it changes a byte but the name of the layer."""

    into: str | None = None
    layer: str | None = None
    workers: Count | None = None
    mode: Literal["forward", "inverse"] = "forward"
    start_chunk: Count | None = None
    end_chunk: Count | None = None
    engine: Literal["local"] = "local"
    memory_limit: Positive | None = None
    max_failures: Count | Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    skip_unreadable: bool = False


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


def from_file(path: str, flags: Mapping[str, Any]) -> Settings:
    """`forebay build settings.toml`; paths in the file are relative to its folder."""
    file = read_settings_file(path)
    for note in file.notes:
        say(f"note: {note}")
    kind = KINDS[checked_kind(file, KINDS)]
    folder = os.path.dirname(path)
    structs: dict[str, type[Any]] = {"source": kind.source, "recipe": kind.recipe, "build": BuildSettings}
    source, recipe, build = _sorted(kind, flags)
    return _settings(
        kind,
        {**_paths_from(folder, checked_section(file, "source", structs)), **source},
        {
            **_placed(kind, folder, checked_section(file, "recipe", structs, kind.recipe_fields({}))),
            **_placed(kind, "", recipe),
        },
        {**_paths_from(folder, checked_section(file, "build", structs)), **build},
    )


def from_cache(root: str, flags: Mapping[str, Any]) -> Settings:
    """`forebay build CACHE`: the source and the recipe that the cache keeps."""
    check_kept_texts(open_store(root))
    kept = kept_recipe(root, flags.get("layer"))
    kind = KINDS[kept.kind]
    source, recipe, build = _sorted(kind, flags)
    if source or "into" in build:
        raise click.UsageError(f"'{root}' is a cache and knows its source; `forebay grow` appends other data.")
    plan = begun_plan(open_store(root))
    remote, is_allowed = remote_source(plan.source), bool(flags.get("check_source"))
    verb = click.get_current_context().command_path.split()[1]
    if remote and not is_allowed:
        raise SourceNotContacted(root, remote, verb)
    constants = os.path.join(root, layout.constants(kept.layer))
    reopened = cast(Recipe, reopen_recipe(kept, constants, root=root, verb=verb, check_source=is_allowed))
    return Settings(
        reopen_source(plan.source),
        _changed(kind, reopened, _placed(kind, "", recipe)),
        msgspec.convert({**build, "into": root, "layer": kept.layer}, BuildSettings),
    )


def _changed(kind: Kind, reopened: Recipe, given: dict[str, Any]) -> Recipe:
    """The recipe that a cache keeps, with the fields that a user passed."""
    if not given:
        return reopened
    changed: Recipe = msgspec.convert(kind.recipe_fields({**fields_of(reopened), **given}), kind.recipe)
    return changed


def kept_recipe(root: str, layer: str | None) -> RecipeDocument:
    """The recipe of a layer, the base layer unless one is named, if its kind is known here."""
    store = open_store(root)
    name = layer or read_cache_document(store).base
    kept = read_recipe_document(store, name)
    if kept is None:
        raise LayerNotFound(root, name, layers_of(store))
    if kept.kind == TeacherRecipe.kind:
        raise click.UsageError(
            f"layer '{name}' is a teacher's; continue with: {command_line('build', 'teachers', root)}"
        )
    if kept.kind not in KINDS:
        raise UnknownKind("recipe", kept.kind, list(KINDS))
    return kept


def _settings(kind: Kind, source: dict[str, Any], recipe: dict[str, Any], build: dict[str, Any]) -> Settings:
    return Settings(
        msgspec.convert(source, kind.source).open(),
        msgspec.convert(kind.recipe_fields(recipe), kind.recipe),
        msgspec.convert(build, BuildSettings),
    )


def _sorted(kind: Kind, flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Flags by the section they belong to."""
    structs = (kind.source, kind.recipe, BuildSettings)
    names = [{field.name for field in msgspec.structs.fields(struct)} for struct in structs]
    source, recipe, build = ({name: flags[name] for name in known if name in flags} for known in names)
    return source, recipe, build


def _paths_from(folder: str, section: dict[str, Any]) -> dict[str, Any]:
    """A section with its paths relative to a folder; what is on the hub is in no folder."""
    if "paths" in section:
        paths = (path if is_on_hub(path) else os.path.join(folder, path) for path in section["paths"])
        section = {**section, "paths": tuple(paths)}
    found = {name: os.path.join(folder, section[name]) for name in ("into", "spool", "root") if section.get(name)}
    return {**section, **found}


def _placed(kind: Kind, folder: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe whose files, where they are files, can be found from any folder; `gpt2` is not one."""
    found = {
        name: os.path.abspath(os.path.join(folder, recipe[name]))
        for name in hooks_of(kind.recipe).located
        if name in recipe and is_path(recipe[name]) and os.path.exists(os.path.join(folder, recipe[name]))
    }
    return {**recipe, **found}
