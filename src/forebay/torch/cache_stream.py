"""The stream of one cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.cache.reader import Cache
from forebay.errors import StateMismatch
from forebay.order.bijection import Numbers
from forebay.order.orders import GlobalOrder, Order, SequentialOrder
from forebay.torch.stream import Located


@dataclass(frozen=True, eq=False)
class CacheStream:
    """The rows of one cache in an order."""

    cache: Cache
    order: Order
    seed: int

    @property
    def caches(self) -> tuple[Cache, ...]:
        return (self.cache,)

    def size(self, epoch: int) -> int:
        return self.order.size

    def locate(self, epoch: int, positions: Numbers) -> Located:
        return Located(self.order.rows_at(epoch, positions))

    def state(self) -> dict[str, Any]:
        generation = self.cache.generation
        return {
            "cache_id": generation.document.cache_id,
            "generation": generation.number,
            "rows": len(self.cache),
            "seed": self.seed,
            "order": type(self.order).__name__,
        }

    def resumed(self, state: Mapping[str, Any]) -> "CacheStream":
        mine = self.state()
        differs = [name for name in mine if state.get(name) != mine[name]]
        if differs:
            raise StateMismatch(self.cache.root, {name: (state.get(name), mine[name]) for name in differs})
        return self


def cache_stream(cache: Cache, shuffle: str | None, seed: int) -> CacheStream:
    order: Order = SequentialOrder(len(cache)) if shuffle is None else GlobalOrder(len(cache), seed)
    return CacheStream(cache, order, seed)
