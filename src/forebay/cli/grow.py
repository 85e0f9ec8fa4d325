"""`forebay grow`: append new data."""

from typing import Any

import click

from forebay import api
from forebay.cli.hub_options import DOWNLOAD_OPTIONS, REVISION_OPTION
from forebay.cli.options import (
    Command,
    cache_argument,
    complete_file,
    decorated,
    failures_option,
    json_option,
    memory_option,
    skip_option,
    workers_option,
)
from forebay.cli.progress import shown_progress
from forebay.cli.show import show
from forebay.cli.source_paths import refuse_standard_input
from forebay.cli.sources_again import source_like_before


def _with_download_options(command: Command) -> Command:
    return decorated(command, REVISION_OPTION, *DOWNLOAD_OPTIONS)


@click.command()
@cache_argument
@click.argument(
    "paths", nargs=-1, required=True, metavar="SOURCE...", callback=refuse_standard_input, shell_complete=complete_file
)
@_with_download_options
@workers_option
@memory_option
@failures_option
@skip_option
@json_option
def grow(
    cache: str,
    paths: tuple[str, ...],
    workers: int | None,
    memory_limit: int | None,
    max_failures: int | float | None,
    skip_unreadable: bool | None,
    as_json: bool,
    **download: Any,
) -> None:
    """Append new files, and what was appended to known ones, then build it.

    SOURCE is read as the first build read it; the recipe is the one that the cache keeps. A known file with other
    content is an error that names it. A cache of a data set on the hub grows by a newer revision of it.

    \b
    Example: forebay grow caches/edu 'data/2025-*.jsonl'
             forebay grow caches/fineweb hub:HuggingFaceFW/fineweb-edu
    """
    given = {name: value for name, value in download.items() if value is not None}
    with shown_progress(as_json) as on_progress:
        report = api.grow(
            cache,
            source_like_before(cache, paths, given),
            workers=workers,
            memory_limit=memory_limit,
            max_failures=max_failures,
            skip_unreadable=bool(skip_unreadable),
            on_progress=on_progress,
        )
    show(report, as_json)
