"""Flow matching, with noise at t = 0 and data at t = 1.

    x_t = (1 − t)·noise + t·data        velocity = data − noise        SNR(t) = (t / (1 − t))²

`features.at(rows, t, direction="t0_noise")` reads a teacher at these times, whichever way its own time runs. A `shift`
above 1 moves times towards data; SD3 and Flux count time from data to noise, so their shift of 3 is 1/3 here.
`min_snr_weight` is the form for noise prediction, applied to a velocity loss.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.order.coins import Coins

TimeDistribution = Literal["logit_normal", "uniform"]
SHIFT = 3.0
MIN_SNR_GAMMA = 5.0
_EDGE = 1e-4  # the least distance of a sampled time from pure noise and pure data


def sample_times(
    count: int,
    *,
    shift: float = SHIFT,
    distribution: TimeDistribution = "logit_normal",
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draw the times of a batch, float32 (count,), shifted towards data.

    They are drawn on the generator's device (the CPU without one), so that a seed gives the same times on any device.
    """
    drawn_on = generator.device if generator else torch.device("cpu")
    if distribution == "logit_normal":
        times = torch.sigmoid(torch.randn(count, generator=generator, device=drawn_on))
    elif distribution == "uniform":
        times = torch.rand(count, generator=generator, device=drawn_on)
    else:
        raise ValueError(f"distribution must be 'logit_normal' or 'uniform' (got {distribution!r})")
    return shift_times(times, shift).clamp(_EDGE, 1 - _EDGE).to(device)


@dataclass(frozen=True, slots=True)
class LogitNormalTimes:
    """Draws the times of rows from their coins, as `sample_times` does from a generator.

    A row has the same time in any batch, on any rank and after any resume; another one in every epoch.
    """

    shift: float = SHIFT
    purpose: str = "t"

    def __call__(self, coins: Coins) -> NDArray[np.float32]:
        normal = torch.special.ndtri(torch.from_numpy(coins.uniform(self.purpose)).clamp(1e-9, 1 - 1e-9))
        return shift_times(torch.sigmoid(normal).float(), self.shift).clamp(_EDGE, 1 - _EDGE).numpy()


def shift_times(times: Tensor, shift: float = SHIFT) -> Tensor:
    """Return `s·t / (1 + (s − 1)·t)`: a shift above 1 moves towards 1, below 1 towards 0; the ends stay.

    >>> shift_times(torch.tensor([0.0, 0.5, 1.0])).tolist()
    [0.0, 0.75, 1.0]
    """
    if shift <= 0:
        raise ValueError(f"shift must be more than 0; 1 shifts nothing (got {shift})")
    return shift * times / (1 + (shift - 1) * times)


def interpolate(data: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Return x_t: the linear mix of data (rows, …) and noise, each row at its own time (rows,)."""
    wide = times.view(-1, *[1] * (data.dim() - 1)).to(data.dtype)
    return (1 - wide) * noise + wide * data


def velocity(data: Tensor, noise: Tensor) -> Tensor:
    """Return the derivative of x_t, the same at every t."""
    return data - noise


def min_snr_weight(times: Tensor, gamma: float = MIN_SNR_GAMMA) -> Tensor:
    """Return `min(SNR, γ) / SNR`, which weights times near the data, the easy ones, less.

    >>> [round(weight, 4) for weight in min_snr_weight(torch.tensor([0.0, 0.5, 0.9])).tolist()]
    [1.0, 1.0, 0.0617]
    """
    # γ / SNR, written so that neither end divides by 0.
    ratio = gamma * ((1 - times.float()) / times.float().clamp(min=torch.finfo(torch.float32).tiny)).square()
    return ratio.clamp(max=1.0)
