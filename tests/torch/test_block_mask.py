"""Block masks built from lengths, against `create_block_mask` on every index pair and the dense mask."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_batches import PackedBatch, batch, packed_batches, random_batch
from tests.helpers.hypothesis_profiles import scaled
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from forebay import masks
from forebay.torch import causal_block_mask, document_block_mask, image_block_mask, prefix_block_mask
from forebay.torch.attention.block_mask import dense_mask

PAIRS = ("kv", "full_kv", "q", "full_q")
block_sizes = st.sampled_from([16, 64, 128, (128, 64), (32, 128), 7])
fewer = settings(max_examples=scaled(30), deadline=None)


def assert_equal_blocks(mask: BlockMask, expected: BlockMask) -> None:
    """Equal counts, and equal indices as far as the counts reach."""
    assert mask.seq_lengths == expected.seq_lengths
    assert mask.BLOCK_SIZE == expected.BLOCK_SIZE
    for pair in PAIRS:
        count, wanted_count = getattr(mask, f"{pair}_num_blocks"), getattr(expected, f"{pair}_num_blocks")
        assert torch.equal(count, wanted_count), pair
        assert count.dtype == torch.int32
        indices, wanted = getattr(mask, f"{pair}_indices"), getattr(expected, f"{pair}_indices")
        assert indices.shape == wanted.shape
        assert indices.is_contiguous()
        used = torch.arange(indices.shape[-1]) < count[..., None]
        assert torch.equal(indices[used], wanted[used]), pair


def assert_equal_to_torch(mask: BlockMask, definition: Tensor) -> None:
    """`definition` [rows, S, S] says who sees whom; torch makes its mask from that and from our mask_mod."""
    rows, length, _ = definition.shape
    index = torch.arange(length)
    assert torch.equal(dense_mask(mask.mask_mod, torch.arange(rows), index, index)[:, 0], definition)

    def by_definition(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return definition[b, q, kv]

    assert_equal_blocks(
        mask,
        create_block_mask(by_definition, rows, 1, length, length, device="cpu", BLOCK_SIZE=mask.BLOCK_SIZE),
    )


def definition(case: PackedBatch, kind: str, window: int | None) -> Tensor:
    ids = torch.from_numpy(masks.document_ids(case.seq_lens, case.sequence_length))
    query, key = torch.arange(case.sequence_length)[:, None], torch.arange(case.sequence_length)
    seen = ids[:, :, None] == ids[:, None, :]
    if kind == "causal":
        seen &= key <= query
    if window is not None:
        seen &= (query - key).abs() < window
    return seen


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@given(case=packed_batches(), block_size=block_sizes, window=st.none() | st.integers(1, 5000))
@fewer
def test_documents_equal_create_block_mask(kind, case: PackedBatch, block_size, window):
    mask = document_block_mask(*case, kind=kind, window=window, block_size=block_size)
    assert_equal_to_torch(mask, definition(case, kind, window))


@given(packed_batches(), block_sizes, st.randoms(use_true_random=False))
@fewer
def test_prefix_lm_equals_create_block_mask(case: PackedBatch, block_size, random):
    prefix = case.seq_lens.clone().apply_(lambda length: random.randint(0, length))
    spans = masks.prefix_spans(case.seq_lens, prefix, case.sequence_length)
    mask = prefix_block_mask(case.seq_lens, prefix, case.sequence_length, block_size=block_size)
    assert_equal_to_torch(mask, torch.from_numpy(masks.dense_mask(spans)))


@given(st.integers(1, 400), block_sizes)
@fewer
def test_a_row_without_documents_equals_create_block_mask(length: int, block_size):
    mask = causal_block_mask(length, block_size=block_size)
    assert_equal_to_torch(mask, torch.ones(1, length, length, dtype=torch.bool).tril())


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 96)), min_size=1, max_size=3),
    block_sizes,
    st.integers(0, 2),
)
@fewer
def test_padding_of_images_equals_create_block_mask(contents, block_size, leading_tokens):
    size, patch = (64, 96), 8
    boxes = [[(96 - width) // 2, (64 - height) // 2, width, height] for height, width in contents]
    mask = image_block_mask(boxes, size, patch, threshold=0.999, leading_tokens=leading_tokens, block_size=block_size)
    kept = ~masks.token_ignore_mask(boxes, size, patch, 0.999).reshape(len(boxes), -1)
    kept = np.concatenate((np.ones((len(boxes), leading_tokens), bool), kept), axis=1)
    length = kept.shape[1]
    assert_equal_to_torch(mask, torch.from_numpy(kept)[:, None, :].expand(-1, length, length))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1024, 2049, 4096])
@pytest.mark.parametrize(("kind", "window"), [("causal", None), ("bidirectional", None), ("causal", 500)])
def test_long_rows_equal_create_block_mask(length: int, kind, window):
    case = random_batch(2, length, seed=length)
    mask = document_block_mask(*case, kind=kind, window=window)
    assert_equal_to_torch(mask, definition(case, kind, window))
    assert mask.full_kv_num_blocks.sum() > 0


def test_no_query_row_is_empty():
    mask = document_block_mask(*batch([[], [3], [1, 1, 1]], 300))
    seen = dense_mask(mask.mask_mod, torch.arange(3), torch.arange(300), torch.arange(300))
    assert seen.any(dim=-1).all()
    assert ((mask.kv_num_blocks + mask.full_kv_num_blocks) > 0).all()


def test_a_block_size_is_one_integer_or_two():
    for block_size in (128.0, "128", (128,), (1, 2, 3), None):
        with pytest.raises(TypeError, match=r"block_size must be one integer or two \(queries, keys\)"):
            document_block_mask([[3, 2]], 9, block_size=block_size)
    for block_size in (np.int64(64), [64, 64], np.array([64, 64]), (np.int32(64), 64)):
        assert document_block_mask([[3, 2]], 9, block_size=block_size).BLOCK_SIZE == (64, 64)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (document_block_mask, ([[100, 60]], 200)),
        (prefix_block_mask, ([[100, 60]], [[10, 0]], 200)),
        (image_block_mask, ([[0, 8, 32, 16]], (32, 32), 8)),
        (causal_block_mask, (200,)),
    ],
)
def test_a_mask_is_built_whole_on_its_device(build, arguments):
    """What `mask_mod` closes over too."""
    mask = build(*arguments, device="meta")
    assert mask.kv_indices.device.type == "meta"
    assert mask.mask_mod(*[torch.zeros(1, dtype=torch.int64, device="meta")] * 4).device.type == "meta"
