"""FlexAttention block masks, made directly from document lengths and rectangles.

`create_block_mask` evaluates S × S pairs of tokens to find the empty blocks; here they follow from the lengths. The
result is equal on all four index pairs, takes O(batch · blocks) work besides the index tensors, and no S² memory.

All return torch's own `BlockMask`, which `torch.compile` knows. It does not pickle, and its `to` leaves the tensors
that `mask_mod` closes over: send `seq_lens` through workers, and build the mask next to the model, with `device=`.

Each `mask_mod` closes over tensors of a fixed shape only, so that new documents, another window or another prefix are
new tensor contents, and `torch.compile` keeps its kernel.

Packed rows for models of `transformers`: the arguments with which each of their attentions keeps documents apart.

    attention             argument                                    where
    "flex_attention"      attention_mask: a BlockMask                 CUDA; CPU without gradients
    "sdpa"                attention_mask: bool [rows, 1, S, S]        any device; S² memory
    "flash_attention_2"   cu_seq_lens_q, max_length_q and so on       CUDA

`position_ids` alone are not enough for flash attention: with more than one row in a batch, `transformers` 5 attends
over whole rows, without a warning.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from forebay.masks.documents import cu_seqlens, positions
from forebay.masks.rectangle import IGNORE_THRESHOLD, Size, token_ignore_mask
from forebay.masks.spans import (
    BlockList,
    BlockLists,
    DocumentKind,
    Spans,
    block_pair,
    causal_spans,
    document_spans,
    key_block_lists,
    prefix_spans,
    span_block_lists,
    windowed,
)

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal_mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Keys up to the query: rows without documents."""
    return kv <= q


def causal_span_mask_mod(first: Tensor) -> MaskMod:
    """Keys from `first[b, q]` up to the query itself: causal documents, with or without a window."""

    def causal_span(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= q) & (kv >= first[b, q])

    return causal_span


def span_mask_mod(first: Tensor, stop: Tensor) -> MaskMod:
    """Keys from `first[b, q]` to before `stop[b, q]`: bidirectional documents and prefix-LM."""

    def span(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv >= first[b, q]) & (kv < stop[b, q])

    return span


def key_mask_mod(keep: Tensor) -> MaskMod:
    """The keys with `keep[b, kv]`, for every query: padding masks of images."""

    def unpadded_key(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return keep[b, kv]

    return unpadded_key


def dense_mask(mask_mod: MaskMod, rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the mask `[rows, 1, queries, keys]`, True = sees."""
    head = rows.new_zeros(())
    mask = mask_mod(rows[:, None, None, None], head, queries[:, None], keys)
    # not `len`, which would make the batch of an exported program a constant
    return mask.expand(rows.shape[0], 1, queries.shape[0], keys.shape[0])


DEFAULT_BLOCK_SIZE = 128
Device = torch.device | str | None


def document_block_mask(
    seq_lens: Tensor | ArrayLike,
    sequence_length: int | None = None,
    *,
    kind: DocumentKind = "causal",
    window: int | None = None,
    block_size: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    device: Device = None,
) -> BlockMask:
    """Return the mask of packed rows: no token sees another document, and padding is a separate document.

    seq_lens [[3, 2]], sequence_length 6      a a a b b .
                                           a  1 . . . . .
                                           a  1 1 . . . .
                                           a  1 1 1 . . .
                                           b  . . . 1 . .
                                           b  . . . 1 1 .
                                           .  . . . . . 1

    `window` keeps the keys fewer than that many tokens away. `sequence_length` defaults to the length of the fullest
    row, `device` to that of `seq_lens`.
    """
    lengths, device = _on_host(seq_lens, device)
    spans = document_spans(lengths, sequence_length, kind)
    if window is not None:
        spans = windowed(spans, window)
    first = _tensor(spans.first, device)
    mask_mod = causal_span_mask_mod(first) if kind == "causal" else span_mask_mod(first, _tensor(spans.stop, device))
    return _span_block_mask(spans, mask_mod, block_size, device)


def prefix_block_mask(
    seq_lens: Tensor | ArrayLike,
    prefix_lens: Tensor | ArrayLike,
    sequence_length: int | None = None,
    *,
    window: int | None = None,
    block_size: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    device: Device = None,
) -> BlockMask:
    """Return the prefix-LM mask of packed rows: a document sees its first `prefix_lens` tokens, the rest is causal.

    seq_lens [[4, 1]], prefix_lens [[2, 0]]      1 1 . . .
                                                 1 1 . . .
                                                 1 1 1 . .
                                                 1 1 1 1 .
                                                 . . . . 1
    """
    lengths, device = _on_host(seq_lens, device)
    spans = prefix_spans(lengths, _on_host(prefix_lens, device)[0], sequence_length)
    if window is not None:
        spans = windowed(spans, window)
    mask_mod = span_mask_mod(_tensor(spans.first, device), _tensor(spans.stop, device))
    return _span_block_mask(spans, mask_mod, block_size, device)


def causal_block_mask(
    sequence_length: int,
    *,
    block_size: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    device: Device = None,
) -> BlockMask:
    """Return the causal mask of rows without documents; one mask serves every batch size."""
    return _span_block_mask(causal_spans(sequence_length), causal_mask_mod, block_size, device)


def image_block_mask(
    rectangles: Tensor | ArrayLike,
    size: Size,
    patch: int,
    *,
    threshold: float = IGNORE_THRESHOLD,
    leading_tokens: int = 1,
    block_size: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    device: Device = None,
) -> BlockMask:
    """Return the key mask of letterboxed images: no token sees a patch of padding; `leading_tokens` are always seen.

    CLS and a 2 × 2 grid whose lower patches are padding      c 0 1 . .
                                                              1 1 1 . .
                                                              1 1 1 . .     the same for every query
    """
    boxes, device = _on_host(rectangles, device)
    ignored = token_ignore_mask(boxes, size, patch, threshold).reshape(len(boxes), -1)
    keep = np.pad(~ignored, ((0, 0), (leading_tokens, 0)), constant_values=True)
    pair = block_pair(block_size)
    return _block_mask(key_block_lists(keep, pair), key_mask_mod(_tensor(keep, device)), keep.shape[1], pair, device)


def _span_block_mask(spans: Spans, mask_mod: MaskMod, block_size: int | tuple[int, int], device: Device) -> BlockMask:
    pair = block_pair(block_size)
    return _block_mask(span_block_lists(spans, pair), mask_mod, spans.sequence_length, pair, device)


def _block_mask(
    lists: BlockLists, mask_mod: MaskMod, length: int, block_size: tuple[int, int], device: Device
) -> BlockMask:
    kv, full_kv = _with_heads(lists.kv, device), _with_heads(lists.full_kv, device)
    q, full_q = _with_heads(lists.q, device), _with_heads(lists.full_q, device)
    return BlockMask((length, length), *kv, *full_kv, *q, *full_q, BLOCK_SIZE=block_size, mask_mod=mask_mod)


def _with_heads(blocks: BlockList, device: Device) -> tuple[Tensor, Tensor]:
    """Return count and indices with an axis of one head, which is used for all heads."""
    return _tensor(blocks.count, device)[:, None], _tensor(blocks.indices, device)[:, None]


def _on_host(values: Tensor | ArrayLike, device: Device) -> tuple[NDArray[np.generic], torch.device]:
    """Return values as numpy, and the device of the mask: `device`, or that of the values."""
    if isinstance(values, Tensor):
        return values.cpu().numpy(), torch.device(device) if device is not None else values.device
    return np.asarray(values), torch.device(device) if device is not None else torch.device("cpu")


def _tensor(array: NDArray[np.generic], device: Device) -> Tensor:
    return torch.from_numpy(array).to(device)


Attention = Literal["flex_attention", "sdpa", "eager", "flash_attention_2", "flash_attention_3"]


def transformers_inputs(batch: Mapping[str, Any], attention: Attention, *, window: int | None = None) -> dict[str, Any]:
    """Return the arguments of a causal model of `transformers` for a batch of packed rows.

        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        loader = Loader(cache, global_batch_size=8, collate=TokenBatch(cache, labels="unshifted"))
        for batch in loader:
            loss = model(**transformers_inputs(batch, "sdpa"), labels=batch["labels"]).loss

    `attention` is the `attn_implementation` of the model. Pass `window` for a model with a sliding window, which a mask
    replaces; flash and eager attention apply that of the model. The tensors are on the device of the tokens.
    """
    if attention not in get_args(Attention):
        raise ValueError(f"attention must be one of {', '.join(get_args(Attention))} (got {attention!r})")
    tokens, lengths = batch["tokens"], np.asarray(batch["seq_lens"].cpu())
    if tokens.dtype in (torch.uint16, torch.uint32):
        raise TypeError(f"tokens are {tokens.dtype}, as on_device=True leaves them; call derive_on_device(batch) first")
    rows, length = tokens.shape
    position_ids = torch.from_numpy(positions(lengths, length)).to(tokens.device, torch.int64)
    inputs: dict[str, Any] = {"input_ids": tokens, "position_ids": position_ids, "use_cache": False}
    if attention == "eager":
        return inputs  # transformers finds the documents in the positions
    if attention not in ("flex_attention", "sdpa"):
        return inputs | _segments(lengths, length, tokens.device)
    mask = document_block_mask(lengths, length, window=window, device=tokens.device)
    if attention == "flex_attention":
        return inputs | {"attention_mask": mask}
    row, at = (torch.arange(count, device=tokens.device) for count in (rows, length))
    return inputs | {"attention_mask": dense_mask(mask.mask_mod, row, at, at)}


def _segments(lengths: np.ndarray[Any, Any], length: int, device: torch.device) -> dict[str, Tensor | int]:
    starts = cu_seqlens(lengths, length)
    offsets, longest = torch.from_numpy(starts).to(device), int(np.diff(starts).max(initial=0))
    return {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": longest, "max_length_k": longest}
