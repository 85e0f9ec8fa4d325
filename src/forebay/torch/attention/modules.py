"""Attention modules that mask documents and padding.

    PackedSelfAttention    packed rows: no token sees another document
    SeedAttention          a causal residual block that is initialised to the identity
    MaskedViTBlock         letterboxed images: no token sees a patch of padding; CLS is always seen

Each takes the mask of the batch as `mask=`, built once and passed to all layers: then a model compiles as one graph
(`fullgraph=True`). Without it a layer builds the mask itself, between two graphs; layers share masks if they are made
with the same `BlockMaskCache`.

A small cache of block masks, shared by all layers that see the same batch.

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
from typing import Literal, ParamSpec, Self, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from forebay.masks.spans import DocumentKind, block_pair
from forebay.torch.attention.backends import (
    Backend,
    attend_auto,
    attend_causal,
    attend_documents,
    attend_masked,
    attend_packed,
    no_compile,
)
from forebay.torch.attention.block_mask import (
    DEFAULT_BLOCK_SIZE,
    captured_tensors,
    causal_block_mask,
    document_block_mask,
)


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


class PackedSelfAttention(nn.Module):
    """Multi-head self-attention over packed rows.

        attention = PackedSelfAttention(dim=512, n_head=8)
        y = attention(x, batch["seq_lens"])                  # x, y: (rows, sequence_length, dim)
        y = attention(x, mask=mask)                          # mask = document_block_mask(batch["seq_lens"], …)

    `backend="auto"` uses FlexAttention where it can run, and SDPA elsewhere, with equal results. A kernel is compiled
    for each new shape of `x`, some seconds on a CPU: for rows of many lengths pass "dense" or "documents". Keep
    `seq_lens` on the CPU: the mask is made from it there, and sent to the device of `x`.
    """

    def __init__(
        self,
        dim: int,
        n_head: int,
        *,
        kind: DocumentKind = "causal",
        window: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        backend: Literal["auto"] | Backend = "auto",
        cache: BlockMaskCache | None = None,
    ) -> None:
        super().__init__()
        self.n_head = _checked_heads(dim, n_head)
        _check_backend(backend, ("auto", *get_args(Backend)))
        self.kind, self.window, self.block_size, self.backend = kind, window, block_size, backend
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.cache = cache if cache is not None else BlockMaskCache()

    def forward(self, x: Tensor, seq_lens: Tensor | None = None, *, mask: BlockMask | None = None) -> Tensor:
        query, key, value = _split_heads(self.qkv(x), self.n_head)
        if mask is None:
            lengths = _lengths_of(x, seq_lens)
            made = self._mask(lengths, x.shape[1], x.device)
            if self.backend == "auto":
                attended = attend_auto(query, key, value, made, lengths, self._sees())
            else:
                attended = attend_packed(query, key, value, made, lengths, self.backend, self._sees())
        elif self.backend == "documents":
            attended = attend_documents(query, key, value, mask, _lengths_of(x, seq_lens))
        else:
            attended = attend_masked(query, key, value, mask, self.backend)
        projected: Tensor = self.proj(_join_heads(attended))
        return projected

    def _sees(self) -> DocumentKind | None:
        """Return what a document sees of itself if that needs no mask; a window does."""
        return self.kind if self.window is None else None

    def _mask(self, seq_lens: Tensor, sequence_length: int, device: torch.device) -> BlockMask:
        return self.cache.get(
            document_block_mask,
            seq_lens,
            sequence_length,
            kind=self.kind,
            window=self.window,
            block_size=self.block_size,
            device=device,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The model moves to another device or dtype: masks on the old device are not needed again.
        self.cache.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return self


class SeedAttention(nn.Module):
    """A causal residual attention block to add to a trained model.

    Its output projection is initialised to zero, so that the block starts as the identity. Sequences have no documents;
    one mask per length serves every batch size and dtype.
    """

    def __init__(
        self,
        dim: int,
        n_head: int,
        *,
        backend: Literal["auto", "flex", "dense"] = "auto",
        cache: BlockMaskCache | None = None,
    ) -> None:
        super().__init__()
        self.n_head = _checked_heads(dim, n_head)
        _check_backend(backend, ("auto", "flex", "dense"))
        self.backend = backend
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)
        self.cache = cache if cache is not None else BlockMaskCache(max_entries=8)

    def forward(self, x: Tensor, *, mask: BlockMask | None = None) -> Tensor:
        query, key, value = _split_heads(self.qkv(x), self.n_head)
        if mask is not None:
            attended = attend_masked(query, key, value, mask, self.backend)
        else:
            mask = self.cache.get(causal_block_mask, x.shape[1], device=x.device)
            attended = attend_causal(query, key, value, mask, self.backend)
        residual: Tensor = self.proj(_join_heads(attended))
        return x + residual

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.cache.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return self


class MaskedViTBlock(nn.Module):
    """A pre-norm transformer block for the tokens of letterboxed images.

        ignore = torch.from_numpy(token_ignore_mask(rectangles, (224, 224), 16)).flatten(1)
        y = block(x, ignore)             # x, y: (images, 1 + tokens, dim), x[:, 0] is CLS
        y = block(x, mask=mask)          # mask = image_block_mask(rectangles, (224, 224), 16)

    tokens     c 0 1 2 3
    ignore       . . 1 1      True = padding, as everywhere
    seen       1 1 1 . .      by every query; CLS always
    """

    def __init__(self, dim: int, n_head: int, *, mlp_ratio: float = 4.0) -> None:
        super().__init__()
        self.n_head = _checked_heads(dim, n_head)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        hidden = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor, ignore: Tensor | None = None, *, mask: BlockMask | None = None) -> Tensor:
        heads = _split_heads(self.qkv(self.norm1(x)), self.n_head)
        if mask is not None:
            attended = attend_masked(*heads, mask, "auto")
        elif ignore is not None:
            seen = kept_with_cls(ignore, images=x.shape[0], tokens=x.shape[1])
            attended = scaled_dot_product_attention(*heads, attn_mask=seen[:, None, None, :])
        else:
            raise TypeError("pass the ignored tokens of these images, or their mask")
        x = x + self.proj(_join_heads(attended))
        residual: Tensor = self.mlp(self.norm2(x))
        return x + residual


def kept_with_cls(ignore: Tensor, images: int, tokens: int) -> Tensor:
    """Return the keys that are seen, `[images, 1 + patches]`: CLS, and each patch that is not ignored."""
    if ignore.dtype != torch.bool or ignore.shape != (images, tokens - 1):
        raise ValueError(
            f"ignore must be bool [{images}, {tokens - 1}] for {images} images of {tokens} tokens with CLS "
            f"(got {ignore.dtype} {tuple(ignore.shape)}); flatten the token_ignore_mask of these images"
        )
    cls = ignore.new_ones(len(ignore), 1)
    return torch.cat((cls, ~ignore), dim=1)


def _lengths_of(x: Tensor, seq_lens: Tensor | None) -> Tensor:
    if seq_lens is None:
        raise TypeError("pass seq_lens, or, with a backend other than 'documents', the mask of this batch")
    if len(seq_lens) != len(x):
        raise ValueError(f"x has {len(x)} rows but seq_lens has {len(seq_lens)}; pass the lengths of this batch")
    return seq_lens


def _check_backend(backend: str, known: tuple[str, ...]) -> None:
    if backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)} (got {backend!r})")


def _split_heads(qkv: Tensor, n_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, S, 3 · dim) → three of (rows, n_head, S, head_dim)."""
    rows, length, width = qkv.shape
    query, key, value = qkv.view(rows, length, 3, n_head, width // (3 * n_head)).permute(2, 0, 3, 1, 4)
    return query, key, value


def _join_heads(attended: Tensor) -> Tensor:
    return attended.transpose(1, 2).flatten(2)


def _checked_heads(dim: int, n_head: int) -> int:
    if n_head < 1 or dim % n_head:
        raise ValueError(f"n_head must be at least 1 and divide dim {dim} (got {n_head})")
    return n_head
