"""How far ahead of the training step batches are made: bounded by batches, and unless told, by bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.cache.reader import Cache
from forebay.torch.shuffle import row_bytes

_AHEAD_BYTES = 32 * 1024 * 1024
_MOST, _LEAST = 128, 4


@dataclass(frozen=True, slots=True)
class Pace:
    """`threads` make `ahead` runs of `run` batches each before they are asked for; without threads, one when it is."""

    threads: int
    run: int
    ahead: int

    @classmethod
    def of(cls, threads: int, prefetch: int | None, batch_bytes: int) -> "Pace":
        """Runs for all threads and one to take from, in `prefetch` batches, or in as many as 32 MiB hold."""
        if threads < 0 or (prefetch is not None and prefetch < 1):
            raise ValueError(f"threads is {threads} and prefetch is {prefetch}; 0 or more, and 1 or more are expected")
        wanted = prefetch or min(_MOST, max(_LEAST, _AHEAD_BYTES // max(1, batch_bytes)))
        ahead = min(wanted, 2 * threads + 1)
        return cls(threads, wanted // ahead, ahead)

    @property
    def batches(self) -> int:
        """Batches that are under way or made at most."""
        return self.run * self.ahead


def batch_bytes(caches: Sequence[Cache], columns: Sequence[str], rows: int, derived: int) -> int:
    """What a batch takes: its columns, and so many numbers of 8 bytes for every token."""
    cache = caches[0]
    read = [cache.column(name) for name in columns]
    width = cache.column("tokens").shape[0] if derived else 0
    return rows * (row_bytes(cache, read) + 8 * width * derived)
