"""The claims of a ticket on block-mask caches (docs/documents/block-masks.md), each with its corrected figure."""

import tracemalloc

import pytest
import torch

from forebay.torch import BlockMaskCache, PackedSelfAttention, document_block_mask
from forebay.torch.attention.mask_cache import index_bytes
from forebay.torch.attention.packed_attention import attend_dense

INDEX_BYTES = {1024: 1_152, 8192: 66_560, 32_768: 1_052_672, 131_072: 16_793_600}  # of one batch row


def packed_mask(tokens: int, rows: int = 1):
    return document_block_mask([[tokens // 2, tokens // 4]] * rows, tokens)


@pytest.mark.parametrize(("tokens", "size_bytes"), INDEX_BYTES.items())
def test_masks_grow_with_length_and_with_rows(tokens: int, size_bytes: int) -> None:
    """ "~1 KB, ~8 KB in all": true near 1,024 tokens and one row only."""
    blocks = tokens // 128
    assert index_bytes(packed_mask(tokens)) == 16 * (blocks + blocks**2) == size_bytes
    assert index_bytes(packed_mask(1024, rows=32)) == 32 * INDEX_BYTES[1024]


def test_a_list_has_one_int32_per_pair_of_blocks() -> None:
    """ "seq=1024 → only 256 elements": 64 in each of four lists."""
    mask = packed_mask(1024)
    lists = [mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices]
    assert [(indices.numel(), indices.dtype) for indices in lists] == [(64, torch.int32)] * 4


def test_autocast_clears_nothing_and_needs_to_clear_nothing() -> None:
    """ "autocast bypasses _apply()": true, and harmless."""
    layer = PackedSelfAttention(32, 4, backend="dense")
    x, lengths = torch.randn(2, 60, 32), torch.tensor([[40, 10], [60, 0]])
    expected = layer(x, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x, lengths).float(), expected, atol=0.05, rtol=0.05)
    assert (layer.cache.statistics.misses, layer.cache.statistics.hits) == (1, 1)
    layer.to(torch.bfloat16)
    assert layer.cache.statistics.entries == 0, "_apply clears, for dtypes as for devices"


def test_one_mask_serves_every_dtype() -> None:
    """ "dtype changes cause stale entries": false, as a mask has no dtype."""
    cache, lengths = BlockMaskCache(), [[40, 20], [64, 0]]
    heads = torch.randn(3, 2, 4, 64, 16)
    mask = cache.get(document_block_mask, lengths, 64)
    expected = attend_dense(*heads, mask)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert cache.get(document_block_mask, lengths, 64) is mask
        attended = attend_dense(*heads.to(dtype), mask)
        torch.testing.assert_close(attended.float(), expected, atol=0.03, rtol=0.03)
    assert cache.statistics.misses == 1


def test_eight_entries_are_bounded_by_bytes_too() -> None:
    """ "_MAX_CACHE_SIZE = 8 is a memory concern": not at 1,024 tokens, but eight masks of long rows are."""
    assert 8 * INDEX_BYTES[1024] == 9_216
    assert 8 * 8 * INDEX_BYTES[131_072] > 1 << 30, "eight entries of eight rows of 131,072 tokens"
    cache = BlockMaskCache(max_entries=8, max_bytes=3 << 20)
    for tokens in range(32_768 - 7 * 128, 32_768 + 1, 128):
        cache.get(document_block_mask, [[tokens]], tokens)
        assert cache.statistics.bytes + cache.statistics.captured_bytes <= cache.max_bytes
    assert (cache.statistics.entries, cache.statistics.evictions) == (2, 6)


def test_building_a_mask_takes_no_dense_transient() -> None:
    """What the ticket missed: `create_block_mask` evaluates S × S pairs, 1.07 GB of bools at 32,768 tokens."""
    tracemalloc.start()
    try:
        mask = packed_mask(32_768)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mask.shape == (1, 1, 32_768, 32_768)
    assert peak < 20e6 < 32_768**2
