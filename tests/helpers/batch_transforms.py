"""Transforms that tests give to datasets and loaders; importable, so that worker processes find them."""

import torch

from forebay.torch import Canvases, Coins
from forebay.torch.batches import Batch


def tell_coins(batch: Batch, coins: Coins) -> Batch:
    """Rows of numbered tokens that say which row they are and how their coin fell."""
    return batch | {"row": batch["tokens"][:, 0], "coin": torch.from_numpy(coins.uniform("told"))}


def jitter(canvases: Canvases, coins: Coins) -> Canvases:
    """Images that moved by a few pixels, some of them out of their canvas."""
    return canvases.shifted(coins.integers("right", -9, 10), coins.integers("down", -9, 10))
