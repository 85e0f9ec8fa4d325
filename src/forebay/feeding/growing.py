"""Move a stream to newer generations, with rows that were published after the loader started.

pinned   stay on the generation of the cache it was made with; a state of an older one finishes its epoch first
epoch    move to the newest generation at the end of each epoch; each cache of a mixture first finishes its pass
within   train while it builds: also append added rows, shuffled among themselves, to the end of the running epoch
"""

import warnings
from collections.abc import Callable
from typing import get_args

from forebay.errors import StateMismatch, choice_error
from forebay.feeding.mixture import Mixture
from forebay.feeding.stream import CacheStream, Growth, Policy, Ranks, Stream

Report = Callable[[Growth], None]


class Growing:
    """Moves a stream to newer generations; rank 0 decides for all ranks: `agree` returns its number on all of them."""

    def __init__(self, policy: Policy, ranks: Ranks, agree: Callable[[int], int]) -> None:
        if policy not in get_args(Policy):
            raise choice_error("growth", policy, get_args(Policy))
        if policy != "pinned" and not ranks.can_agree:
            raise ValueError(
                f"growth={policy!r} needs ranks that agree on a generation: leave rank and world_size to "
                "torch.distributed, or keep growth='pinned' and call loader.move_to(generation) on every rank"
            )
        self.policy, self._agree = policy, agree

    def within(self, stream: Stream, report: Report) -> Stream | None:
        """Return the running epoch with added rows at its end; None if there are none, or they wait for the next."""
        if self.policy != "within" or not isinstance(stream, CacheStream):
            return None
        newest = self._newest(stream)
        newer = stream if newest == stream.cache.generation.number else stream.read_through(newest)
        growth = newer.growth()
        if growth is None:
            return None
        extended = newer.with_added_rows()
        if extended.size(0) == stream.size(0):
            return None
        report(growth)
        return extended

    def between(self, stream: Stream, epoch: int, report: Report) -> Stream:
        """Return the stream of an epoch that begins."""
        if isinstance(stream, Mixture):
            return self._grown(stream, epoch, report)
        if not isinstance(stream, CacheStream):
            return stream
        now = stream.cache.generation.number if self.policy == "pinned" else self._newest(stream)
        return self.begin_at(stream, now, report)

    def _grown(self, mixture: Mixture, epoch: int, report: Report) -> Stream:
        if self.policy == "pinned":
            return mixture
        newest = [self._newest(stream) for stream in mixture.streams]
        pairs = list(zip(mixture.streams, newest, strict=True))
        if all(stream.cache.generation.number == number for stream, number in pairs):
            return mixture
        try:
            following = mixture.grown(newest, epoch)
        except StateMismatch as error:  # training continues with the rows that it has
            warnings.warn(
                f"the mixture keeps the rows that it began with: {error}; create it again to use the new ones",
                stacklevel=2,
            )
            return mixture
        for (old, number), new in zip(pairs, following.streams, strict=True):
            before = old.cache.generation.number
            if before != number:
                report(Growth(before, number, old.size(0), new.size(0)))
        return following

    def begin_at(self, stream: CacheStream, generation: int, report: Report) -> CacheStream:
        """Return the stream of an epoch that begins with all rows of a generation."""
        if stream.generations == (generation,):
            return stream
        following, before = stream.on_newest_rows(generation), stream.generations[-1]
        if generation != before:
            report(Growth(before, generation, stream.size(0), following.size(0)))
        return following

    def _newest(self, stream: CacheStream) -> int:
        return self._agree(max(stream.newest(), stream.cache.generation.number))
