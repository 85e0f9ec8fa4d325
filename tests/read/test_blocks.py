"""Decoded blocks in memory: bounded by bytes, least recently used go first."""

import random
import threading
import time

import numpy as np
import pytest

from forebay.columns import Array
from forebay.read.gather import BlockCache, BlockStatistics


def block(size: int) -> Array:
    return np.zeros(size, np.uint8)


def test_a_block_is_decoded_once_while_there_is_room() -> None:
    blocks, decoded = BlockCache(100), []
    for _ in range(3):
        assert len(blocks.get("a", lambda: decoded.append(1) or block(40))) == 40
    assert decoded == [1]
    assert blocks.statistics() == BlockStatistics(hits=2, misses=1, blocks=1, bytes=40, limit_bytes=100)


def test_the_least_recently_used_goes_first() -> None:
    blocks = BlockCache(100)
    for key in ("a", "b", "a", "c"):
        blocks.get(key, lambda: block(40))
    before = blocks.statistics().misses
    blocks.get("a", lambda: block(40))
    assert blocks.statistics().misses == before
    blocks.get("b", lambda: block(40))
    assert blocks.statistics().misses == before + 1


@pytest.mark.parametrize("limit", [0, 39])
def test_a_block_larger_than_the_whole_allowance_is_not_kept(limit: int) -> None:
    blocks = BlockCache(limit)
    for _ in range(2):
        assert len(blocks.get("a", lambda: block(40))) == 40
    assert blocks.statistics() == BlockStatistics(hits=0, misses=2, blocks=0, bytes=0, limit_bytes=limit)


def test_a_decoding_that_fails_leaves_nothing_behind() -> None:
    blocks = BlockCache(100)
    with pytest.raises(ZeroDivisionError):
        blocks.get("a", lambda: block(1 // 0))
    assert len(blocks.get("a", lambda: block(7))) == 7


def test_threads_that_want_a_block_at_once_decode_it_once() -> None:
    blocks, begun, decoded = BlockCache(100), threading.Barrier(4), []

    def decode() -> Array:
        decoded.append(threading.current_thread())
        time.sleep(0.05)
        return block(40)

    def work() -> None:
        begun.wait()
        assert len(blocks.get("a", decode)) == 40

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(decoded) == 1
    assert blocks.statistics().hits == 3


def test_a_decoding_that_fails_does_not_leave_others_waiting() -> None:
    blocks, begun = BlockCache(100), threading.Event()

    def fail() -> Array:
        begun.set()
        time.sleep(0.05)
        raise ZeroDivisionError

    def work() -> None:
        with pytest.raises(ZeroDivisionError):
            blocks.get("a", fail)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    assert len(blocks.get("a", lambda: block(7))) == 7
    thread.join()


def test_never_more_bytes_than_allowed_whatever_threads_do() -> None:
    blocks, seen, end = BlockCache(1000), [], threading.Event()

    def watch() -> None:
        while not end.is_set():
            seen.append(blocks.statistics().bytes)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(3000):
            size = choose.randrange(400)
            assert len(blocks.get(size, lambda size=size: block(size))) == size

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in [watcher, *workers]:
        thread.start()
    for thread in workers:
        thread.join()
    end.set()
    watcher.join()
    statistics = blocks.statistics()
    assert max(seen) <= 1000
    assert statistics.hits + statistics.misses == 18_000
    assert statistics.bytes == sum(array.nbytes for array in blocks._blocks.values())
