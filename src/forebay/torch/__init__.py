"""Feeding PyTorch: the only room that imports torch."""

try:
    import torch as _torch  # noqa: F401  # first, so that the sentence below is the one that is read
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("forebay.torch needs PyTorch: pip install 'forebay[torch]'", name="torch") from missing

from forebay.order.coins import Coins
from forebay.torch.attention import MaskedViTBlock, PackedSelfAttention, SeedAttention
from forebay.torch.block_mask import (
    PortableBlockMask,
    causal_block_mask,
    document_block_mask,
    image_block_mask,
    prefix_block_mask,
)
from forebay.torch.block_mask_cache import BlockMaskCache, BlockMaskStatistics
from forebay.torch.dataset import CacheDataset
from forebay.torch.isolation import Leak, PaddingLeak, document_leaks, padding_leaks
from forebay.torch.loader import Loader
from forebay.torch.mixture import Ingredient, Mixture, change_weights
from forebay.torch.mixture_file import open_mixture
from forebay.torch.rules import Split, Where
from forebay.torch.schedule import Schedule
from forebay.torch.stream import Located, Stream
from forebay.torch.transform import Transform

__all__ = [
    "BlockMaskCache",
    "BlockMaskStatistics",
    "CacheDataset",
    "Coins",
    "Ingredient",
    "Leak",
    "Loader",
    "Located",
    "MaskedViTBlock",
    "Mixture",
    "PackedSelfAttention",
    "PaddingLeak",
    "PortableBlockMask",
    "Schedule",
    "SeedAttention",
    "Split",
    "Stream",
    "Transform",
    "Where",
    "causal_block_mask",
    "change_weights",
    "document_block_mask",
    "document_leaks",
    "image_block_mask",
    "open_mixture",
    "padding_leaks",
    "prefix_block_mask",
]
