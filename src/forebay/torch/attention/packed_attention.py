"""Self-attention over packed rows: no token sees another document.

    flex    FlexAttention: skips empty blocks; CUDA, or CPU without gradients
    dense   SDPA with a boolean mask: S² memory, any device, gradients

Both give equal results. FlexAttention is compiled once per signature, each time as a separate function with static
shapes:

    (mask kind, shapes, dtype, device, block size, gradients)     →     one kernel

torch counts recompilations per function and rejects the ninth, and with dynamic shapes its C++ template does not
compile. New documents are not a new signature: they change contents, not shapes.
"""

import shutil
import warnings
from collections.abc import Callable, Hashable
from functools import cache, lru_cache
from types import FunctionType
from typing import Literal, Self, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._triton import has_triton

from forebay.masks.spans import DocumentKind
from forebay.torch.attention.block_mask import DEFAULT_BLOCK_SIZE, dense_mask, document_block_mask
from forebay.torch.attention.mask_cache import BlockMaskCache, no_compile

FlexAttention = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]
Backend = Literal["auto", "flex", "dense"]
MAX_KERNELS = 64
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CUDA_SMALLEST_HEAD_DIM = 16
CUDA_BLOCK = 128
_broken_flex: list[str] = []  # why "auto" no longer uses FlexAttention in this process


class PackedSelfAttention(nn.Module):
    """Multi-head self-attention over packed rows.

        attention = PackedSelfAttention(dim=512, n_head=8)
        y = attention(x, batch["seq_lens"])                  # x, y: (rows, sequence_length, dim)
        y = attention(x, mask=mask)                          # mask = document_block_mask(batch["seq_lens"], …)

    `backend="auto"` uses FlexAttention where it can run, and SDPA elsewhere. A kernel is compiled for each new shape of
    `x`, which takes seconds on a CPU: pass "dense" for rows of many lengths. Keep `seq_lens` on the CPU; the mask is
    made there and sent to the device of `x`. Layers with the same `cache` share masks. To compile a model as one graph,
    build the mask once per batch and pass it to all layers.
    """

    def __init__(
        self,
        dim: int,
        n_head: int,
        *,
        kind: DocumentKind = "causal",
        window: int | None = None,
        block_size: int = DEFAULT_BLOCK_SIZE,
        backend: Backend = "auto",
        cache: BlockMaskCache | None = None,
    ) -> None:
        super().__init__()
        if n_head < 1 or dim % n_head:
            raise ValueError(f"n_head must be at least 1 and divide dim {dim} (got {n_head})")
        if backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {', '.join(get_args(Backend))} (got {backend!r})")
        document_block_mask([[1]], 1, kind=kind, window=window, block_size=block_size)  # raises for wrong ones
        self.n_head, self.kind, self.window, self.block_size, self.backend = n_head, kind, window, block_size, backend
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.cache = BlockMaskCache() if cache is None else cache

    def forward(self, x: Tensor, seq_lens: Tensor | None = None, *, mask: BlockMask | None = None) -> Tensor:
        heads = split_heads(self.qkv(x), self.n_head)
        if mask is not None:
            attended = attend(*heads, mask, self.backend)
        else:  # the lookup breaks the graph anyway, and a separate kernel has static shapes
            attended = _attend_uncompiled(*heads, self._mask(x, seq_lens), self.backend)
        projected: Tensor = self.proj(join_heads(attended))
        return projected

    def _mask(self, x: Tensor, seq_lens: Tensor | None) -> BlockMask:
        if seq_lens is None:
            raise TypeError("pass seq_lens or mask")
        if len(seq_lens) != len(x):
            raise ValueError(f"x has {len(x)} rows but seq_lens has {len(seq_lens)}; pass the lengths of this batch")
        return self.cache.get(
            document_block_mask,
            seq_lens,
            x.shape[1],
            kind=self.kind,
            window=self.window,
            block_size=self.block_size,
            device=x.device,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # The model moves to another device: masks on the old one are not needed again.
        self.cache.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch ships it untyped
        return self


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, backend: Backend = "auto") -> Tensor:
    """Attend with a block mask to heads of the shape `[rows, heads, S, head_dim]`.

    Inside `torch.compile` this is part of the caller's graph.
    """
    _check_mask(query, mask)
    if backend == "dense" or (backend == "auto" and not flex_can_run(query, key, value, mask)):
        return attend_dense(query, key, value, mask)
    if torch.compiler.is_compiling():
        return _attend(query, key, value, mask)
    return (attend_flex if backend == "flex" else _attend_flex_or_dense)(query, key, value, mask)


_attend_uncompiled = no_compile(attend)


def attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    rows = torch.arange(mask.shape[0], device=query.device)
    tokens = torch.arange(query.shape[2], device=query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=dense_mask(mask.mask_mod, rows, tokens, tokens))


@no_compile
def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Run FlexAttention with the kernel of this signature; the `MAX_KERNELS` most recently used stay compiled."""
    return _kernel(flex_signature(query, key, value, mask))(query, key, value, mask)


def flex_signature(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Hashable:
    """Return the key of a compiled kernel. Layers of a model share kernels, and so do batches of one shape."""
    heads = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (query, key, value))
    mask_kind = getattr(mask.mask_mod, "__code__", mask.mask_mod)
    return mask_kind, mask.shape, mask.BLOCK_SIZE, heads, query.device, torch.is_grad_enabled()


@lru_cache(MAX_KERNELS)
def _kernel(signature: Hashable) -> FlexAttention:
    # A copy of the code, because torch stores compiled kernels with the code object. `fullgraph`, because torch may
    # otherwise silently run FlexAttention uncompiled, with S × S scores.
    copied = FunctionType(_attend.__code__.replace(), _attend.__globals__, _attend.__name__)
    return cast(FlexAttention, torch.compile(copied, fullgraph=True, dynamic=False))


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    attended: Tensor = flex_attention(query, key, value, block_mask=mask)
    return attended


@no_compile
def _attend_flex_or_dense(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Attend with FlexAttention; after a kernel failed to compile, warn once and use SDPA."""
    if not _broken_flex:
        try:
            return attend_flex(query, key, value, mask)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            _broken_flex.append(f"{type(error).__name__}: {error}")
            warnings.warn(
                f"FlexAttention did not compile ({_broken_flex[0][:200]}); using SDPA instead, with equal results but "
                "slower on long rows. Pass backend='flex' to see the whole error",
                RuntimeWarning,
                stacklevel=2,
            )
    return attend_dense(query, key, value, mask)


def flex_can_run(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> bool:
    """Return whether torch has a kernel for these heads and blocks on this device.

    cpu      no gradient of query, key or value (torch has no backward there), AVX2, and a C++ compiler
    cuda     Triton, heads of 16 or more, blocks of a multiple of 128 tokens
    both     float32, bfloat16 or float16
    """
    if query.dtype not in FLEX_DTYPES:
        return False
    if query.device.type == "cpu":
        needs_gradient = torch.is_grad_enabled() and any(heads.requires_grad for heads in (query, key, value))
        return not needs_gradient and _cpu_has_flex()
    return query.device.type == "cuda" and _cuda_has_flex() and fits_cuda(query.shape[-1], mask.BLOCK_SIZE)


def _constant(function: Callable[[], bool]) -> Callable[[], bool]:
    """Make a compiled caller evaluate a function once and store the answer in its graph."""
    constant = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]  # torch ships it untyped
    return cast(Callable[[], bool], constant)


@_constant
def _cpu_has_flex() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX") and has_cpp_compiler()


@_constant
def _cuda_has_flex() -> bool:
    return has_triton()


def fits_cuda(head_dim: int, block_size: tuple[int, int]) -> bool:
    return head_dim >= CUDA_SMALLEST_HEAD_DIM and not any(side % CUDA_BLOCK for side in block_size)


@cache
def has_cpp_compiler() -> bool:
    """Return whether the C++ compiler that torch would call is installed; checked once."""
    configured = torch._inductor.config.cpp.cxx
    names = [configured] if isinstance(configured, str) else configured
    return any(name is not None and shutil.which(name) is not None for name in names)


def split_heads(qkv: Tensor, n_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, S, 3 · dim) → three of (rows, n_head, S, head_dim)."""
    rows, length, width = qkv.shape
    query, key, value = qkv.view(rows, length, 3, n_head, width // (3 * n_head)).permute(2, 0, 3, 1, 4)
    return query, key, value


def join_heads(attended: Tensor) -> Tensor:
    return attended.transpose(1, 2).flatten(2)


def _check_mask(query: Tensor, mask: BlockMask) -> None:
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask is a {type(mask).__name__}; pass a BlockMask: document_block_mask(seq_lens, length)")
    rows, _, length, _ = query.shape
    if mask.shape[0] not in (1, rows) or mask.seq_lengths[0] != length:
        raise ValueError(
            f"query has {rows} rows of {length} tokens but the mask is for {mask.shape[0]} of {mask.seq_lengths[0]}; "
            "make the mask from the seq_lens of this batch"
        )
