"""A small cache of block masks, shared by all layers that see the same batch.

Bounded by entries *and* by bytes, because masks grow with the square of the length. With blocks of 128 tokens
and n = ⌈S/128⌉ the index tensors of one batch row take 16 · (n + n²) bytes:

    tokens         1,024     8,192      32,768      131,072
    bytes          1,152    66,560   1,052,672   16,793,600

What `mask_mod` closes over (4 bytes per token for causal documents) is counted beside that, and the bound is
on both together. The least recently used mask leaves first; a mask larger than the whole bound is handed out
but not kept.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from forebay.torch.block_mask_key import BlockMaskKey, block_mask_key
from forebay.torch.graphs import outside_graphs
from forebay.torch.mask_mod import captured_tensors

DEFAULT_MAX_ENTRIES = 8
DEFAULT_MAX_BYTES = 256 << 20  # 15 rows of 131,072 tokens

Arguments = ParamSpec("Arguments")


@dataclass(frozen=True, slots=True)
class BlockMaskStatistics:
    """What a cache has done and what it holds; `bytes + captured_bytes` never passes the bound."""

    hits: int
    misses: int
    evictions: int
    entries: int
    bytes: int  # index tensors, as in the table above
    captured_bytes: int  # what the mask_mods close over


@dataclass(frozen=True, slots=True)
class _Entry:
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
            raise ValueError(f"a cache of {max_entries} entries and {max_bytes} bytes holds nothing; pass 1 or more")
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[BlockMaskKey, _Entry] = OrderedDict()
        self._hits = self._misses = self._evictions = 0

    @outside_graphs
    def get(
        self, build: Callable[Arguments, BlockMask], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> BlockMask:
        """The mask that `build(*args, **kwargs)` makes, built at most once while it is kept."""
        key = block_mask_key(build, args, kwargs)
        found = self._find(key)
        # Built outside the lock: other threads go on, and whoever is second takes the first one's mask.
        return found if found is not None else self._keep(key, build(*args, **kwargs))

    def clear(self) -> None:
        """Forget all masks; the counters go on."""
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
        entry = _Entry(mask, index_bytes(mask), _size_bytes(captured_tensors(mask.mask_mod)))
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
    """Bytes of the index tensors of a mask: 16 · (n + n²) per batch row for n square blocks."""
    return _size_bytes(tuple(value for value in vars(mask).values() if isinstance(value, Tensor)))


def _size_bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
