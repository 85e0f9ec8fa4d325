"""Small models with random weights, saved as real ones are: the whole way of loading runs.

Weights are drawn from seeds of their own, so that two sets of them differ.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

WIDTH = 16  # of text states
WORDS = ("a", "an", "red", "blue", "cat", "dog", "house", "on", "the", "hill", "of", "two")


@dataclass(frozen=True, slots=True)
class TinyModels:
    """Folders of one model each."""

    vae: str
    t5: str
    clip: str
    unet: str


def save_tiny_models(folder: Path, seed: int = 0) -> TinyModels:
    """A VAE that halves an image of 16 pixels, two text encoders of 8 tokens, and a UNet for latents of 8 × 8."""
    torch.manual_seed(seed)
    tiny_vae().save_pretrained(folder / "vae")
    tiny_unet().save_pretrained(folder / "unet")
    t5 = T5Config(vocab_size=32, d_model=WIDTH, d_kv=4, d_ff=24, num_layers=1, num_heads=2)
    T5EncoderModel(t5).eval().save_pretrained(folder / "t5")
    clip = CLIPTextConfig(
        vocab_size=32, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=2, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    CLIPTextModel(clip).eval().save_pretrained(folder / "clip")
    for name in ("t5", "clip"):
        _tokenizer(bos=name == "clip").save_pretrained(folder / name)
    return TinyModels(*(str(folder / name) for name in ("vae", "t5", "clip", "unet")))


def tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    ).eval()


def tiny_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        norm_num_groups=4,
        layers_per_block=1,
    ).eval()


def _tokenizer(bos: bool) -> PreTrainedTokenizerFast:
    special = ("<pad>", "</s>", "<s>", "<unk>")
    words = {word: number for number, word in enumerate((*special, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    single = "<s> $A </s>" if bos else "$A </s>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<s>", 2), ("</s>", 1)] if bos else [("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )
