"""Teacher dropout: some samples of a batch learn without their teacher, so that the student can do without it.

Whether a sample has its teacher is a function of (seed, step, sample, teacher): the same on any rank, in any order,
after any resume. Samples go by permanent numbers, for instance `sample_keys` of a `MultiSourceCache`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay.order.coins import Coins
from forebay.torch.arrays import to_array

Numbers = Tensor | ArrayLike


@dataclass(frozen=True, slots=True)
class TeacherDropout:
    """Which samples keep their teacher.

    >>> TeacherDropout(rate=0.5).kept("lune", step=3, samples=[7, 8, 9, 10]).tolist()
    [True, True, False, False]
    """

    rate: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"the dropout rate is {self.rate}; it is a share from 0 to 1")

    def kept(self, teacher: str, step: int, samples: Numbers, dataset_ids: Numbers = 0) -> Tensor:
        """bool (samples,), True where a sample learns from this teacher at this step."""
        keys = to_array(samples).astype(np.uint64)
        datasets = np.broadcast_to(to_array(dataset_ids), keys.shape)
        kept = np.empty(keys.shape, np.bool_)
        for dataset in np.unique(datasets).tolist():
            here = datasets == dataset
            kept[here] = ~self._dropped(keys[here], f"{teacher} of {dataset}", step)
        return torch.from_numpy(kept)

    def _dropped(self, keys: NDArray[np.uint64], of: str, step: int) -> NDArray[np.bool_]:
        return Coins(self.seed, step, keys).flip(f"drop the teacher {of}", self.rate)
