"""`forebay warm`: fill a tier of single rows ahead of training."""

from typing import Any

import click

from forebay import tiers
from forebay.cli.kind_group import gathered
from forebay.cli.kinds import KINDS
from forebay.cli.options import complete_file, complete_folder, decorated, json_option, workers_option
from forebay.cli.progress import shown_progress
from forebay.cli.show import show
from forebay.cli.sizes import SizeType
from forebay.cli.source_paths import refuse_standard_input
from forebay.tiers.naming import RowRecipe

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
