"""Outdated chunks: listed rows that an amended plan asks to be made again, and what they were made from.

    plan 0   chunk 3 = a.png b.png                        generation 0 lists chunk 3, revision 0
    plan 1   chunk 3 = a.png b.png, from revision 1 on    b.json was edited, and a refresh was begun

Until revision 1 is listed, the rows are those of plan 0. The newer plan knows the files as they are now, so it alone
would call them fresh.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from forebay.cache.freshness import reported
from forebay.cache.plan import Plan
from forebay.cache.presence import layer_columns
from forebay.cache.publish import outdated_chunks
from forebay.cache.published import open_chunk, published_record, read_column
from forebay.columns import Array
from forebay.errors import Damaged
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable, Generation
from forebay.source import Source
from forebay.store.base import Store

Row = dict[str, Array]
Stale = Callable[[Plan], Mapping[str, str]]  # the files that are not what a plan says -> how they differ


def plan_of_rows(plan: Plan, layer: str, chunk: int, revision: int) -> Plan:
    """The plan that a revision of a chunk was made by."""
    for number, segment in enumerate(plan.segments):
        if segment.amends and segment.asked(layer).get(chunk, 0) > revision:
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


def reusable_rows(
    store: Store, source: Source, plan: Plan, layer: str, listed: Generation, chunk: int
) -> dict[str, Row]:
    """Rows of an outdated chunk, by sample id, whose samples differ in nothing but their metadata.

    A sample counts that has the name of its file, if nobody has written to that file since it was planned, and if what
    describes it is all that was edited. Empty where the chunk is not outdated, or is damaged.
    """
    record = published_record(listed, layer, chunk)
    if record is None or record.revision >= plan.revisions(layer)[chunk]:
        return {}
    known = plan_of_rows(plan, layer, chunk, record.revision).files
    pairs = [(known[part.file.path], part.file) for part in plan.parts(chunk) if part.file.path in known]
    same = {
        now.path
        for then, now in pairs
        if then.same_file(now) and (then.etag == now.etag or source.edited_beside(then, now))
    }
    name = listed.recipe(layer).sample_ids
    try:
        rows = rows_in(store, listed, layer, record) if same and name else iter(())
        return {path: row for row in rows if (path := _text(row[name])) in same}
    except Damaged:
        return {}  # all of it is made anew; verify reports the chunk


def rows_in(
    store: Store, listed: Generation, layer: str, record: ChunkRecord, names: Sequence[str] = ()
) -> Iterator[Row]:
    """The rows of a listed chunk, with the columns named, or with all."""
    declared = layer_columns(listed.recipe(layer).columns, layer == listed.base)
    file = open_chunk(store, layer, record, columns=declared, keyed=listed.tagged)
    wanted = names or [column.name for column in declared]
    columns = {name: read_column(store, layer, file, name) for name in wanted}
    return ({name: values[at] for name, values in columns.items()} for at in range(record.rows))


def _text(values: Array) -> str:
    return values.tobytes().decode("utf-8", "surrogateescape")
