"""Attention over packed rows: two backends with equal results."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from packed_batches import PackedBatch, batch, random_batch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from forebay.torch import PackedSelfAttention, document_block_mask
from forebay.torch.attention.packed_attention import attend, attend_dense, fits_cuda, flex_can_run

ROWS = batch([[70, 50, 1], [130], []], 140)


def heads(case: PackedBatch, requires_grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    shape = (len(case.seq_lens), 2, case.sequence_length, 8)
    return [torch.randn(shape, requires_grad=requires_grad) for _ in range(3)]


def attention_by_document(query: Tensor, key: Tensor, value: Tensor, case: PackedBatch) -> Tensor:
    """Causal attention of each document alone, padding included, by slicing: no mask of ours is involved."""
    out = torch.zeros_like(query)
    for row, lengths in enumerate(case.seq_lens.tolist()):
        start = 0
        for length in [*lengths, case.sequence_length - sum(lengths)]:
            at = (slice(row, row + 1), slice(None), slice(start, start + length))
            if length:
                out[at] = scaled_dot_product_attention(query[at], key[at], value[at], is_causal=True)
            start += length
    return out


def gradients(attended: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad((attended * torch.randn_like(attended)).sum(), inputs))


def test_sdpa_and_its_gradients_equal_those_of_separate_attention_per_document():
    inputs = heads(ROWS, requires_grad=True)
    attended, expected = attend_dense(*inputs, document_block_mask(*ROWS)), attention_by_document(*inputs, ROWS)
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=0)
    for gradient, wanted in zip(gradients(attended, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=0)


def test_the_cpu_trains_with_sdpa_and_evaluates_with_flex():
    query, mask = heads(ROWS)[0], document_block_mask(*ROWS)
    assert flex_can_run(query, query, query, mask) == torch.backends.cpu.get_cpu_capability().startswith("AVX")
    trained = query.clone().requires_grad_()
    for inputs in ((trained, query, query), (query, trained, query), (query, query, trained)):
        assert not flex_can_run(*inputs, mask), "adapters on keys or values alone"
        attend(*inputs, mask).sum().backward()
        assert trained.grad is not None
        trained.grad = None


def test_double_precision_falls_back_to_sdpa():
    query, mask = heads(ROWS)[0].double(), document_block_mask(*ROWS)
    assert not flex_can_run(query, query, query, mask)
    module = PackedSelfAttention(16, 2).double().eval()
    with torch.no_grad():
        assert module(torch.randn(3, 140, 16).double(), ROWS.seq_lens).dtype == torch.float64


@pytest.mark.parametrize(
    ("head_dim", "block_size", "fits"),
    [(16, (128, 128), True), (64, (256, 128), True), (8, (128, 128), False), (64, (128, 64), False)],
)
def test_what_the_kernels_of_cuda_can_do(head_dim, block_size, fits):
    assert fits_cuda(head_dim, block_size) == fits


WITHOUT_COMPILER = """
import torch
from forebay.torch import PackedSelfAttention
with torch.no_grad():
    print(tuple(PackedSelfAttention(32, 2)(torch.randn(2, 77, 32), torch.tensor([[9], [9]])).shape))
"""


@pytest.mark.slow
def test_a_machine_without_a_c_compiler_evaluates_with_sdpa():
    environment = {**os.environ, "CXX": "/nowhere/g++"}
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_COMPILER]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "(2, 77, 32)"


def test_a_model_that_moves_forgets_its_masks():
    model = nn.Sequential(PackedSelfAttention(16, 2, backend="dense"))
    model[0](torch.randn(3, 140, 16), ROWS.seq_lens)
    assert len(model[0].cache) == 1
    model.to("meta")
    assert len(model[0].cache) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_module_looks_masks_up_between_graphs():
    """A mask baked into the graph would be served for the next batch too. Two graphs: before and after."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = PackedSelfAttention(16, 2, backend="dense")
    compiled = torch.compile(module, backend="eager")
    x = torch.randn(1, 140, 16)
    for seed in range(3):
        seq_lens = random_batch(1, 140, seed, mean_length=30).seq_lens
        torch.testing.assert_close(compiled(x, seq_lens), module(x, seq_lens), atol=1e-5, rtol=0)
    assert (module.cache.statistics.misses, module.cache.statistics.hits) == (3, 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"n_head": 3}, r"n_head must be at least 1 and divide dim 16 \(got 3\)"),
        ({"backend": "documents"}, "backend must be one of"),
        ({"kind": "causl"}, "kind must be"),
        ({"window": 0}, "window must be"),
        ({"block_size": 0}, "block_size must be"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_the_constructor(options, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        PackedSelfAttention(**{"dim": 16, "n_head": 2, **options})


def test_a_layer_needs_the_lengths_or_the_mask_of_its_batch():
    layer, x = PackedSelfAttention(16, 2), torch.randn(3, 140, 16)
    with pytest.raises(ValueError, match="x has 3 rows but seq_lens has 1"):
        layer(x, ROWS.seq_lens[:1])
    with pytest.raises(TypeError, match="mask is a Tensor; pass a BlockMask"):
        layer(x, mask=torch.ones(3, 1, 140, 140, dtype=torch.bool))
    with pytest.raises(TypeError, match="pass seq_lens or mask"):
        layer(x)
    mask = document_block_mask(ROWS.seq_lens[:2], ROWS.sequence_length)
    for backend in ("auto", "flex", "dense"):
        with pytest.raises(ValueError, match="query has 3 rows of 140 tokens but the mask is for 2 of 140"):
            attend(*heads(ROWS), mask, backend)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_flex_trains_on_the_gpu_with_the_gradients_of_sdpa():
    torch.manual_seed(0)
    flex = PackedSelfAttention(64, 4, backend="flex").cuda()
    dense = copy.deepcopy(flex)
    dense.backend = "dense"
    x = torch.randn(len(ROWS.seq_lens), ROWS.sequence_length, 64, device="cuda")
    outputs = [module(x, ROWS.seq_lens) for module in (flex, dense)]
    torch.testing.assert_close(*outputs, atol=1e-3, rtol=1e-3)
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(flex.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-2, rtol=1e-2)
