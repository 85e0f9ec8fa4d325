"""Where the time of a training run goes: measured while a loader makes and yields batches.

    thread         ├─ locate ─┤── open chunks: fetching ──┤─ check, decode, copy ─┤ handoff
    training step  ────────────────┤ asks … waits … waits … waits … waits … waits ┤ gets it
                                   └── waited for the tier ┘└──── waited for ─────┘
                                                                    gathering

Every handoff carries the seconds it took and the spans in which its thread opened chunks; the consumer adds them up, so
nothing is locked. A wait counts for the tier where it overlaps such a span.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from forebay.read.cache import Cache
from forebay.read.maps import Spans
from forebay.store import LocalStore
from forebay.store.base import Fetching, Transfers

_FILE_SECONDS = 1.0  # between two writes of a statistics file


class LoaderStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and bytes of a loader since it was made. Seconds of threads may exceed those of the run."""

    epoch: int = 0
    position: int = 0
    rank: int = 0
    world_size: int = 1
    batches: int = 0
    seconds: float = 0.0  # of the run: from asking for the first batch to receiving the last one
    waited: float = 0.0  # of the run, for batches
    waited_tier: float = 0.0  # of these, while chunks were opened: fetched, where they are not local
    opening: float = 0.0  # of threads that make batches: opened or fetched chunks
    gathering: float = 0.0  # of threads: located, checked, decoded and copied rows
    transfers: Transfers | None = None  # None where all caches are local

    @property
    def hit_rate(self) -> float | None:
        """Share of the chunks that were in the tier when they were opened; a chunk stays open over many batches."""
        asked = 0 if self.transfers is None else self.transfers.hits + self.transfers.misses
        return self.transfers.hits / asked if self.transfers is not None and asked else None

    @property
    def verdict(self) -> str:
        """One line: the causes of waiting.

        >>> transfers = Transfers(hits=2, misses=3)
        >>> LoaderStatistics(batches=9, seconds=50, waited=7, waited_tier=6, transfers=transfers).verdict
        'the run waited 12% of its time for downloads and 2% for gathering; tier hit rate 40% of 5 opened chunks'
        """
        if not self.batches:
            return "no batch was made yet"
        total = max(self.seconds, 1e-9)
        tier, rest = self.waited_tier / total, (self.waited - self.waited_tier) / total
        if self.transfers is None:
            return f"the run waited {tier + rest:.0%} of its time for data"
        opened = self.transfers.hits + self.transfers.misses
        rate = f"; tier hit rate {self.hit_rate:.0%} of {opened:,} opened chunks" if self.hit_rate is not None else ""
        return f"the run waited {tier:.0%} of its time for downloads and {rest:.0%} for gathering{rate}"

    def __str__(self) -> str:
        return self.verdict


Batch = dict[str, Any]


class Handoff(NamedTuple):
    """Batches that one thread passes on together, last batch first, with the time that making them took.

    An `error` belongs to the batch after them.
    """

    batches: list[Batch]
    seconds: float
    opened: Spans
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class HandoffMeter:
    """Sums the measurements of a loader's handoffs."""

    batches: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    waited_tier: float = 0.0
    opening: float = 0.0
    gathering: float = 0.0
    _written: float = field(default=float("-inf"))
    _asked: float = 0.0
    _last: float = 0.0  # when the last handoff was received; 0 between iterations

    def asks(self) -> None:
        """Note that the run asks for a handoff from now on."""
        self._asked = time.perf_counter()
        self._last = self._last or self._asked

    def receives(self, handoff: Handoff) -> None:
        """Note that it has got one."""
        received = time.perf_counter()
        self.batches += len(handoff.batches)
        self.seconds += received - self._last
        self.waited += received - self._asked
        self.gathering += handoff.seconds
        if handoff.opened:
            self._note_opened(self._asked, received, handoff.opened)
        self._last = received

    def ends(self) -> None:
        """Note that the run asks for no more."""
        self.seconds += time.perf_counter() - self._last
        self._last = 0.0

    def _note_opened(self, asked: float, received: float, spans: Spans) -> None:
        opening = sum(stop - start for start, stop in spans)
        self.opening += opening
        self.gathering -= opening
        self.waited_tier += sum(max(0.0, min(received, stop) - max(asked, start)) for start, stop in spans)

    def statistics(self, caches: Sequence[Cache], **where: int) -> LoaderStatistics:
        stores = {id(cache.store): cache.store for cache in caches}.values()
        fetched = [store.transfers() for store in stores if isinstance(store, Fetching)]
        return LoaderStatistics(
            **where,
            batches=self.batches,
            seconds=self.seconds,
            waited=self.waited,
            waited_tier=self.waited_tier,
            opening=self.opening,
            gathering=self.gathering,
            transfers=sum(fetched, Transfers()) if fetched else None,
        )

    def file_is_due(self) -> bool:
        """Whether the last file was written a second ago; True at most once a second."""
        now = time.monotonic()
        if now - self._written < _FILE_SECONDS:
            return False
        self._written = now
        return True


def write_statistics(path: str, statistics: LoaderStatistics) -> None:
    """Replace a JSON file by these statistics; a reader sees the old file or the new one."""
    record = msgspec.to_builtins(statistics) | {"verdict": statistics.verdict, "written": time.time()}
    folder, name = os.path.split(os.path.abspath(path))
    LocalStore(folder).replace(name, [msgspec.json.encode(record)], durable=False)
