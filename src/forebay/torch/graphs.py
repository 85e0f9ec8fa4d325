"""What is compiled, and what stays outside of compiled graphs.

FlexAttention is compiled once per signature, with static shapes, each time as a function of its own:

    (mask kind, shapes, dtype, device, block size, gradients)     →     one kernel

torch counts recompilations per function and refuses the ninth; and with shapes left dynamic its C++ template
does not compile at all. New documents are no new signature: they are contents, not shapes.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
FlexAttention = Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]

MAX_KERNELS = 64

_kernels: OrderedDict[Hashable, FlexAttention] = OrderedDict()
_kernels_lock = threading.Lock()


def outside_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run as plain Python even when the caller is compiled: its graph ends here, a new one starts after."""
    disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch ships it untyped
    return cast(Callable[Arguments, Result], disabled)


@outside_graphs
def compiled_flex_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """FlexAttention by the kernel of this signature; the least recently used of `MAX_KERNELS` leaves first."""
    return _kernel(flex_signature(query, key, value, mask))(query, key, value, mask)


def flex_signature(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Hashable:
    """All that a kernel is made for. Two layers of one model share theirs, and so do all batches of one shape."""
    heads = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (query, key, value))
    who_sees_whom = getattr(mask.mask_mod, "__code__", mask.mask_mod)
    return who_sees_whom, mask.shape, mask.BLOCK_SIZE, heads, query.device, torch.is_grad_enabled()


def _kernel(signature: Hashable) -> FlexAttention:
    with _kernels_lock:
        kernel = _kernels.pop(signature, None) or _new_kernel()
        _kernels[signature] = kernel
        if len(_kernels) > MAX_KERNELS:
            _kernels.popitem(last=False)
    return kernel


def _new_kernel() -> FlexAttention:
    # A copy of the code, because torch keeps what it compiled with the code object. `fullgraph`, because
    # otherwise torch may run FlexAttention uncompiled without a word, S × S scores and all.
    copied = FunctionType(_attend.__code__.replace(), _attend.__globals__, _attend.__name__)
    compiled = torch.compile(copied, fullgraph=True, dynamic=False)
    return cast(FlexAttention, compiled)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    attended: Tensor = flex_attention(query, key, value, block_mask=mask)
    return attended
