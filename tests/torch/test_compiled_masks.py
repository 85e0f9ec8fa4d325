"""A mask that is built once for a batch and passed down: one graph, no recompilation, and torch's own type."""

import pytest
import torch
from packed_batches import PackedBatch, batch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from forebay.torch import PackedSelfAttention, document_block_mask, document_leaks

LENGTH, DIM = 96, 16
FIRST = batch([[50, 30], [96]], LENGTH)
OTHER = batch([[10, 86], [40, 20]], LENGTH)


class Stack(nn.Module):
    """Two layers that share the mask they are called with."""

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        self.layers = nn.ModuleList(PackedSelfAttention(DIM, 2, backend=backend) for _ in range(2))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask=mask)
        return x


def stack(backend: str = "auto") -> Stack:
    torch.manual_seed(0)
    return Stack(backend)


def by_lengths(model: Stack, x: Tensor, case: PackedBatch) -> Tensor:
    """The same layers, each of which builds its mask from the lengths."""
    for layer in model.layers:
        x = x + layer(x, case.seq_lens)
    return x


def compiled(model: nn.Module, graphs: list, backend: str = "eager") -> nn.Module:
    """The model as one graph; `graphs` gets an entry for every compilation."""

    def count(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return torch.compile(model, fullgraph=True, dynamic=False, backend=count)


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_training_is_one_graph_for_all_documents(backend):
    model, graphs = stack(backend), []
    one_graph = compiled(model, graphs, "aot_eager")
    x = torch.randn(2, LENGTH, DIM)
    for case in (FIRST, OTHER):
        model.zero_grad()
        attended = one_graph(x, document_block_mask(*case))
        attended.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        expected = by_lengths(model, x, case)
        expected.square().sum().backward()
        torch.testing.assert_close(attended, expected, atol=1e-5, rtol=0)
        for found, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, atol=1e-3, rtol=1e-4)
    assert len(graphs) == 1, "new documents are new contents, not a new graph"


@pytest.mark.long  # it compiles kernels with a C++ compiler
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_evaluation_has_flex_attention_in_the_graph(compiler):
    model, graphs = stack().eval(), []
    one_graph = compiled(model, graphs, compiler)
    x = torch.randn(2, LENGTH, DIM)
    with torch.no_grad():
        for case in (FIRST, OTHER):
            found = one_graph(x, document_block_mask(*case))
            torch.testing.assert_close(found, by_lengths(model, x, case), atol=1e-5, rtol=0)
    (graph,) = graphs
    assert sum("flex_attention" in str(node.target) for node in graph.graph.nodes) == len(model.layers)
    mask = document_block_mask(*FIRST)
    assert not document_leaks(lambda inputs: one_graph(inputs, mask), x, FIRST.seq_lens)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("backend", ["auto", "flex", "dense"])
def test_a_layer_gives_the_same_with_a_mask_as_with_lengths(backend):
    layer = PackedSelfAttention(DIM, 2, backend=backend)
    x = torch.randn(2, LENGTH, DIM)
    with torch.no_grad():
        found = layer(x, mask=document_block_mask(*FIRST))
        assert len(layer.cache) == 0
        torch.testing.assert_close(found, layer(x, FIRST.seq_lens), atol=1e-5, rtol=0)


def test_the_mask_that_is_passed_decides():
    """A window that the layer does not know of."""
    layer = PackedSelfAttention(DIM, 2, backend="dense")
    windowed = PackedSelfAttention(DIM, 2, backend="dense", window=7)
    windowed.load_state_dict(layer.state_dict())
    x = torch.randn(2, LENGTH, DIM)
    found = layer(x, mask=document_block_mask(*FIRST, window=7))
    torch.testing.assert_close(found, windowed(x, FIRST.seq_lens))


def test_a_whole_graph_that_builds_masks_is_told_to_take_one():
    layer = PackedSelfAttention(DIM, 2)
    whole = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="build the mask outside of the compiled model"):
        whole(torch.randn(2, LENGTH, DIM), OTHER.seq_lens)
