"""Draw what a tier of chunks keeps, and what training from a bucket fetches."""

from rich.console import Group, RenderableType

from forebay.cache.records import RemoteEstimate, TierClean, TierContents, TierFill
from forebay.cli.render.parts import facts, listing, next_command, title
from forebay.preview.words import command_line, counted, human_bytes, human_time


def draw_remote_estimate(found: RemoteEstimate) -> RenderableType:
    nodes = counted(found.nodes, "node")
    if found.ranks_per_node > 1:
        nodes += f" with {found.ranks_per_node} ranks each"
    tier = "none: everything is kept" if found.tier_bytes is None else human_bytes(found.tier_bytes)
    first = f"{human_bytes(found.first_epoch_bytes)} in {counted(found.first_epoch_requests, 'request')}"
    later = f"{human_bytes(found.later_epoch_bytes)} in {counted(found.later_epoch_requests, 'request')}"
    shown = facts(
        [
            ("a node needs", f"{counted(found.node_chunks, 'chunk')}, {human_bytes(found.node_bytes)}, in every epoch"),
            ("limit of the tier", tier),
            ("first epoch", f"{first}, {human_time(found.first_epoch_seconds)} of downloads"),
            (
                "later epochs",
                f"{later}, {human_time(found.later_epoch_seconds)} of downloads; tier hit rate {found.hit_rate:.0%}",
            ),
            ("smallest tier", f"{human_bytes(found.node_bytes)} make later epochs free of downloads"),
            ("beside the tier", f"{human_bytes(found.mixed_bytes)} for chunks that pass through, if it is smaller"),
            (
                "first batch",
                f"{human_time(found.first_batch_seconds)}: {counted(found.first_batch_chunks, 'chunk')}, "
                f"{human_bytes(found.first_batch_bytes)}, for {found.batch_size:,} rows of all ranks",
            ),
        ]
    )
    whole = f"{counted(found.chunks, 'chunk')}, {human_bytes(found.bytes)}"
    return Group(title(found.root, whole, nodes, f"{human_bytes(found.bandwidth)}/s"), shown)


def draw_tier_fill(fill: TierFill) -> RenderableType:
    rate = f"{human_bytes(fill.fetched_bytes / max(fill.seconds, 1e-3))}/s"
    fetched = f"{counted(fill.fetched_chunks, 'chunk')}, {human_bytes(fill.fetched_bytes)} at {rate}"
    there = fill.chunks - fill.fetched_chunks - fill.refused_chunks
    shown = facts(
        [
            ("tier", fill.tier),
            ("fetched", fetched if fill.fetched_chunks else "nothing"),
            ("there before", counted(there, "chunk") if there > 0 else ""),
            ("not kept", f"{counted(fill.refused_chunks, 'chunk')}: the tier is full" if fill.refused_chunks else ""),
        ]
    )
    return Group(title(fill.root, counted(fill.chunks, "chunk"), human_bytes(fill.bytes)), shown)


def draw_tier_contents(contents: TierContents) -> RenderableType:
    rows = (
        (one.cache_id, counted(one.chunks, "chunk"), human_bytes(one.bytes), ", ".join(one.addresses))
        for one in contents.caches
    )
    parts = [title(contents.path, counted(len(contents.caches), "cache"), human_bytes(contents.bytes))]
    return Group(*parts, *listing("caches", rows), next_command(command_line("tier", "clean", contents.path)))


def draw_tier_clean(report: TierClean) -> RenderableType:
    return title(
        report.path, f"{counted(len(report.caches), 'cache')} removed", f"{human_bytes(report.freed_bytes)} freed"
    )
