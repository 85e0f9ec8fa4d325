"""Attention over packed rows, three ways with one result.

    flex        FlexAttention: skips empty blocks; CUDA, or CPU without gradients
    dense       SDPA with a boolean mask: S² memory, any device, gradients
    documents   one SDPA call per document: memory of the longest document, any device, gradients

All take queries, keys and values `[rows, heads, S, head_dim]` and a block mask, whose `mask_mod` says who
sees whom.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from forebay.masks.documents import whole_lengths
from forebay.torch.graphs import compiled_flex_attention, outside_graphs
from forebay.torch.mask_mod import dense_mask

Backend = Literal["flex", "dense", "documents"]

DENSE_LIMIT_BYTES = 64 << 20


def backend_for(query: Tensor) -> Backend:
    """FlexAttention where it can run; else a dense mask while that is small, else document by document."""
    if flex_can_run(query):
        return "flex"
    rows, _, length, _ = query.shape
    return "dense" if rows * length * length <= DENSE_LIMIT_BYTES else "documents"


def flex_can_run(query: Tensor) -> bool:
    """On CUDA always; on a CPU with AVX2 while no gradient is asked for (torch has no backward there)."""
    if query.device.type == "cpu":
        return not query.requires_grad and torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return query.device.type == "cuda"


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, seq_lens: Tensor, backend: Backend
) -> Tensor:
    match backend:
        case "flex":
            return attend_flex(query, key, value, mask)
        case "dense":
            return attend_dense(query, key, value, mask)
        case "documents":
            return attend_documents(query, key, value, mask, seq_lens)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    attended: Tensor = compiled_flex_attention(query, key, value, block_mask=mask)
    return attended


def attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    rows = torch.arange(mask.shape[0], device=query.device)
    tokens = torch.arange(query.shape[2], device=query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=dense_mask(mask.mask_mod, rows, tokens, tokens))


@outside_graphs
def attend_documents(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, seq_lens: Tensor) -> Tensor:
    """Each document by itself, with its own corner of the mask."""
    whole = whole_lengths(seq_lens.cpu().numpy(), query.shape[2]).tolist()
    rows = [
        torch.cat([_attend_slice(query, key, value, mask, row, start, stop) for start, stop in _slices(lengths)], 2)
        for row, lengths in enumerate(whole)
    ]
    return torch.cat(rows)


def _attend_slice(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, row: int, start: int, stop: int
) -> Tensor:
    tokens = torch.arange(start, stop, device=query.device)
    seen = dense_mask(mask.mask_mod, torch.tensor([row], device=query.device), tokens, tokens)
    q, k, v = (tensor[row : row + 1, :, start:stop] for tensor in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _slices(lengths: list[int]) -> list[tuple[int, int]]:
    """Where each document lies in its row: [3, 2, 0] gives (0, 3), (3, 5)."""
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True) if length]
