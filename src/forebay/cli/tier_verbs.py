"""`forebay tier` and `forebay warm`: tiers of single rows."""

from typing import Any

import click

from forebay import tiers
from forebay.cli.build_verbs import gathered
from forebay.cli.options import (
    Decorator,
    SizeType,
    complete_file,
    complete_folder,
    decorated,
    json_option,
    refuse_standard_input,
    workers_option,
)
from forebay.cli.progress import shown_progress
from forebay.cli.settings import KINDS
from forebay.cli.show import show
from forebay.recipe import RowRecipe

path_argument: Decorator = click.argument("path", shell_complete=complete_folder)


@click.group()
def tier() -> None:
    """Look after a tier: the LMDB folder that CachedImages fills.

    Example: forebay tier stats tiers/photos
    """


@tier.command()
@path_argument
@json_option
def stats(path: str, as_json: bool) -> None:
    """Show what a tier holds, by recipe, and how large it is.

    Example: forebay tier stats tiers/photos
    """
    show(tiers.summarize_tier(path), as_json)


@tier.command()
@path_argument
@json_option
@click.pass_context
def verify(ctx: click.Context, path: str, as_json: bool) -> None:
    """Check every value: its checksum, its tag, its name.

    What is bad is never served: it is made again when it is next read. With FOREBAY_HMAC_KEY set, values without a tag
    of that key are bad; without it, tagged ones cannot be checked, and count as bad. Exit code 1 when a value is bad.

    Example: forebay tier verify tiers/photos
    """
    with shown_progress(as_json) as on_progress:
        report = tiers.verify_tier(path, on_progress=on_progress)
    show(report, as_json)
    ctx.exit(int(not report.sound))


@tier.command()
@path_argument
@click.option("--recipe", metavar="FINGERPRINT", help="Remove the rows of one recipe only; see `forebay tier stats`.")
@json_option
def clear(path: str, recipe: str | None, as_json: bool) -> None:
    """Remove all that a tier holds, damaged or not.

    Its files are removed where no process has it open; otherwise its values are, and the room in its file is used
    again. With --recipe, the beginning of a fingerprint, the rows of other recipes stay.

    Example: forebay tier clear tiers/photos
    """
    show(tiers.clear_tier(path, recipe=recipe), as_json)


_TEXT = """Fill a tier with the rows of all images of a source.

Takes the sources and the recipe options of `forebay build images`; CachedImages with the same recipe finds the rows.
Rows that are there and sound are kept: run it again to resume. Exit code 1 when the tier takes no more. A tier whose
rows are tagged needs its FOREBAY_HMAC_KEY.

Example: forebay warm photos --l2 tiers/photos
"""


def _command(l2: str, max_bytes: int | None, as_json: bool, **flags: Any) -> None:
    settings = gathered("images", None, None, flags)
    if not isinstance(settings.recipe, RowRecipe):
        raise TypeError(f"{type(settings.recipe).__name__} makes no single rows")
    bound = {} if max_bytes is None else {"max_bytes": max_bytes}
    with shown_progress(as_json) as on_progress:
        report = tiers.warm(
            settings.source, settings.recipe, l2, workers=settings.build.workers, on_progress=on_progress, **bound
        )
    show(report, as_json)
    click.get_current_context().exit(int(not report.complete))


warm = click.command("warm", help=_TEXT)(
    decorated(
        _command,
        click.argument(
            "paths",
            nargs=-1,
            required=True,
            metavar="SOURCE...",
            callback=refuse_standard_input,
            shell_complete=complete_file,
        ),
        click.option(
            "--l2",
            required=True,
            metavar="PATH",
            shell_complete=complete_folder,
            help="The folder of the tier, on a disk of this machine.",
        ),
        click.option("--max-bytes", type=SizeType(), help="How large the tier may become.  [100GB]"),
        *KINDS["images"].options,
        workers_option,
        json_option,
    )
)
