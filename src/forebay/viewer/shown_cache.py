"""A cache for the pages: reopened when it grows, addressed by its list index, never by a path."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.cache.catalog import generation_numbers, unpublished
from forebay.format import layout
from forebay.read.cache import Cache
from forebay.read.opening import open_cache
from forebay.source import Source
from forebay.store import Root, Store, open_store
from forebay.viewer.chunk_map import HeadChecks
from forebay.viewer.live_build import Watch

MEMORY = 64 << 20  # decoded blocks of one open generation
MAPS = 64  # of chunk files of one layer: all are looked at before each answer


@dataclass(eq=False)
class ShownCache:
    """One cache of the viewer, with values that are reused between requests."""

    store: Store
    source: Source | None = None
    statistics: tuple[str, ...] = ()  # files that running loaders write
    _open: tuple[tuple[int, str], Cache] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.heads = HeadChecks()
        self.watch = Watch(self.store, self.heads)

    @classmethod
    def of(cls, root: Root | Cache, source: Source | None = None, statistics: tuple[str, ...] = ()) -> "ShownCache":
        return cls(root.store if isinstance(root, Cache) else open_store(root), source, statistics)

    @property
    def root(self) -> str:
        return self.store.address

    def generations(self) -> list[int]:
        return generation_numbers(self.store)

    def at(self) -> Cache:
        """The newest generation that is published now."""
        numbers = self.generations()
        if not numbers:
            raise unpublished(self.store)
        entry = self.store.head(layout.generation(numbers[-1]))
        name = (numbers[-1], "" if entry is None else entry.etag)  # a cache may be replaced by another
        with self._lock:
            if self._open is None or self._open[0] != name:
                opened = open_cache(self.store, generation=numbers[-1], memory=MEMORY, max_maps=MAPS)
                self._open = name, opened
            self._open[1].close_changed()
            return self._open[1]


Endpoint = Callable[[ShownCache, "Query"], object]


class BadQuery(ValueError):
    """An invalid URL parameter."""


@dataclass(frozen=True)
class Query:
    """The parameters of a URL, checked when they are read."""

    values: tuple[tuple[str, str], ...]

    def text(self, name: str, default: str = "") -> str:
        return next((value for key, value in self.values if key == name), default)

    def whole(self, name: str, default: int | None = None, most: int = 1 << 40) -> int:
        """A whole number from 0 to `most`."""
        text = self.text(name, "" if default is None else str(default))
        if not text.isascii() or not text.isdecimal() or len(text) > 15 or int(text) > most:
            raise BadQuery(f"'{name}' must be a whole number from 0 to {most:,} (got {text[:40]!r})")
        return int(text)

    def some(self, name: str) -> int | None:
        return self.whole(name) if self.text(name) else None

    def share(self, name: str, default: float) -> float:
        """A number from 0 to 1."""
        text = self.text(name, str(default))
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number <= 1:
            raise BadQuery(f"'{name}' must be a number from 0 to 1 (got {text[:40]!r})")
        return number
