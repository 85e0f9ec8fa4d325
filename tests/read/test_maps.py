"""Mapped chunks: bounded in number, kept while a gather may point into them."""

import gc
import os
import signal
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.token_caches import token_cache

import forebay as fb
from forebay.read.maps import MapBudget, Maps
from forebay.store.base import Expected


class File:
    """Stands for a mapped chunk, as far as `Maps` knows one."""


def made(limit: int, count: int = 100) -> tuple[Maps, list[int]]:
    opened: list[int] = []
    return Maps(count, lambda position: opened.append(position) or File(), limit), opened  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("limit", [1, 2, 8, 50])
def test_no_more_maps_than_allowed_are_open(limit: int) -> None:
    maps, _ = made(limit)
    for position in np.random.default_rng(0).integers(0, 100, 500).tolist():
        maps.get(position)
        assert 0 < len(maps) <= limit


def test_a_map_is_opened_once_while_it_is_in_use() -> None:
    maps, opened = made(4)
    assert maps.get(3) is maps.get(3)
    for position in range(10):
        maps.get(3)
        maps.get(position)
    assert opened.count(3) == 1


def test_threads_that_want_the_same_map_open_it_once() -> None:
    opened: list[int] = []
    everyone = threading.Barrier(4)

    def slowly(position: int) -> File:
        opened.append(position)
        time.sleep(0.05)
        return File()

    maps = Maps(100, slowly)  # type: ignore[arg-type]

    def get() -> object:
        everyone.wait()
        return maps.get(7)

    with ThreadPoolExecutor(4) as pool:
        found = {id(each.result()) for each in [pool.submit(get) for _ in range(4)]}
    assert opened == [7]
    assert len(found) == 1


class Stuck(fb.LocalStore):
    """Opens chunks only in other processes than the one that made it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.maker, self.begun, self.over = os.getpid(), threading.Event(), threading.Event()

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        if key.startswith("layers/") and key.endswith("000000.safetensors") and os.getpid() == self.maker:
            self.begun.set()
            self.over.wait()
        return super().view(key, expect=expect)


def test_a_forked_child_opens_what_a_thread_of_its_parent_was_opening(tmp_path: Path) -> None:
    store = Stuck(token_cache(tmp_path, 9))
    cache = fb.open_cache(store)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(cache.read, [0], ["tokens"])
        store.begun.wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork with threads
            child = os.fork()
        if not child:
            signal.alarm(60)  # ends a child that waits for the thread
            os._exit(int(cache.read([0], ["tokens"])["tokens"][0, 0]))
        store.over.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert reading.result()["tokens"][0, 0] == 0


def test_the_least_recently_touched_is_closed() -> None:
    maps, _ = made(3)
    closed: list[int] = []
    maps.on_close(closed.append)
    for position in (0, 1, 2):
        maps.get(position)
    maps.get(3)
    assert closed == [0]
    maps.reading().__enter__()
    maps.touch(np.array([1]))
    maps.get(4)
    assert closed == [0, 2]


def test_a_closed_map_lives_until_the_last_gather_that_may_know_it_has_ended() -> None:
    maps, _ = made(1)
    early, late, after = maps.reading(), maps.reading(), maps.reading()
    early.__enter__()
    file = weakref.ref(maps.get(0))
    late.__enter__()
    maps.get(1)
    gc.collect()
    assert file() is not None
    after.__enter__()
    early.__exit__(None, None, None)
    gc.collect()
    assert file() is not None, "the second gather began before it was closed"
    late.__exit__(None, None, None)
    gc.collect()
    assert file() is None, "the third gather cannot know it"
    after.__exit__(None, None, None)


def test_a_note_about_a_map_that_is_closed_already_is_not_taken() -> None:
    maps, _ = made(1)
    notes: list[str] = []
    file = maps.get(0)
    maps.while_open(0, file, lambda: notes.append("open"))
    maps.get(1)
    maps.while_open(0, file, lambda: notes.append("closed"))
    again = maps.get(0)
    maps.while_open(0, file, lambda: notes.append("another map of the same chunk"))
    maps.while_open(0, again, lambda: notes.append("open again"))
    assert notes == ["open", "open again"]


def budgeted(budget: MapBudget, count: int, limit: int = 8192) -> Maps:
    return Maps(count, lambda position: File(), limit, budget)  # type: ignore[arg-type, return-value]


def test_all_layers_together_stay_within_the_budget_of_the_process() -> None:
    budget = MapBudget(320)
    layers = []
    for _ in range(64):
        layers.append(budgeted(budget, count=100))
        for position in range(100):
            layers[-1].get(position)
        assert sum(map(len, layers)) <= 320
    assert min(map(len, layers)) >= 1


def test_small_layers_get_what_they_want_and_the_others_share_the_rest() -> None:
    budget = MapBudget(100)
    small, first, second = budgeted(budget, 10), budgeted(budget, 1000), budgeted(budget, 1000, limit=60)
    assert [small.limit, first.limit, second.limit] == [10, 45, 45]
    del second
    first.get(0)
    budget.share()
    assert [small.limit, first.limit] == [10, 90]


def test_a_layer_that_is_closed_for_another_keeps_what_a_gather_may_know() -> None:
    budget = MapBudget(4)
    first = budgeted(budget, 100)
    with first.reading():
        files = [weakref.ref(first.get(position)) for position in range(4)]
        second = budgeted(budget, 100)
        assert len(first) == second.limit == 2
        assert all(file() is not None for file in files)
    assert sum(file() is not None for file in files) == 2


def test_threads_of_many_layers_share_one_budget_without_waiting_for_each_other_for_ever() -> None:
    budget = MapBudget(40)
    layers = [budgeted(budget, 50) for _ in range(8)]

    def read(number: int) -> None:
        choose = np.random.default_rng(number)
        for _ in range(300):
            with layers[number].reading():
                for position in choose.integers(0, 50, 4).tolist():
                    layers[number].get(position)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8), timeout=600))
    assert sum(map(len, layers)) <= 40
