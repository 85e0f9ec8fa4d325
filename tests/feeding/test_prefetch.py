"""The order in which threads hand on what they make: that of the groups, whatever their lanes and lengths."""

import random
import threading
import time
from collections.abc import Iterator

import pytest

from forebay.feeding.prefetch import Lanes, Prefetcher, PrefetchPlan

Items = list[int]
WITHIN = 60.0  # seconds; a deadlock would last


def all_of(prefetcher: Prefetcher[Items]) -> list[int]:
    """Everything in the order in which it comes, or a failure if it does not come."""
    found: list[int] = []
    taking = threading.Thread(
        target=lambda: found.extend(i for items in prefetcher.items() for i in items), daemon=True
    )
    taking.start()
    taking.join(WITHIN)
    assert not taking.is_alive(), f"nothing came after {found[-3:]}"
    prefetcher.stop()
    return found


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
@pytest.mark.parametrize("turn", [1, 2, 3])
@pytest.mark.parametrize("queued", [1, 2])
def test_lanes_of_any_length_are_joined_in_the_order_of_their_group(threads: int, turn: int, queued: int) -> None:
    lanes, sizes = max(1, threads), [1, *range(14), 0, 0, 5, 12, 3, 12]

    def make(group: int, lane: int) -> Iterator[Items]:
        pieces = [list(range(at, min(at + turn, sizes[group]))) for at in range(0, sizes[group], turn)]
        for piece in pieces[lane::lanes]:
            time.sleep(random.random() / 2000)
            cut = random.randrange(len(piece))  # what takes long is handed on in parts
            yield from ([100 * group + at for at in part] for part in (piece[:cut], piece[cut:]) if part)

    prefetcher = Prefetcher(make, len(sizes), threads=threads, queued=queued, lanes=Lanes(lanes, turn, len))
    assert all_of(prefetcher) == [100 * group + at for group, size in enumerate(sizes) for at in range(size)]


def test_an_error_of_one_lane_is_raised_after_all_that_comes_before_it() -> None:
    def make(group: int, lane: int) -> Iterator[Items]:
        for at in range(lane, 10, 2):
            if (group, at) == (1, 5):
                raise OSError("of item 5")
            yield [10 * group + at]

    found: list[int] = []
    prefetcher = Prefetcher(make, 3, threads=2, queued=2, lanes=Lanes(2, 1, len))
    with pytest.raises(OSError, match="of item 5"):
        found.extend(at for items in prefetcher.items() for at in items)
    prefetcher.stop()
    assert found == list(range(15))


def test_threads_that_decode_make_whole_groups() -> None:
    options = {"read_bytes": 1 << 17, "batch_bytes": 3 << 19}
    assert PrefetchPlan.of(2, None, decoded=False, **options).lanes == 2
    assert PrefetchPlan.of(2, None, decoded=True, **options).lanes == 1
    assert PrefetchPlan.of(0, None, decoded=False, **options).lanes == 1
