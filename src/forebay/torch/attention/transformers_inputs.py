"""Packed rows for models of `transformers`: the arguments with which each of their attentions keeps documents apart.

    attention             argument                                    where
    "flex_attention"      attention_mask: a BlockMask                 CUDA; CPU without gradients
    "sdpa"                attention_mask: bool [rows, 1, S, S]        any device; S² memory
    "flash_attention_2"   cu_seq_lens_q, max_length_q and so on       CUDA

`position_ids` alone are not enough for flash attention: with more than one row in a batch, `transformers` 5 attends
over whole rows, without a warning.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from forebay.masks.documents import cu_seqlens, positions
from forebay.torch.attention.block_mask import dense_mask, document_block_mask

Attention = Literal["flex_attention", "sdpa", "flash_attention_2", "flash_attention_3"]


def transformers_inputs(batch: Mapping[str, Any], attention: Attention, *, window: int | None = None) -> dict[str, Any]:
    """Return the arguments of a causal model of `transformers` for a batch of packed rows.

        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        loader = Loader(cache, global_batch_size=8, labels="unshifted")
        for batch in loader:
            loss = model(**transformers_inputs(batch, "sdpa"), labels=batch["labels"]).loss

    `attention` is the `attn_implementation` of the model. Pass `window` for a model with a sliding window, which a mask
    replaces; flash attention applies that of the model. The tensors are on the device of the tokens.
    """
    if attention not in get_args(Attention):
        raise ValueError(f"attention must be one of {', '.join(get_args(Attention))} (got {attention!r})")
    tokens, lengths = batch["tokens"], np.asarray(batch["seq_lens"].cpu())
    rows, length = tokens.shape
    place = torch.from_numpy(positions(lengths, length)).to(tokens.device, torch.int64)
    inputs: dict[str, Any] = {"input_ids": tokens, "position_ids": place, "use_cache": False}
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
