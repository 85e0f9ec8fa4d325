"""`forebay build` and `forebay estimate`: one subcommand per kind of data."""

import os
from typing import Any

import click
from click.shell_completion import CompletionItem

from forebay import api
from forebay.cache.catalog import unpublished
from forebay.cache.reports import DryRun, Estimate
from forebay.cli.options import (
    Decorator,
    WrongUsage,
    check_destination,
    checked_range,
    decorated,
    network_option,
    option,
    passed_flags,
    source_argument,
    struct_options,
)
from forebay.cli.output import Finding, shown_progress
from forebay.cli.settings import (
    BuildSettings,
    Kind,
    Settings,
    base_recipe,
    engine_of,
    from_cache,
    from_file,
    from_words,
    kind_names,
    kind_of,
)
from forebay.cli.settings_file import checked_kind, read_settings_file
from forebay.cli.verb import Verbs, verb
from forebay.errors import closest
from forebay.fields import declared
from forebay.format import layout
from forebay.preview.words import command_line, human_bytes
from forebay.store import open_store
from forebay.store.base import holds, is_url

FROM_OPTIONS: tuple[Decorator, ...] = (  # how the group names the settings to the command of a kind
    option("--from-file", hidden=True),
    option("--from-cache", hidden=True),
)
TEACHERS = "teachers"


class KindGroup(Verbs):
    """One subcommand per kind, made when it is used; a settings file or a cache selects its kind."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*kind_names(), *self.homes]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.commands and name in kind_names():
            kind = kind_of(name)
            if kind is None:
                raise WrongUsage(f"recipes of kind '{name}' are not built from files", "build this layer in Python")
            self.add_command(kind_command(str(ctx.info_name), kind))
        return super().get_command(ctx, name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete kinds, and files for settings files and caches."""
        return [CompletionItem(incomplete, type="file"), *super().shell_complete(ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word in self.list_commands(ctx) or word.startswith("-"):
            return click.Group.resolve_command(self, ctx, args)
        if ctx.resilient_parsing:
            return None, None, args  # completion opens no settings file and no cache
        if is_settings_file(word):
            kind = checked_kind(read_settings_file(word), kind_names())
            return kind, self.get_command(ctx, kind), ["--from-file", *args]
        if is_cache(word):
            kind = base_recipe(word).kind
            return kind, self.get_command(ctx, kind), ["--from-cache", *args]
        if is_begun(word):
            raise unpublished(open_store(word))
        known = self.list_commands(ctx)
        meant = None if os.path.exists(word) else closest(word, known)
        words = [known[0], *args] if meant is None else [meant, *args[1:]]
        example = command_line(str(ctx.info_name), *words)
        raise WrongUsage(
            f"'{word}' is not a kind of data ({', '.join(known)}), a settings file or a cache",
            f"did you mean: {example}" if meant else f"the kind of data comes first: {example}",
        )


def is_settings_file(word: str) -> bool:
    return word.endswith(".toml")


def is_cache(word: str) -> bool:
    return holds(open_store(word), layout.CACHE) if is_url(word) else os.path.exists(os.path.join(word, layout.CACHE))


def is_begun(word: str) -> bool:
    """Whether a build has begun there and planned nothing."""
    return (is_url(word) or os.path.isdir(word)) and any(open_store(word).entries(layout.BUILDERS))


def gathered(kind: Kind, file: str | None, cache: str | None, flags: dict[str, Any]) -> Settings:
    """The settings from a file, a cache or the command line; flags win."""
    passed = passed_flags(flags)
    if file is not None:
        return from_file(kind, file, passed)
    if cache is not None:
        return from_cache(kind, cache, passed)
    return from_words(kind, passed)


def kind_options(kind: Kind) -> tuple[Decorator, ...]:
    """The options of a kind's source and recipe. A field that both have is one option."""
    own = [name for name in declared(kind.source) if name not in {"paths", *declared(kind.recipe)}]
    return (*struct_options(kind.source, "Source", *own), *struct_options(kind.recipe, "Recipe"))


def kind_command(verb_name: str, kind: Kind) -> click.Command:
    """The command of one kind, of `build` or `estimate`."""
    is_build = verb_name == "build"
    build_options = (*struct_options(BuildSettings, "Build"), DRY_RUN)
    estimate_options = struct_options(BuildSettings, "Build", "into", "workers")
    run = _build if is_build else _estimate

    def command(**flags: Any) -> Any:
        return run(kind, **flags)

    kind_verb: click.Command = verb(kind.name, help=kind.help(verb_name))(
        decorated(
            command,
            source_argument(required=False),
            *FROM_OPTIONS,
            *kind_options(kind),
            *(build_options if is_build else estimate_options),
            network_option,
        )
    )
    return kind_verb


DRY_RUN = option("-n", "--dry-run", is_flag=True, group="Build", help="Show what would be built; write nothing.")


@click.group(cls=KindGroup, subcommand_metavar="KIND|SETTINGS.toml|CACHE [ARGS]...")
def build() -> None:
    """Build a cache, or resume an unfinished one.

    Pass a kind of data and its sources, a settings file ([source] [recipe] [build]; flags override it), or an
    unfinished cache. Ctrl-C stops at once and prints the command to resume.

    \b
    Example: forebay build tokens 'data/*.jsonl' --into caches/edu
             forebay build wiki.toml --workers 8
             forebay build caches/edu --start-chunk 35 --end-chunk 44
    """


def _build(kind: Kind, dry_run: bool, from_file: str | None, from_cache: str | None, **flags: Any) -> Any:
    settings = gathered(kind, from_file, from_cache, flags)
    _check(settings, from_file)
    with checked_range(settings.build.start_chunk, settings.build.end_chunk):
        return _dry_run(settings) if dry_run else _built(settings)


def _check(settings: Settings, file: str | None) -> None:
    wanted = settings.build
    if wanted.into is None:
        hint = "pass the folder of the cache, for instance --into caches/new"
        hint = f"{hint}, or set 'into' in [build] of '{file}'" if file else hint
        raise WrongUsage("missing option '--into'", hint)
    check_destination(wanted.into)


def _dry_run(settings: Settings) -> DryRun:
    named = _named(settings.build, "layer", "workers", "start_chunk", "end_chunk")
    return api.dry_run(str(settings.build.into), settings.source, settings.recipe, **named)


def _built(settings: Settings) -> Any:
    root, build = str(settings.build.into), settings.build
    options = _named(build, "layer", "workers", "mode", "start_chunk", "end_chunk", "memory_limit", "max_failures")
    options |= {**_named(build, "reuse", "copy"), "engine": engine_of(build)}
    with shown_progress() as on_progress:
        return api.build(root, settings.source, settings.recipe, on_progress=on_progress, **options)


def _named(build: BuildSettings, *names: str) -> dict[str, Any]:
    return {name: getattr(build, name) for name in names}


@click.group(cls=KindGroup, subcommand_metavar="KIND|SETTINGS.toml|CACHE [ARGS]...")
def estimate() -> None:
    """Estimate the size and time of a build from a sample.

    Takes the kind, the sources and the recipe options of `forebay build`. Reads at most 5% of the source, but at least
    a few whole documents, and all image tags unless --tags sets the vocabulary. Duplicates are included. Exits 1 if the
    disk at --into is too small, or if every sample failed. `estimate remote` shows what training will fetch.

    \b
    Example: forebay estimate tokens 'data/*.jsonl' --into caches/edu
             forebay estimate remote s3://my-bucket/edu --nodes 4
    """


def _estimate(kind: Kind, from_file: str | None, from_cache: str | None, **flags: Any) -> Any:
    settings = gathered(kind, from_file, from_cache, flags)
    report = api.estimate(settings.source, settings.recipe, into=settings.build.into, workers=settings.build.workers)
    problems = [no_room(settings.build.into, report.stored_bytes, report.free_bytes)] if not report.fits else []
    problems += [_all_failed(report)] if report.all_failed else []
    if not problems:
        return report
    return Finding(report, "EverySampleFailed" if report.fits else "StoreFull", "; ".join(problems), prints_error=True)


def _all_failed(report: Estimate) -> str:
    return f"every trial sample failed, most as '{report.failure_reason}' ({report.failure_example})"


def no_room(into: str | None, needed: int, free: int | None) -> str:
    sizes = f"about {human_bytes(needed)} are needed, {human_bytes(free or 0)} are free"
    return f"not enough disk space at '{into}': {sizes}; free some or use another disk"


build.homes = {TEACHERS: "forebay.cli.teacher_verbs:build_teachers"}
estimate.homes = {
    TEACHERS: "forebay.cli.teacher_verbs:estimate_teachers_command",
    "remote": "forebay.cli.machine_verbs:estimate_remote",
}
