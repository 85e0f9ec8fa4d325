"""Feeding PyTorch: the only room that imports torch."""

from forebay.torch.attention import MaskedViTBlock, PackedSelfAttention, SeedAttention
from forebay.torch.block_mask import (
    PortableBlockMask,
    causal_block_mask,
    document_block_mask,
    image_block_mask,
    prefix_block_mask,
)
from forebay.torch.block_mask_cache import BlockMaskCache, BlockMaskStatistics

__all__ = [
    "BlockMaskCache",
    "BlockMaskStatistics",
    "MaskedViTBlock",
    "PackedSelfAttention",
    "PortableBlockMask",
    "SeedAttention",
    "causal_block_mask",
    "document_block_mask",
    "image_block_mask",
    "prefix_block_mask",
]
