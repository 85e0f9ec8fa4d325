"""Which part of every global batch this process takes."""

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `rank` of `world_size` takes the positions that leave this remainder, whatever the batch size."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of world size {self.world_size}; ranks count from 0")


def current_ranks(rank: int | None = None, world_size: int | None = None) -> Ranks:
    """As given; else as torch.distributed says; else RANK and WORLD_SIZE, as torchrun sets them; else alone."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank is {rank} and world_size is {world_size}; give both or neither")
    if rank is not None and world_size is not None:
        return Ranks(rank, world_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
