"""A causal residual attention block on forebay's mask cache, to add to a trained model.

Run it: python examples/seed_attention.py
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from forebay.torch import BlockMaskCache, causal_block_mask
from forebay.torch.attention.packed_attention import Backend, attend, join_heads, split_heads


class SeedAttention(nn.Module):
    """A causal residual attention block to add to a trained model.

    Its output projection is initialized to zero, so it starts as the identity. Sequences have no documents; one mask
    per length serves every batch size and dtype.
    """

    def __init__(self, dim: int, n_head: int, *, backend: Backend = "auto", cache: BlockMaskCache | None = None):
        super().__init__()
        self.n_head, self.backend = n_head, backend
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)
        self.cache = BlockMaskCache(max_entries=8) if cache is None else cache

    def forward(self, x: Tensor, *, mask: BlockMask | None = None) -> Tensor:
        if mask is None:
            mask = self.cache.get(causal_block_mask, x.shape[1], device=x.device)
        return x + self.proj(join_heads(attend(*split_heads(self.qkv(x), self.n_head), mask, self.backend)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.cache.clear()  # the model moves: masks on the old device are not needed again
        super()._apply(fn, recurse)
        return self


def main() -> None:
    torch.manual_seed(0)
    seed = SeedAttention(32, 4)
    x = torch.randn(2, 20, 32)
    print("a new SeedAttention is the identity:", torch.equal(seed(x), x), "|", seed.cache)


if __name__ == "__main__":
    main()
