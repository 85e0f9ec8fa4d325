"""What a loader does about rows that are published while it runs, or were since its state was taken.

pinned   the generation of the cache that the loader was given; a state of an older one finishes its epoch first
epoch    at the end of an epoch, the newest generation
within   also at the end of the running epoch: the added rows follow, shuffled among themselves
"""

from collections.abc import Callable
from typing import Protocol, get_args

from forebay.feeding.shuffle import Ranks
from forebay.feeding.stream import CacheStream, Growth, Policy, Stream

Report = Callable[[Growth], None]


class Agreement(Protocol):
    def first(self, number: int) -> int:
        """The number that the first rank has; every rank must ask."""
        ...


class Growing:
    """Moves a stream on. All ranks move alike: the first one decides."""

    def __init__(self, policy: Policy, ranks: Ranks, agreement: Agreement) -> None:
        if policy not in get_args(Policy):
            raise ValueError(f"growth is {policy!r}; one of {', '.join(get_args(Policy))} is expected")
        if policy != "pinned" and not ranks.can_agree:
            raise ValueError(
                f"growth={policy!r} needs ranks that agree on a generation: leave rank and world_size to "
                "torch.distributed, or keep growth='pinned' and call loader.move_to(generation) on every rank"
            )
        self.policy, self._agreement = policy, agreement

    def within(self, stream: Stream, report: Report) -> Stream | None:
        """The running epoch with added rows at its end; None where there are none, or they shall wait."""
        if self.policy != "within" or not isinstance(stream, CacheStream):
            return None
        newest = self._newest(stream)
        newer = stream if newest == stream.cache.generation.number else stream.reading(newest)
        growth = newer.growth()
        if growth is None or newer.has_replaced():  # what was replaced belongs to the next epoch, and so do added rows
            return None
        followed = newer.followed()
        if followed.size(0) == stream.size(0):
            return None
        report(growth)
        return followed

    def between(self, stream: Stream, report: Report) -> Stream:
        """The stream of the next epoch."""
        if not isinstance(stream, CacheStream):
            return stream
        now = stream.cache.generation.number if self.policy == "pinned" else self._newest(stream)
        return self.moved(stream, now, report)

    def moved(self, stream: CacheStream, generation: int, report: Report) -> CacheStream:
        """The stream of an epoch that begins with all rows of a generation."""
        if stream.generations == (generation,):
            return stream
        following, before = stream.moved(generation), stream.generations[-1]
        if generation != before:
            report(Growth(before, generation, stream.size(0), following.size(0)))
        return following

    def _newest(self, stream: CacheStream) -> int:
        return self._agreement.first(max(stream.newest(), stream.cache.generation.number))
