"""Feeding PyTorch: the only room that imports torch.

Names are imported when they are first used: worker processes that read a cache do not wait for torch's compiler, which
the masks of FlexAttention bring along.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401  # first, so that the sentence below is the one that is read
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("forebay.torch needs PyTorch: pip install 'forebay[torch]'", name="torch") from missing

if TYPE_CHECKING:
    from forebay.order.coins import Coins
    from forebay.order.quality import ShuffleQuality
    from forebay.order.window import Window
    from forebay.torch.attention import MaskedViTBlock, PackedSelfAttention, SeedAttention
    from forebay.torch.block_mask import (
        PortableBlockMask,
        causal_block_mask,
        document_block_mask,
        image_block_mask,
        prefix_block_mask,
    )
    from forebay.torch.block_mask_cache import BlockMaskCache, BlockMaskStatistics
    from forebay.torch.collate import Collate
    from forebay.torch.dataset import CacheDataset
    from forebay.torch.growth import Growth
    from forebay.torch.image_batch import ImageBatch
    from forebay.torch.image_joint import Canvases, JointTransform
    from forebay.torch.isolation import Leak, PaddingLeak, document_leaks, padding_leaks
    from forebay.torch.letterbox_module import LetterboxModule
    from forebay.torch.loader import Loader
    from forebay.torch.mixture import Ingredient, Mixture, change_weights
    from forebay.torch.mixture_file import open_mixture
    from forebay.torch.normalize import normalize_on_device
    from forebay.torch.old_import import import_old
    from forebay.torch.rules import Split, Where
    from forebay.torch.schedule import Schedule
    from forebay.torch.stream import Located, Stream
    from forebay.torch.timed_features import TorchFeatures, features
    from forebay.torch.transform import Transform

# Where each public name lives.
_HOMES = {
    "Coins": "forebay.order.coins",
    "ShuffleQuality": "forebay.order.quality",
    "Window": "forebay.order.window",
    **dict.fromkeys(("MaskedViTBlock", "PackedSelfAttention", "SeedAttention"), "forebay.torch.attention"),
    **dict.fromkeys(
        ("PortableBlockMask", "causal_block_mask", "document_block_mask", "image_block_mask", "prefix_block_mask"),
        "forebay.torch.block_mask",
    ),
    **dict.fromkeys(("BlockMaskCache", "BlockMaskStatistics"), "forebay.torch.block_mask_cache"),
    "Collate": "forebay.torch.collate",
    "CacheDataset": "forebay.torch.dataset",
    **dict.fromkeys(("Leak", "PaddingLeak", "document_leaks", "padding_leaks"), "forebay.torch.isolation"),
    "Growth": "forebay.torch.growth",
    "ImageBatch": "forebay.torch.image_batch",
    **dict.fromkeys(("Canvases", "JointTransform"), "forebay.torch.image_joint"),
    "LetterboxModule": "forebay.torch.letterbox_module",
    "Loader": "forebay.torch.loader",
    **dict.fromkeys(("Ingredient", "Mixture", "change_weights"), "forebay.torch.mixture"),
    "open_mixture": "forebay.torch.mixture_file",
    "normalize_on_device": "forebay.torch.normalize",
    "import_old": "forebay.torch.old_import",
    **dict.fromkeys(("Split", "Where"), "forebay.torch.rules"),
    "Schedule": "forebay.torch.schedule",
    **dict.fromkeys(("Located", "Stream"), "forebay.torch.stream"),
    **dict.fromkeys(("TorchFeatures", "features"), "forebay.torch.timed_features"),
    "Transform": "forebay.torch.transform",
}

__all__ = [
    "BlockMaskCache", "BlockMaskStatistics", "CacheDataset", "Canvases", "Coins", "Collate", "Growth", "ImageBatch",
    "Ingredient", "JointTransform", "Leak", "LetterboxModule", "Loader", "Located", "MaskedViTBlock",
    "Mixture", "PackedSelfAttention", "PaddingLeak", "PortableBlockMask", "Schedule", "SeedAttention", "ShuffleQuality",
    "Split", "Stream", "TorchFeatures", "Transform", "Where", "Window", "causal_block_mask", "change_weights",
    "document_block_mask", "document_leaks", "features", "image_block_mask", "import_old", "normalize_on_device",
    "open_mixture", "padding_leaks", "prefix_block_mask",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay.torch' has no attribute '{name}'")


def __dir__() -> list[str]:
    return list(__all__)
