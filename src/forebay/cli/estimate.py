"""`forebay estimate`: what a build will take."""

from typing import Any

import click

from forebay import api
from forebay.cache.records import Estimate
from forebay.cli.kind_group import FROM_OPTIONS, KindGroup, gathered
from forebay.cli.kinds import KINDS, Kind
from forebay.cli.options import (
    Decorator,
    complete_file,
    complete_folder,
    decorated,
    json_option,
    skip_option,
    source_option,
    workers_option,
)
from forebay.cli.show import say_error, show
from forebay.cli.source_paths import refuse_standard_input
from forebay.cli.teachers import estimate_command as estimate_teachers_command
from forebay.cli.words import human_bytes


@click.group(cls=KindGroup, subcommand_metavar="KIND|SETTINGS.toml|CACHE [ARGS]...")
def estimate() -> None:
    """Say what a build will take, from a sample, before building.

    Takes the kind, the sources and the recipe options of `forebay build`. At most 5 % of the source is read, and of
    small sources a few whole documents, even if that is more. Of images, the tags of all are read as well, in sidecars,
    manifest or Parquet columns, unless --tags names the vocabulary. Duplicates are counted as if they stayed. With
    --into, exit code 1 when the disk there cannot hold it. Exit code 1 also when every sample that was tried failed.

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
            help="Where the cache will be: compare with the free disk there.",
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
    return f"every sample that was tried failed, most as '{found.failure_reason}' ({found.failure_example})"


def _no_room(into: str | None, found: Estimate) -> str:
    needed, free = human_bytes(found.stored_bytes), human_bytes(found.free_bytes or 0)
    return f"no room at '{into}': about {needed} are needed, {free} are free; make room or choose another disk"


for known in KINDS.values():
    estimate.add_command(estimate_command(known))
estimate.add_command(estimate_teachers_command)
