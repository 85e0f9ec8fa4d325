"""Times of flow matching, with noise at t = 0 and data at t = 1.

`features.at(rows, t, direction="t0_noise")` reads a teacher at these times, whichever way its own time runs. A `shift`
above 1 moves times towards data; SD3 and Flux count time from data to noise, so their shift of 3 is 1/3 here.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.fields import checked_number
from forebay.order.coins import Coins

_EDGE = 1e-4  # the least distance of a time from pure noise and pure data


@dataclass(frozen=True, slots=True)
class LogitNormalTimes:
    """Draws the times of rows from their coins: `s·t / (1 + (s − 1)·t)` of logit-normal t, with the shift s.

    A row has the same time in any batch, on any rank and after any resume; another one in every epoch.
    """

    shift: float = 3.0
    purpose: str = "t"

    def __post_init__(self) -> None:
        checked_number("shift", self.shift)

    def __call__(self, coins: Coins) -> NDArray[np.float32]:
        normal = torch.special.ndtri(torch.from_numpy(coins.uniform(self.purpose)).clamp(1e-9, 1 - 1e-9))
        times = torch.sigmoid(normal).float()
        shifted = self.shift * times / (1 + (self.shift - 1) * times)
        return shifted.clamp(_EDGE, 1 - _EDGE).numpy()
