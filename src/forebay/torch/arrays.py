"""Arrays as tensors and back, without a copy: numpy and torch have no common bfloat16."""

import ml_dtypes
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forebay.columns import Array

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_tensor(array: Array) -> Tensor:
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(values: Tensor | ArrayLike) -> Array:
    """What is a tensor, on any device, as an array; anything else as numpy takes it."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    if values.dtype == torch.bfloat16:
        return to_array(values.detach().contiguous().view(torch.int16)).view(_BFLOAT16)
    array: Array = values.numpy(force=True)
    return array
