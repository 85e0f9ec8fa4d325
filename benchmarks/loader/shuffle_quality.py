"""How close the window shuffle is to a global one, and how many chunks a node reads.

`python -m benchmarks.loader.shuffle_quality`.

Needs no cache: orders are functions of numbers. For comparison, `dealt anew` gives every epoch the deal of another
seed, as the window shuffle did before its lanes were fixed for a run.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from forebay.order.shuffle import GlobalOrder, Numbers, Order, key_of
from forebay.order.window import Window, WindowOrder, shuffle_quality

SHAPES = {  # name: chunks, rows of a chunk, window, batch
    "tokens, 125 chunks of 8,000 rows": (125, 8000, Window(rows=384, unit=64), 512),
    "tokens, 2,000 chunks of 500 rows": (2000, 500, Window(rows=384, unit=64), 512),
    "images, 1,000 chunks of 128 rows": (1000, 128, Window(rows=16, unit=1), 256),
    "a bucket, 1,000 chunks of 1,000 rows, 2 at a time": (1000, 1000, Window(rows=384, unit=1, chunks=2), 512),
}
EPOCHS = 4


class DealtAnew:
    """Every epoch in the deal of another seed."""

    def __init__(self, counts: Numbers, seed: int, window: Window) -> None:
        self._counts, self._seed, self._window = counts, seed, window
        self.size = int(counts.sum())

    def rows_at(self, epoch: int, positions: Numbers) -> Numbers:
        return WindowOrder(self._counts, key_of("anew", self._seed, epoch), self._window).rows_at(epoch, positions)


@dataclass(frozen=True, slots=True)
class Figures:
    order: str
    chunks: float  # of a global shuffle: distinct chunks in a batch
    units: float
    travel: float  # of a global shuffle: distance between successive rows
    moved: float  # of a global shuffle: distance between the positions of a row in successive epochs
    node_share: float  # of the chunks that one of 8 nodes reads in an epoch
    node_share_all: float  # of the chunks that it reads in all epochs


def figures(name: str, order: Order, counts: Numbers, unit: int, batch: int) -> Figures:
    qualities = [shuffle_quality(order, counts, unit, batch, epoch) for epoch in range(EPOCHS)]
    places, read = [], []
    for epoch in range(EPOCHS):
        rows = order.rows_at(epoch, np.arange(order.size))
        places.append(np.argsort(rows))
        read.append(set((rows[0::8] // counts[0]).tolist()))
    moved = [np.abs(one - other).mean() / (order.size / 3) for one, other in pairwise(places)]
    return Figures(
        name,
        *(float(np.mean([getattr(one, field) for one in qualities])) for field in ("chunks", "units", "travel")),
        moved=float(np.mean(moved)),
        node_share=float(np.mean([len(one) for one in read])) / len(counts),
        node_share_all=len(set().union(*read)) / len(counts),
    )


def measured(shape: str) -> list[Figures]:
    chunks, rows, window, batch = SHAPES[shape]
    counts = np.full(chunks, rows)
    orders: dict[str, Order] = {
        "global": GlobalOrder(chunks * rows, 0),
        "window, dealt anew": DealtAnew(counts, 0, window),
        "window": WindowOrder(counts, 0, window),
    }
    return [figures(name, order, counts, window.unit, batch) for name, order in orders.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    for shape in SHAPES:
        found = measured(shape)
        if as_json:
            print(json.dumps({"shape": shape, "orders": [asdict(one) for one in found]}))
            continue
        print(
            f"{shape}\n{'':22}{'chunks':>9}{'units':>9}{'travel':>9}{'moved':>9}{'1 epoch':>9}{f'{EPOCHS} epochs':>10}"
        )
        for one in found:
            shares = (one.chunks, one.units, one.travel, one.moved, one.node_share, one.node_share_all)
            print(f"  {one.order:20}" + "".join(f"{share:9.1%}" for share in shares))


if __name__ == "__main__":
    main()
