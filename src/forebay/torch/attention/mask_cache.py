"""A small cache of block masks, shared by all layers that see the same batch.

Bounded by entries *and* by bytes, because masks grow with the square of the length. With blocks of 128 tokens
and n = ⌈S/128⌉ the index tensors of one batch row take 16 · (n + n²) bytes:

    tokens         1,024     8,192      32,768      131,072
    bytes          1,152    66,560   1,052,672   16,793,600

The tensors that `mask_mod` closes over (4 bytes per token for causal documents) count too. The least recently used mask
is evicted first; a mask larger than the whole bound is returned but not kept.
"""

import hashlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from forebay.masks.spans import block_pair
from forebay.torch.attention.backends import no_compile
from forebay.torch.attention.block_mask import captured_tensors


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
    """Return the key of `build(*args, **kwargs)`, the same for positional and keyword arguments."""
    bound = inspect.signature(build).bind(*args, **kwargs)
    bound.apply_defaults()
    passed = dict(bound.arguments)
    device = _device(passed.pop("device", None), passed)
    pair = block_pair(passed.pop("block_size")) if "block_size" in passed else None
    arrays = {name: value for name, value in passed.items() if _is_array(value)}
    parameters = tuple((name, _by_value(name, value)) for name, value in passed.items() if name not in arrays)
    return BlockMaskKey(build, _digest(arrays), parameters, pair, device)


def _is_array(value: object) -> bool:
    """Return whether a value is keyed by its content: tensors, arrays, lists, tuples, nested or not."""
    return isinstance(value, list | tuple) or (hasattr(value, "__array__") and not isinstance(value, np.generic))


def _by_value(name: str, value: object) -> Hashable:
    """Return a number, string, None or the like; an object that hashes by identity would give stale masks."""
    if isinstance(value, np.generic):
        return cast(Hashable, value.item())
    singular = value is None or callable(value)
    if isinstance(value, Hashable) and (singular or type(value).__hash__ is not object.__hash__):
        return value
    raise TypeError(
        f"{name} is a {type(value).__name__}, which cannot be part of a cache key; pass a tensor, an array, a list or "
        "a plain value, or build this mask without the cache"
    )


def _device(device: object, passed: Mapping[str, object]) -> torch.device:
    """Return the device of the mask: `device`, or that of its lengths."""
    if device is None:
        device = next((value.device for value in passed.values() if isinstance(value, Tensor)), "cpu")
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
    """Return a value as a numpy array; integers of any width become int64, so that their digests agree."""
    if isinstance(value, list | tuple):
        value = [_host_array(item) if _is_array(item) else item for item in value]
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array


DEFAULT_MAX_ENTRIES = 8
DEFAULT_MAX_BYTES = 256 << 20  # 15 rows of 131,072 tokens
Arguments = ParamSpec("Arguments")


@dataclass(frozen=True, slots=True)
class BlockMaskStatistics:
    """Counters and size of a cache; `bytes + captured_bytes` never exceeds the bound."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int  # index tensors
    captured_bytes: int  # what the mask_mods close over


@dataclass(frozen=True, slots=True)
class _CachedMask:
    mask: BlockMask
    bytes: int
    captured_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.bytes + self.captured_bytes


class BlockMaskCache:
    """Masks by content: layout, kind, parameters, block size and device; never the dtype of the model.

        cache = BlockMaskCache()
        mask = cache.get(document_block_mask, seq_lens, 512, window=64)     # builds
        mask = cache.get(document_block_mask, seq_lens, 512, window=64)     # the same object

    Threads may share it. A copy or a pickle of it is an empty cache with the same bounds. Inside
    `torch.compile` a lookup always runs as plain Python, between two graphs.
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if max_entries < 1 or max_bytes < 1:
            raise ValueError(f"max_entries and max_bytes must be at least 1 (got {max_entries} and {max_bytes})")
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[BlockMaskKey, _CachedMask] = OrderedDict()
        self._hits = self._misses = self._evictions = 0

    @no_compile
    def get(
        self, build: Callable[Arguments, BlockMask], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> BlockMask:
        """Return the mask that `build(*args, **kwargs)` makes, built at most once while it is kept."""
        key = block_mask_key(build, args, kwargs)
        found = self._find(key)
        # Built outside the lock, so that other threads continue; if two build the same mask, the first one is kept.
        return found if found is not None else self._keep(key, build(*args, **kwargs))

    def clear(self) -> None:
        """Remove all masks; the counters continue."""
        with self._lock:
            self._entries.clear()

    @property
    def statistics(self) -> BlockMaskStatistics:
        with self._lock:
            held = self._entries.values()
            return BlockMaskStatistics(
                self._hits,
                self._misses,
                self._evictions,
                entries=len(held),
                bytes=sum(entry.bytes for entry in held),
                captured_bytes=sum(entry.captured_bytes for entry in held),
            )

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[type["BlockMaskCache"], tuple[int, int]]:
        return BlockMaskCache, (self.max_entries, self.max_bytes)

    def _find(self, key: BlockMaskKey) -> BlockMask | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return entry.mask

    def _keep(self, key: BlockMaskKey, mask: BlockMask) -> BlockMask:
        entry = _CachedMask(mask, index_bytes(mask), _size_bytes(captured_tensors(mask.mask_mod)))
        with self._lock:
            if key in self._entries:
                return self._entries[key].mask
            if entry.total_bytes <= self.max_bytes:
                self._make_room(entry.total_bytes)
                self._entries[key] = entry
        return mask

    def _make_room(self, needed: int) -> None:
        held = sum(entry.total_bytes for entry in self._entries.values())
        while self._entries and (len(self._entries) >= self.max_entries or held + needed > self.max_bytes):
            held -= self._entries.popitem(last=False)[1].total_bytes
            self._evictions += 1


def index_bytes(mask: BlockMask) -> int:
    """Return the bytes of the index tensors of a mask: 16 · (n + n²) per batch row for n square blocks."""
    return _size_bytes(tuple(value for value in vars(mask).values() if isinstance(value, Tensor)))


def _size_bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
