"""Between numpy and a device."""

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.columns import Array


def to_device(values: Array, like: torch.Tensor) -> torch.Tensor:
    """Numbers as a tensor of the type and on the device of another; whole numbers stay whole."""
    own = torch.from_numpy(np.array(values, np.float32 if values.dtype.kind in "fV" else values.dtype))
    return own.to(like.device, like.dtype) if own.is_floating_point() else own.to(like.device)


def to_numpy(values: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = values.float().cpu().numpy()
    return found
