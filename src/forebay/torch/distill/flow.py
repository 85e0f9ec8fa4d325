"""Flow matching, with noise at t = 0 and data at t = 1.

    x_t = (1 − t)·noise + t·data        velocity = data − noise        SNR(t) = (t / (1 − t))²

`features.at(rows, t, direction="t0_noise")` reads a teacher at these times, whichever way its own time runs. A `shift`
above 1 moves times towards data; SD3 and Flux count time from data to noise, so that their shift of 3 is 1/3 here.
`min_snr_weight` is the form for noise prediction, used on a velocity loss as the document asks.
"""

from typing import Literal

import torch
from torch import Tensor

TimeDistribution = Literal["logit_normal", "uniform"]
SHIFT = 3.0
MIN_SNR_GAMMA = 5.0
_EDGE = 1e-4  # how near to pure noise or pure data a sampled time comes


def sample_times(
    count: int,
    *,
    shift: float = SHIFT,
    distribution: TimeDistribution = "logit_normal",
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Times of a batch, float32 (count,), shifted towards data.

    Drawn where the generator is (the CPU without one), so that a seed gives the same times on any device.
    """
    drawn_on = generator.device if generator else torch.device("cpu")
    if distribution == "logit_normal":
        times = torch.sigmoid(torch.randn(count, generator=generator, device=drawn_on))
    elif distribution == "uniform":
        times = torch.rand(count, generator=generator, device=drawn_on)
    else:
        raise ValueError(f"the distribution of times is {distribution!r}; known are: logit_normal, uniform")
    return shift_times(times, shift).clamp(_EDGE, 1 - _EDGE).to(device)


def shift_times(times: Tensor, shift: float = SHIFT) -> Tensor:
    """`s·t / (1 + (s − 1)·t)`: above 1 towards 1, below 1 towards 0; the ends stay.

    >>> shift_times(torch.tensor([0.0, 0.5, 1.0])).tolist()
    [0.0, 0.75, 1.0]
    """
    if shift <= 0:
        raise ValueError(f"the shift is {shift}; it is more than 0, and 1 shifts nothing")
    return shift * times / (1 + (shift - 1) * times)


def interpolate(data: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """x_t: data (rows, …) and noise on the straight line between them, each row at its own time (rows,)."""
    wide = times.view(-1, *[1] * (data.dim() - 1)).to(data.dtype)
    return (1 - wide) * noise + wide * data


def velocity(data: Tensor, noise: Tensor) -> Tensor:
    """Where x_t goes, at every t."""
    return data - noise


def min_snr_weight(times: Tensor, gamma: float = MIN_SNR_GAMMA) -> Tensor:
    """`min(SNR, γ) / SNR`: times near the data, which are easy, weigh less.

    >>> [round(weight, 4) for weight in min_snr_weight(torch.tensor([0.0, 0.5, 0.9])).tolist()]
    [1.0, 1.0, 0.0617]
    """
    # γ / SNR, written so that neither end divides by 0.
    ratio = gamma * ((1 - times.float()) / times.float().clamp(min=torch.finfo(torch.float32).tiny)).square()
    return ratio.clamp(max=1.0)
