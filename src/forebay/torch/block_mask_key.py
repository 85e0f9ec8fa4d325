"""What makes two block masks the same: the content they are built from, never the object that carries it."""

import hashlib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from forebay.masks.blocks import block_pair


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
    pair = block_pair(given.pop("block_size")) if "block_size" in given else None
    arrays = {name: value for name, value in given.items() if _is_array(value)}
    parameters = tuple((name, _by_value(name, value)) for name, value in given.items() if name not in arrays)
    return BlockMaskKey(build, _digest(arrays), parameters, pair, device)


def _is_array(value: object) -> bool:
    """What has a content that may change under its identity: tensors, arrays, lists, tuples, nested or not."""
    return isinstance(value, list | tuple) or (hasattr(value, "__array__") and not isinstance(value, np.generic))


def _by_value(name: str, value: object) -> Hashable:
    """A number, a word, None or the like; an object known by its identity only would give stale masks."""
    if isinstance(value, np.generic):
        return cast(Hashable, value.item())
    singular = value is None or callable(value)
    if isinstance(value, Hashable) and (singular or type(value).__hash__ is not object.__hash__):
        return value
    raise TypeError(
        f"{name} is a {type(value).__name__}, which a mask cannot be kept by; pass a tensor, an array, a list or "
        "a plain value, or build this mask without the cache"
    )


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
        if array.dtype == object:
            raise TypeError(f"{name} holds {type(array.flat[0]).__name__} but numbers are expected")
        digest.update(f"{name} {array.shape} {array.dtype.str}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _host_array(value: object) -> NDArray[np.generic]:
    """Integers of any width are the same content."""
    if isinstance(value, list | tuple):
        value = [_host_array(item) if _is_array(item) else item for item in value]
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array
