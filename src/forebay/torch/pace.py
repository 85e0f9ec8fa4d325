"""How far ahead of the training step batches are made: bounded by batches, and unless told, by bytes.

run     batches that are found, checked and decoded together; by one thread, copied and derived one after the other
piece   batches that are handed over together: waking a thread costs as much as copying 64 KiB
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.cache.reader import Cache
from forebay.torch.shuffle import decoded_columns

_AHEAD_BYTES = 16 * 1024 * 1024
_RUN_BYTES = 8 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
_MOST, _LEAST = 64, 4


@dataclass(frozen=True, slots=True)
class Pace:
    """`threads` make runs of `run` batches, at most `ahead` pieces of `piece` batches of each before they are taken."""

    threads: int
    run: int
    piece: int
    ahead: int

    @classmethod
    def of(cls, threads: int, prefetch: int | None, *, read_bytes: int, batch_bytes: int, decoded: bool) -> "Pace":
        """At most `prefetch` batches ahead, or as many as 16 MiB hold.

        Where little is to be found, many threads share the copying and deriving: a run is as long as one of them may go
        ahead. Where blocks are decoded, runs are long, and one thread decodes the next while another copies.
        """
        if threads < 0:
            raise ValueError(f"threads is {threads}; it must be at least 0")
        if prefetch is not None and prefetch < 1:
            raise ValueError(f"prefetch is {prefetch}; it must be at least 1")
        wanted = prefetch or _between(_LEAST, _AHEAD_BYTES // max(1, batch_bytes), _MOST)
        each = max(1, wanted // (threads + 1))
        run = each if threads > 1 and not decoded else _between(1, _RUN_BYTES // max(1, read_bytes), _MOST)
        piece = _between(1, _PIECE_BYTES // max(1, batch_bytes), min(each, run)) if threads else 1
        return cls(threads, run, piece, max(1, each // piece))

    @property
    def batches(self) -> int:
        """Batches that are under way or made at most."""
        return (self.threads + 1) * (self.ahead + 1) * self.piece


def suitable_threads(caches: Sequence[Cache], columns: Sequence[str]) -> int:
    """One thread keeps up with memory; decoding is shared by two."""
    return 2 if any(decoded_columns(cache, columns) for cache in caches) else 1


def batch_bytes(cache: Cache, columns: Sequence[str], rows: int, derived: int = 0) -> int:
    """What a batch takes: its columns, and so many numbers of 8 bytes for every token."""
    width = cache.column("tokens").shape[0] if derived else 0
    return rows * (cache.row_bytes(columns) + 8 * width * derived)


def _between(least: int, wanted: int, most: int) -> int:
    return max(least, min(wanted, most))
