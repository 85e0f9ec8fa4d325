"""`forebay grow`: append new data."""

import os

import click

from forebay import api
from forebay.cache.plan import load_plan
from forebay.cache.publish import read_cache_document
from forebay.cli.options import cache_argument, failures_option, json_option, memory_option, workers_option
from forebay.cli.progress import shown_progress
from forebay.cli.show import show
from forebay.cli.source_paths import refuse_standard_input
from forebay.errors import NothingPublished
from forebay.kinds import reopen_source
from forebay.source import Source
from forebay.sources.paths import common_root
from forebay.store import open_store


@click.command()
@cache_argument
@click.argument("paths", nargs=-1, required=True, metavar="SOURCE...", callback=refuse_standard_input)
@workers_option
@memory_option
@failures_option
@json_option
def grow(
    cache: str,
    paths: tuple[str, ...],
    workers: int | None,
    memory_limit: int | None,
    max_failures: int | float | None,
    as_json: bool,
) -> None:
    """Append new files, and what was appended to known ones, then build it.

    SOURCE is read as the first build read it; the recipe is the one that the cache keeps. A known file with other
    content is an error that names it.

    Example: forebay grow caches/raw 'data/2025-*.jsonl'
    """
    with shown_progress(as_json) as on_progress:
        report = api.grow(
            cache,
            _source_like_before(cache, paths),
            workers=workers,
            memory_limit=memory_limit,
            max_failures=max_failures,
            on_progress=on_progress,
        )
    show(report, as_json)


def _source_like_before(cache: str, paths: tuple[str, ...]) -> Source:
    """Other files, read as the plan's source reads its own."""
    store = open_store(cache)
    read_cache_document(store)
    plan = load_plan(store)
    if not plan.segments:
        raise NothingPublished(cache)
    names = [os.path.abspath(path) for path in paths]
    root = common_root(names)
    patterns = [os.path.relpath(name, root) for name in names]
    return reopen_source({**plan.source, "root": root, "patterns": patterns})
