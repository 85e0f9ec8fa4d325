"""Attention over packed rows by three backends with equal results.

    flex        FlexAttention: skips empty blocks; CUDA, or CPU without gradients
    dense       SDPA with a boolean mask: S² memory, any device, gradients
    documents   one SDPA call per document: memory of the longest document, any device, gradients

All take queries, keys and values `[rows, heads, S, head_dim]` and a block mask, whose `mask_mod` defines what each
query sees. FlexAttention is compiled once per signature, with static shapes, each time as a separate function:

    (mask kind, shapes, dtype, device, block size, gradients)     →     one kernel

torch counts recompilations per function and refuses the ninth, and with dynamic shapes its C++ template does not
compile at all. New documents are not a new signature: they change contents, not shapes.
"""

import shutil
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from itertools import accumulate
from types import FunctionType
from typing import Literal, ParamSpec, TypeVar, cast

import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._triton import has_triton

from forebay.masks.documents import whole_lengths
from forebay.masks.spans import DocumentKind
from forebay.torch.attention.block_mask import dense_mask

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FlexAttention = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]
MAX_KERNELS = 64
_kernels: OrderedDict[Hashable, FlexAttention] = OrderedDict()
_kernels_lock = threading.Lock()


def no_compile(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function run as plain Python even if its caller is compiled: the graph breaks here."""
    reason = "build the mask outside of the compiled model and pass it to the layers as mask="
    disabled = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]  # torch ships it untyped
    return cast(Callable[Arguments, Result], disabled)


def _constant(function: Callable[[], bool]) -> Callable[[], bool]:
    """Make a compiled caller ask once, and keep the answer in its graph."""
    constant = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]  # torch ships it untyped
    return cast(Callable[[], bool], constant)


@no_compile
def compiled_flex_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Run FlexAttention with the kernel of this signature; the `MAX_KERNELS` most recently used are kept."""
    return _kernel(flex_signature(query, key, value, mask))(query, key, value, mask)


def flex_signature(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Hashable:
    """Return what a kernel is compiled for. Layers of a model share kernels, and so do batches of one shape."""
    heads = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (query, key, value))
    mask_kind = getattr(mask.mask_mod, "__code__", mask.mask_mod)
    return mask_kind, mask.shape, mask.BLOCK_SIZE, heads, query.device, torch.is_grad_enabled()


def _kernel(signature: Hashable) -> FlexAttention:
    with _kernels_lock:
        kernel = _kernels.pop(signature, None) or _new_kernel()
        _kernels[signature] = kernel
        if len(_kernels) > MAX_KERNELS:
            _kernels.popitem(last=False)
    return kernel


def _new_kernel() -> FlexAttention:
    # A copy of the code, because torch stores compiled kernels with the code object. `fullgraph`, because torch may
    # otherwise silently run FlexAttention uncompiled, with S × S scores.
    copied = FunctionType(_attend.__code__.replace(), _attend.__globals__, _attend.__name__)
    compiled = torch.compile(copied, fullgraph=True, dynamic=False)
    return cast(FlexAttention, compiled)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    attended: Tensor = flex_attention(query, key, value, block_mask=mask)
    return attended


Backend = Literal["flex", "dense", "documents"]
DENSE_LIMIT_BYTES = 64 << 20
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CUDA_SMALLEST_HEAD_DIM = 16
CUDA_BLOCK = 128
_broken_flex: list[str] = []  # why `auto` no longer uses FlexAttention in this process


def backend_for(query: Tensor, mask: BlockMask, *beside: Tensor) -> Backend:
    """Return "flex" where it can run, else "dense" while the mask is small, else "documents".

    `beside` are key and value, which may need gradients even if the query does not.
    """
    if flex_can_run(query, mask, *beside) and not _broken_flex:
        return "flex"
    return sdpa_for(query)


def sdpa_for(query: Tensor) -> Backend:
    rows, _, length, _ = query.shape
    return "dense" if rows * length * length <= DENSE_LIMIT_BYTES else "documents"


def flex_can_run(query: Tensor, mask: BlockMask, *beside: Tensor) -> bool:
    """Return whether torch has a kernel for these heads and blocks on this device.

    cpu      no gradient of query, key or value (torch has no backward there), AVX2, and a C++ compiler
    cuda     Triton, heads of 16 or more, blocks of a multiple of 128 tokens
    both     float32, bfloat16 or float16
    """
    if query.dtype not in FLEX_DTYPES:
        return False
    if query.device.type == "cpu":
        asks_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, *beside))
        return not asks_gradient and _cpu_has_flex()
    return query.device.type == "cuda" and _cuda_has_flex() and fits_cuda(query.shape[-1], mask.BLOCK_SIZE)


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


@no_compile
def attend_auto(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    seq_lens: Tensor | ArrayLike,
    sees: DocumentKind | None = None,
) -> Tensor:
    """Attend with the best available backend. If FlexAttention fails to compile, warn and use SDPA from then on."""
    _check_mask(query, mask)
    attended = _flex_if_possible(query, key, value, mask)
    if attended is not None:
        return attended
    return attend_packed(query, key, value, mask, seq_lens, sdpa_for(query), sees)


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, backend: Literal["auto", "flex", "dense"]
) -> Tensor:
    """Attend with a mask that the caller built. Inside `torch.compile` this is a part of the caller's graph."""
    _check_mask(query, mask)
    if not torch.compiler.is_compiling():
        attended = _flex_if_possible(query, key, value, mask) if backend == "auto" else None
        return attended if attended is not None else attend_packed(query, key, value, mask, (), _masked(backend))
    if backend == "flex" or (backend == "auto" and flex_can_run(query, mask, key, value)):
        return _attend(query, key, value, mask)
    return attend_dense(query, key, value, mask)


def _masked(backend: Literal["auto", "flex", "dense"]) -> Backend:
    return "dense" if backend == "auto" else backend


def attend_causal(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, backend: Literal["auto", "flex", "dense"]
) -> Tensor:
    """Attend over rows without documents; SDPA has this mask built in, and makes no S² one."""
    if backend == "flex":
        return attend_flex(query, key, value, mask)
    attended = _flex_if_possible(query, key, value, mask) if backend == "auto" else None
    return attended if attended is not None else scaled_dot_product_attention(query, key, value, is_causal=True)


@no_compile
def _flex_if_possible(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor | None:
    if backend_for(query, mask, key, value) != "flex":
        return None
    try:
        return attend_flex(query, key, value, mask)
    except _compile_errors() as error:
        give_up_flex(error)
        return None


def _compile_errors() -> tuple[type[Exception], ...]:
    # Looked up only after an error: importing torch's compiler takes a second.
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit


def give_up_flex(error: Exception) -> None:
    _broken_flex.append(f"{type(error).__name__}: {error}")
    warnings.warn(
        f"FlexAttention did not compile ({type(error).__name__}: {str(error)[:200]}); using SDPA instead, with equal "
        "results but slower on long rows. Pass backend='flex' to see the whole error",
        RuntimeWarning,
        stacklevel=2,
    )


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    seq_lens: Tensor | ArrayLike,
    backend: Backend,
    sees: DocumentKind | None = None,
) -> Tensor:
    """Attend with one backend; `sees` as in `attend_documents`."""
    _check_mask(query, mask)
    match backend:
        case "flex":
            return attend_flex(query, key, value, mask)
        case "dense":
            return attend_dense(query, key, value, mask)
        case "documents":
            return attend_documents(query, key, value, mask, seq_lens, sees)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    return compiled_flex_attention(query, key, value, mask)


def attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    rows = torch.arange(mask.shape[0], device=query.device)
    tokens = torch.arange(query.shape[2], device=query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=dense_mask(mask.mask_mod, rows, tokens, tokens))


@no_compile
def attend_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    seq_lens: Tensor | ArrayLike,
    sees: DocumentKind | None = None,
) -> Tensor:
    """Attend to each document by itself.

    With `sees`, a document is causal or sees all of itself, and no mask is made; without, each uses its part of `mask`.
    """
    lengths = seq_lens.cpu().numpy() if isinstance(seq_lens, Tensor) else seq_lens
    whole = whole_lengths(lengths, query.shape[2]).tolist()
    if len(whole) != len(query):
        raise ValueError(f"query has {len(query)} rows but seq_lens has {len(whole)}; pass the lengths of this batch")
    rows = [
        torch.cat([_attend_slice(query, key, value, mask, row, place, sees) for place in _slices(documents)], 2)
        for row, documents in enumerate(whole)
    ]
    return torch.cat(rows)


def _attend_slice(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, row: int, place: slice, sees: DocumentKind | None
) -> Tensor:
    q, k, v = (tensor[row : row + 1, :, place] for tensor in (query, key, value))
    if sees is not None:
        return scaled_dot_product_attention(q, k, v, is_causal=sees == "causal")
    tokens = torch.arange(place.start, place.stop, device=query.device)
    seen = dense_mask(mask.mask_mod, torch.tensor([row], device=query.device), tokens, tokens)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _slices(lengths: list[int]) -> list[slice]:
    """Return the slice of each document in its row: [3, 2, 0] gives 0:3 and 3:5."""
    return [slice(stop - length, stop) for stop, length in zip(accumulate(lengths), lengths, strict=True) if length]


def _check_mask(query: Tensor, mask: BlockMask) -> None:
    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask is a {type(mask).__name__}; pass a BlockMask: document_block_mask(seq_lens, length)")
    rows, _, length, _ = query.shape
    if mask.shape[0] not in (1, rows) or mask.seq_lengths[0] != length:
        raise ValueError(
            f"query has {rows} rows of {length} tokens but the mask is for {mask.shape[0]} of {mask.seq_lengths[0]}; "
            "make the mask from the seq_lens of this batch"
        )
