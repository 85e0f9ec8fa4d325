"""FlexAttention with our masks: equal to SDPA, compiled and not, and compiled once for all documents.

The few tests that compile C++ are here; they share shapes so that few kernels are built.
"""

import pytest
import torch
from packed_batches import batch, random_batch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from forebay.torch import (
    PackedSelfAttention,
    causal_block_mask,
    document_block_mask,
    image_block_mask,
    prefix_block_mask,
)
from forebay.torch.attention import packed_attention
from forebay.torch.attention.block_mask import dense_mask
from forebay.torch.attention.packed_attention import attend_dense, attend_flex

# torch warns itself while it loads its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

ROWS, LENGTH = 2, 200


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    packed_attention._kernel.cache_clear()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        yield


def heads(length: int = LENGTH) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(ROWS, 2, length, 16) for _ in range(3)]


def sdpa_with_the_dense_mask(query, key, value, mask: BlockMask) -> torch.Tensor:
    tokens = torch.arange(query.shape[2])
    seen = dense_mask(mask.mask_mod, torch.arange(mask.shape[0]), tokens, tokens)
    return scaled_dot_product_attention(query, key, value, attn_mask=seen)


DOCUMENTS = batch([[70, 50, 1], [130]], LENGTH)
MASKS = {
    "causal": document_block_mask(*DOCUMENTS),
    "window": document_block_mask(*DOCUMENTS, window=20, block_size=32),
    "bidirectional": document_block_mask(*DOCUMENTS, kind="bidirectional"),
    "prefix": prefix_block_mask(DOCUMENTS.seq_lens, DOCUMENTS.seq_lens // 2, LENGTH),
    "plain": causal_block_mask(LENGTH, block_size=64),
    "image": image_block_mask([[0, 40, 160, 80], [60, 0, 16, 160]], (160, 80 + 80), 16),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", MASKS)
def test_flex_attention_without_compile_equals_sdpa(name):
    mask = MASKS[name]
    query, key, value = heads(mask.seq_lengths[0])
    attended = flex_attention(query, key, value, block_mask=mask)
    expected = sdpa_with_the_dense_mask(query, key, value, mask)
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal", pytest.param("bidirectional", marks=pytest.mark.long)])
def test_compiled_flex_attention_equals_sdpa_and_compiles_once_for_all_documents(kind):
    query, key, value = heads()
    for seed in range(4):
        case = random_batch(ROWS, LENGTH, seed, mean_length=80)
        mask = document_block_mask(*case, kind=kind, window=None if seed < 2 else 40 * seed, block_size=32)
        assert mask.full_kv_num_blocks.sum() > 0
        attended = attend_flex(query, key, value, mask)
        expected = sdpa_with_the_dense_mask(query, key, value, mask)
        torch.testing.assert_close(attended, expected, atol=1e-5, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("compiler")
def test_packed_self_attention_takes_flex_without_gradients_and_agrees_with_sdpa():
    torch.manual_seed(0)
    module = PackedSelfAttention(32, 2)
    x = torch.randn(ROWS, LENGTH, 32)
    attended = module(x, DOCUMENTS.seq_lens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    with torch.enable_grad():
        trained = module(x, DOCUMENTS.seq_lens)
    torch.testing.assert_close(attended, trained.detach(), atol=1e-5, rtol=0)


def signatures() -> list[tuple[torch.Tensor, BlockMask]]:
    shapes = [(rows, 2, length, head_dim) for rows in (1, 2, 3) for length in (40, 50) for head_dim in (8, 16)]
    return [(torch.randn(shape), document_block_mask([[20, 9]] * shape[0], shape[2])) for shape in shapes]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_more_signatures_than_torch_recompiles_one_function_for():
    cases = signatures()
    assert len(cases) == 12 > torch._dynamo.config.recompile_limit
    for query, mask in cases * 2:
        attended = attend_flex(query, query, query, mask)
        torch.testing.assert_close(attended, attend_dense(query, query, query, mask), atol=1e-5, rtol=0)
    assert (
        torch._dynamo.utils.counters["stats"]["unique_graphs"] == packed_attention._kernel.cache_info().currsize == 12
    )


def test_a_kernel_that_does_not_compile_is_warned_about_once_and_sdpa_goes_on(monkeypatch):
    def no_kernel(*_: object) -> torch.Tensor:
        raise torch._dynamo.exc.BackendCompilerFailed(no_kernel, RuntimeError("C++ compile error"), None)

    monkeypatch.setattr(packed_attention, "attend_flex", no_kernel)
    monkeypatch.setattr(packed_attention, "_broken_flex", [])
    module, x = PackedSelfAttention(32, 2), torch.randn(ROWS, LENGTH, 32)
    with pytest.warns(RuntimeWarning, match="FlexAttention did not compile"):
        attended = module(x, DOCUMENTS.seq_lens)
    assert torch.equal(module(x, DOCUMENTS.seq_lens), attended)
    module.backend = "dense"
    torch.testing.assert_close(attended, module(x, DOCUMENTS.seq_lens), atol=1e-5, rtol=0)
    module.backend = "flex"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        module(x, DOCUMENTS.seq_lens)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.usefixtures("compiler")
def test_a_compiled_model_keeps_its_static_kernels():
    """The model's own graphs may leave sizes open; its attention runs between them."""
    torch.manual_seed(0)
    module = PackedSelfAttention(32, 2).eval()
    compiled = torch.compile(module, backend="eager")
    for rows in (ROWS, 1):
        x, case = torch.randn(rows, LENGTH, 32), random_batch(rows, LENGTH, rows, mean_length=80)
        torch.testing.assert_close(compiled(x, case.seq_lens), module(x, case.seq_lens), atol=1e-5, rtol=0)
    assert packed_attention._kernel.cache_info().currsize == 2
