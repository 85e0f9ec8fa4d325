"""`forebay build`: plan, then compute what is missing."""

import errno
import os
from collections.abc import Mapping
from typing import Any

import click

from forebay import api
from forebay.cli.dry_run import dry_run_of
from forebay.cli.kind_group import FROM_OPTIONS, KindGroup, gathered, is_cache
from forebay.cli.kinds import KINDS, Kind
from forebay.cli.old_names import naming_verbs
from forebay.cli.options import (
    complete_file,
    complete_folder,
    decorated,
    failures_option,
    json_option,
    memory_option,
    skip_option,
    source_option,
    workers_option,
)
from forebay.cli.progress import shown_progress
from forebay.cli.settings import Settings
from forebay.cli.show import show
from forebay.cli.source_paths import refuse_standard_input
from forebay.cli.teachers import build_teachers
from forebay.errors import RangeInvalid

RUN_OPTIONS = (
    click.option("--into", metavar="CACHE", shell_complete=complete_folder, help="Where the cache is, or will be."),
    click.option("--layer", help="The layer's name.  [default: the kind]"),
    workers_option,
    click.option("--start-chunk", type=click.IntRange(min=0), metavar="A", help="First chunk to build."),
    click.option("--end-chunk", type=click.IntRange(min=0), metavar="B", help="Last chunk to build, inclusive."),
    click.option(
        "--mode",
        type=click.Choice(["forward", "inverse"]),
        help="inverse: check what is there first, then fill gaps from the far end.",
    ),
    click.option("--resume", is_flag=True, help="Go on where a build stopped; always so, accepted for clarity."),
    click.option("--engine", type=click.Choice(["local"]), help="Who makes the chunks: processes of this machine."),
    memory_option,
    failures_option,
    skip_option,
    source_option,
    click.option("--dry-run", is_flag=True, help="Say what would be built; write nothing."),
    json_option,
)


@click.group(cls=KindGroup, subcommand_metavar="KIND|SETTINGS.toml|CACHE [ARGS]...")
@naming_verbs
def build() -> None:
    """Build a cache: plan, then compute what is missing, and nothing else.

    Name a kind of data and its sources, or a settings file ([source] [recipe] [build]; flags win; paths in it are
    relative to its folder), or a cache that was begun. Ctrl-C stops at once and prints the command to resume.

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
        raise NotADirectoryError(errno.ENOTDIR, "there is a file, and a cache is a folder", wanted.into)
    if wanted.start_chunk is not None and wanted.end_chunk is not None and wanted.start_chunk > wanted.end_chunk:
        raise click.UsageError(f"--start-chunk {wanted.start_chunk} comes after --end-chunk {wanted.end_chunk}.")


def _check_start(settings: Settings) -> None:
    """Refuse a range without a chunk of a cache that is planned; of a new one, the build says so when it is planned."""
    start, root = settings.build.start_chunk, str(settings.build.into)
    if not start or not is_cache(root):
        return
    planned = api.gaps(root, layer=settings.build.layer or settings.recipe.kind)[0].planned
    if planned and start >= planned:
        raise click.UsageError(f"--start-chunk {start} is beyond the plan: '{root}' has {planned:,} chunks, from 0 on.")


def _built(settings: Settings, as_json: bool) -> Any:
    with shown_progress(as_json) as on_progress:
        try:
            return api.build(
                str(settings.build.into), settings.source, settings.recipe, on_progress=on_progress, **_terms(settings)
            )
        except RangeInvalid as error:
            raise click.UsageError(f"--{str(error).replace('_', '-', 1)}") from error


def _terms(settings: Settings) -> Mapping[str, Any]:
    names = ("layer", "workers", "mode", "start_chunk", "end_chunk", "memory_limit", "max_failures", "skip_unreadable")
    return {name: getattr(settings.build, name) for name in names}


for known in KINDS.values():
    build.add_command(build_command(known))
build.add_command(build_teachers)
