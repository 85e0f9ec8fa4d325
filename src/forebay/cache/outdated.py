"""Outdated chunks: listed rows that an amended plan asks to be made again, and what they were made from.

    plan 0   chunk 3 = a.png b.png                        generation 0 lists chunk 3, revision 0
    plan 1   chunk 3 = a.png b.png, from revision 1 on    b.json was edited, and a refresh was begun

Until revision 1 is listed, the rows are those of plan 0. The newer plan knows the files as they are now, so it alone
would call them fresh.
"""

from collections.abc import Callable, Mapping

from forebay.cache.freshness import reported
from forebay.cache.plan import Plan
from forebay.cache.publish import outdated_chunks
from forebay.format.generation import ChunkTable
from forebay.source import Source

Stale = Callable[[Plan], Mapping[str, str]]  # the files that are not what a plan says -> how they differ


def plan_of_rows(plan: Plan, layer: str, chunk: int, revision: int) -> Plan:
    """The plan that a revision of a chunk was made by."""
    for number, segment in enumerate(plan.segments):
        asked = segment.revisions(layer) if segment.amends else None
        if asked is not None and (asked[segment.chunk_numbers == chunk] > revision).any():
            return plan.first(number)
    return plan


def stale_files(source: Source, plan: Plan, layer: str, table: ChunkTable, stale: Stale) -> dict[str, str]:
    """The files that are not what the listed rows were made from, by the name of what was edited.

    `stale` compares the source with a plan: with the newest one, and for outdated chunks with the one they are of.
    """
    found = reported(source, plan, stale(plan))
    older: dict[int, set[str]] = {}  # segments of the plan -> paths that outdated chunks were made from by it
    for chunk in outdated_chunks(table, plan.revisions(layer)).tolist():
        at = table.position(chunk)
        assert at is not None
        made_by = plan_of_rows(plan, layer, chunk, int(table.numbers["revision"][at]))
        older.setdefault(len(made_by.segments), set()).update(part.file.path for part in made_by.parts(chunk))
    for segments, paths in older.items():
        made_by = plan.first(segments)
        found |= reported(source, made_by, {path: how for path, how in stale(made_by).items() if path in paths})
    return found
