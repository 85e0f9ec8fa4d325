"""The attention layers of the examples: a seed block that starts as the identity, and a block for images."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from forebay.masks import token_ignore_mask

EXAMPLES = Path(__file__).parents[2] / "examples"
SeedAttention = runpy.run_path(str(EXAMPLES / "seed_attention.py"))["SeedAttention"]
MaskedViTBlock = runpy.run_path(str(EXAMPLES / "train_tagger.py"))["MaskedViTBlock"]


def trained_seed(**settings):
    torch.manual_seed(0)
    seed = SeedAttention(32, 4, **settings)
    nn.init.normal_(seed.proj.weight, std=0.2)
    return seed


def test_a_seed_starts_as_the_identity_and_learns():
    x = torch.randn(2, 20, 32)
    seed = SeedAttention(32, 4, backend="dense")
    assert torch.equal(seed(x), x)
    seed(x).square().sum().backward()
    assert seed.proj.weight.grad.abs().sum() > 0


def test_a_later_token_changes_no_earlier_output():
    seed = trained_seed(backend="dense")
    x = torch.randn(1, 30, 32)
    before = seed(x)
    x[:, 17] += 1
    changed = (seed(x) != before).any(dim=-1)[0]
    assert not changed[:17].any()
    assert changed[17:].all()


BOXES, SIZE, PATCH = [[0, 8, 32, 16], [12, 0, 8, 32]], (32, 32), 8


@pytest.fixture
def ignore() -> Tensor:
    return torch.from_numpy(token_ignore_mask(BOXES, SIZE, PATCH)).flatten(1)


def test_images_attend_to_kept_tokens_and_cls_only(ignore: Tensor):
    """Equal to the same block on a shorter sequence from which the ignored tokens were taken out."""
    torch.manual_seed(0)
    block = MaskedViTBlock(16, 2)
    x = torch.randn(2, 17, 16)
    out = block(x, ignore)
    for image in range(2):
        seen = torch.cat((torch.tensor([True]), ~ignore[image]))
        short = block(x[image : image + 1, seen], torch.zeros(1, int(seen.sum()) - 1, dtype=torch.bool))
        torch.testing.assert_close(out[image : image + 1, seen], short, atol=1e-5, rtol=0)


def test_cls_is_seen_even_when_all_patches_are_ignored():
    torch.manual_seed(0)
    block, x = MaskedViTBlock(16, 2), torch.randn(1, 5, 16)
    out = block(x, torch.ones(1, 4, dtype=torch.bool))
    alone = block(x[:, :1], torch.ones(1, 0, dtype=torch.bool))
    torch.testing.assert_close(out[:, :1], alone, atol=1e-5, rtol=0)
    x[:, 0] = torch.randn(16)
    assert not torch.allclose(block(x, torch.ones(1, 4, dtype=torch.bool))[:, 1:], out[:, 1:])


def test_a_mask_of_another_size_or_batch_is_rejected(ignore: Tensor):
    """One row would be broadcast over all images without a word."""
    with pytest.raises(ValueError, match=r"bool \[2, 20\] for 2 images of 21 tokens with CLS"):
        MaskedViTBlock(16, 2)(torch.randn(2, 21, 16), ignore)
    with pytest.raises(ValueError, match=r"must be bool \[2, 16\] .* \(1, 16\)"):
        MaskedViTBlock(16, 2)(torch.randn(2, 17, 16), ignore[:1])
