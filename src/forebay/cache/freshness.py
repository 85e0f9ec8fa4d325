"""Whether the files behind a plan are still what they were.

same size, same mtime           fresh
other mtime                     its planned ranges are hashed again: same content is fresh, other content is changed
larger, planned ranges the same grown: what was planned holds, the rest can be appended
smaller, or other content       changed
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from forebay.cache.plan import Plan
from forebay.cache.published import open_chunk
from forebay.format.generation import ChunkTable
from forebay.source import Source, SourceFile
from forebay.store.base import Store


@dataclass(frozen=True, slots=True)
class Freshness:
    """What became of the planned files."""

    changed: Mapping[str, str] = field(default_factory=dict)  # path -> how
    missing: tuple[str, ...] = ()
    grown: tuple[str, ...] = ()
    now: Mapping[str, SourceFile] = field(default_factory=dict)  # files whose look differs, content does not

    @property
    def stale(self) -> dict[str, str]:
        return {**self.changed, **dict.fromkeys(self.missing, "is gone")}


def check_freshness(store: Store, source: Source, plan: Plan, layer: str, table: ChunkTable) -> Freshness:
    """Look at every planned file; hash only those whose look changed."""
    changed: dict[str, str] = {}
    missing: list[str] = []
    now: dict[str, SourceFile] = {}
    for path, known in plan.files.items():
        try:
            found = source.look(path)
        except FileNotFoundError:
            missing.append(path)
            continue
        if known.same_identity(found):
            continue
        if found.size < known.size:
            changed[path] = f"has {found.size:,} bytes, {known.size:,} were planned"
        elif not _same_content(store, source, plan, layer, table, known, found):
            changed[path] = "has other content than was planned"
        else:
            now[path] = found
    grown = tuple(path for path, found in now.items() if found.size > plan.files[path].size)
    return Freshness(changed, tuple(missing), grown, now)


def _same_content(
    store: Store, source: Source, plan: Plan, layer: str, table: ChunkTable, known: SourceFile, found: SourceFile
) -> bool:
    if known.digest is not None:
        return source.digest(found, 0, known.size) == known.digest
    ranges = _published_ranges(store, plan, layer, table, known.path)
    return all(source.digest(found, start, stop) == sum_ for start, stop, sum_ in ranges)


def _published_ranges(
    store: Store, plan: Plan, layer: str, table: ChunkTable, path: str
) -> Iterator[tuple[int, int, int]]:
    """(start, stop, digest) of every part of a file that a published chunk was made from.

    A part that was never read has no old content to be stale against.
    """
    for chunk, part, start, stop in plan.places_of(path):
        position = table.position(chunk)
        if position is not None:
            yield start, stop, open_chunk(store, layer, table.record(position)).source_sums()[part]
