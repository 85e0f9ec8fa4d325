"""`forebay tier`, `doctor` and `estimate remote`: this machine, and its local copies of remote chunks."""

import os
from typing import Any

import click

from forebay import installation
from forebay.cli.options import (
    BANDWIDTH,
    SIZE,
    Parsed,
    WrongUsage,
    cache_argument,
    complete_folder,
    decorated,
    option,
    whole,
)
from forebay.cli.output import Finding, shown_progress
from forebay.cli.verb import Verbs, verb
from forebay.feeding import tiers
from forebay.fields import checked_number
from forebay.installation import DoctorReport
from forebay.preview.words import command_line, counted
from forebay.read.opening import with_tier
from forebay.store import Root, open_store
from forebay.store.base import is_url

MILLISECONDS = Parsed("milliseconds", lambda text: checked_number("it", float(text), least=0))
TIER_VARIABLE, TIER_BYTES_VARIABLE = "FOREBAY_TIER", "FOREBAY_TIER_BYTES"


fill_options = (
    option(
        "--tier-bytes",
        type=SIZE,
        envvar=TIER_BYTES_VARIABLE,
        help="Size limit of the tier, e.g. 500GB.  [default: $FOREBAY_TIER_BYTES, else the disk less a reserve]",
    ),
    option(
        "--node",
        type=whole(0),
        help="Fetch only the chunks of this machine, counted from 0, e.g. --node 1 --nodes 4.  [default: all]",
    ),
    option("--nodes", type=whole(1), default=1, help="Machines that train together, with --node."),
    option("--ranks", type=whole(1), default=1, help="Ranks of each machine, with --node."),
    option("--seed", type=whole(0), default=0, show_default=True, help="Loader seed."),
)


def through_tier(cache: str) -> Root:
    """The cache at a URL, read through the tier that FOREBAY_TIER names, if it is set."""
    folder, size = os.environ.get(TIER_VARIABLE), os.environ.get(TIER_BYTES_VARIABLE)
    if not folder or not is_url(cache):
        return cache
    try:
        return with_tier(open_store(cache), folder, size or None)
    except ValueError as error:
        raise WrongUsage(f"{TIER_BYTES_VARIABLE}: {error}") from error


def _fill(cache: str, path: str, tier_bytes: int | None, **share: Any) -> Any:
    """Fetch chunks of a remote cache into a tier before training.

    Fetches all chunks, or those that one of several machines needs. Chunks in the tier are not fetched again. Exits 1
    if the tier is full. Without TIER, the folder is $FOREBAY_TIER.

    Example: forebay tier fill s3://my-bucket/edu /nvme/forebay --node 0 --nodes 4
    """
    _check_share(**share)
    ranks = share.pop("ranks")
    with shown_progress() as on_progress:
        report = tiers.warm_cache(
            cache, path, tier_bytes=tier_bytes, ranks_per_node=ranks, on_progress=on_progress, **share
        )
    if not report.refused_chunks:
        return report
    return Finding(report, "TierFull", f"'{path}' is full", command_line("tier", "list", path), prints_error=True)


def _check_share(node: int | None, nodes: int, **_: Any) -> None:
    if node is None and nodes > 1:
        raise WrongUsage(f"--nodes {nodes} needs --node, from 0 to {nodes - 1}", "leave out both to fetch all chunks")
    if node is not None and node >= nodes:
        hint = "pass --nodes, the number of machines" if nodes == 1 else ""
        raise WrongUsage(f"--node must be from 0 to {nodes - 1} (got {node})", hint)


@verb("remote")
@cache_argument
@option("--nodes", type=whole(1), default=1, show_default=True, help="Machines that train together.")
@option("--ranks", type=whole(1), default=1, show_default=True, help="Ranks of each machine.")
@option("--tier-bytes", type=SIZE, help="Limit of the tier of each machine.  [default: none]")
@option("--bandwidth", type=BANDWIDTH, default="1Gbit", show_default=True, help="Bandwidth of each machine.")
@option("--latency", type=MILLISECONDS, default=20.0, show_default=True, help="Milliseconds of one request.")
@option("--batch-size", type=whole(1), default=32, show_default=True, help="Rows of a global batch.")
@option("--seed", type=whole(0), default=0, show_default=True, help="Seed of the loader.")
def estimate_remote(cache: str, ranks: int, latency: float, **machines: Any) -> Any:
    """Show what training from a cache in a bucket will fetch.

    Bytes per node and epoch, requests, the smallest useful tier and the time to the first batch, with window shuffle,
    for the node that needs most. Exact, because the order of rows is a function of the seed.

    Example: forebay estimate remote s3://my-bucket/edu --nodes 4 --tier-bytes 500GB --bandwidth 1Gbit
    """
    return tiers.estimate_remote(cache, ranks_per_node=ranks, latency=latency / 1000, **machines)


def _named_tier(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if value is None:
        raise WrongUsage("missing argument 'TIER'", f"pass the folder of the tier, or set {TIER_VARIABLE}")
    return value


_tier_argument = click.argument(
    "path", envvar=TIER_VARIABLE, metavar="[TIER]", required=False, callback=_named_tier, shell_complete=complete_folder
)


@verb("list")
@_tier_argument
def list_tier(path: str) -> Any:
    """List the caches in a tier.

    Without TIER, the folder is $FOREBAY_TIER.

    Example: forebay tier list /nvme/forebay
    """
    return tiers.tier_contents(path)


@verb("clean")
@_tier_argument
@option("--cache", metavar="URL", help="Only the cache at this address; see `forebay tier list`.")
def clean_tier(path: str, cache: str | None) -> Any:
    """Remove the chunks of all caches or of one from a tier.

    Removes only files that forebay wrote. Training that reads them continues, and fetches them again when it next opens
    them. Without TIER, the folder is $FOREBAY_TIER.

    Example: forebay tier clean /nvme/forebay --cache s3://my-bucket/edu
    """
    return tiers.clean_tier(path, cache)


@click.group(cls=Verbs)
def tier() -> None:
    """Manage a tier: a local folder that holds chunks of remote caches.

    Example: forebay tier list /nvme/forebay
    """


fill_tier = verb("fill")(decorated(_fill, cache_argument, _tier_argument, *fill_options))
tier.add_command(fill_tier)
tier.add_command(list_tier)
tier.add_command(clean_tier)


@verb()
@click.argument("cache", required=False, shell_complete=complete_folder)
def doctor(cache: str | None) -> Finding | DoctorReport:
    """Check the installation, the machine, the disk and, if one is passed, a cache.

    Lists versions and extras with the commands that install missing ones; CPU, memory and disk. Tries a create-only
    write next to CACHE, or in this folder. Exits 1 if there is a problem.

    \b
    Example: forebay doctor
             forebay doctor caches/edu
    """
    report = installation.doctor(cache)
    if not report.problems:
        return report
    first = report.problems[0]
    names = ", ".join(check.name for check in report.problems)
    return Finding(report, "ProblemsFound", f"{counted(len(report.problems), 'problem')}: {names}", first.command)
