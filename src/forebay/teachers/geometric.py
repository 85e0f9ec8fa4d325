"""Sol in closed form: what attention is like at a moment, without any model. It is the same for all samples."""

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.columns import Array
from forebay.teachers.protocol import Output, Teacher


class GeometricSol(Teacher, frozen=True, kw_only=True, tag="geometric-sol"):
    """Early attention is focused and central, late attention spread: constants of the layer, stored once."""

    timed: ClassVar[bool] = True
    of: ClassVar[Literal["sample", "prompt", "nothing"]] = "nothing"

    side: int = 8
    name: str = "sol"

    def layer_name(self) -> str:
        return self.name

    def outputs(self) -> tuple[Output, ...]:
        return ()

    def constants(self, buckets: tuple[float, ...]) -> Mapping[str, Array]:
        return {
            f"{self.name}_stats": geometric_stats(buckets),
            f"{self.name}_spatial": geometric_spatial(buckets, self.side),
        }


def geometric_stats(moments: ArrayLike) -> NDArray[np.float32]:
    """Locality, entropy, clustering, sparsity, `(moments, 4)`."""
    t = np.asarray(moments, np.float64)
    return np.stack([1 - t, t, 0.5 - 0.3 * np.abs(t - 0.5), 1 - t], axis=-1).astype(np.float32)


def geometric_spatial(moments: ArrayLike, side: int = 8) -> NDArray[np.float32]:
    """A map that falls off from the centre, never below 0, with sum 1: `(moments, side, side)`."""
    t = np.asarray(moments, np.float64)
    line = np.linspace(-1.0, 1.0, side)
    distance = np.hypot(line[:, None], line[None, :])
    # Without the clamp the corners are negative for t below 0.3.
    height = np.maximum(1.0 - distance * (1.0 - t)[:, None, None], 0.0)
    normal: NDArray[np.float32] = (height / height.sum(axis=(1, 2), keepdims=True)).astype(np.float32)
    return normal
