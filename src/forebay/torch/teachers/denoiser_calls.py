"""Call a denoiser as its own pipeline of diffusers does, and find the image in the output of one of its blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from forebay.torch.teachers.run_hook import first_output

FLUX_TIMESTEPS = 1000.0  # by which its pipeline divides those of its scheduler
SD3_T5_TOKENS = 256  # of zeros, where an SD3 has no T5


@dataclass(frozen=True, slots=True, eq=False)
class DenoiserInputs:
    """What a pipeline passes to its denoiser, on the device and in the type of the model."""

    latents: Tensor  # (samples, channels, height, width)
    timesteps: Tensor  # (samples,), float32, as the model counts them
    texts: tuple[Tensor, ...]  # (samples, tokens, width) each
    pooled: Tensor | None  # (samples, width)
    labels: Tensor | None  # (samples,), whole numbers; None: the class that stands for none
    image_size: int
    guidance: float


def call_unet(unet: Any, given: DenoiserInputs) -> None:
    conditions = None
    if given.pooled is not None:  # SDXL: sizes and crop of the whole image
        side = given.image_size or 8 * unet.config.sample_size
        ids = torch.tensor([[side, side, 0, 0, side, side]], dtype=given.latents.dtype, device=given.latents.device)
        conditions = {"text_embeds": given.pooled, "time_ids": ids.expand(len(given.latents), -1)}
    unet(
        given.latents,
        given.timesteps,
        encoder_hidden_states=torch.cat(given.texts, dim=-1),
        added_cond_kwargs=conditions,
        return_dict=False,
    )


def call_sd3(transformer: Any, given: DenoiserInputs) -> None:
    width = transformer.config.joint_attention_dim
    clip = torch.cat(given.texts[:2], dim=-1)
    t5 = given.texts[2] if len(given.texts) > 2 else clip.new_zeros(len(clip), SD3_T5_TOKENS, width)
    transformer(
        hidden_states=given.latents,
        timestep=given.timesteps,
        encoder_hidden_states=torch.cat([pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5], dim=-2),
        pooled_projections=given.pooled,
        return_dict=False,
    )


def call_flux(transformer: Any, given: DenoiserInputs) -> None:
    latents, text = given.latents, given.texts[0]
    guidance = None
    if transformer.config.guidance_embeds:
        guidance = torch.full((len(latents),), given.guidance, device=latents.device, dtype=torch.float32)
    transformer(
        hidden_states=packed(latents),
        timestep=given.timesteps.to(latents.dtype) / FLUX_TIMESTEPS,
        guidance=guidance,
        pooled_projections=given.pooled,
        encoder_hidden_states=text,
        txt_ids=latents.new_zeros(text.shape[1], 3),
        img_ids=_places(latents.shape[-2] // 2, latents.shape[-1] // 2).to(latents),
        return_dict=False,
    )


def call_dit(transformer: Any, given: DenoiserInputs) -> None:
    labels = given.labels
    if labels is None:
        none = transformer.config.num_embeds_ada_norm
        labels = torch.full((len(given.latents),), none, device=given.latents.device)
    transformer(given.latents, timestep=given.timesteps, class_labels=labels, return_dict=False)


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


def _places(height: int, width: int) -> Tensor:
    """Return the position ids of packed latents, `(tokens, 3)`: 0, row, column."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3)
