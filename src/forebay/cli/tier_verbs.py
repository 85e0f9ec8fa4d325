"""`forebay tier`, `warm` and `estimate CACHE --remote`: tiers of chunks, to train from a bucket, and of single rows."""

import os
import re
from typing import Any

import click

from forebay import api, tiers
from forebay.cli.build_verbs import gathered, kind_options
from forebay.cli.settings import BuildSettings, Kind, kind_of
from forebay.cli.verb import (
    Decorator,
    Finding,
    SizeType,
    Verbs,
    cache_argument,
    complete_folder,
    decorated,
    shown_progress,
    source_argument,
    struct_options,
    verb,
)
from forebay.fields import parse_bandwidth
from forebay.preview.words import command_line
from forebay.read.cache import with_tier
from forebay.recipe import RowRecipe
from forebay.store import Root, open_store
from forebay.store.base import is_url

TIER_VARIABLE, TIER_BYTES_VARIABLE = "FOREBAY_TIER", "FOREBAY_TIER_BYTES"
_LANE = re.compile(r"[0-9]{1,6}")


class LanesType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """Numbers of lanes on the command line: 0-15, or 0,4,8-11."""

    name = "lanes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        found: set[int] = set()
        for part in str(value).split(","):
            first, dash, last = part.strip().partition("-")
            last = last if dash else first
            if not _LANE.fullmatch(first) or not _LANE.fullmatch(last) or int(last) < int(first):
                self.fail(f"{value!r} does not name lanes; use 0-15 or 0,4,8-11", param, ctx)
            found |= set(range(int(first), int(last) + 1))
        return sorted(found)


class BandwidthType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """Bytes per second on the command line."""

    name = "bandwidth"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return value if isinstance(value, float) else parse_bandwidth(value)
        except ValueError:
            self.fail(f"{value!r} is not a bandwidth; use 1Gbit or 100MB", param, ctx)


tier_options: tuple[Decorator, ...] = (
    click.option(
        "--tier",
        "chunk_tier",
        envvar=TIER_VARIABLE,
        metavar="DIR",
        shell_complete=complete_folder,
        help="Folder on a local disk that keeps chunks of remote caches.  [default: $FOREBAY_TIER]",
    ),
    click.option(
        "--tier-bytes",
        type=SizeType(),
        envvar=TIER_BYTES_VARIABLE,
        help="Most bytes of chunks in the tier, e.g. 500GB.  [default: $FOREBAY_TIER_BYTES, else the disk less a "
        "reserve]",
    ),
    click.option(
        "--lanes",
        type=LanesType(),
        help="Lanes of the window shuffle whose chunks to fetch, e.g. 0-15.  [default: all]",
    ),
    click.option(
        "--node",
        type=click.IntRange(min=0),
        help="Fetch what one of several machines needs, counted from 0, e.g. --node 1 --nodes 4.  [default: all]",
    ),
    click.option("--nodes", type=click.IntRange(min=1), default=1, help="Machines that train together, with --node."),
    click.option("--ranks", type=click.IntRange(min=1), default=1, help="Ranks of each machine, with --node."),
    click.option("--seed", default=0, show_default=True, help="Seed of the loader whose lanes are meant."),
)


def through_tier(cache: str) -> Root:
    """The cache at a URL, read through the tier that FOREBAY_TIER names, if it is set."""
    folder, size = os.environ.get(TIER_VARIABLE), os.environ.get(TIER_BYTES_VARIABLE)
    if not folder or not is_url(cache):
        return cache
    try:
        return with_tier(open_store(cache), folder, size or None)
    except ValueError as error:
        raise click.UsageError(f"{TIER_BYTES_VARIABLE}: {error}") from error


def warm_chunks(paths: tuple[str, ...], folder: str, tier_bytes: int | None, share: dict[str, Any]) -> Any:
    if len(paths) != 1:
        raise click.UsageError(f"--tier takes one cache, not {len(paths)}.")
    if share["node"] is not None and share["lanes"] is not None:
        raise click.UsageError("Pass --lanes or --node, not both.")
    allowed = f"from 0 to {share['nodes'] - 1}"
    if share["node"] is None and share["nodes"] > 1:
        raise click.UsageError(f"--nodes {share['nodes']} needs --node, {allowed}; leave out both to fetch all chunks.")
    if share["node"] is not None and share["node"] >= share["nodes"]:
        advice = "; pass --nodes, the number of machines" if share["nodes"] == 1 else ""
        raise click.UsageError(f"--node must be {allowed} (got {share['node']}){advice}.")
    with shown_progress() as on_progress:
        filled = api.warm_cache(
            paths[0],
            folder,
            tier_bytes=tier_bytes,
            lanes=share["lanes"],
            node=share["node"],
            nodes=share["nodes"],
            ranks_per_node=share["ranks"],
            seed=share["seed"],
            on_progress=on_progress,
        )
    if not filled.refused_chunks:
        return filled
    return Finding(filled, "TierFull", f"'{folder}' is full", command_line("tier", "list", folder))


@verb("remote")
@cache_argument
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Machines that train together.")
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks of each machine.")
@click.option("--tier-bytes", type=SizeType(), help="Limit of the tier of each machine.  [default: none]")
@click.option(
    "--bandwidth", type=BandwidthType(), default="1Gbit", show_default=True, help="Bandwidth of each machine."
)
@click.option("--latency", type=float, default=20.0, show_default=True, help="Milliseconds of one request.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Rows of a global batch.")
@click.option("--seed", default=0, show_default=True, help="Seed of the loader.")
def estimate_remote(
    cache: str,
    nodes: int,
    ranks: int,
    tier_bytes: int | None,
    bandwidth: float,
    latency: float,
    batch_size: int,
    seed: int,
) -> Any:
    """Show what training from a cache in a bucket will fetch.

    Bytes per node and epoch, requests, the smallest useful tier and the time to the first batch, with window shuffle,
    for the node that needs most. Exact, because the order of rows is a function of the seed.

    Example: forebay estimate caches/edu --remote --nodes 4 --tier-bytes 500GB --bandwidth 1Gbit
    """
    return api.estimate_remote(
        cache,
        nodes=nodes,
        ranks_per_node=ranks,
        tier_bytes=tier_bytes,
        bandwidth=bandwidth,
        latency=latency / 1000,
        batch_size=batch_size,
        seed=seed,
    )


def _named_tier(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if value is None:
        raise click.UsageError(f"Pass the folder of the tier, or set {TIER_VARIABLE}.")
    return value


_tier_argument: Decorator = click.argument(
    "path",
    envvar=TIER_VARIABLE,
    metavar="[TIER]",
    required=False,
    callback=_named_tier,
    shell_complete=complete_folder,
)


@verb("list")
@_tier_argument
def list_tier(path: str) -> Any:
    """List the caches that a tier keeps chunks of.

    Without TIER, the folder is that of FOREBAY_TIER.

    Example: forebay tier list /nvme/forebay
    """
    return api.tier_contents(path)


@verb("clean")
@_tier_argument
@click.option("--cache", "cache_id", metavar="ID", help="Only the cache whose id begins so; see `forebay tier list`.")
def clean_tier(path: str, cache_id: str | None) -> Any:
    """Remove the chunks that a tier keeps, of all caches or of one.

    Only files that forebay made are removed. Training that reads them continues, and fetches them again when it next
    opens them. Without TIER, the folder is that of FOREBAY_TIER.

    Example: forebay tier clean /nvme/forebay --cache 3f6c
    """
    return api.clean_tier(path, cache_id)


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


_TEXT = """Fill a tier with chunks of a remote cache, or with decoded images.

With --tier, fetches the chunks of a cache before training: all, those that one of several machines needs, or those of
some lanes of the window shuffle. Chunks that are there are kept. Exits 1 if the tier is full.

With --l2, takes the sources and the recipe options of `forebay build images`; CachedImages with the same recipe reads
the rows. Valid rows are kept: run it again to resume. Exits 1 if the tier filled up. A tier with tagged rows needs its
FOREBAY_HMAC_KEY.

\b
Example: forebay warm caches/edu --tier /nvme/forebay --node 0 --nodes 4
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
        **flags: Any,
    ) -> Any:
        share = {name: flags.pop(name) for name in ("lanes", "node", "nodes", "ranks", "seed")}
        if l2 is not None:
            return _warm(kind, l2, max_bytes, flags)
        if chunk_tier is None:
            raise click.UsageError(
                "Pass --tier DIR, or set FOREBAY_TIER, to fetch chunks of a cache; or --l2 PATH for rows of images."
            )
        return warm_chunks(flags["paths"], chunk_tier, tier_bytes, share)

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
