"""A cache that pages are made of: reopened when it grows, addressed by its place in the list, never by a path."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from forebay.cache.catalog import generation_numbers
from forebay.errors import NothingPublished
from forebay.format import layout
from forebay.read.cache import Cache, open_cache
from forebay.source import Source
from forebay.store import Root, Store, open_store
from forebay.viewer.live_build import HeadChecks, Watch

try:
    from forebay.viewer import _cut_files
except ImportError:  # installed without a compiler
    _cut_files = None  # type: ignore[assignment]

MEMORY = 64 << 20  # decoded blocks of one open generation
KEPT_OPEN = 3
MAPS = 64  # of chunk files of one layer: all are looked at before each answer


def survive_cut_files() -> None:
    """Keep this process alive where a mapped file is cut short under it; for a process that does nothing but view.

    What is read there is zeros: `pages_lost` counts them, and what was read meanwhile must not be shown.
    """
    if _cut_files is not None:
        _cut_files.survive()


def pages_lost() -> int:
    """How many pages of mapped files could not be read by this process, and were read as zeros."""
    return 0 if _cut_files is None else _cut_files.count()


@dataclass(eq=False)
class ShownCache:
    """One cache of the viewer, with what is worth keeping between requests."""

    store: Store
    source: Source | None = None
    statistics: tuple[str, ...] = ()  # files that running loaders write
    _open: dict[tuple[int, str], Cache] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lost: int = field(default_factory=pages_lost)  # pages, when all that is open was opened

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

    def at(self, generation: int | None = None) -> Cache:
        """The cache at a generation, by default the newest that is published now."""
        number = generation
        if number is None:
            numbers = self.generations()
            if not numbers:
                raise NothingPublished(self.root)
            number = numbers[-1]
        entry = self.store.head(layout.generation(number))
        name = (number, "" if entry is None else entry.etag)  # a cache may be replaced by another
        with self._lock:
            if self._lost != pages_lost():  # maps may have pages of zeros
                self._open.clear()
                self._lost = pages_lost()
            opened = self._open.pop(name, None)
            if opened is None:
                opened = open_cache(self.store, generation=number, memory=MEMORY, max_maps=MAPS)
            opened.close_changed()
            self._open[name] = opened  # the newest at the end
            while len(self._open) > KEPT_OPEN:
                del self._open[next(iter(self._open))]
            return opened


Endpoint = Callable[[ShownCache, "Query"], object]


class BadQuery(ValueError):
    """A parameter of a URL that is not what the record needs."""


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

    def wholes(self, name: str) -> list[int]:
        """Every value of a parameter that may be repeated."""
        return [Query(((name, value),)).whole(name) for key, value in self.values if key == name]

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
