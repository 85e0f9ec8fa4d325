"""Whole pipelines of small models with random weights, saved as real ones are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tests.helpers.tiny_models import _tokenizer, tiny_unet, tiny_vae
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

FIRST, SECOND, PROJECTED, T5_WIDTH = 16, 24, 12, 48
CLASSES = 10


def shifted_vae(channels: int = 4, **fields: Any) -> AutoencoderKL:
    """A VAE whose latents are shifted, as those of SD3 and Flux."""
    return AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=channels, norm_num_groups=4, sample_size=16,
        **{"scaling_factor": 1.5305, "shift_factor": 0.0609, **fields},
    ).eval()  # fmt: skip


def clip_config(width: int, layers: int = 3) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=32, hidden_size=width, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=2, eos_token_id=1, pad_token_id=1, projection_dim=PROJECTED,
    )  # fmt: skip


def t5_encoder() -> T5EncoderModel:
    config = T5Config(vocab_size=32, d_model=T5_WIDTH, d_kv=4, d_ff=24, num_layers=2, num_heads=2)
    return T5EncoderModel(config).eval()


def tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    made = _tokenizer(bos=bos)
    made.model_max_length = 8
    return made


def sd3_transformer(**fields: Any) -> SD3Transformer2DModel:
    settings = {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8,
        "num_attention_heads": 2, "joint_attention_dim": T5_WIDTH, "caption_projection_dim": 16,
        "pooled_projection_dim": 2 * PROJECTED, "out_channels": 4, "pos_embed_max_size": 8,
    }  # fmt: skip
    return SD3Transformer2DModel(**{**settings, **fields}).eval()


def flux_transformer(**fields: Any) -> FluxTransformer2DModel:
    settings = {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": T5_WIDTH, "pooled_projection_dim": FIRST, "guidance_embeds": True,
        "axes_dims_rope": (2, 2, 4),
    }  # fmt: skip
    return FluxTransformer2DModel(**{**settings, **fields}).eval()


def dit_transformer(**fields: Any) -> DiTTransformer2DModel:
    settings = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 8, "num_layers": 3,
        "sample_size": 8, "num_embeds_ada_norm": CLASSES,
    }  # fmt: skip
    return DiTTransformer2DModel(**{**settings, **fields}).eval()


def sdxl_unet(**fields: Any) -> UNet2DConditionModel:
    settings = {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16), "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "norm_num_groups": 4, "attention_head_dim": 4,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": FIRST + SECOND,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + PROJECTED,
    }  # fmt: skip
    return UNet2DConditionModel(**{**settings, **fields}).eval()


def stable_diffusion(**parts: Any) -> StableDiffusionPipeline:
    own = {
        "unet": tiny_unet(), "scheduler": DDPMScheduler(steps_offset=1, clip_sample=False), "vae": tiny_vae(),
        "text_encoder": CLIPTextModel(clip_config(FIRST)).eval(), "tokenizer": tokenizer(bos=True),
        "safety_checker": None, "feature_extractor": None, "requires_safety_checker": False,
    }  # fmt: skip
    return StableDiffusionPipeline(**{**own, **parts})


def sdxl(**parts: Any) -> StableDiffusionXLPipeline:
    own = {
        "unet": sdxl_unet(), "scheduler": DDPMScheduler(), "vae": tiny_vae(),
        "text_encoder": CLIPTextModel(clip_config(FIRST)).eval(), "tokenizer": tokenizer(bos=True),
        "text_encoder_2": CLIPTextModelWithProjection(clip_config(SECOND)).eval(), "tokenizer_2": tokenizer(bos=True),
    }  # fmt: skip
    return StableDiffusionXLPipeline(**{**own, **parts})


def sd3(**parts: Any) -> StableDiffusion3Pipeline:
    own = {
        "transformer": sd3_transformer(), "scheduler": FlowMatchEulerDiscreteScheduler(), "vae": shifted_vae(),
        "text_encoder": CLIPTextModelWithProjection(clip_config(FIRST)).eval(), "tokenizer": tokenizer(bos=True),
        "text_encoder_2": CLIPTextModelWithProjection(clip_config(SECOND)).eval(), "tokenizer_2": tokenizer(bos=True),
        "text_encoder_3": t5_encoder(), "tokenizer_3": tokenizer(bos=False),
    }  # fmt: skip
    return StableDiffusion3Pipeline(**{**own, **parts})


def flux(**parts: Any) -> FluxPipeline:
    own = {
        "transformer": flux_transformer(), "scheduler": FlowMatchEulerDiscreteScheduler(), "vae": shifted_vae(),
        "text_encoder": CLIPTextModel(clip_config(FIRST)).eval(), "tokenizer": tokenizer(bos=True),
        "text_encoder_2": t5_encoder(), "tokenizer_2": tokenizer(bos=False),
    }  # fmt: skip
    return FluxPipeline(**{**own, **parts})


def dit(**parts: Any) -> DiTPipeline:
    vae = shifted_vae(scaling_factor=0.18215, shift_factor=None)
    return DiTPipeline(**{"transformer": dit_transformer(), "vae": vae, "scheduler": DDIMScheduler(), **parts})


def saved(folder: Path, make: Callable[..., Any], seed: int = 0, **parts: Any) -> Path:
    """Save a pipeline whose weights are drawn from a seed, and return its folder."""
    torch.manual_seed(seed)
    made = make(**parts)
    for part in made.components.values():
        if isinstance(part, torch.nn.Module):  # several of these are zero at first, and would hide what they read
            for weights in part.parameters():
                if not weights.any():
                    torch.nn.init.normal_(weights, std=0.05)
    made.save_pretrained(folder)
    return folder
