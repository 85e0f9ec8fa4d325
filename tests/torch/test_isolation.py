"""The self-check finds leaks that are there, finds none that are not, and refuses to prove nothing."""

import pytest
import torch
from packed_batches import batch
from torch import Tensor, nn

from forebay.masks import token_ignore_mask
from forebay.torch import MaskedViTBlock, PackedSelfAttention, SeedAttention, document_leaks, padding_leaks

CASE = batch([[9, 5, 1], [12], []], 20)


class PackedModel(nn.Module):
    def __init__(self, *layers: PackedSelfAttention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(layers)

    def forward(self, tokens: Tensor, seq_lens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, seq_lens)
        return x


@pytest.fixture
def tokens() -> Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 50, (3, 20))


@pytest.mark.parametrize("backend", ["dense", "documents"])
@pytest.mark.parametrize(("kind", "window"), [("causal", None), ("bidirectional", None), ("causal", 3)])
def test_packed_attention_keeps_documents_apart(tokens, kind, window, backend):
    layers = [PackedSelfAttention(16, 2, kind=kind, window=window, backend=backend) for _ in range(2)]
    model = PackedModel(*layers)
    assert document_leaks(lambda ids: model(ids, CASE.seq_lens), tokens, CASE.seq_lens) == []


def test_attention_across_documents_is_found_and_named(tokens):
    """Causal without documents: each document reaches all later ones of its row, and no earlier one."""
    model = nn.Sequential(nn.Embedding(50, 16), SeedAttention(16, 2, backend="dense"))
    nn.init.normal_(model[1].proj.weight)
    leaks = document_leaks(model, tokens, CASE.seq_lens)
    first_row = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert {(leak.row, leak.changed, leak.reached) for leak in leaks} == {
        *((0, changed, reached) for changed, reached in first_row),
        (1, 0, 1),
    }
    assert "row 0: changing document 0 moved the output of document 1 by" in str(leaks[0])


def test_a_leak_between_rows_is_found(tokens):
    """Batch statistics tie all rows together: also the third row, whose own input did not change."""

    def normalised_by_the_batch(ids: Tensor) -> Tensor:
        return ids / ids.float().mean()

    assert {leak.row for leak in document_leaks(normalised_by_the_batch, tokens, CASE.seq_lens)} == {0, 1, 2}


def test_embeddings_can_be_checked_too():
    torch.manual_seed(0)
    attention = PackedSelfAttention(16, 2, backend="dense")
    x = torch.randn(3, 20, 16)
    assert document_leaks(lambda x: attention(x, CASE.seq_lens), x, CASE.seq_lens) == []
    assert document_leaks(lambda x: x.cumsum(1), x, CASE.seq_lens) != []


def test_a_random_model_is_refused(tokens):
    model = nn.Sequential(nn.Embedding(50, 16), nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        document_leaks(model, tokens, CASE.seq_lens)
    assert document_leaks(model.eval(), tokens, CASE.seq_lens) == []


def test_a_model_that_ignores_its_input_proves_nothing(tokens):
    with pytest.raises(ValueError, match="does not react to document 0"):
        document_leaks(lambda ids: torch.zeros(ids.shape), tokens, CASE.seq_lens)


BOXES, PATCH = [[0, 8, 32, 16], [9, 0, 14, 32]], 8


class TinyViT(nn.Module):
    """Patches to tokens, one masked block, the output of CLS."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, PATCH, stride=PATCH)
        self.cls = nn.Parameter(torch.randn(1, 1, 16))
        self.block = MaskedViTBlock(16, 2)

    def forward(self, images: Tensor, ignore: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.block(torch.cat((self.cls.expand(len(images), -1, -1), tokens), 1), ignore)[:, 0]


@pytest.fixture
def images() -> Tensor:
    torch.manual_seed(0)
    return torch.rand(2, 3, 32, 32)


def test_padding_pixels_do_not_reach_the_output(images):
    model, ignore = TinyViT(), torch.from_numpy(token_ignore_mask(BOXES, (32, 32), PATCH)).flatten(1)
    assert padding_leaks(lambda pixels: model(pixels, ignore), images, BOXES, PATCH) == []


def test_pixels_may_be_bytes(images):
    model, ignore = TinyViT(), torch.from_numpy(token_ignore_mask(BOXES, (32, 32), PATCH)).flatten(1)
    stored = (images * 255).round().to(torch.uint8)
    stored[0, 0, 0, 0] = 255
    assert padding_leaks(lambda pixels: model(pixels / 255, ignore), stored, BOXES, PATCH) == []
    assert padding_leaks(lambda pixels: pixels.float().mean((1, 2, 3)), stored, BOXES, PATCH) != []


def test_padding_pixels_that_reach_the_output_are_found(images):
    """The second image is not masked: its padding is seen, that of the first is not."""
    model, ignore = TinyViT(), torch.from_numpy(token_ignore_mask(BOXES, (32, 32), PATCH)).flatten(1)
    ignore[1] = False
    leaks = padding_leaks(lambda pixels: model(pixels, ignore), images, BOXES, PATCH)
    assert [leak.image for leak in leaks] == [1]
    assert "image 1: changing its padding moved the output by" in str(leaks[0])


def test_a_model_that_ignores_the_content_proves_nothing(images):
    with pytest.raises(ValueError, match="does not react to the content"):
        padding_leaks(lambda pixels: torch.zeros(2, 5), images, BOXES, PATCH)
