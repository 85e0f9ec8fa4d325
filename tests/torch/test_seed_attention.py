"""The seed block: identity at birth, causal, one cached mask per length whatever the dtype."""

import pytest
import torch
from torch import nn

from forebay.torch import SeedAttention


def grown_seed(**settings) -> SeedAttention:
    """A seed whose output projection has learned something."""
    torch.manual_seed(0)
    seed = SeedAttention(32, 4, **settings)
    nn.init.normal_(seed.proj.weight, std=0.2)
    return seed


def test_a_seed_is_the_identity_at_birth():
    x = torch.randn(2, 20, 32)
    assert torch.equal(SeedAttention(32, 4, backend="dense")(x), x)


def test_a_seed_learns_from_birth():
    seed = SeedAttention(32, 4)
    seed(torch.randn(2, 20, 32)).square().sum().backward()
    assert seed.proj.weight.grad.abs().sum() > 0


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match=r"n_head must be at least 1 and divide dim 32 \(got 5\)"):
        SeedAttention(32, 5)


def test_a_later_token_changes_no_earlier_output():
    seed = grown_seed(backend="dense")
    x = torch.randn(1, 30, 32)
    before = seed(x)
    x[:, 17] += 1
    changed = (seed(x) != before).any(dim=-1)[0]
    assert not changed[:17].any()
    assert changed[17:].all()


def test_the_same_length_reuses_its_mask():
    seed = grown_seed(backend="dense")
    for rows in (1, 4, 2):
        seed(torch.randn(rows, 30, 32))
    assert (seed.cache.statistics.misses, seed.cache.statistics.hits) == (1, 2)


def test_two_lengths_give_two_entries():
    seed = grown_seed(backend="dense")
    seed(torch.randn(1, 30, 32))
    seed(torch.randn(1, 31, 32))
    assert len(seed.cache) == 2


def test_the_cache_is_bounded_to_eight_masks():
    seed = grown_seed(backend="dense")
    for length in range(1, 20):
        seed(torch.randn(1, length, 32))
    assert len(seed.cache) == seed.cache.max_entries == 8


@pytest.mark.parametrize("move", [lambda seed: seed.to("meta"), lambda seed: seed.to(torch.float64)])
def test_moving_the_seed_clears_its_masks(move):
    seed = grown_seed(backend="dense")
    seed(torch.randn(1, 30, 32))
    move(nn.Sequential(seed))
    assert len(seed.cache) == 0


def test_autocast_finds_the_mask_of_float32():
    seed = grown_seed(backend="dense")
    x = torch.randn(2, 30, 32)
    with torch.no_grad():
        expected = seed(x)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(seed(x).float(), expected, atol=3e-2, rtol=0)
    assert (seed.cache.statistics.misses, seed.cache.statistics.hits) == (1, 1)
