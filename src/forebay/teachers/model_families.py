"""The supported kinds of VAEs and denoisers, and the shapes of each, from its configuration.

How a denoiser is called is in `forebay.torch.teachers.run_denoiser`; which parts a pipeline has, in `pipelines.py`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from forebay.teachers.protocol import config_of, setting, unusable


@dataclass(frozen=True, slots=True)
class VaeFamily:
    """A kind of VAE: the settings that give the shape of its latents."""

    channels: str
    levels: str  # a list with one entry for each resolution, each half of the one before
    of_videos: bool = False  # an image is a video of one frame


VAES = {
    "AutoencoderKL": VaeFamily("latent_channels", "block_out_channels"),
    "AutoencoderKLQwenImage": VaeFamily("z_dim", "dim_mult", of_videos=True),
    "AutoencoderKLWan": VaeFamily("z_dim", "dim_mult", of_videos=True),
}


@dataclass(frozen=True, slots=True)
class DenoiserFamily:
    """A kind of denoiser: its inputs besides latents and t, and the shapes of its parts."""

    texts: tuple[int, ...]  # the numbers of text columns that it may read
    needs_pooled: bool | None  # None: its configuration decides
    fields: str  # the fields of a teacher that name what it reads, as an example
    middle: Callable[[str], str]  # the name of its middle block
    width: Callable[[str], int]  # the channels of that block's output
    latents: Callable[[str, int], tuple[int, int]]  # channels and side, for a size of images or 0
    attends_to: str = "image"  # what its self-attention is over


def _number(model: str, name: str) -> int:
    return int(setting(model, name))


def _inner_width(model: str) -> int:
    return _number(model, "num_attention_heads") * _number(model, "attention_head_dim")


def _sampled(model: str, image_size: int) -> tuple[int, int]:
    return _number(model, "in_channels"), _number(model, "sample_size")


def _packed(model: str, image_size: int) -> tuple[int, int]:
    """Latents of which four neighboring cells are one token. The pipeline's own size of images is 1024."""
    return _number(model, "in_channels") // 4, (image_size or 1024) // 8


def _middle_block(model: str) -> str:
    return f"transformer_blocks.{_number(model, 'num_layers') // 2}"


def _middle_of_both(model: str) -> str:
    """The middle of all blocks, of which those with two streams come first."""
    double = _number(model, "num_layers")
    middle = (double + _number(model, "num_single_layers")) // 2
    return f"transformer_blocks.{middle}" if middle < double else f"single_transformer_blocks.{middle - double}"


DENOISERS = {
    "DiTTransformer2DModel": DenoiserFamily(
        texts=(0,),
        needs_pooled=False,
        fields="text='', labels='metadata.class'",
        middle=_middle_block,
        width=_inner_width,
        latents=_sampled,
    ),
    "FluxTransformer2DModel": DenoiserFamily(
        texts=(1,),
        needs_pooled=True,
        fields="text='t5_states', pooled='clip_pooled'",
        middle=_middle_of_both,
        width=_inner_width,
        latents=_packed,
        attends_to="text and image",
    ),
    "SD3Transformer2DModel": DenoiserFamily(
        texts=(2, 3),
        needs_pooled=True,
        fields="text='clip_l_states+clip_g_states+t5_states', pooled='clip_l_pooled+clip_g_pooled'",
        middle=_middle_block,
        width=_inner_width,
        latents=_sampled,
        attends_to="text and image",
    ),
    "UNet2DConditionModel": DenoiserFamily(
        texts=(1, 2),
        needs_pooled=None,
        fields="text='clip_states', or of the SDXL kind text='clip_l_states+clip_g_states', pooled='clip_g_pooled'",
        middle=lambda model: "mid_block",
        width=lambda model: int(setting(model, "block_out_channels")[-1]),
        latents=_sampled,
    ),
}


def vae_class(vae: str) -> str:
    return _known(vae, VAES, "VAEs", "AutoencoderKL")


def denoiser_class(model: str) -> str:
    return _known(model, DENOISERS, "denoisers", "UNet2DConditionModel")


def latent_shape(vae: str, size: int) -> tuple[int, int, int]:
    """Return the shape of the latents of square images."""
    family = VAES[vae_class(vae)]
    side = size // 2 ** (len(setting(vae, family.levels)) - 1) // int(config_of(vae).get("patch_size") or 1)
    return _number(vae, family.channels), side, side


def check_text_model(model: str, types: Collection[str], what: str) -> None:
    """Raise for a text encoder of another kind than `types`, if its configuration says which it is."""
    config = config_of(model)
    model_type = config.get("model_type")
    if model_type is not None and model_type not in types:
        named = (config.get("architectures") or [model_type])[0]
        raise unusable(
            model, f"its class is {named}, of the kind '{model_type}'; {what} must be one of {', '.join(types)}"
        )


def _known(model: str, known: Collection[str], what: str, default: str) -> str:
    """Return the class that a model's configuration names; raise ModelUnusable unless it is supported."""
    config = config_of(model)
    class_name = str(config.get("_class_name") or (config.get("architectures") or [default])[0])
    if class_name in known:
        return class_name
    raise unusable(
        model,
        f"its class is {class_name}; supported {what} are {', '.join(known)}",
        hint="for another, use Hook or a Teacher class",
    )
