"""What `forebay view` prints: where the page is."""

from forebay.cache.records import Record


class Viewing(Record, frozen=True, kw_only=True):
    """What a server of the viewer shows, and where."""

    url: str
    caches: tuple[str, ...]


class BundleReport(Record, frozen=True, kw_only=True):
    """A static page with sampled rows."""

    path: str
    caches: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]  # those of each cache that it carries
    bytes: int
