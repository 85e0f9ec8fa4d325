"""`forebay build` and `forebay estimate`: one subcommand per kind of data."""

import errno
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click
import msgspec
from click.shell_completion import CompletionItem

from forebay import api
from forebay.building.begin import resolve_recipe
from forebay.building.layer_build import in_order
from forebay.cache.catalog import read_recipe_document
from forebay.cache.plan import load_plan
from forebay.cache.records import Estimate
from forebay.cli.legacy import naming_verbs
from forebay.cli.options import (
    Decorator,
    complete_file,
    complete_folder,
    decorated,
    failures_option,
    json_option,
    memory_option,
    refuse_standard_input,
    skip_option,
    source_option,
    workers_option,
)
from forebay.cli.progress import shown_progress
from forebay.cli.settings import KINDS, Kind, Settings, from_cache, from_file, from_words, kept_recipe
from forebay.cli.settings_file import checked_kind, closest, read_settings_file
from forebay.cli.show import say_error, show
from forebay.cli.teacher_verbs import build_teachers
from forebay.cli.teacher_verbs import estimate_command as estimate_teachers_command
from forebay.errors import RangeInvalid, RecipeMismatch
from forebay.format import layout
from forebay.preview.row_records import DryRun
from forebay.preview.words import command_line, human_bytes
from forebay.recipe import differing_fields, fingerprint
from forebay.store import open_store


def dry_run_of(settings: Settings) -> DryRun:
    root, layer = str(settings.build.into), settings.build.layer or settings.recipe.kind
    recipe, _ = resolve_recipe(open_store(root), settings.source, settings.recipe, layer)
    planned, missing = _gaps(root, layer, replace(settings, recipe=recipe))
    estimate = api.estimate(
        settings.source,
        settings.recipe,
        into=root,
        workers=settings.build.workers,
        skip_unreadable=settings.build.skip_unreadable,
    )
    return DryRun(
        root=root,
        layer=layer,
        kind=settings.recipe.kind,
        planned=planned,
        missing=missing,
        estimate=estimate if missing is None else _of_missing(root, missing, estimate),
    )


def _of_missing(root: str, missing: tuple[int, ...], whole: Estimate) -> Estimate:
    """The estimate of the missing chunks, from the estimate of the whole source."""
    weights = load_plan(open_store(root)).weights
    weight = int(weights[list(missing)].sum())
    share = weight / max(1, int(weights.sum()))
    stored = round(share * whole.stored_bytes)
    return msgspec.structs.replace(
        whole,
        source_weight=weight,
        chunks=len(missing),
        stored_bytes=stored,
        **{name: round(share * getattr(whole, name)) for name in ("rows", "raw_bytes", "failures")},
        by_codec={codec: round(share * size) for codec, size in whole.by_codec.items()},
        seconds=share * whole.seconds,
        statistics={name: round(share * value) for name, value in whole.statistics.items()},
        fits=whole.free_bytes is None or stored <= whole.free_bytes,
    )


def _gaps(root: str, layer: str, settings: Settings) -> tuple[int | None, tuple[int, ...] | None]:
    """The number of planned chunks and the requested ones that are missing; None if there is no plan."""
    store = open_store(root)
    kept = read_recipe_document(store, layer)
    if kept is not None and kept.fingerprint != fingerprint(settings.recipe):
        raise RecipeMismatch(root, layer, differing_fields(kept, settings.recipe))
    if kept is None or not load_plan(store).segments:
        return None, None
    found = api.gaps(root, layer=layer)[0]
    asked = in_order(range(found.planned), settings.build.mode, settings.build.start_chunk, settings.build.end_chunk)
    return found.planned, tuple(sorted(set(asked) & set(found.missing)))


# How the group tells the subcommand of a kind where the settings are.
FROM_OPTIONS: tuple[Decorator, ...] = (
    click.option("--from-file", hidden=True),
    click.option("--from-cache", hidden=True),
)


class KindGroup(click.Group):
    """One subcommand per kind; a settings file or a cache selects the kind that it names."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete kinds, and files for settings files and caches."""
        return [CompletionItem(incomplete, type="file"), *super().shell_complete(ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word in self.commands or word.startswith("-"):
            return super().resolve_command(ctx, args)
        if ctx.resilient_parsing:
            return None, None, args  # completion opens no settings file and no cache
        if is_settings_file(word):
            kind = checked_kind(read_settings_file(word), KINDS)
            return kind, self.commands[kind], ["--from-file", *args]
        if is_cache(word):
            kind = kept_recipe(word, _layer_among(args)).kind
            return kind, self.commands[kind], ["--from-cache", *args]
        raise click.UsageError(
            f"'{word}' is not a kind of data ({', '.join(KINDS)}), a settings file or a cache. {self._hint(ctx, args)}",
            ctx,
        )

    def _hint(self, ctx: click.Context, args: list[str]) -> str:
        """The command that was probably meant: the kind was misspelt, or is missing before the source."""
        meant = closest(args[0], list(self.commands))
        words = [next(iter(self.commands)), *args] if meant is None else [meant, *args[1:]]
        return f"Did you mean: {command_line(str(ctx.info_name), *words)}"


def is_settings_file(word: str) -> bool:
    return word.endswith(".toml")


def is_cache(word: str) -> bool:
    return os.path.exists(os.path.join(word, layout.CACHE))


def gathered(kind: str, file: str | None, cache: str | None, flags: Mapping[str, Any]) -> Settings:
    """The settings from a file, a cache or the command line; flags win."""
    given = {name: value for name, value in flags.items() if value is not None and value != ()}
    if file is not None:
        return from_file(file, given)
    if cache is not None:
        return from_cache(cache, given)
    return from_words(KINDS[kind], given)


def _layer_among(args: list[str]) -> str | None:
    """The value of --layer, whose recipe decides which options there are."""
    for position, word in enumerate(args[1:], 1):
        if word == "--layer" and position + 1 < len(args):
            return args[position + 1]
        if word.startswith("--layer="):
            return word.partition("=")[2]
    return None


RUN_OPTIONS = (
    click.option(
        "--into", metavar="CACHE", shell_complete=complete_folder, help="Folder of the cache, new or existing."
    ),
    click.option("--layer", help="Name of the layer.  [default: the kind]"),
    workers_option,
    click.option("--start-chunk", type=click.IntRange(min=0), metavar="A", help="First chunk to build."),
    click.option("--end-chunk", type=click.IntRange(min=0), metavar="B", help="Last chunk to build, inclusive."),
    click.option(
        "--mode",
        type=click.Choice(["forward", "inverse"]),
        help="inverse: check existing chunks first, then fill gaps from the end.",
    ),
    click.option("--resume", is_flag=True, help="Resume a stopped build (always on; kept for compatibility)."),
    click.option("--engine", type=click.Choice(["local"]), help="Engine that builds the chunks."),
    memory_option,
    failures_option,
    skip_option,
    source_option,
    click.option("--dry-run", is_flag=True, help="Show what would be built; write nothing."),
    json_option,
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


def build_command(kind: Kind) -> click.Command:
    """The subcommand of one kind."""

    def command(
        dry_run: bool, resume: bool, as_json: bool, from_file: str | None, from_cache: str | None, **flags: Any
    ) -> None:
        settings = gathered(kind.name, from_file, from_cache, flags)
        _check(settings, from_file)
        _check_start(settings)
        record = dry_run_of(settings) if dry_run else _built(settings, as_json)
        show(record, as_json)

    options = (*FROM_OPTIONS, naming_verbs, *kind.options, *RUN_OPTIONS)
    text = f"{kind.summary}\n\n{kind.details}\n\nExample: forebay build {kind.example} --into caches/{kind.name}"
    argument = click.argument(
        "paths", nargs=-1, metavar="SOURCE...", callback=refuse_standard_input, shell_complete=complete_file
    )
    return click.command(kind.name, help=text)(decorated(command, argument, *options))


def _check(settings: Settings, file: str | None) -> None:
    wanted = settings.build
    if wanted.into is None:
        key = f", or set 'into' in [build] of '{file}'" if file else ""
        raise click.UsageError(f"Missing option '--into'{key}.")
    if os.path.isfile(wanted.into):
        raise NotADirectoryError(errno.ENOTDIR, "it is a file; --into needs a folder", wanted.into)
    if wanted.start_chunk is not None and wanted.end_chunk is not None and wanted.start_chunk > wanted.end_chunk:
        raise click.UsageError(f"--start-chunk {wanted.start_chunk} comes after --end-chunk {wanted.end_chunk}.")


def _check_start(settings: Settings) -> None:
    """Reject a start chunk beyond the plan before the build starts; a new cache has no plan yet."""
    start, root = settings.build.start_chunk, str(settings.build.into)
    if not start or not is_cache(root):
        return
    planned = api.gaps(root, layer=settings.build.layer or settings.recipe.kind)[0].planned
    if planned and start >= planned:
        raise click.UsageError(
            f"--start-chunk {start} is beyond the plan: '{root}' has {planned:,} chunks, numbered from 0."
        )


def _built(settings: Settings, as_json: bool) -> Any:
    with shown_progress(as_json) as on_progress:
        try:
            return api.build(
                str(settings.build.into),
                settings.source,
                settings.recipe,
                on_progress=on_progress,
                **_build_options(settings),
            )
        except RangeInvalid as error:
            raise click.UsageError(f"--{str(error).replace('_', '-', 1)}") from error


def _build_options(settings: Settings) -> Mapping[str, Any]:
    names = ("layer", "workers", "mode", "start_chunk", "end_chunk", "memory_limit", "max_failures", "skip_unreadable")
    return {name: getattr(settings.build, name) for name in names}


for known in KINDS.values():
    build.add_command(build_command(known))
build.add_command(build_teachers)


@click.group(cls=KindGroup, subcommand_metavar="KIND|SETTINGS.toml|CACHE [ARGS]...")
def estimate() -> None:
    """Estimate the size and time of a build from a sample.

    Takes the kind, the sources and the recipe options of `forebay build`. Reads at most 5 % of the source, but at least
    a few whole documents. For images it also reads all tags (sidecars, manifest or Parquet columns), unless --tags sets
    the vocabulary. Duplicates are included; only a full build can count them. Exits 1 if the disk at --into is too
    small, or if every sample failed.

    Example: forebay estimate tokens 'data/*.jsonl' --into caches/edu
    """


def estimate_command(kind: Kind) -> click.Command:
    """The subcommand of one kind."""

    def command(as_json: bool, from_file: str | None, from_cache: str | None, **flags: Any) -> None:
        settings = gathered(kind.name, from_file, from_cache, flags)
        found = api.estimate(
            settings.source,
            settings.recipe,
            into=settings.build.into,
            workers=settings.build.workers,
            skip_unreadable=settings.build.skip_unreadable,
        )
        show(found, as_json)
        problems = [_no_room(settings.build.into, found)] if not found.fits else []
        problems += [_all_failed(found)] if found.all_failed else []
        for problem in problems:
            say_error(problem)
        click.get_current_context().exit(int(bool(problems)))

    options: tuple[Decorator, ...] = (
        *FROM_OPTIONS,
        click.option("--layer", hidden=True),
        *kind.options,
        click.option(
            "--into",
            metavar="CACHE",
            shell_complete=complete_folder,
            help="Folder of the cache: compare with its free disk space.",
        ),
        workers_option,
        skip_option,
        source_option,
        json_option,
    )
    text = f"{kind.summary}\n\n{kind.details}\n\nExample: forebay estimate {kind.example} --into caches/{kind.name}"
    argument = click.argument(
        "paths", nargs=-1, metavar="SOURCE...", callback=refuse_standard_input, shell_complete=complete_file
    )
    return click.command(kind.name, help=text)(decorated(command, argument, *options))


def _all_failed(found: Estimate) -> str:
    return f"every trial sample failed, most as '{found.failure_reason}' ({found.failure_example})"


def _no_room(into: str | None, found: Estimate) -> str:
    needed, free = human_bytes(found.stored_bytes), human_bytes(found.free_bytes or 0)
    return (
        f"not enough disk space at '{into}': about {needed} are needed, {free} are free; free some or use another disk"
    )


for known in KINDS.values():
    estimate.add_command(estimate_command(known))
estimate.add_command(estimate_teachers_command)
