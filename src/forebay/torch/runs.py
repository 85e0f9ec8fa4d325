"""The batches that a rank takes of a stretch of an epoch, in runs.

positions    start ├─── batch ───┼─── batch ───┼─── batch ───┼─ … ─┤ stop
run 0              └──────── located, found and checked together ────────┘
rank r of w        takes the positions p with p % w == r
"""

from collections.abc import Iterator
from functools import lru_cache

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
    ) -> None:
        self._stream, self._epoch, self._start, self._stop = stream, epoch, start, stop
        self._ranks, self._making = ranks, making
        self._local_size = max(1, batch_size // ranks.world_size)
        self._piece = pace.piece
        self._run_positions = batch_size * pace.run
        self._run_rows = self._local_size * pace.run
        self._runs_at_once = max(1, _LOCATED_ROWS // self._run_rows)
        self._stretch = lru_cache(maxsize=2)(self._located)

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

    def _located(self, stretch: int) -> Located:
        rank, world = self._ranks.rank, self._ranks.world_size
        size = self._run_positions * self._runs_at_once
        start = self._start + stretch * size
        positions = np.arange(start + (rank - start) % world, min(self._stop, start + size), world)
        return self._stream.locate(self._epoch, positions)
