"""The queue of batches and chunks: in order, bounded, with errors at their own task."""

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from forebay.feeding.ahead import Ahead, Slot
from forebay.feeding.statistics import Handoff
from forebay.feeding.steps import AHEAD_BYTES, BatchTask, Pace, tasks
from forebay.feeding.stream import Ranks


def always(task: Any, pending: Any) -> bool:
    return len(pending) < 8


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_items_come_in_the_order_of_their_tasks(threads: int) -> None:
    def make(task: int) -> int:
        time.sleep(0.001 * (task % 3))
        return task * task

    assert list(Ahead(iter(range(50)), make, always, threads, "test")) == [task * task for task in range(50)]


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_an_error_comes_at_its_own_task_and_the_items_before_it_first(threads: int) -> None:
    queue = Ahead(iter(range(20)), lambda task: 1 // (7 - task), always, threads, "test")
    assert len(list(itertools.islice(queue, 7))) == 7
    with pytest.raises(ZeroDivisionError):
        next(queue)
    queue.stop()


def test_an_error_in_listing_tasks_comes_after_the_tasks_before_it() -> None:
    def listed() -> Iterator[int]:
        yield from (1, 2)
        raise ValueError("no third task")

    queue = Ahead(listed(), lambda task: task, always, 2, "test")
    assert [next(queue), next(queue)] == [1, 2]
    with pytest.raises(ValueError, match="no third task"):
        next(queue)


def test_an_error_in_listing_tasks_is_not_an_end_for_a_consumer_that_asks_before_it_is_pending() -> None:
    asked = threading.Event()

    def listed() -> Iterator[int]:
        asked.wait(60)
        raise ValueError("no task")
        yield

    queue = Ahead(listed(), lambda task: task, always, 1, "test")
    with queue._lock:
        asked.set()
        time.sleep(0.05)  # the thread has the error, and waits to add it
    with pytest.raises(ValueError, match="no task"):
        next(queue)


def test_no_more_tasks_are_begun_than_fit() -> None:
    begun: list[int] = []
    queue = Ahead(
        itertools.count(), lambda task: begun.append(task) or task, lambda _, ahead: len(ahead) < 3, 2, "test"
    )
    assert next(queue) == 0
    time.sleep(0.2)
    assert len(begun) <= 4
    queue.stop()


def test_released_tasks_make_room_without_being_waited_for() -> None:
    blocked, begun = threading.Event(), list[int]()

    def make(task: int) -> int:
        begun.append(task)
        if task == 0:
            blocked.wait(60)
        return task

    queue = Ahead(itertools.count(), make, lambda _, ahead: len(ahead) < 2, 2, "test")
    while len(begun) < 2:
        time.sleep(0.01)
    queue.release(lambda task: task < 1)
    end = time.monotonic() + 60
    while len(begun) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    blocked.set()
    queue.stop()
    assert not queue.is_running


def test_an_item_is_held_by_its_consumer_only() -> None:
    class Item:
        pass

    queue = Ahead(iter(range(3)), lambda task: Item(), always, 1, "test")
    item = weakref.ref(next(queue))
    gc.collect()
    assert item() is None
    queue.stop()


def test_a_garbage_collection_in_a_thread_of_the_queue_stops_it() -> None:
    """It may run at any line of a thread, also where the thread holds the lock, and free the owner of the queue."""

    class Owner:
        def __init__(self) -> None:
            self.itself = self

    is_garbage = threading.Event()

    def fits(task: int, pending: Sequence[Slot[int, int]]) -> bool:
        for _ in pending:
            is_garbage.wait(60)
            gc.collect()
        return len(pending) < 2

    gc.disable()
    try:
        queue = Ahead(itertools.count(), lambda task: task, fits, 1, "test")
        weakref.finalize(Owner(), queue.stop)
        is_garbage.set()
        queue._threads[0].join(10)
    finally:
        gc.enable()
    assert not queue._threads[0].is_alive()
    assert not queue.is_running


def test_tasks_grow_with_cheap_batches_and_keep_to_the_bytes_allowed() -> None:
    pace = Pace(threads=1, most=None)
    pace.note(1, 1000, 1e-5)
    assert pace.batches == 2
    pace.note(2, 2000, 2e-5)
    assert pace.batches == 4
    pace.note(4, 4 * AHEAD_BYTES // 3, 1.0)
    assert pace.batches == 1
    task = BatchTask(0, 0, 1, (0, 1))
    queue: Ahead[BatchTask, Handoff] = Ahead(iter([task] * 9), lambda _: Handoff([], 0.0, ()), pace.fits, 1, "test")
    time.sleep(0.1)
    assert len(queue._pending) == 3
    queue.stop()


def test_tasks_have_one_batch_while_more_than_half_is_done() -> None:
    pace, slot = Pace(threads=1, most=16), Slot[BatchTask, Handoff](BatchTask(0, 0, 9, (0, 1)))
    pace.note(4, 4000, 1e-5)
    for is_done, batches in ((False, 8), (True, 1), (False, 8)):
        slot.is_done = is_done
        assert pace.fits(BatchTask(0, 0, 1, (0, 1)), [slot])
        assert pace.next_batches() == batches


def test_tasks_cover_every_position_once_and_stay_in_their_stretch() -> None:
    pace = Pace(threads=1, most=None)
    pace.batches = 3
    found = list(tasks(0, [(6, 30_000), (30_000, 30_002)], None, 6, Ranks(0, 2), pace))
    at = 6
    for task in found:
        assert task.start == at
        assert task.stretch[0] <= task.start < task.stretch[1]
        at = min(task.start + 6 * task.batches, task.stretch[1])
    assert at == 30_002
