"""Run a denoiser: the output of its middle block (Lune), and its self-attention as statistics and a map (Sol).

Attention is p[query, key] ≥ 0 with sum 1 over keys; positions are on a grid of side s, N = s².

Call a denoiser as its own pipeline of diffusers does, and find the image in the output of one of its blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt, log
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate, pad

from forebay.columns import Array, Ragged
from forebay.teachers.built_in import DenoiserTeacher, Lune, Sol
from forebay.teachers.model_families import DENOISERS, denoiser_class
from forebay.teachers.protocol import Batch, unusable
from forebay.teachers.teacher_samples import class_in
from forebay.torch.batches import to_device, to_numpy
from forebay.torch.teachers.loading import class_named, input_like, load_model
from forebay.torch.teachers.run_hook import Captures, first_output, mixed, model_timesteps, noise_share, not_fired


class Denoiser:
    """The UNet or transformer of a Lune or Sol teacher."""

    def __init__(self, teacher: DenoiserTeacher, device: str, dtype: str) -> None:
        self.teacher = teacher
        kind = denoiser_class(teacher.unet)
        self.module: Any = load_model(class_named(kind, teacher.unet), teacher.unet, teacher.weights, device, dtype)
        self._call = CALLS[kind]
        self._like = input_like(self.module)
        teacher.check_inputs()
        if kind == "UNet2DConditionModel":
            self._check_unet()
        if isinstance(teacher, Sol) and DENOISERS[kind].attends_to != "image":
            attends_to = DENOISERS[kind].attends_to
            problem = f"its class is {kind}, whose attention is over {attends_to} together, without a map for Sol"
            raise unusable(teacher.unet, problem, hint="use Lune")

    def _check_unet(self) -> None:
        """Raise for a UNet that takes other inputs than latents, t and text, unless they are those of SDXL."""
        config = self.module.config
        names = ("addition_embed_type", "encoder_hid_dim_type", "class_embed_type", "num_class_embeds")
        extra = {name: config[name] for name in names if config.get(name) is not None}
        is_sdxl = extra == {"addition_embed_type": "text_time"}
        if extra and not is_sdxl:
            conditions = ", ".join(f"{name} is {value}" for name, value in extra.items())
            raise unusable(self.teacher.unet, f"{conditions}; such UNets are not supported")
        if is_sdxl and not self.teacher.pooled:
            problem = "addition_embed_type is text_time; it is of the SDXL kind"
            raise unusable(self.teacher.unet, problem, hint="pass pooled='…', the column of its second encoder")
        if self.teacher.pooled and not is_sdxl:
            raise unusable(self.teacher.unet, "it takes latents, t and text alone", hint="leave out pooled")
        crossed = config.get("only_cross_attention")  # of all blocks, or of each
        if isinstance(self.teacher, Sol) and (any(crossed) if isinstance(crossed, list | tuple) else crossed):
            raise unusable(self.teacher.unet, "its self-attention is cross-attention, which has no map for Sol")

    def run(self, batch: Batch) -> None:
        """Run one forward: every sample's latents at its t, with its conditions."""
        teacher = self.teacher
        pooled = [to_device(batch.array(column), self._like) for column in teacher.pooleds]
        share = noise_share(batch, teacher.time_direction)
        times = model_timesteps(share, teacher.noise_timestep, teacher.data_timestep)
        inputs = DenoiserInputs(
            latents=to_device(self._latents(batch, share), self._like),
            timesteps=times.to(self._like.device),
            texts=tuple(self._states(batch, column) for column in teacher.texts),
            pooled=torch.cat(pooled, dim=-1) if pooled else None,
            labels=torch.from_numpy(self._labels(batch)).to(self._like.device) if teacher.labels else None,
            image_size=teacher.image_size,
            guidance=teacher.guidance,
        )
        self._call(self.module, inputs)

    def _states(self, batch: Batch, column: str) -> Tensor:
        states = batch.columns[column]
        values = states.values if isinstance(states, Ragged) else states
        if values.ndim != 3:  # (tokens, width) without samples: real tokens only, also where each prompt has one
            raise unusable(
                self.teacher.unet,
                f"it reads the states of padding too, and '{column}' holds those of real tokens only",
                hint="build the text layer without ragged",
            )
        return to_device(batch.array(column), self._like)

    def _latents(self, batch: Batch, share: NDArray[np.float32]) -> Array:
        teacher, shape = self.teacher, self.teacher.latent_shape
        if teacher.noise == "pure":
            return batch.noise(shape, per=teacher.noise_per)
        channels = batch.array(teacher.latents).shape[1]
        if channels != shape[0]:
            raise unusable(
                teacher.unet, f"it takes latents of {shape[0]} channels, and '{teacher.latents}' has {channels}"
            )
        return mixed(batch, teacher.latents, share, teacher.noise_per)

    def _labels(self, batch: Batch) -> NDArray[np.int64]:
        column, _, key = self.teacher.labels.partition(".")
        return np.array([class_in(row, key) for row in batch.rows(column)], np.int64)


class LoadedLune:
    def __init__(self, teacher: Lune, device: str, dtype: str) -> None:
        self._denoiser = Denoiser(teacher, device, dtype)
        points = {teacher.name: teacher.hooked()}
        self._captures = Captures(self._denoiser.module, points, teacher.unet, image_mean)

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        outputs = self._captures.of(batch, lambda: self._denoiser.run(batch))
        return {name: to_numpy(values) for name, values in outputs.items()}


def attention_statistics(attention: Tensor) -> Tensor:
    """Return locality, entropy, clustering and sparsity, from 0 to 1: `(samples, heads, N, N)` → `(samples, 4)`."""
    count = attention.shape[-1]
    side = grid_side(count)
    entropy = -(attention * attention.clamp_min(1e-30).log()).sum(-1) / log(count)
    apart = (attention * _distances(side).to(attention)).sum(-1) / _distances(side).max().item()
    sparsity = (count - 1 / attention.square().sum(-1)) / (count - 1)
    statistics = torch.stack([_mean(1 - apart), _mean(entropy), _clustering(attention, side), _mean(sparsity)], dim=-1)
    return statistics.clamp(0.0, 1.0)


def attention_received(attention: Tensor, side: int) -> Tensor:
    """Return the attention that each position receives, resampled to a grid with sum 1: `(samples, side, side)`."""
    received = attention.mean(dim=(1, 2))
    grid = grid_side(received.shape[-1])
    map_ = received.reshape(-1, 1, grid, grid)
    resampled = (
        adaptive_avg_pool2d(map_, side) if grid >= side else interpolate(map_, size=(side, side), mode="nearest")
    )
    return (resampled / resampled.sum(dim=(2, 3), keepdim=True))[:, 0]


def grid_side(positions: int) -> int:
    side = isqrt(positions)
    if side * side != positions or side < 2:
        raise ValueError(f"{positions} positions are not a square grid of at least 2 × 2")
    return side


def _clustering(attention: Tensor, side: int) -> Tensor:
    """Return how much the attention of neighboring queries overlaps."""
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
    positions_of_cells = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    return torch.cdist(positions_of_cells, positions_of_cells)


SELF_ATTENTION = "attn1"


class LoadedSol:
    def __init__(self, teacher: Sol, device: str, dtype: str) -> None:
        self._teacher = teacher
        self._denoiser = Denoiser(teacher, device, dtype)
        self._seen: list[tuple[Tensor, Tensor]] = []  # per layer: statistics, map
        for name, part in self._denoiser.module.named_modules():
            if name.endswith(f".{SELF_ATTENTION}"):
                part.set_processor(Watching(self._note, teacher.most_positions))

    @torch.inference_mode()
    def __call__(self, batch: Batch) -> Mapping[str, Array]:
        self._seen.clear()
        self._denoiser.run(batch)
        if not self._seen:
            raise not_fired(f"*.{SELF_ATTENTION}", self._teacher.unet, batch)
        stats, maps = (torch.stack(layers).mean(dim=0) for layers in zip(*self._seen, strict=True))
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


FLUX_TIMESTEPS = 1000.0  # by which its pipeline divides those of its scheduler
SD3_T5_TOKENS = 256  # of zeros, where an SD3 has no T5


@dataclass(frozen=True, slots=True, eq=False)
class DenoiserInputs:
    """The inputs of a pipeline's denoiser, on the device and in the type of the model."""

    latents: Tensor  # (samples, channels, height, width)
    timesteps: Tensor  # (samples,), float32, as the model counts them
    texts: tuple[Tensor, ...]  # (samples, tokens, width) each
    pooled: Tensor | None  # (samples, width)
    labels: Tensor | None  # (samples,), whole numbers; None: the class that stands for none
    image_size: int
    guidance: float


def call_unet(unet: Any, inputs: DenoiserInputs) -> None:
    conditions = None
    if inputs.pooled is not None:  # SDXL: sizes and crop of the whole image
        side = inputs.image_size or 8 * unet.config.sample_size
        ids = torch.tensor([[side, side, 0, 0, side, side]], dtype=inputs.latents.dtype, device=inputs.latents.device)
        conditions = {"text_embeds": inputs.pooled, "time_ids": ids.expand(len(inputs.latents), -1)}
    unet(
        inputs.latents,
        inputs.timesteps,
        encoder_hidden_states=torch.cat(inputs.texts, dim=-1),
        added_cond_kwargs=conditions,
        return_dict=False,
    )


def call_sd3(transformer: Any, inputs: DenoiserInputs) -> None:
    width = transformer.config.joint_attention_dim
    clip = torch.cat(inputs.texts[:2], dim=-1)
    t5 = inputs.texts[2] if len(inputs.texts) > 2 else clip.new_zeros(len(clip), SD3_T5_TOKENS, width)
    transformer(
        hidden_states=inputs.latents,
        timestep=inputs.timesteps,
        encoder_hidden_states=torch.cat([pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5], dim=-2),
        pooled_projections=inputs.pooled,
        return_dict=False,
    )


def call_flux(transformer: Any, inputs: DenoiserInputs) -> None:
    latents, text = inputs.latents, inputs.texts[0]
    guidance = None
    if transformer.config.guidance_embeds:
        guidance = torch.full((len(latents),), inputs.guidance, device=latents.device, dtype=torch.float32)
    transformer(
        hidden_states=packed(latents),
        timestep=inputs.timesteps.to(latents.dtype) / FLUX_TIMESTEPS,
        guidance=guidance,
        pooled_projections=inputs.pooled,
        encoder_hidden_states=text,
        txt_ids=latents.new_zeros(text.shape[1], 3),
        img_ids=_position_ids(latents.shape[-2] // 2, latents.shape[-1] // 2).to(latents),
        return_dict=False,
    )


def call_dit(transformer: Any, inputs: DenoiserInputs) -> None:
    labels = inputs.labels
    if labels is None:
        none = transformer.config.num_embeds_ada_norm
        labels = torch.full((len(inputs.latents),), none, device=inputs.latents.device)
    transformer(inputs.latents, timestep=inputs.timesteps, class_labels=labels, return_dict=False)


CALLS: dict[str, Callable[[Any, DenoiserInputs], None]] = {
    "DiTTransformer2DModel": call_dit,
    "FluxTransformer2DModel": call_flux,
    "SD3Transformer2DModel": call_sd3,
    "UNet2DConditionModel": call_unet,
}


def packed(latents: Tensor) -> Tensor:
    """Return latents as tokens of 2 × 2 cells: `(samples, channels, h, w)` → `(samples, h/2 · w/2, 4 · channels)`."""
    samples, channels, height, width = latents.shape
    cells = latents.view(samples, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return cells.reshape(samples, (height // 2) * (width // 2), 4 * channels)


def image_mean(out: Any) -> Tensor:
    """Return the mean over the image of a block's output, `(samples, channels)`.

    A block of a UNet returns `(samples, channels, height, width)`, one of a transformer `(samples, tokens, channels)`,
    and one with two streams those of the text and those of the image.
    """
    if isinstance(out, tuple) and len(out) == 2 and all(_is_stream(part) for part in out):
        out = out[1]
    value = first_output(out)
    return value.float().mean(dim=1 if value.ndim == 3 else (2, 3))


def _is_stream(part: Any) -> bool:
    """Whether a part of an output is a stream of tokens; the last block of SD3 returns no text."""
    return part is None or (isinstance(part, Tensor) and part.ndim == 3)


def _position_ids(height: int, width: int) -> Tensor:
    """Return the position ids of packed latents, `(tokens, 3)`: 0, row, column."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
