"""`forebay build` and `forebay estimate`: one subcommand per kind of data."""

import errno
import os
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem

from forebay import api
from forebay.cache.records import DryRun, Estimate
from forebay.cli.legacy import naming_verbs
from forebay.cli.settings import (
    BuildSettings,
    Kind,
    Settings,
    checked_kind,
    engine_of,
    from_cache,
    from_file,
    from_words,
    is_offered,
    kept_recipe,
    kind_names,
    kind_of,
    place_in_plan,
    read_settings_file,
)
from forebay.cli.verb import (
    SOURCE_HELP,
    Decorator,
    Finding,
    Option,
    Verbs,
    checked_range,
    decorated,
    passed_flags,
    refuse_memory,
    shown_progress,
    source_argument,
    struct_options,
    verb,
)
from forebay.errors import RangeInvalid, closest
from forebay.fields import declared
from forebay.format import layout
from forebay.preview.words import command_line, human_bytes
from forebay.store import open_store
from forebay.store.base import holds, is_url

FROM_OPTIONS: tuple[Decorator, ...] = (  # how the group names the settings to the command of a kind
    click.option("--from-file", hidden=True),
    click.option("--from-cache", hidden=True),
)
TEACHERS = "teachers"


class KindGroup(Verbs):
    """One subcommand per kind, made when it is used; a settings file or a cache selects the kind that it names."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*kind_names(), *self.homes]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.commands and name not in self.homes and is_offered(name):
            kind = kind_of(name)
            self.add_command(kind_command(str(ctx.info_name), kind) if kind else click.Command(name))
        return super().get_command(ctx, name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete kinds, and files for settings files and caches."""
        return [CompletionItem(incomplete, type="file"), *super().shell_complete(ctx, incomplete)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`--remote`, before or after the cache, is another way to write the command `remote`."""
        if "--remote" in args and "remote" in self.homes:
            args = ["remote", *(arg for arg in args if arg != "--remote")]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word in self.homes or is_offered(word) or word.startswith("-"):
            return click.Group.resolve_command(self, ctx, args)
        if ctx.resilient_parsing:
            return None, None, args  # completion opens no settings file and no cache
        if is_settings_file(word):
            kind = checked_kind(read_settings_file(word), kind_names())
            return kind, self.get_command(ctx, kind), ["--from-file", *args]
        if is_cache(word):
            kind = kept_recipe(word, _layer_among(args)).kind
            return kind, self.get_command(ctx, kind), ["--from-cache", *args]
        known = self.list_commands(ctx)
        meant = None if os.path.exists(word) else closest(word, known)
        words = [known[0], *args] if meant is None else [meant, *args[1:]]
        hint = "Did you mean" if meant else f"The kind of data ({', '.join(known)}) comes first"
        raise click.UsageError(
            f"'{word}' is not a kind of data, a settings file or a cache. {hint}: "
            f"{command_line(str(ctx.info_name), *words)}",
            ctx,
        )


def is_settings_file(word: str) -> bool:
    return word.endswith(".toml")


def is_cache(word: str) -> bool:
    return holds(open_store(word), layout.CACHE) if is_url(word) else os.path.exists(os.path.join(word, layout.CACHE))


def gathered(kind: Kind, file: str | None, cache: str | None, flags: dict[str, Any]) -> Settings:
    """The settings from a file, a cache or the command line; flags win."""
    given = passed_flags(flags)
    if file is not None:
        return from_file(kind, file, given)
    if cache is not None:
        return from_cache(kind, cache, given)
    return from_words(kind, given)


def _layer_among(args: list[str]) -> str | None:
    """The value of --layer, whose recipe decides which options there are."""
    for position, word in enumerate(args[1:], 1):
        if word == "--layer" and position + 1 < len(args):
            return args[position + 1]
        if word.startswith("--layer="):
            return word.partition("=")[2]
    return None


def kind_options(kind: Kind) -> tuple[Decorator, ...]:
    """The options of a kind's source and recipe. A field that both have is one option."""
    own = [name for name in declared(kind.source) if name not in {"paths", *declared(kind.recipe)}]
    return (*struct_options(kind.source, "Source", *own), *struct_options(kind.recipe, "Recipe"))


def kind_command(verb_name: str, kind: Kind) -> click.Command:
    """The command of one kind, of `build` or `estimate`."""
    options: tuple[Decorator, ...] = (*FROM_OPTIONS, *kind_options(kind))
    if verb_name == "build":
        options += (naming_verbs, *struct_options(BuildSettings, "Build"), *RUN_OPTIONS)
    else:
        options += (click.option("--layer", hidden=True), *struct_options(BuildSettings, "Build", *ESTIMATED))
    options += (click.option("--check-source", is_flag=True, cls=Option, group="Build", help=SOURCE_HELP),)
    run = _build if verb_name == "build" else _estimate

    def command(**flags: Any) -> Any:
        return run(kind, **flags)

    made: click.Command = verb(kind.name, help=kind.help(verb_name))(
        decorated(command, source_argument(required=False), *options)
    )
    return made


ESTIMATED = ("into", "workers", "skip_unreadable")
RUN_OPTIONS = (
    click.option(
        "--resume",
        is_flag=True,
        cls=Option,
        group="Build",
        help="Resume a stopped build (always on; kept for compatibility).",
    ),
    click.option(
        "-n", "--dry-run", is_flag=True, cls=Option, group="Build", help="Show what would be built; write nothing."
    ),
)


@click.group(cls=KindGroup, subcommand_metavar="KIND|SETTINGS.toml|CACHE [ARGS]...")
@naming_verbs
def build() -> None:
    """Build a cache, or resume an unfinished one.

    Name a kind of data and its sources, or a settings file ([source] [recipe] [build]; flags win; paths in it are
    relative to its folder), or an unfinished cache. Ctrl-C stops at once and prints the command to resume.

    \b
    Example: forebay build tokens 'data/*.jsonl' --into caches/edu
             forebay build wiki.toml --workers 8
             forebay build caches/edu --start-chunk 35 --end-chunk 44
    """


def _build(kind: Kind, dry_run: bool, resume: bool, from_file: str | None, from_cache: str | None, **flags: Any) -> Any:
    settings = gathered(kind, from_file, from_cache, flags)
    _check(settings, from_file)
    with checked_range(settings.build.start_chunk, settings.build.end_chunk):
        _check_start(settings)
        return _dry_run(settings) if dry_run else _built(settings)


def _check(settings: Settings, file: str | None) -> None:
    wanted = settings.build
    if wanted.into is None:
        key = f", or set 'into' in [build] of '{file}'" if file else ": the folder of the cache, e.g. --into caches/new"
        raise click.UsageError(f"Missing option '--into'{key}.")
    refuse_memory(wanted.into)
    if os.path.isfile(wanted.into):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file; --into needs a folder", wanted.into)


def _check_start(settings: Settings) -> None:
    """Reject a start chunk beyond the plan before the build starts; a new cache has no plan yet."""
    start, root = settings.build.start_chunk, str(settings.build.into)
    if not start or not is_cache(root):
        return
    planned = api.gaps(root, layer=settings.build.layer or settings.recipe.kind)[0].planned
    if planned and start >= planned:
        raise RangeInvalid(root, start, planned)


def _dry_run(settings: Settings) -> DryRun:
    names = ("layer", "workers", "start_chunk", "end_chunk", "skip_unreadable")
    named = {name: getattr(settings.build, name) for name in names}
    return api.dry_run(str(settings.build.into), settings.source, settings.recipe, **named)


def _built(settings: Settings) -> Any:
    with shown_progress() as on_progress:
        return api.build(
            str(settings.build.into),
            settings.source,
            settings.recipe,
            on_progress=on_progress,
            **_build_options(settings),
        )


def _build_options(settings: Settings) -> Mapping[str, Any]:
    names = ["layer", "workers", "mode", "start_chunk", "end_chunk", "memory_limit", "max_failures"]
    names += ["skip_unreadable"]
    named = {name: getattr(settings.build, name) for name in names}
    return {**named, "engine": engine_of(settings.build), "begin_at": place_in_plan(os.environ)}


@click.group(cls=KindGroup, subcommand_metavar="KIND|SETTINGS.toml|CACHE [ARGS]...")
def estimate() -> None:
    """Estimate the size and time of a build from a sample.

    Takes the kind, the sources and the recipe options of `forebay build`. Reads at most 5 % of the source, but at least
    a few whole documents. For images it also reads all tags (sidecars, manifest or Parquet columns), unless --tags sets
    the vocabulary. Duplicates are included; only a full build can count them. Exits 1 if the disk at --into is too
    small, or if every sample failed.

    With --remote, shows what training from a cache in a bucket will fetch: `forebay estimate remote --help`.

    \b
    Example: forebay estimate tokens 'data/*.jsonl' --into caches/edu
             forebay estimate caches/edu --remote --nodes 4 --tier-bytes 500GB --bandwidth 1Gbit
    """


def _estimate(kind: Kind, from_file: str | None, from_cache: str | None, **flags: Any) -> Any:
    settings = gathered(kind, from_file, from_cache, flags)
    found = api.estimate(
        settings.source,
        settings.recipe,
        into=settings.build.into,
        workers=settings.build.workers,
        skip_unreadable=settings.build.skip_unreadable,
    )
    problems = [_no_room(settings.build.into, found)] if not found.fits else []
    problems += [_all_failed(found)] if found.all_failed else []
    if not problems:
        return found
    return Finding(found, "EverySampleFailed" if found.fits else "DiskFull", "; ".join(problems), is_said=True)


def _all_failed(found: Estimate) -> str:
    return f"every trial sample failed, most as '{found.failure_reason}' ({found.failure_example})"


def _no_room(into: str | None, found: Estimate) -> str:
    needed, free = human_bytes(found.stored_bytes), human_bytes(found.free_bytes or 0)
    return (
        f"not enough disk space at '{into}': about {needed} are needed, {free} are free; free some or use another disk"
    )


build.homes = {TEACHERS: "forebay.cli.teacher_verbs:build_teachers"}
estimate.homes = {
    TEACHERS: "forebay.cli.teacher_verbs:estimate_teachers_command",
    "remote": "forebay.cli.tier_verbs:estimate_remote",
}
