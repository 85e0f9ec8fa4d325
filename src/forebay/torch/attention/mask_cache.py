"""A small cache of block masks, shared by all layers that see the same batch.

Bounded by entries and by bytes, because masks grow with the square of the length. With blocks of 128 tokens and
n = ⌈S/128⌉, the index tensors of one batch row take 16 · (n + n²) bytes:

    tokens         1,024     8,192      32,768      131,072
    bytes          1,152    66,560   1,052,672   16,793,600

The tensors that `mask_mod` closes over (4 bytes per token for causal documents) count as well. The least recently used
mask is evicted first; a mask larger than the limit is returned but not cached.
"""

import hashlib
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from forebay.fields import checked_whole
from forebay.masks.spans import block_pair

DEFAULT_MAX_ENTRIES = 8
DEFAULT_MAX_BYTES = 256 << 20  # 15 rows of 131,072 tokens
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def no_compile(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function run as plain Python even if its caller is compiled: the graph breaks here."""
    reason = "build the mask outside of the compiled model and pass it to the layers as mask="
    disabled = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]  # torch ships it untyped
    return cast(Callable[Arguments, Result], disabled)


@dataclass(frozen=True, slots=True)
class BlockMaskStatistics:
    """Counters and size of a cache; `bytes + captured_bytes` never exceeds `max_bytes`."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int  # index tensors
    captured_bytes: int  # tensors that the mask_mods close over

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


class BlockMaskCache:
    """Block masks by document lengths, mask parameters and device. The dtype of the model is not part of the key.

        cache = BlockMaskCache()
        mask = cache.get(document_block_mask, seq_lens, 512, window=64)     # builds
        mask = cache.get(document_block_mask, seq_lens, 512, window=64)     # the same object

    Threads may share it. A copy or a pickle is an empty cache with the same limits. Inside `torch.compile` a lookup
    runs as plain Python, between two graphs.
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        if checked_whole("max_entries", max_entries) < 1 or checked_whole("max_bytes", max_bytes) < 1:
            raise ValueError(f"max_entries and max_bytes must be at least 1 (got {max_entries} and {max_bytes})")
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self._lock = threading.Lock()
        self._masks: OrderedDict[Hashable, BlockMask] = OrderedDict()
        self._hits = self._misses = self._evictions = 0

    @no_compile
    def get(
        self, build: Callable[Arguments, BlockMask], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> BlockMask:
        """Return the mask that `build(*args, **kwargs)` makes, built once while it is cached."""
        key = mask_key(build, *args, **kwargs)
        with self._lock:
            if key in self._masks:
                self._hits += 1
                self._masks.move_to_end(key)
                return self._masks[key]
            self._misses += 1
        # Built outside the lock: other threads continue, and of two that build the same mask the first is cached.
        return self._add(key, build(*args, **kwargs))

    def clear(self) -> None:
        """Remove all masks; the counters continue."""
        with self._lock:
            self._masks.clear()

    @property
    def statistics(self) -> BlockMaskStatistics:
        with self._lock:
            masks = self._masks.values()
            return BlockMaskStatistics(
                self._hits,
                self._misses,
                self._evictions,
                entries=len(masks),
                bytes=sum(map(index_bytes, masks)),
                captured_bytes=sum(map(captured_bytes, masks)),
            )

    def __len__(self) -> int:
        return len(self._masks)

    def __repr__(self) -> str:
        numbers = self.statistics
        return f"BlockMaskCache({numbers.entries} masks, {numbers.bytes:,} bytes, hit rate {numbers.hit_rate:.0%})"

    def __reduce__(self) -> tuple[type["BlockMaskCache"], tuple[int, int]]:
        return BlockMaskCache, (self.max_entries, self.max_bytes)

    def _add(self, key: Hashable, mask: BlockMask) -> BlockMask:
        with self._lock:
            if key in self._masks:
                return self._masks[key]
            if _total_bytes(mask) <= self.max_bytes:
                self._evict_for(_total_bytes(mask))
                self._masks[key] = mask
        return mask

    def _evict_for(self, needed: int) -> None:
        total = sum(map(_total_bytes, self._masks.values()))
        while self._masks and (len(self._masks) >= self.max_entries or total + needed > self.max_bytes):
            total -= _total_bytes(self._masks.popitem(last=False)[1])
            self._evictions += 1


def mask_key(build: Callable[..., BlockMask], *args: object, **kwargs: object) -> Hashable:
    """Return the key of `build(*args, **kwargs)`, equal for positional and keyword arguments."""
    bound = inspect.signature(build).bind(*args, **kwargs)
    bound.apply_defaults()
    values = dict(bound.arguments)
    device = _device(values.pop("device", None), values.values())
    if "block_size" in values:
        values["block_size"] = block_pair(values["block_size"])
    return build, device, tuple((name, _by_content(name, value)) for name, value in values.items())


def _by_content(name: str, value: object) -> Hashable:
    """Return arrays as a digest and other values as they are; an object hashed by identity would give stale masks."""
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        array = _host_array(value)
        return array.shape, hashlib.blake2b(array.tobytes(), digest_size=16).digest()
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{name} must be a tensor, an array, a list or a plain value (got {type(value).__name__})")


def _host_array(value: object) -> NDArray[np.generic]:
    """Return an array; integers of any width become int64, so that equal lengths have equal digests."""
    if isinstance(value, list | tuple):
        value = [_host_array(item) if isinstance(item, list | tuple | Tensor) else item for item in value]
    array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
    return array.astype(np.int64) if np.issubdtype(array.dtype, np.integer) else array


def _device(device: object, values: Iterable[object]) -> torch.device:
    """Return the device of the mask: `device`, or that of its lengths."""
    if device is None:
        device = next((value.device for value in values if isinstance(value, Tensor)), "cpu")
    chosen = torch.device(str(device))
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def index_bytes(mask: BlockMask) -> int:
    """Return the bytes of the index tensors of a mask: 16 · (n + n²) per batch row for n square blocks."""
    return sum(value.nbytes for value in vars(mask).values() if isinstance(value, Tensor))


def captured_bytes(mask: BlockMask) -> int:
    """Return the bytes of the tensors that `mask_mod` closes over."""
    contents = [cell.cell_contents for cell in getattr(mask.mask_mod, "__closure__", None) or ()]
    return sum(value.nbytes for value in contents if isinstance(value, Tensor))


def _total_bytes(mask: BlockMask) -> int:
    return index_bytes(mask) + captured_bytes(mask)
