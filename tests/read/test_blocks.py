"""Decoded blocks in memory: bounded by bytes, least recently used go first."""

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
from tests.layer_recipes import stored_cache

import forebay as fb
from forebay import compiled
from forebay.columns import Array, Column, Ragged
from forebay.read import gather
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
    assert statistics.bytes == sum(array.nbytes for array in blocks._held if array is not None)


def test_blocks_are_dropped_in_the_order_of_their_last_use() -> None:
    blocks, model, choose = BlockCache(1000), OrderedDict[int, int](), random.Random(0)
    for _ in range(3000):
        key = choose.randrange(60)
        size = 5 + key
        blocks.get(key, lambda size=size: block(size))
        model[key] = model.pop(key, size)
        while sum(model.values()) > 1000:
            model.popitem(last=False)
        assert blocks._slots.keys() == model.keys()


def test_threads_that_need_the_same_blocks_share_the_work() -> None:
    blocks, first_begun, second_done = BlockCache(1000), threading.Event(), threading.Event()
    decoded: dict[str, list[int]] = {"first": [], "second": []}

    def decode(numbers: list[int]) -> Iterator[Array]:
        name = threading.current_thread().name
        for number in numbers:
            decoded[name].append(number)
            first_begun.set()
            if name == "first":
                assert second_done.wait(10), "the second thread waits for a block instead of decoding the next one"
            if len(decoded["second"]) == 3:
                second_done.set()
            yield block(number)

    def work() -> None:
        assert [len(each) for each in blocks.get_all([1, 2, 3, 4], decode, 1)] == [1, 2, 3, 4]

    threads = [threading.Thread(target=work, name=name) for name in decoded]
    threads[0].start()
    first_begun.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert decoded == {"first": [1], "second": [2, 3, 4]}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("memory", [3000, 1 << 20])
def test_compiled_code_finds_and_decodes_what_numpy_does(
    ragged: bool, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_TABLE", 16)  # blocks take each other's places
    store, count = fb.MemoryStore(), 700
    lengths = np.random.default_rng(0).integers(0, 5, count)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    values = Ragged(np.arange(ends[-1]), ends) if ragged else np.arange(count)
    column = Column(name="n", dtype="int64", codec="zstd", rows_per_block=8, ragged=ragged)
    stored_cache(store, [column], [{"n": values}, {"n": values}])
    rows = [np.random.default_rng(turn).integers(0, 2 * count, 150) for turn in range(6)]
    whole = fb.open_cache(store)
    for numbers in rows[:2]:
        _, _, held = whole._reader("n")._compiled_addresses(whole._place(numbers))
        assert len(held) == len(np.unique(numbers // count * 88 + numbers % count // 8)), "as long as rows are read"
    found = []
    for loops in (compiled.native, None):
        monkeypatch.setattr(compiled, "native", loops)
        cache, read = fb.open_cache(store, memory=memory), []
        for numbers in rows:
            monkeypatch.setattr(compiled, "native", loops)
            reader = cache.locate_batches if loops else cache.read_batches
            for batch in reader(numbers, 50, ["n"]):
                each = batch[0].copied() if loops else batch["n"]
                read.append((each.values.tolist(), each.lengths.tolist()) if ragged else each.tolist())
        found.append((read, cache.statistics().bytes <= memory, cache.statistics().blocks > 16))
    assert found[0] == found[1]
    assert found[0][1:] == (True, True)
