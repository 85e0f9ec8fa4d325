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
    """Manage a tier: the LMDB folder that CachedImages fills.

    Example: forebay tier stats tiers/photos
    """


@tier.command()
@path_argument
@json_option
def stats(path: str, as_json: bool) -> None:
    """Show the size and content of a tier, by recipe.

    Example: forebay tier stats tiers/photos
    """
    show(tiers.summarize_tier(path), as_json)


@tier.command()
@path_argument
@json_option
@click.pass_context
def verify(ctx: click.Context, path: str, as_json: bool) -> None:
    """Check every value: its checksum, tag and key.

    A bad value is never served; it is rebuilt when it is next read. With FOREBAY_HMAC_KEY set, values without a tag of
    that key are bad; without it, tagged values cannot be checked and count as bad. Exits 1 if a value is bad.

    Example: forebay tier verify tiers/photos
    """
    with shown_progress(as_json) as on_progress:
        report = tiers.verify_tier(path, on_progress=on_progress)
    show(report, as_json)
    ctx.exit(int(not report.sound))


@tier.command()
@path_argument
@click.option("--recipe", metavar="FINGERPRINT", help="Only remove the rows of this recipe; see `forebay tier stats`.")
@json_option
def clear(path: str, recipe: str | None, as_json: bool) -> None:
    """Remove the content of a tier, damaged or not.

    Deletes the files if no process has the tier open, else deletes the entries and reuses the space. With --recipe,
    the beginning of a fingerprint, rows of other recipes stay.

    Example: forebay tier clear tiers/photos
    """
    show(tiers.clear_tier(path, recipe=recipe), as_json)


_TEXT = """Fill a tier with the rows of all images of a source.

Takes the sources and the recipe options of `forebay build images`; CachedImages with the same recipe reads the rows.
Valid rows are kept: run it again to resume. Exits 1 if the tier filled up. A tier with tagged rows needs its
FOREBAY_HMAC_KEY.

Example: forebay warm photos --l2 tiers/photos
"""


def _command(l2: str, max_bytes: int | None, as_json: bool, **flags: Any) -> None:
    settings = gathered("images", None, None, flags)
    if not isinstance(settings.recipe, RowRecipe):
        raise TypeError(f"{type(settings.recipe).__name__} does not make single rows")
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
            help="Folder of the tier, on a local disk.",
        ),
        click.option("--max-bytes", type=SizeType(), help="Size limit of the tier.  [100GB]"),
        *KINDS["images"].options,
        workers_option,
        json_option,
    )
)
