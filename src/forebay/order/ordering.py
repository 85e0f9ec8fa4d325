"""How rows are ordered, whichever they are: what a loader's state says of its order."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from forebay.order.bijection import Numbers
from forebay.order.orders import GlobalOrder, Order, SequentialOrder
from forebay.order.window import Window, WindowOrder

Kind = Literal["global", "window", "sequential"]


@dataclass(frozen=True, slots=True)
class Ordering:
    """An order without its rows. A window shuffle has a window, and no other has one."""

    kind: Kind
    seed: int
    window: Window | None = None
    automatic: bool = False  # chosen by how the rows are stored: a cache that has grown may get another kind

    def __post_init__(self) -> None:
        if (self.kind == "window") != (self.window is not None):
            raise ValueError(f"shuffle is {self.kind!r} with window {self.window}; a window belongs to 'window' alone")

    def of(self, counts: Numbers, part: int = 0) -> Order:
        """The order of so many rows of each chunk; the parts of an epoch have orders of their own."""
        if self.window is not None:
            return WindowOrder(counts, self.seed, self.window, part)
        size = int(counts.sum())
        return SequentialOrder(size) if self.kind == "sequential" else GlobalOrder(size, self.seed, part)

    def state(self) -> dict[str, Any]:
        window = None if self.window is None else asdict(self.window)
        return {"shuffle": self.kind, "seed": self.seed, "window": window, "automatic": self.automatic}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Ordering":
        window = None if state["window"] is None else Window(**state["window"])
        return cls(state["shuffle"], state["seed"], window, state["automatic"])
