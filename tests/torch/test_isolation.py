"""The self-check finds leaks that are there, finds none that are not, and refuses to prove nothing."""

import pytest
import torch
from packed_batches import batch
from tests.torch.test_attention_layers import MaskedViTBlock, SeedAttention
from torch import Tensor, nn

from forebay.masks import padding_mask, token_ignore_mask
from forebay.torch import PackedSelfAttention, document_leaks, padding_leaks

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


@pytest.mark.parametrize(("kind", "window"), [("causal", None), ("bidirectional", None), ("causal", 3)])
def test_packed_attention_keeps_documents_apart(tokens, kind, window):
    layers = [PackedSelfAttention(16, 2, kind=kind, window=window, backend="dense") for _ in range(2)]
    model = PackedModel(*layers)
    assert document_leaks(lambda ids: model(ids, CASE.seq_lens), tokens, CASE.seq_lens) == []


def test_attention_across_documents_is_found_and_named(tokens):
    """Causal without documents: each document reaches all later ones of its row, and no earlier one."""
    model = nn.Sequential(nn.Embedding(50, 16), SeedAttention(16, 2, backend="dense"))
    nn.init.normal_(model[1].proj.weight)
    leaks = document_leaks(model, tokens, CASE.seq_lens)
    first_row = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert all(leak.row == leak.changed_row for leak in leaks)
    assert {(leak.row, leak.changed, leak.reached) for leak in leaks} == {
        *((0, changed, reached) for changed, reached in first_row),
        (1, 0, 1),
    }
    assert "row 0: changing document 0 moved the output of document 1 by" in str(leaks[0])


ROWS_ALIKE = [[9, 11], [9, 11]]


def test_rows_that_swap_places_are_found():
    """Each document reaches the one with its own number in the other row, and nothing else."""
    leaks = document_leaks(lambda x: x.flip(0), torch.randn(2, 20, 16), ROWS_ALIKE)
    assert {(leak.changed_row, leak.changed, leak.row, leak.reached) for leak in leaks} == {
        (0, 0, 1, 0), (0, 1, 1, 1), (1, 0, 0, 0), (1, 1, 0, 1),
    }  # fmt: skip
    assert "row 0: changing document 0 moved the output of document 0 of row 1 by" in str(leaks[0])


def test_zeroed_outputs_of_padding_are_accepted():
    torch.manual_seed(0)
    attention = PackedSelfAttention(16, 2, backend="dense")
    padded = torch.from_numpy(padding_mask(CASE.seq_lens, 20))[..., None]
    x = torch.randn(3, 20, 16)
    assert document_leaks(lambda x: attention(x, CASE.seq_lens).masked_fill(padded, 0), x, CASE.seq_lens) == []


ALIVE = torch.tensor([1.0, 0.0])[:, None, None]


@pytest.mark.parametrize(
    ("model", "lengths", "problem"),
    [
        (lambda x: x * ALIVE, ROWS_ALIKE, "does not react to document 0 of row 1"),  # row 1 is dead
        (lambda x: torch.zeros(x.shape), ROWS_ALIKE, "does not react to document 0"),
        (lambda x: x, [[20]], "only one document"),
        (lambda x: x.mean(1), ROWS_ALIKE, r"one entry per token, \[2, 20, …\] \(got \(2, 16\)\)"),
        (lambda x: x / 0 * 0, ROWS_ALIKE, "has NaN"),
        (lambda x: (x,), ROWS_ALIKE, r"must return a tensor \(got a tuple\)"),
    ],
)
def test_what_proves_nothing_is_refused(model, lengths, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        document_leaks(model, torch.randn(len(lengths), 20, 16), lengths)


def test_a_random_model_is_refused(tokens):
    model = nn.Sequential(nn.Embedding(50, 16), nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        document_leaks(model, tokens, CASE.seq_lens)
    assert document_leaks(model.eval(), tokens, CASE.seq_lens) == []


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


def test_padding_pixels_that_reach_the_output_are_found(images):
    """The second image is not masked: its padding is seen, that of the first is not."""
    model, ignore = TinyViT(), torch.from_numpy(token_ignore_mask(BOXES, (32, 32), PATCH)).flatten(1)
    ignore[1] = False
    leaks = padding_leaks(lambda pixels: model(pixels, ignore), images, BOXES, PATCH)
    assert [leak.image for leak in leaks] == [1]
    assert "image 1: changing its padding moved the output by" in str(leaks[0])


def test_a_threshold_on_bytes_is_found(images):
    """Gray padding of 114: one more is still below the threshold of the model, another byte may not be."""
    stored = torch.full((2, 3, 32, 32), 114, dtype=torch.uint8)
    stored[:, :, 8:24] = (images[:, :, 8:24] * 255).to(torch.uint8)

    def bright_share(pixels: Tensor) -> Tensor:
        return torch.stack(((pixels > 127).float().mean((1, 2, 3)), pixels[:, :, 8:24].float().mean((1, 2, 3))), 1)

    leaks = padding_leaks(bright_share, stored, [[0, 8, 32, 16]] * 2, PATCH)
    assert [(leak.changed_image, leak.image) for leak in leaks] == [(0, 0), (1, 1)]


def test_padding_that_reaches_another_image_is_found(images):
    leaks = padding_leaks(lambda pixels: pixels.mean((2, 3)).flip(0), images, BOXES, PATCH)
    assert [(leak.changed_image, leak.image) for leak in leaks] == [(0, 1), (1, 0)]
    assert "image 1: changing the padding of image 0 moved the output by" in str(leaks[0])


def test_images_without_ignored_patches_or_a_reaction_prove_nothing(images):
    with pytest.raises(ValueError, match="does not react to the content"):
        padding_leaks(lambda pixels: torch.zeros(2, 5), images, BOXES, PATCH)
    for box in ([0, 0, 32, 32], [0, 4, 32, 24]):
        with pytest.raises(ValueError, match="no patch of these images is ignored"):
            padding_leaks(lambda pixels: pixels.mean((1, 2, 3)), images, [box] * 2, PATCH)
