"""Which part of every global batch this process takes, and how processes agree on a number."""

import os
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `rank` of `world_size` takes the positions that leave this remainder, whatever the batch size."""

    rank: int
    world_size: int
    joined: bool = False  # the ranks are those of torch.distributed

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of world size {self.world_size}; ranks count from 0")

    @property
    def can_agree(self) -> bool:
        return self.joined or self.world_size == 1

    def agree(self, number: int) -> int:
        """The number that the first rank has; every rank must ask."""
        if self.world_size == 1:
            return number
        shared = _shared(number)
        distributed.broadcast(shared, src=0)
        return int(shared.item())

    def lowest(self, number: int) -> int:
        """The lowest number that any rank has; every rank must ask. Ranks that cannot agree keep their own."""
        if self.world_size == 1 or not self.joined:
            return number
        shared = _shared(number)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MIN)
        return int(shared.item())


def _shared(number: int) -> torch.Tensor:
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    return torch.tensor([number], dtype=torch.int64, device=device)


def current_ranks(rank: int | None = None, world_size: int | None = None) -> Ranks:
    """As given; else as torch.distributed says; else RANK and WORLD_SIZE, as torchrun sets them; else alone."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank is {rank} and world_size is {world_size}; give both or neither")
    if rank is not None and world_size is not None:
        return Ranks(rank, world_size)
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size(), joined=True)
    return Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
