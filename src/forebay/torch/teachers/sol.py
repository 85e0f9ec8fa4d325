"""Sol: the self-attention of a UNet as numbers and a map, averaged over layers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forebay.columns import Array
from forebay.errors import HookSilent
from forebay.teachers.protocol import Batch
from forebay.teachers.unet import Sol
from forebay.torch.teachers.arrays import to_numpy
from forebay.torch.teachers.attention_statistics import attention_received, attention_statistics
from forebay.torch.teachers.unet import Unet

SELF_ATTENTION = "attn1"


class LoadedSol:
    def __init__(self, teacher: Sol, device: str, dtype: str) -> None:
        self._teacher = teacher
        self._unet = Unet(teacher, device, dtype)
        self._seen: list[tuple[Tensor, Tensor]] = []  # per layer: statistics, map
        for name, part in self._unet.module.named_modules():
            if name.endswith(f".{SELF_ATTENTION}"):
                part.set_processor(Watching(self._note, teacher.most_positions))

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        self._seen.clear()
        self._unet.run(batch)
        if not self._seen:
            raise HookSilent(self._teacher.unet, f"*.{SELF_ATTENTION}", batch.ids[0], batch.first_moment)
        stats, maps = (torch.stack(found).mean(dim=0) for found in zip(*self._seen, strict=True))
        self._seen.clear()
        name = self._teacher.name
        return {f"{name}_stats": to_numpy(stats), f"{name}_spatial": to_numpy(maps)}

    def _note(self, attention: Tensor) -> None:
        self._seen.append((attention_statistics(attention), attention_received(attention, self._teacher.side)))


class Watching:
    """Self-attention computed so that its weights can be seen; the output is what it would have been."""

    def __init__(self, note: Any, most_positions: int) -> None:
        self._note = note
        self._most = most_positions

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, **_: object
    ) -> Tensor:
        query, key, value = (
            attn.head_to_batch_dim(projected(hidden_states)) for projected in (attn.to_q, attn.to_k, attn.to_v)
        )
        positions = hidden_states.shape[1]
        if positions > self._most:
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=attn.scale)
        else:
            weights = (query.float() @ key.float().transpose(1, 2) * attn.scale).softmax(dim=-1)
            self._note(weights.reshape(-1, attn.heads, positions, positions))
            mixed = weights.to(value.dtype) @ value
        out: Tensor = attn.to_out[1](attn.to_out[0](attn.batch_to_head_dim(mixed)))
        return out
