"""`forebay tier` and `forebay warm`: tiers of chunks (see `remote_verbs`) and of single rows."""

from typing import Any

import click

from forebay import tiers
from forebay.cli.build_verbs import gathered, kind_options
from forebay.cli.options import Decorator, SizeType, complete_folder, decorated, source_argument, struct_options
from forebay.cli.remote_verbs import clean_tier, list_tier, tier_options, warm_chunks
from forebay.cli.settings import BuildSettings, Kind, kind_of
from forebay.cli.verb import Finding, Verbs, shown_progress, verb
from forebay.preview.words import command_line
from forebay.recipe import RowRecipe

path_argument: Decorator = click.argument("path", shell_complete=complete_folder)


@click.group(cls=Verbs)
def tier() -> None:
    """Manage a tier: chunks of remote caches on a local disk, or the LMDB folder that CachedImages fills.

    `list` and `clean` are for chunks, `stats`, `verify` and `clear` for the rows of CachedImages.

    \b
    Example: forebay tier list /nvme/forebay
             forebay tier stats tiers/photos
    """


tier.add_command(list_tier)
tier.add_command(clean_tier)


@tier.command()
@path_argument
def stats(path: str) -> Any:
    """Show the size and content of a tier, by recipe.

    Example: forebay tier stats tiers/photos
    """
    return tiers.summarize_tier(path)


@tier.command()
@path_argument
def verify(path: str) -> Any:
    """Check every value: its checksum, tag and key.

    A bad value is never served; it is rebuilt when it is next read. With FOREBAY_HMAC_KEY set, values without a tag of
    that key are bad; without it, tagged values cannot be checked and count as bad. Exits 1 if a value is bad.

    Example: forebay tier verify tiers/photos
    """
    with shown_progress() as on_progress:
        report = tiers.verify_tier(path, on_progress=on_progress)
    if report.sound:
        return report
    return Finding(report, "TierDamaged", f"'{path}' has bad values", command_line("tier", "clear", path))


@tier.command()
@path_argument
@click.option("--recipe", metavar="FINGERPRINT", help="Only remove the rows of this recipe; see `forebay tier stats`.")
def clear(path: str, recipe: str | None) -> Any:
    """Remove the content of a tier, damaged or not.

    Deletes the files if no process has the tier open, else deletes the entries and reuses the space. With --recipe,
    the beginning of a fingerprint, rows of other recipes stay.

    Example: forebay tier clear tiers/photos
    """
    return tiers.clear_tier(path, recipe=recipe)


_TEXT = """Fill a tier with chunks of a remote cache, or with the rows of all images of a source.

With --tier, fetches the chunks of a cache before training, all or those of some lanes of the window shuffle; chunks
that are there are kept. Exits 1 if the tier is full.

With --l2, takes the sources and the recipe options of `forebay build images`; CachedImages with the same recipe reads
the rows. Valid rows are kept: run it again to resume. Exits 1 if the tier filled up. A tier with tagged rows needs its
FOREBAY_HMAC_KEY.

\b
Example: forebay warm caches/edu --tier /nvme/forebay --lanes 0-15
         forebay warm photos --l2 tiers/photos
"""


def warm() -> click.Command:
    """The command `warm`, whose options need Pillow."""
    kind = kind_of("images")
    assert kind is not None

    def command(
        l2: str | None,
        max_bytes: int | None,
        chunk_tier: str | None,
        tier_bytes: int | None,
        lanes: list[int] | None,
        seed: int,
        **flags: Any,
    ) -> Any:
        if l2 is not None:
            return _warm(kind, l2, max_bytes, flags)
        if chunk_tier is None:
            raise click.UsageError("Pass --tier DIR to fetch chunks of a cache, or --l2 PATH for rows of images.")
        return warm_chunks(flags["paths"], chunk_tier, tier_bytes, lanes, seed)

    made: click.Command = verb("warm", help=_TEXT)(
        decorated(
            command,
            source_argument(required=True),
            *tier_options,
            click.option(
                "--l2",
                metavar="PATH",
                shell_complete=complete_folder,
                help="Folder of the tier of single rows, on a local disk.",
            ),
            click.option(
                "--max-bytes", type=SizeType(), help="Size limit of the tier of single rows.  [default: 100GB]"
            ),
            *kind_options(kind),
            *struct_options(BuildSettings, "Build", "workers"),
        )
    )
    return made


def _warm(kind: Kind, l2: str, max_bytes: int | None, flags: dict[str, Any]) -> Any:
    settings = gathered(kind, None, None, flags)
    if not isinstance(settings.recipe, RowRecipe):
        raise TypeError(f"{type(settings.recipe).__name__} does not make single rows")
    bound = {} if max_bytes is None else {"max_bytes": max_bytes}
    with shown_progress() as on_progress:
        report = tiers.warm(
            settings.source, settings.recipe, l2, workers=settings.build.workers, on_progress=on_progress, **bound
        )
    return report if report.complete else Finding(report, "TierFull", f"'{l2}' is full; pass a larger --max-bytes")
