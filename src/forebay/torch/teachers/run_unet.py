"""Run a UNet: the output of its middle block (Lune), and its self-attention as statistics and a map (Sol).

Attention is p[query, key] ≥ 0 with sum 1 over keys; positions are on a grid of side s, N = s².
"""

from collections.abc import Mapping
from functools import lru_cache
from math import isqrt, log
from typing import Any

import numpy as np
import torch
from diffusers import UNet2DConditionModel
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from forebay.columns import Array
from forebay.errors import HookSilent, TeacherUnusable
from forebay.teachers.built_in import Lune, Sol, UnetTeacher
from forebay.teachers.protocol import Batch
from forebay.torch.batches import to_device, to_numpy
from forebay.torch.teachers.loading import load_model
from forebay.torch.teachers.run_hook import Capture

TIMESTEPS = 1000.0


class Unet:
    """The UNet of a Lune or Sol teacher."""

    def __init__(self, teacher: UnetTeacher, device: str, dtype: str) -> None:
        self.teacher = teacher
        self.module: Any = load_model(UNet2DConditionModel, teacher.unet, teacher.weights, device, dtype)
        self._like = next(self.module.parameters())

    def run(self, batch: Batch) -> None:
        """Run one forward: every sample's latents at its t, with its text."""
        self.module(
            to_device(self._latents(batch), self._like),
            torch.from_numpy(self._noise_share(batch) * np.float32(TIMESTEPS)).to(self._like.device),
            encoder_hidden_states=to_device(batch.array(self.teacher.text), self._like),
            return_dict=False,
        )

    def _latents(self, batch: Batch) -> Array:
        channels, *sides = self.teacher.latent_shape
        if self.teacher.noise == "pure":
            return batch.noise((channels, *sides))
        data = batch.array(self.teacher.latents).astype(np.float32)
        if data.shape[1] != channels:
            raise TeacherUnusable(
                self.teacher.unet,
                f"it takes latents of {channels} channels, and '{self.teacher.latents}' has {data.shape[1]}",
            )
        share = self._noise_share(batch).reshape(-1, 1, 1, 1)
        mixed: Array = (1 - share) * data + share * batch.noise(data.shape[1:])
        return mixed

    def _noise_share(self, batch: Batch) -> NDArray[np.float32]:
        """Return the share of noise in each sample, 0 to 1. A UNet's timestep 0 is data and 1000 is noise."""
        assert batch.t is not None
        return 1 - batch.t if self.teacher.time_direction == "t0_noise" else batch.t


class LoadedLune:
    def __init__(self, teacher: Lune, device: str, dtype: str) -> None:
        self._teacher = teacher
        self._unet = Unet(teacher, device, dtype)
        self._capture = Capture(self._unet.module, teacher.submodule, teacher.unet)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        middle = self._capture.of(batch, lambda: self._unet.run(batch))  # (samples, channels, height, width)
        return {self._teacher.name: to_numpy(middle.float().mean(dim=(2, 3)))}


def attention_statistics(attention: Tensor) -> Tensor:
    """Return locality, entropy, clustering and sparsity, from 0 to 1: `(samples, heads, N, N)` → `(samples, 4)`."""
    count = attention.shape[-1]
    side = grid_side(count)
    entropy = -(attention * attention.clamp_min(1e-30).log()).sum(-1) / log(count)
    apart = (attention * _distances(side).to(attention)).sum(-1) / _distances(side).max().item()
    sparsity = (count - 1 / attention.square().sum(-1)) / (count - 1)
    found = torch.stack([_mean(1 - apart), _mean(entropy), _clustering(attention, side), _mean(sparsity)], dim=-1)
    return found.clamp(0.0, 1.0)


def attention_received(attention: Tensor, side: int) -> Tensor:
    """Return the attention that each position receives, resampled to a grid with sum 1: `(samples, side, side)`."""
    received = attention.mean(dim=(1, 2))
    own = grid_side(received.shape[-1])
    map_ = received.reshape(-1, 1, own, own)
    resampled = adaptive_avg_pool2d(map_, side) if own >= side else interpolate(map_, size=(side, side), mode="nearest")
    return (resampled / resampled.sum(dim=(2, 3), keepdim=True))[:, 0]


def grid_side(positions: int) -> int:
    side = isqrt(positions)
    if side * side != positions or side < 2:
        raise ValueError(f"{positions} positions are not a square grid of at least 2 × 2")
    return side


def _clustering(attention: Tensor, side: int) -> Tensor:
    """Return how much the attention of neighbouring queries overlaps."""
    grid = attention.reshape(*attention.shape[:2], side, side, -1)
    across = torch.minimum(grid[:, :, :, 1:], grid[:, :, :, :-1]).sum(-1)
    down = torch.minimum(grid[:, :, 1:], grid[:, :, :-1]).sum(-1)
    return (_mean(across.flatten(2)) + _mean(down.flatten(2))) / 2


def _mean(values: Tensor) -> Tensor:
    """Return the mean over heads and queries."""
    return values.mean(dim=(1, 2))


@lru_cache(maxsize=8)
def _distances(side: int) -> Tensor:
    """Return the distances between positions, `(N, N)`."""
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    return torch.cdist(places, places)


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
            raise HookSilent(self._teacher.unet, f"*.{SELF_ATTENTION}", batch.ids[0], batch.first_t)
        stats, maps = (torch.stack(found).mean(dim=0) for found in zip(*self._seen, strict=True))
        self._seen.clear()
        name = self._teacher.name
        return {f"{name}_stats": to_numpy(stats), f"{name}_spatial": to_numpy(maps)}

    def _note(self, attention: Tensor) -> None:
        self._seen.append((attention_statistics(attention), attention_received(attention, self._teacher.side)))


class Watching:
    """Computes self-attention with explicit weights, and reports them; the output is the same."""

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
