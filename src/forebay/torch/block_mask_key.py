"""What makes two block masks the same: the content they are built from, never the object that carries it."""

import hashlib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, slots=True)
class BlockMaskKey:
    """The identity of a block mask. A mask has no dtype, so neither has its key."""

    kind: Callable[..., BlockMask]  # the function that builds it
    layout: str  # digest of all lengths, prefixes or rectangles of the whole batch
    parameters: tuple[tuple[str, Hashable], ...]  # window, kind, threshold, …
    block_size: Hashable
    device: torch.device


def block_mask_key(
    build: Callable[..., BlockMask], args: Sequence[object], kwargs: Mapping[str, object]
) -> BlockMaskKey:
    """The key of `build(*args, **kwargs)`, the same however the arguments are spelled."""
    bound = inspect.signature(build).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    device = _device(given.pop("device", None), given)
    block_size = given.pop("block_size", None)
    arrays = {name: value for name, value in given.items() if isinstance(value, Tensor | np.ndarray | list)}
    parameters = tuple((name, value) for name, value in given.items() if name not in arrays)
    pair = (block_size, block_size) if isinstance(block_size, int) else block_size
    return BlockMaskKey(build, _digest(arrays), parameters, pair, device)


def _device(device: object, given: Mapping[str, object]) -> torch.device:
    """Where the mask will lie: `device`, or where its lengths do."""
    if device is None:
        device = next((value.device for value in given.values() if isinstance(value, Tensor)), "cpu")
    assert isinstance(device, torch.device | str)
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def _digest(arrays: Mapping[str, object]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in arrays.items():
        array = _host_array(value)
        digest.update(f"{name} {array.shape} {array.dtype.str}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _host_array(value: object) -> NDArray[np.generic]:
    """Integers of any width are the same content."""
    array = value.cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array
