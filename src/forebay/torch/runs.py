"""The batches that a rank takes of a stretch of an epoch, in runs.

positions    start ├─── batch ───┼─── batch ───┼─── batch ───┼─ … ─┤ stop
run 0              └──────── located, found and checked together ────────┘
rank r of w        takes the positions p with p % w == r

With `filled`, a last batch whose rows do not go round is filled up on the ranks that lack one: with a copy of its last
row, whose weight is 0. So every rank has a batch of the same shape.
"""

from collections.abc import Iterator
from functools import lru_cache, partial

import numpy as np

from forebay.torch.batch import Batch
from forebay.torch.making import Making
from forebay.torch.pace import Pace
from forebay.torch.ranks import Ranks
from forebay.torch.stream import Located, Stream

_LOCATED_ROWS = 4096


class Runs:
    """Positions `start` to `stop` of an epoch, in batches of `batch_size`, `pace.run` of them to a run.

    Rows are located for many runs at once: looking up one position costs about as much as a thousand.
    """

    def __init__(
        self,
        stream: Stream,
        epoch: int,
        start: int,
        stop: int,
        batch_size: int,
        pace: Pace,
        ranks: Ranks,
        making: Making,
        *,
        filled: bool,
    ) -> None:
        self._stream, self._epoch, self._start, self._stop = stream, epoch, start, stop
        self._making = making
        self._local_size = max(1, batch_size // ranks.world_size)
        self._piece = pace.piece
        self._run_positions = batch_size * pace.run
        self._run_rows = self._local_size * pace.run
        self._runs_at_once = max(1, _LOCATED_ROWS // self._run_rows)
        size = self._run_positions * self._runs_at_once
        # No method: the cache goes with the loader, not when a collector finds it in a circle.
        self._stretch = lru_cache(maxsize=2)(partial(_located, stream, epoch, start, stop, size, ranks, filled))

    def __len__(self) -> int:
        return -(-(self._stop - self._start) // self._run_positions)

    def make(self, number: int) -> Iterator[list[Batch]]:
        """The batches of one run, a piece at a time, each with its last batch first; up to the first error in it."""
        stretch, within = divmod(number, self._runs_at_once)
        rows = slice(within * self._run_rows, (within + 1) * self._run_rows)
        piece: list[Batch] = []
        error = None
        try:
            located = self._stretch(stretch).part(rows)
            for batch in self._making.batches(self._stream, self._epoch, located, self._local_size):
                piece.append(batch)
                del batch
                if len(piece) == self._piece:
                    yield piece[::-1]
                    piece = []
        except Exception as raised:  # it belongs to one batch: those before it are good
            error = raised
        if piece:
            yield piece[::-1]
        if error is not None:
            raise error


def _located(
    stream: Stream, epoch: int, start: int, stop: int, size: int, ranks: Ranks, filled: bool, stretch: int
) -> Located:
    """The rows of a rank in one of the stretches of `size` positions."""
    first = start + stretch * size
    last = min(stop, first + size)
    positions = np.arange(first + (ranks.rank - first) % ranks.world_size, last, ranks.world_size)
    if not filled:
        return stream.locate(epoch, positions)
    rows = -(-(last - first) // ranks.world_size)
    weights = np.zeros(rows, np.float32)
    weights[: len(positions)] = 1
    filling = np.full(rows - len(positions), last - 1)
    return stream.locate(epoch, np.concatenate([positions, filling]))._replace(weights=weights)
