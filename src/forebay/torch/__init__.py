"""PyTorch loaders, datasets, attention masks and image batches for forebay caches.

Names are imported when they are first used: worker processes that only read a cache do not wait for torch's compiler,
which FlexAttention imports.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import torch as _torch  # noqa: F401  # first, so that a missing torch gives the message below
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("forebay.torch needs PyTorch: pip install 'forebay[torch]'", name="torch") from missing
if TYPE_CHECKING:
    from forebay.feeding.mixture import Ingredient, Mixture, open_mixture
    from forebay.feeding.selection import Present, Split, Where
    from forebay.feeding.statistics import LoaderStatistics
    from forebay.feeding.stream import Growth, Located, Stream
    from forebay.order.orders import Coins, ShuffleQuality, Window
    from forebay.torch.assemble import Collate, FeaturesAt, Transform
    from forebay.torch.attention.block_mask import (
        causal_block_mask,
        document_block_mask,
        image_block_mask,
        move_mask,
        prefix_block_mask,
        register_block_masks,
        transformers_inputs,
    )
    from forebay.torch.attention.leaks import Leak, PaddingLeak, document_leaks, padding_leaks
    from forebay.torch.attention.modules import (
        BlockMaskCache,
        BlockMaskStatistics,
        MaskedViTBlock,
        PackedSelfAttention,
        SeedAttention,
    )
    from forebay.torch.batches import BatchTable, LoadedBatch, MaskPicture, derive_on_device, show_batch, show_mask
    from forebay.torch.dataset import CacheDataset
    from forebay.torch.distill.timed_features import TorchFeatures, features
    from forebay.torch.images.canvas import Canvases, JointTransform
    from forebay.torch.images.image_batch import (
        AspectBucket,
        BucketLoader,
        ImageBatch,
        RandomResizedCrop,
        aspect_buckets,
    )
    from forebay.torch.images.model_input import LetterboxModule, masks_on_device, normalize_on_device
    from forebay.torch.loader import Loader, change_weights
    from forebay.torch.preference_batch import PackedBatch, PreferenceBatch
    from forebay.torch.schedule import Schedule
# Where each public name lives.
_HOMES = {
    "Coins": "forebay.order.orders",
    "ShuffleQuality": "forebay.order.orders",
    "Window": "forebay.order.orders",
    **dict.fromkeys(("MaskedViTBlock", "PackedSelfAttention", "SeedAttention"), "forebay.torch.attention.modules"),
    **dict.fromkeys(
        ("causal_block_mask", "document_block_mask", "image_block_mask", "move_mask", "prefix_block_mask"),
        "forebay.torch.attention.block_mask",
    ),
    **dict.fromkeys(("BlockMaskCache", "BlockMaskStatistics"), "forebay.torch.attention.modules"),
    "Collate": "forebay.torch.assemble",
    "CacheDataset": "forebay.torch.dataset",
    **dict.fromkeys(("Leak", "PaddingLeak", "document_leaks", "padding_leaks"), "forebay.torch.attention.leaks"),
    "Growth": "forebay.feeding.stream",
    **dict.fromkeys(
        ("AspectBucket", "BucketLoader", "RandomResizedCrop", "aspect_buckets"), "forebay.torch.images.image_batch"
    ),
    "ImageBatch": "forebay.torch.images.image_batch",
    **dict.fromkeys(("Canvases", "JointTransform"), "forebay.torch.images.canvas"),
    "LetterboxModule": "forebay.torch.images.model_input",
    **dict.fromkeys(("Loader", "change_weights"), "forebay.torch.loader"),
    "PackedBatch": "forebay.torch.preference_batch",
    "PreferenceBatch": "forebay.torch.preference_batch",
    "LoaderStatistics": "forebay.feeding.statistics",
    **dict.fromkeys(("Ingredient", "Mixture"), "forebay.feeding.mixture"),
    "open_mixture": "forebay.feeding.mixture",
    "derive_on_device": "forebay.torch.batches",
    **dict.fromkeys(("masks_on_device", "normalize_on_device"), "forebay.torch.images.model_input"),
    **dict.fromkeys(("Present", "Split", "Where"), "forebay.feeding.selection"),
    "FeaturesAt": "forebay.torch.assemble",
    "Schedule": "forebay.torch.schedule",
    **dict.fromkeys(("BatchTable", "LoadedBatch", "MaskPicture", "show_batch", "show_mask"), "forebay.torch.batches"),
    **dict.fromkeys(("Located", "Stream"), "forebay.feeding.stream"),
    **dict.fromkeys(("TorchFeatures", "features"), "forebay.torch.distill.timed_features"),
    "Transform": "forebay.torch.assemble",
    **dict.fromkeys(("register_block_masks", "transformers_inputs"), "forebay.torch.attention.block_mask"),
}
__all__ = [
    "AspectBucket", "BatchTable", "BlockMaskCache", "BlockMaskStatistics", "BucketLoader", "CacheDataset", "Canvases",
    "Coins", "Collate", "FeaturesAt", "Growth", "ImageBatch", "Ingredient", "JointTransform", "Leak", "LetterboxModule",
    "LoadedBatch", "Loader", "LoaderStatistics", "Located", "MaskPicture", "MaskedViTBlock", "Mixture", "PackedBatch",
    "PackedSelfAttention", "PaddingLeak", "PreferenceBatch", "Present", "RandomResizedCrop", "Schedule",
    "SeedAttention", "ShuffleQuality", "Split", "Stream", "TorchFeatures", "Transform", "Where", "Window",
    "aspect_buckets", "causal_block_mask", "change_weights", "derive_on_device", "document_block_mask",
    "document_leaks", "features", "image_block_mask", "masks_on_device", "move_mask", "normalize_on_device",
    "open_mixture", "padding_leaks", "prefix_block_mask", "register_block_masks", "show_batch", "show_mask",
    "transformers_inputs",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay.torch' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return list(__all__)
