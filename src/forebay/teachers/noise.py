"""Noise as a function of (seed, sample, bucket): the same for any batch, chunk size, range or order."""

from collections.abc import Sequence
from math import prod

import numpy as np
import xxhash
from numpy.typing import NDArray

from forebay.order.bijection import key_of
from forebay.order.coins import philox

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_UNIT = 2.0**-32


def sample_keys(ids: Sequence[bytes]) -> NDArray[np.uint64]:
    """One number per sample, by its id."""
    return np.array([xxhash.xxh3_64_intdigest(one) for one in ids], np.uint64)


def normal(
    seed: int, keys: NDArray[np.uint64], buckets: NDArray[np.int64], shape: tuple[int, ...], purpose: str = "noise"
) -> NDArray[np.float32]:
    """Standard normal numbers, `(samples, *shape)`, for every (sample, bucket); Philox, then Box–Muller."""
    count = prod(shape)
    key = key_of("teacher", seed, purpose)
    draws = np.arange(-(-count // 4), dtype=np.uint64)
    rows = keys[:, None]
    counter = (rows & _LOW, rows >> _HALF, buckets.astype(np.uint64)[:, None], draws)
    a, b, c, d = philox(counter, (key % 2**32, key >> 32))
    found = np.stack([*_pair(a, b), *_pair(c, d)], axis=-1)
    return found.reshape(len(keys), 4 * len(draws))[:, :count].reshape(len(keys), *shape)


def _pair(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    radius = np.sqrt(-2.0 * np.log((a + np.uint64(1)) * _UNIT))
    angle = b * (2.0 * np.pi * _UNIT)
    return (radius * np.cos(angle)).astype(np.float32), (radius * np.sin(angle)).astype(np.float32)
