"""The order in which threads hand on what they make: that of the groups, whatever their lanes and lengths."""

import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from forebay.feeding.prefetch import Batch, BatchGroups, Lanes, Prefetcher, PrefetchPlan
from forebay.feeding.stream import Located, Ranks
from forebay.order.orders import Numbers

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

    turns: Lanes[Items] = Lanes(lanes, turn, len)
    prefetcher = Prefetcher(make, len(sizes), threads=threads, queued=queued, lanes=turns)
    assert all_of(prefetcher) == [100 * group + at for group, size in enumerate(sizes) for at in range(size)]


def test_an_error_of_one_lane_is_raised_after_all_that_comes_before_it() -> None:
    def make(group: int, lane: int) -> Iterator[Items]:
        for at in range(lane, 10, 2):
            if (group, at) == (1, 5):
                raise OSError("of item 5")
            yield [10 * group + at]

    found: list[int] = []
    lanes: Lanes[Items] = Lanes(2, 1, len)
    prefetcher = Prefetcher(make, 3, threads=2, queued=2, lanes=lanes)
    with pytest.raises(OSError, match="of item 5"):
        found.extend(at for items in prefetcher.items() for at in items)
    prefetcher.stop()
    assert found == list(range(15))


def test_threads_that_decode_make_whole_groups() -> None:
    options = {"read_bytes": 1 << 17, "batch_bytes": 3 << 19}
    assert PrefetchPlan.of(2, None, decoded=False, **options).lanes == 2
    assert PrefetchPlan.of(2, None, decoded=True, **options).lanes == 1
    assert PrefetchPlan.of(0, None, decoded=False, **options).lanes == 1


def test_threads_help_the_one_that_makes_batches_where_compiled_code_does_the_work() -> None:
    options = {"read_bytes": 1 << 17, "batch_bytes": 3 << 19, "decoded": False}
    plans = [PrefetchPlan.of(threads, None, compiled=True, **options) for threads in (0, 1, 2, 5)]
    assert [(plan.threads, plan.helpers, plan.lanes) for plan in plans] == [(0, 0, 1), (1, 0, 1), (1, 1, 1), (1, 4, 1)]
    assert plans[2].batches == plans[1].batches + plans[2].handoff, "what helpers write is in memory too"
    few = PrefetchPlan.of(2, 2, compiled=True, **options)
    assert (few.threads, few.helpers) == (2, 0), "helpers need a batch that is not queued yet"


def test_lanes_need_groups_of_several_batches() -> None:
    assert PrefetchPlan.of(2, None, read_bytes=13 << 20, batch_bytes=19 << 20, decoded=False).lanes == 1


@pytest.mark.parametrize("prefetch", [3, 4, 7, 16])
def test_what_helpers_write_counts_as_made_ahead(prefetch: int) -> None:
    plan = PrefetchPlan.of(2, prefetch, read_bytes=1 << 20, batch_bytes=64, decoded=False, compiled=True)
    assert plan.helpers == 1
    assert ((plan.threads + plan.lanes) * plan.queued + 1) * plan.handoff <= prefetch


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("prefetch", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("decoded", [False, True])
def test_no_more_batches_are_made_ahead_than_asked_for(threads: int, prefetch: int, decoded: bool) -> None:
    plan = PrefetchPlan.of(threads, prefetch, read_bytes=1 << 20, batch_bytes=64, decoded=decoded)
    lock, made, taken, most = threading.Lock(), 0, 0, 0

    def make(group: int, lane: int) -> Iterator[Items]:
        nonlocal made, most
        for _ in range(lane * plan.handoff, plan.group, plan.lanes * plan.handoff):
            with lock:
                made += plan.handoff
                most = max(most, made - taken)
            yield [group] * plan.handoff

    lanes: Lanes[Items] = Lanes(plan.lanes, plan.handoff, len)
    prefetcher = Prefetcher(make, 4, threads=plan.threads, queued=plan.queued, lanes=lanes)
    time.sleep(0.02)
    for items in prefetcher.items():
        for _ in items:
            with lock:
                taken += 1
            time.sleep(0.001)
    prefetcher.stop()
    assert made == taken
    assert most <= prefetch + 1, "one is being used"


class SlowOrder:
    """Rows in the order of their numbers, which takes a while to find out."""

    caches, selections, seed = (), (), 0

    def __init__(self) -> None:
        self.located: list[int] = []

    def locate(self, epoch: int, positions: Numbers) -> Located:
        self.located.append(len(positions))
        time.sleep(0.05)
        return Located(positions)


class RowNumbers:
    def batches(self, stream: object, epoch: int, located: Located, size: int) -> Iterator[Batch]:
        yield from ({"rows": located.rows[at : at + size].tolist()} for at in range(0, len(located.rows), size))


def test_threads_that_begin_groups_at_once_locate_their_rows_once() -> None:
    stream, plan = SlowOrder(), PrefetchPlan(threads=2, group=4, handoff=2, queued=2)
    groups = BatchGroups(stream, 0, 0, 24, 2, plan, Ranks(0, 1), RowNumbers(), filled=False)  # type: ignore[arg-type]
    begun, found = threading.Barrier(3), {}

    def work(number: int) -> None:
        begun.wait()
        batches = [batch for handoff in groups.make(number, 0) for batch in reversed(handoff.batches)]
        found[number] = np.concatenate([batch["rows"] for batch in batches]).tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    assert found == {number: list(range(8 * number, 8 * number + 8)) for number in range(3)}
    assert stream.located == [24]
