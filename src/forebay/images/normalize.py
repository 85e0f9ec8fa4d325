"""What a pixel becomes as a number: one definition, for training, inference and export.

    value = x · scale + shift        scale = 1 / (255 · std)        shift = −mean / std        (x/255 − mean) / std

Product and sum are each rounded to float32. So numpy, torch on any device and an exported graph agree to the last bit,
as long as nothing fuses the two into one rounding; where that happens, they agree to an ulp of the larger of both.
Values of 16 bits are these, rounded to the nearest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Normalize = Literal["imagenet"] | tuple[Sequence[float], Sequence[float]] | None

KNOWN = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """A scale and a shift for each of three channels, float32 `[3, 1, 1]`."""

    scale: NDArray[np.float32]
    shift: NDArray[np.float32]

    @classmethod
    def of(cls, normalize: Normalize) -> "Scaling":
        """By name, by (mean, std) of values from 0 to 1, or None: values from 0 to 1.

        >>> float(Scaling.of(((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))).apply(np.full((3, 1, 1), 255, np.uint8))[0, 0, 0])
        1.0
        """
        mean, std = _mean_and_std(normalize)
        scale = np.array([1 / (255 * each) for each in std], np.float32)
        shift = np.array([-m / s for m, s in zip(mean, std, strict=True)], np.float32)
        return cls(scale[:, None, None], shift[:, None, None])

    def apply(self, pixels: NDArray[np.uint8], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """The values of pixels `[..., 3, height, width]`."""
        values: NDArray[np.float32] = np.empty(pixels.shape, np.float32) if out is None else out
        np.copyto(values, pixels)
        np.multiply(values, self.scale, out=values)
        np.add(values, self.shift, out=values)
        return values


def _mean_and_std(normalize: Any) -> tuple[Sequence[float], Sequence[float]]:
    if normalize is None:
        return (0.0,) * 3, (1.0,) * 3
    if isinstance(normalize, str):
        if normalize not in KNOWN:
            raise ValueError(f"normalize is '{normalize}'; known are {', '.join(KNOWN)}, or give (mean, std)")
        return KNOWN[normalize]
    if not (_has(normalize, 2) and all(_has(side, 3) for side in normalize)):
        raise ValueError(f"normalize is {normalize!r}; give (mean, std), three numbers each, of values from 0 to 1")
    mean, std = (tuple(map(float, side)) for side in normalize)
    if not np.isfinite((mean, std)).all() or min(std) <= 0:
        raise ValueError(f"normalize has the mean {mean} and the std {std}; a std is above 0, and all are finite")
    return mean, std


def _has(values: Any, count: int) -> bool:
    return isinstance(values, Sequence | np.ndarray) and len(values) == count
