"""A mask that is built once for a batch and passed down: one graph, no recompilation, and torch's own type."""

import io

import pytest
import torch
import torch.utils._pytree as pytree
from packed_batches import PackedBatch, batch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from forebay.masks import token_ignore_mask
from forebay.torch import (
    MaskedViTBlock,
    PackedSelfAttention,
    SeedAttention,
    causal_block_mask,
    document_block_mask,
    document_leaks,
    image_block_mask,
    prefix_block_mask,
    register_block_masks,
)
from forebay.torch.attention.backends import attend_masked
from forebay.torch.attention.block_mask import captured_tensors, dense_mask

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
@pytest.mark.parametrize("backend", ["auto", "flex", "dense", "documents"])
def test_a_layer_gives_the_same_with_a_mask_as_with_lengths(backend):
    layer = PackedSelfAttention(DIM, 2, backend=backend)
    x = torch.randn(2, LENGTH, DIM)
    lengths = FIRST.seq_lens if backend == "documents" else None
    with torch.no_grad():
        found = layer(x, lengths, mask=document_block_mask(*FIRST))
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
    documents = PackedSelfAttention(DIM, 2, backend="documents")
    documents.load_state_dict(layer.state_dict())
    torch.testing.assert_close(documents(x, FIRST.seq_lens, mask=document_block_mask(*FIRST, window=7)), found)


def test_seeds_and_image_blocks_are_one_graph_too():
    seed, x = SeedAttention(DIM, 2), torch.randn(2, LENGTH, DIM)
    nn.init.normal_(seed.proj.weight)
    found = torch.compile(seed, fullgraph=True, backend="aot_eager")(x, mask=causal_block_mask(LENGTH))
    torch.testing.assert_close(found, seed(x), atol=1e-5, rtol=0)

    boxes, block = [[0, 8, 32, 16], [0, 0, 32, 32]], MaskedViTBlock(DIM, 2)
    ignore = torch.from_numpy(token_ignore_mask(boxes, (32, 32), 8)).flatten(1)
    tokens = torch.randn(2, 17, DIM)
    mask = image_block_mask(boxes, (32, 32), 8)
    found = torch.compile(block, fullgraph=True, backend="aot_eager")(tokens, mask=mask)
    torch.testing.assert_close(found, block(tokens, ignore), atol=1e-5, rtol=0)


def test_a_layer_needs_lengths_or_a_mask():
    x = torch.randn(2, LENGTH, DIM)
    with pytest.raises(TypeError, match="pass seq_lens"):
        PackedSelfAttention(DIM, 2)(x)
    with pytest.raises(TypeError, match="pass seq_lens"):
        PackedSelfAttention(DIM, 2, backend="documents")(x, mask=document_block_mask(*FIRST))
    with pytest.raises(TypeError, match="pass the ignored tokens"):
        MaskedViTBlock(DIM, 2)(x)
    with pytest.raises(ValueError, match="make the mask from the seq_lens of this batch"):
        PackedSelfAttention(DIM, 2)(x[:1], mask=document_block_mask(*FIRST))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_low_rank_change_of_keys_and_values_trains_on_the_cpu():
    """The queries need no gradient, keys and values do: FlexAttention has no backward pass on a CPU."""
    torch.manual_seed(0)
    x = torch.randn(2, LENGTH, DIM)
    frozen = [nn.Linear(DIM, DIM).requires_grad_(False) for _ in range(3)]
    down, up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, 2 * DIM, bias=False)
    mask = document_block_mask(*FIRST)

    def loss(attend) -> Tensor:
        query, key, value = (layer(x) for layer in frozen)
        more_key, more_value = up(down(x)).chunk(2, dim=-1)
        heads = (
            tensor.unflatten(-1, (2, -1)).transpose(1, 2) for tensor in (query, key + more_key, value + more_value)
        )
        return attend(*heads).square().sum()

    gradients = []
    for attend in (
        lambda q, k, v: attend_masked(q, k, v, mask, "auto"),
        lambda q, k, v: attend_masked(q, k, v, mask, "dense"),
        torch.compile(lambda q, k, v: attend_masked(q, k, v, mask, "auto"), fullgraph=True, backend="aot_eager"),
    ):
        gradients.append(torch.autograd.grad(loss(attend), [down.weight, up.weight]))
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])


class Exported(nn.Module):
    def forward(self, query: Tensor, mask: BlockMask) -> Tensor:
        return flex_attention(query, query, query, block_mask=mask)


class Dense(nn.Module):
    def forward(self, query: Tensor, mask: BlockMask) -> Tensor:
        return attend_masked(query, query, query, mask, "dense")


def mask_of_torch() -> BlockMask:
    ids = torch.arange(LENGTH) // 40

    def same(batch, head, query, key):
        return ids[query] == ids[key]

    return create_block_mask(same, None, None, LENGTH, LENGTH, device="cpu")


def causal_of_torch() -> BlockMask:
    return create_block_mask(lambda batch, head, query, key: key <= query, None, None, LENGTH, LENGTH, device="cpu")


@pytest.fixture
def registered():
    """What a user writes once, so that pytrees and torch.export look into masks."""
    register_block_masks()
    register_block_masks()  # as two modules of a program may
    yield
    pytree._deregister_pytree_node(BlockMask)


def test_pytrees_see_a_plain_block_mask(registered):
    for mask in (document_block_mask(*FIRST), mask_of_torch()):
        assert type(mask) is BlockMask
        moved = pytree.tree_map(lambda tensor: tensor.to("meta"), {"mask": mask})["mask"]
        assert {tensor.device.type for tensor in captured_tensors(moved.mask_mod)} == {"meta"}
        assert {leaf.device.type for leaf in pytree.tree_leaves(moved)} == {"meta"}


def boxed(box: list[list[int]]) -> BlockMask:
    return image_block_mask(box, (32, 32), 4, leading_tokens=LENGTH - 64)


# Every kind of mask, twice with other contents.
PAIRS = {
    "documents": lambda: [document_block_mask(*each) for each in (FIRST, OTHER)],
    "window": lambda: [document_block_mask(*FIRST, window=window, block_size=32) for window in (9, 20)],
    "bidirectional": lambda: [document_block_mask(*each, kind="bidirectional") for each in (FIRST, OTHER)],
    "prefix": lambda: [prefix_block_mask(FIRST.seq_lens, FIRST.seq_lens // share, LENGTH) for share in (2, 3)],
    "causal": lambda: [causal_block_mask(LENGTH) for _ in range(2)],
    "images": lambda: [boxed([[0, 8, 32, 16], [0, 0, 32, 32]]), boxed([[0, 0, 32, 8], [8, 0, 16, 32]])],
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", PAIRS)
def test_an_exported_model_takes_the_masks_of_other_documents(registered, kind, strict):
    query, masks = torch.randn(2, 1, LENGTH, 16), PAIRS[kind]()
    program = torch.export.export(Exported(), (query, masks[0]), strict=strict)
    assert any("flex_attention" in str(node.target) for node in program.graph.nodes)
    assert not program.constants, "the documents are an input, not a part of the program"
    with pytest.raises(Exception, match="Failed serializing node flex_attention"):  # the guide says so
        torch.export.save(program, io.BytesIO())
    for mask in masks:
        seen = dense_mask(mask.mask_mod, torch.arange(2), torch.arange(LENGTH), torch.arange(LENGTH))
        expected = nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=seen)
        torch.testing.assert_close(program.module()(query, mask), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_is_saved_and_takes_batches_of_any_size(registered, tmp_path, strict):
    model, x, mask = stack("dense"), torch.randn(2, LENGTH, DIM), document_block_mask(*FIRST)
    shapes, rows = torch.export.ShapesCollection(), torch.export.Dim("rows")
    for tensor in (x, *pytree.tree_leaves(mask)):
        shapes[tensor] = {0: rows}
    program = torch.export.export(model, (x, mask), dynamic_shapes=shapes, strict=strict)
    program.example_inputs = None  # the mask in it does not pickle
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for lengths in ([[50, 30], [96, 0]], [[10, 86], [40, 20], [96, 0]]):
        x = torch.randn(len(lengths), LENGTH, DIM)
        mask = document_block_mask(lengths, LENGTH)
        torch.testing.assert_close(loaded(x, mask), model(x, mask=mask))


@pytest.mark.long  # it compiles kernels with a C++ compiler
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # of torch for torch
def test_an_exported_model_with_flex_attention_is_compiled_into_a_file(registered, tmp_path):
    model, x = stack("flex").eval(), torch.randn(2, LENGTH, DIM)
    with torch.no_grad():
        program = torch.export.export(model, (x, document_block_mask(*FIRST)))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        for case in (FIRST, OTHER):
            expected = by_lengths(stack("dense"), x, case)
            torch.testing.assert_close(loaded(x, document_block_mask(*case)), expected, atol=1e-5, rtol=0)


def test_a_second_registration_is_refused():
    """torch's own leaves the tensors of a mask_mod out while it exports."""
    pytree.register_pytree_node(BlockMask, BlockMask._flatten, BlockMask._unflatten)
    try:
        with pytest.raises(
            RuntimeError, match=r"registered by 'torch\.nn\.attention\.flex_attention'; .* Call register_b"
        ):
            register_block_masks()
    finally:
        pytree._deregister_pytree_node(BlockMask)


@pytest.mark.parametrize("strict", [False, True])
def test_masks_with_a_mask_mod_that_is_not_ours_are_left_to_torch(registered, strict):
    """torch 2.13 exports none that closes over tensors. The guide says so; look again when this fails."""
    with pytest.raises(
        (RuntimeError, IndexError), match=r"fake tensor in the exported program|list index out of range"
    ):
        torch.export.export(Exported(), (torch.randn(2, 1, LENGTH, 16), mask_of_torch()), strict=strict)
    dense = torch.export.export(Dense(), (torch.randn(2, 1, LENGTH, 16), causal_of_torch()), strict=strict)
    dense.example_inputs = None
    with pytest.raises(ValueError, match="a block mask whose mask_mod forebay did not make cannot be saved"):
        torch.export.save(dense, io.BytesIO())


def test_a_whole_graph_that_builds_masks_is_told_to_take_one():
    layer = PackedSelfAttention(DIM, 2)
    whole = torch.compile(layer, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="build the mask outside of the compiled model"):
        whole(torch.randn(2, LENGTH, DIM), OTHER.seq_lens)
