"""Feeding PyTorch: the only room that imports torch."""

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
    "PortableBlockMask",
    "causal_block_mask",
    "document_block_mask",
    "image_block_mask",
    "prefix_block_mask",
]
