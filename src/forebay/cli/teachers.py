"""`forebay build teachers CACHE` and `forebay estimate teachers CACHE`: layers on a cache that is there.

A layer of a teacher has no source of its own: it is made of the rows of a cache. So the cache comes first, where other
kinds have their sources, and every teacher is an option whose value is its model.
"""

from typing import Any

import click

from forebay import api
from forebay.cache.reader import open_cache
from forebay.cli.options import cache_argument, decorated, failures_option, json_option, source_option
from forebay.cli.progress import shown_progress
from forebay.cli.show import say_error, show
from forebay.cli.teacher_options import TEACHER_OPTIONS, teacher_recipes
from forebay.cli.words import human_bytes
from forebay.store import open_store
from forebay.teachers import TeacherEstimate, estimate_teachers

RUN_OPTIONS = (
    click.option("--start-chunk", type=click.IntRange(min=0), metavar="A", help="First chunk to build."),
    click.option("--end-chunk", type=click.IntRange(min=0), metavar="B", help="Last chunk to build, inclusive."),
    click.option(
        "--mode",
        type=click.Choice(["forward", "inverse"]),
        default="forward",
        help="inverse: check what is there first, then fill gaps from the far end.",
    ),
    failures_option,
    source_option,
    click.option("--dry-run", is_flag=True, help="Say what would be stored; load and write nothing."),
    json_option,
)
_BUILD_TERMS = ("start_chunk", "end_chunk", "mode", "max_failures")


def _build(cache: str, dry_run: bool, as_json: bool, **flags: Any) -> None:
    """What teachers say of every row, as layers of a cache.

    CACHE is a cache of images or of prompts (raw lines). MODEL is a folder that save_pretrained wrote, or org/name on
    the hub. One model is in memory at a time; layers that are complete are passed over, and without any model all
    layers that were begun are continued.

    Example: forebay build teachers caches/art --clip sd/text_encoder --lune sd/unet
    """
    terms = {name: flags.pop(name) for name in _BUILD_TERMS}
    recipes = teacher_recipes(cache, flags)
    if dry_run:
        show(_estimated(cache, recipes, None), as_json)
        return
    with shown_progress(as_json) as on_progress:
        reports = api.build_layers(cache, recipes, on_progress=on_progress, **terms)
    show(reports, as_json)


def _estimate(cache: str, rows: int | None, as_json: bool, **flags: Any) -> None:
    """What layers of teachers will take, from the shapes that models declare.

    Nothing is loaded. What is stored once for equal prompts is counted as if no two were equal. Exit code 1 when the
    disk of the cache cannot hold it.

    Example: forebay estimate teachers caches/art --lune sd/unet --rows 10000
    """
    found = _estimated(cache, teacher_recipes(cache, flags), rows)
    show(found, as_json)
    if not found.fits:
        needed, free = human_bytes(found.bytes), human_bytes(found.free_bytes or 0)
        say_error(f"no room at '{cache}': about {needed} are needed, {free} are free; make room or choose another disk")
        click.get_current_context().exit(1)


def _estimated(cache: str, recipes: Any, rows: int | None) -> TeacherEstimate:
    count = len(open_cache(cache)) if rows is None else rows
    return estimate_teachers(recipes, count, free_bytes=open_store(cache).free_bytes())


build_teachers = click.command("teachers")(decorated(_build, cache_argument, *TEACHER_OPTIONS, *RUN_OPTIONS))
estimate_command = click.command("teachers")(
    decorated(
        _estimate,
        cache_argument,
        *TEACHER_OPTIONS,
        click.option("--rows", type=click.IntRange(min=1), help="Rows to estimate for.  [those of the cache]"),
        source_option,
        json_option,
    )
)
