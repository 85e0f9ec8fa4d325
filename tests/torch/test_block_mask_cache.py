"""The mask cache: what is a hit, what it holds, what it never exceeds."""

import copy
import pickle
import sys
import threading

import numpy as np
import pytest
import torch
from packed_batches import random_batch

from forebay.torch import BlockMaskCache, causal_block_mask, document_block_mask, image_block_mask, prefix_block_mask
from forebay.torch.attention.mask_cache import index_bytes

LENGTHS = torch.tensor([[60, 30], [100, 0]], dtype=torch.int32)


def test_the_same_content_is_a_hit_whatever_carries_it():
    cache = BlockMaskCache()
    mask = cache.get(document_block_mask, LENGTHS, 120)
    assert cache.get(document_block_mask, LENGTHS.clone(), 120) is mask
    assert cache.get(document_block_mask, LENGTHS.long(), sequence_length=120) is mask
    assert cache.get(document_block_mask, LENGTHS.numpy(), 120, block_size=128) is mask
    assert cache.get(document_block_mask, LENGTHS.tolist(), 120, block_size=[128, np.int64(128)], device="cpu") is mask
    statistics = cache.statistics
    assert (statistics.hits, statistics.misses, statistics.entries) == (4, 1, 1)


def test_any_difference_is_a_miss():
    """The second row too: a mask of other documents further down the batch is another mask."""
    cache = BlockMaskCache(max_entries=100)
    other_second_row = LENGTHS.clone()
    other_second_row[1, 0] -= 1
    requests = [
        lambda: cache.get(document_block_mask, LENGTHS, 120),
        lambda: cache.get(document_block_mask, other_second_row, 120),
        lambda: cache.get(document_block_mask, LENGTHS, 121),
        lambda: cache.get(document_block_mask, LENGTHS, 120, kind="bidirectional"),
        lambda: cache.get(document_block_mask, LENGTHS, 120, window=8),
        lambda: cache.get(document_block_mask, LENGTHS, 120, window=9),
        lambda: cache.get(document_block_mask, LENGTHS, 120, block_size=64),
        lambda: cache.get(document_block_mask, LENGTHS, 120, device="meta"),
        lambda: cache.get(document_block_mask, LENGTHS, 300),
        lambda: cache.get(document_block_mask, LENGTHS.flatten()[None], 300),
        lambda: cache.get(prefix_block_mask, LENGTHS, LENGTHS, 120),
        lambda: cache.get(prefix_block_mask, LENGTHS, LENGTHS // 2, 120),
        lambda: cache.get(causal_block_mask, 120),
        lambda: cache.get(image_block_mask, [[0, 0, 16, 16]], (32, 32), 8),
        lambda: cache.get(image_block_mask, [[0, 0, 16, 24]], (32, 32), 8),
    ]
    masks = [request() for request in requests]
    assert cache.statistics.misses == len({id(mask) for mask in masks}) == len(requests)
    assert [request() for request in requests] == masks


class Lengths:
    """Another library's array: hashed by its identity, while its content changes."""

    def __init__(self, values: list[list[int]]) -> None:
        self.values = np.array(values)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.values.copy()


def test_arrays_are_known_by_content_never_by_identity():
    for carry in (
        torch.tensor,
        np.array,
        list,
        lambda values: tuple(map(tuple, values)),
        lambda values: tuple(map(torch.tensor, values)),
        lambda values: list(map(np.array, values)),
        Lengths,
    ):
        cache = BlockMaskCache()
        mask = cache.get(document_block_mask, carry([[60, 30]]), 120)
        assert cache.get(document_block_mask, LENGTHS[:1], 120) is mask
        assert cache.get(document_block_mask, carry([[60, 31]]), 120) is not mask


@pytest.mark.parametrize("window", [{8}, bytearray(b"8"), object()])
def test_what_has_no_content_to_compare_is_refused_by_name(window):
    with pytest.raises(TypeError, match=f"window must be .*got {type(window).__name__}"):
        BlockMaskCache().get(document_block_mask, LENGTHS, 120, window=window)


def test_the_least_recently_used_mask_leaves_first():
    cache = BlockMaskCache(max_entries=2)
    first, second = cache.get(causal_block_mask, 1), cache.get(causal_block_mask, 2)
    assert cache.get(causal_block_mask, 1) is first
    cache.get(causal_block_mask, 3)
    assert cache.get(causal_block_mask, 1) is first
    assert cache.get(causal_block_mask, 2) is not second
    assert cache.statistics.evictions == 2


def test_entries_are_bounded_to_eight_by_default():
    cache = BlockMaskCache()
    for tokens in range(1, 30):
        cache.get(causal_block_mask, tokens)
        assert len(cache) == min(tokens, 8)
    for wrong in ({"max_entries": 0}, {"max_bytes": 0}, {"max_bytes": 1.5}):
        with pytest.raises((TypeError, ValueError), match="max_bytes"):
            BlockMaskCache(**wrong)


def test_bytes_are_bounded_with_what_the_mask_mods_hold():
    one = 16 * (8 + 64) + 4 * 1024
    cache = BlockMaskCache(max_entries=100, max_bytes=3 * one + 5)
    for length in range(10):
        cache.get(document_block_mask, [[length + 1]], 1024)
        assert cache.statistics.bytes + cache.statistics.captured_bytes <= cache.max_bytes
    assert cache.statistics.entries == 3


def test_a_mask_larger_than_the_bound_is_handed_out_but_not_kept():
    cache = BlockMaskCache(max_bytes=2000)
    cache.get(causal_block_mask, 1024)
    assert index_bytes(cache.get(causal_block_mask, 8192)) == 66_560
    assert cache.statistics.entries == 1
    assert cache.statistics.evictions == 0


def test_clear_forgets_the_masks_and_keeps_the_counters():
    cache = BlockMaskCache()
    mask = cache.get(causal_block_mask, 7)
    cache.clear()
    assert (cache.statistics.entries, cache.statistics.bytes, cache.statistics.misses) == (0, 0, 1)
    assert cache.get(causal_block_mask, 7) is not mask


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_an_empty_cache_with_the_same_bounds(copied):
    cache = BlockMaskCache(3, 9999)
    cache.get(causal_block_mask, 7)
    other = copied(cache)
    assert (other.max_entries, other.max_bytes, len(other)) == (3, 9999, 0)


@pytest.fixture
def restless_threads():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless_threads")
def test_threads_never_exceed_the_bounds_and_get_the_right_masks():
    """Eight threads ask for 40 layouts in random order; every answer is checked, and so are the bounds."""
    cache = BlockMaskCache(max_entries=5, max_bytes=30_000)
    layouts = [random_batch(1 + i % 2, 200 + 10 * i, seed=i, mean_length=50) for i in range(40)]
    expected = [document_block_mask(*layout) for layout in layouts]
    problems: list[str] = []
    start = threading.Barrier(8)

    def hammer(seed: int) -> None:
        start.wait()
        for choice in np.random.default_rng(seed).integers(0, len(layouts), 150):
            mask = cache.get(document_block_mask, *layouts[choice])
            if not torch.equal(mask.kv_num_blocks, expected[choice].kv_num_blocks):
                problems.append(f"layout {choice}: wrong mask")
            held = cache.statistics
            if held.entries > 5 or held.bytes + held.captured_bytes > 30_000:
                problems.append(f"{held} exceeds the bounds")

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert cache.statistics.hits + cache.statistics.misses == 8 * 150
    assert cache.statistics.evictions > 0
