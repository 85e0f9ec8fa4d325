"""`forebay refresh`: make the chunks of changed source files again."""

import click

from forebay import api
from forebay.cli.options import (
    cache_argument,
    failures_option,
    json_option,
    memory_option,
    source_option,
    workers_option,
)
from forebay.cli.progress import shown_progress
from forebay.cli.show import show


@click.command()
@cache_argument
@click.option("--drop-missing", is_flag=True, help="Leave out the samples of source files that are gone.")
@source_option
@workers_option
@memory_option
@failures_option
@json_option
@click.pass_context
def refresh(
    ctx: click.Context,
    cache: str,
    drop_missing: bool,
    check_source: bool,
    workers: int | None,
    memory_limit: int | None,
    max_failures: int | float | None,
    as_json: bool,
) -> None:
    """Make the rows of edited source files again.

    Compares the source with what was planned, and makes the chunks of changed files again as new revisions in a new
    generation; chunks keep their numbers, and runs that pinned an older generation keep reading it. Chunks of further
    layers follow. Images whose sidecar alone was edited are not decoded again. New files and appended data are for
    `forebay grow`. Exit code 1 when a layer could not follow.

    Example: forebay refresh caches/photos
    """
    with shown_progress(as_json) as on_progress:
        report = api.refresh(
            cache,
            check_source=check_source,
            drop_missing=drop_missing,
            workers=workers,
            memory_limit=memory_limit,
            max_failures=max_failures,
            on_progress=on_progress,
        )
    show(report, as_json)
    ctx.exit(int(bool(report.missing)))
