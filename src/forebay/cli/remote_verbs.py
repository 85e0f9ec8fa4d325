"""`forebay estimate CACHE --remote`, `warm --tier`, `tier list` and `tier clean`: training from a bucket."""

import os
from typing import Any

import click

from forebay import api
from forebay.cli.options import Decorator, SizeType, cache_argument, complete_folder
from forebay.cli.verb import Finding, verb
from forebay.cli.verb_progress import shown_progress
from forebay.errors import is_url
from forebay.preview.words import command_line
from forebay.read.cache import with_tier
from forebay.sizes import parse_bandwidth
from forebay.store import Root, open_store

TIER_VARIABLE, TIER_BYTES_VARIABLE = "FOREBAY_TIER", "FOREBAY_TIER_BYTES"


class LanesType(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """Numbers of lanes on the command line: 0-15, or 0,4,8-11."""

    name = "lanes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        found: set[int] = set()
        for part in str(value).split(","):
            first, _, last = part.strip().partition("-")
            if not first.isdigit() or not (last or first).isdigit():
                self.fail(f"{value!r} does not name lanes; use 0-15 or 0,4,8-11", param, ctx)
            found |= set(range(int(first), int(last or first) + 1))
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


def warm_chunks(paths: tuple[str, ...], folder: str, tier_bytes: int | None, lanes: list[int] | None, seed: int) -> Any:
    if len(paths) != 1:
        raise click.UsageError(f"--tier takes one cache, not {len(paths)}.")
    with shown_progress() as on_progress:
        filled = api.warm_cache(
            paths[0], folder, tier_bytes=tier_bytes, lanes=lanes, seed=seed, on_progress=on_progress
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


_tier_argument: Decorator = click.argument(
    "path", envvar=TIER_VARIABLE, metavar="[TIER]", shell_complete=complete_folder
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
