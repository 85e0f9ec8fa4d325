"""What a store of copies fetched: counters that a loader reports."""

from typing import Protocol, runtime_checkable

import msgspec


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since a store was opened by this process."""

    hits: int = 0  # chunks that were in the tier when they were needed
    misses: int = 0  # chunks that were not
    fetched: int = 0  # chunks that this process fetched; another process may have fetched the other misses
    bytes_fetched: int = 0
    retries: int = 0  # fetches that were repeated after an error or wrong bytes

    def __add__(self, other: "Transfers") -> "Transfers":
        return Transfers(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


@runtime_checkable
class Fetching(Protocol):
    """A store that fetches what it is asked for from another one."""

    def transfers(self) -> Transfers:
        """What was fetched so far."""
        ...
