"""Decoded blocks in memory: bounded by bytes, least recently used go first."""

import random
import threading
import time
from collections import OrderedDict

import numpy as np
import pytest
from tests.helpers.layer_recipes import stored_cache

import forebay as fb
from forebay.columns import Column, Ragged
from forebay.read.blocks import BlockCache, BlockStatistics, DecodedBlock


def block(size: int) -> DecodedBlock:
    return DecodedBlock(np.zeros(size, np.uint8), 0)


def test_a_block_is_decoded_once_while_there_is_room() -> None:
    blocks, decoded = BlockCache(100), list[int]()
    for _ in range(3):
        assert blocks.get(0, [1], lambda number: decoded.append(number) or block(40))[0].nbytes == 40
    assert decoded == [1]
    assert blocks.statistics() == BlockStatistics(hits=2, misses=1, blocks=1, bytes=40, limit_bytes=100)


@pytest.mark.parametrize("limit", [0, 39])
def test_a_block_larger_than_the_whole_allowance_is_not_kept(limit: int) -> None:
    blocks = BlockCache(limit)
    for _ in range(2):
        assert blocks.get(0, [1], lambda _: block(40))[0].nbytes == 40
    assert blocks.statistics() == BlockStatistics(hits=0, misses=2, blocks=0, bytes=0, limit_bytes=limit)


def test_threads_that_want_a_block_at_once_decode_it_once() -> None:
    blocks, begun, decoded = BlockCache(100), threading.Barrier(4), list[int]()

    def decode(number: int) -> DecodedBlock:
        decoded.append(number)
        time.sleep(0.05)
        return block(40)

    def work() -> None:
        begun.wait()
        assert blocks.get(0, [1], decode)[0].nbytes == 40

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(decoded) == 1
    assert blocks.statistics().hits == 3


def test_never_more_bytes_than_allowed_whatever_threads_do() -> None:
    blocks, seen, end = BlockCache(1000), list[int](), threading.Event()

    def watch() -> None:
        while not end.is_set():
            seen.append(blocks.statistics().bytes)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(3000):
            size = choose.randrange(400)
            assert blocks.get(0, [size], block)[0].nbytes == size

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


def test_blocks_are_dropped_in_the_order_of_their_last_use() -> None:
    blocks, model, choose = BlockCache(1000), OrderedDict[int, int](), random.Random(0)
    for _ in range(3000):
        number = choose.randrange(60)
        is_hit, before = number in model, blocks.statistics().hits
        blocks.get(0, [number], lambda number: block(5 + number))
        model[number] = model.pop(number, 5 + number)
        while sum(model.values()) > 1000:
            model.popitem(last=False)
        assert blocks.statistics().hits - before == is_hit


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("memory", [3000, 1 << 20])
def test_compressed_rows_are_read_within_any_memory(ragged: bool, memory: int) -> None:
    store, count = fb.MemoryStore(), 700
    lengths = np.random.default_rng(0).integers(0, 5, count)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    values = Ragged(np.arange(ends[-1]), ends) if ragged else np.arange(count)
    column = Column(name="n", dtype="int64", codec="zstd", rows_per_block=8, ragged=ragged)
    stored_cache(store, [column], [{"n": values}, {"n": values}])
    cache = fb.open_cache(store, memory=memory)
    for turn in range(6):
        numbers = np.random.default_rng(turn).integers(0, 2 * count, 150)
        read = cache.read(numbers, ["n"])["n"]
        assert [np.asarray(row).tolist() for row in read] == [values[row % count].tolist() for row in numbers.tolist()]
    assert cache.statistics().bytes <= memory


def test_an_interrupted_decode_leaves_no_block_and_can_be_repeated() -> None:
    blocks = BlockCache(100)

    def interrupted(number: int) -> DecodedBlock:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        blocks.get(0, [1], interrupted)
    assert blocks.statistics() == BlockStatistics(hits=0, misses=1, blocks=0, bytes=0, limit_bytes=100)
    assert blocks.get(0, [1], lambda _: block(40))[0].nbytes == 40
