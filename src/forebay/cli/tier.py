"""`forebay tier`: what is in a tier of single rows, whether it is sound, emptying it."""

import click

from forebay import tiers
from forebay.cli.options import Decorator, complete_folder, json_option
from forebay.cli.progress import shown_progress
from forebay.cli.show import show

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
