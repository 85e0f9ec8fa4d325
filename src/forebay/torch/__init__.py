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
    from forebay.feeding.mixture import Ingredient, Mixture
    from forebay.feeding.mixture_file import open_mixture
    from forebay.feeding.selection import Present, Split, Where
    from forebay.feeding.statistics import LoaderStatistics
    from forebay.feeding.stream import Growth, Ranks, Stream
    from forebay.order.coins import Coins
    from forebay.order.window import ShuffleQuality, Window
    from forebay.read.rows import Located, RowReader, Table
    from forebay.read.views import Dequantized, Filled, Padded, Plan, View
    from forebay.teachers.feature_reader import Timed
    from forebay.torch.attention.block_mask import (
        causal_block_mask,
        document_block_mask,
        image_block_mask,
        move_mask,
        prefix_block_mask,
        transformers_inputs,
    )
    from forebay.torch.attention.leaks import Leak, PaddingLeak, document_leaks, padding_leaks
    from forebay.torch.attention.mask_cache import BlockMaskCache, BlockMaskStatistics
    from forebay.torch.attention.packed_attention import PackedSelfAttention
    from forebay.torch.batches import BatchTable, show_batch
    from forebay.torch.collate import Collate, StoredBatch, Transform, usual_collate
    from forebay.torch.dataset import CacheDataset
    from forebay.torch.distill.timed_features import TorchFeatures, features
    from forebay.torch.images.bucket_loader import BucketLoader
    from forebay.torch.images.canvases import Canvases, JointTransform
    from forebay.torch.images.crops import AspectBucket, RandomResizedCrop, aspect_buckets
    from forebay.torch.images.image_batch import ImageBatch
    from forebay.torch.images.letterbox_module import LetterboxModule
    from forebay.torch.images.on_device import masks_on_device, normalize_on_device
    from forebay.torch.images.torchvision_v2 import JointV2
    from forebay.torch.loader import Loader, change_weights
    from forebay.torch.on_device import derive_on_device
    from forebay.torch.preference_batch import PreferenceBatch
    from forebay.torch.ranks import current_ranks
    from forebay.torch.schedule import Schedule
    from forebay.torch.token_batch import TokenBatch
# Where each public name lives.
_HOMES = {
    "Coins": "forebay.order.coins",
    "ShuffleQuality": "forebay.order.window",
    "Window": "forebay.order.window",
    "PackedSelfAttention": "forebay.torch.attention.packed_attention",
    **dict.fromkeys(
        ("causal_block_mask", "document_block_mask", "image_block_mask", "move_mask", "prefix_block_mask"),
        "forebay.torch.attention.block_mask",
    ),
    **dict.fromkeys(("BlockMaskCache", "BlockMaskStatistics"), "forebay.torch.attention.mask_cache"),
    **dict.fromkeys(("Collate", "StoredBatch", "Transform", "usual_collate"), "forebay.torch.collate"),
    "Ranks": "forebay.feeding.stream",
    "Timed": "forebay.teachers.feature_reader",
    **dict.fromkeys(("Dequantized", "Filled", "Padded", "Plan", "View"), "forebay.read.views"),
    **dict.fromkeys(("Located", "RowReader", "Table"), "forebay.read.rows"),
    "current_ranks": "forebay.torch.ranks",
    "TokenBatch": "forebay.torch.token_batch",
    "CacheDataset": "forebay.torch.dataset",
    **dict.fromkeys(("Leak", "PaddingLeak", "document_leaks", "padding_leaks"), "forebay.torch.attention.leaks"),
    "Growth": "forebay.feeding.stream",
    **dict.fromkeys(("AspectBucket", "RandomResizedCrop", "aspect_buckets"), "forebay.torch.images.crops"),
    "BucketLoader": "forebay.torch.images.bucket_loader",
    "ImageBatch": "forebay.torch.images.image_batch",
    "JointV2": "forebay.torch.images.torchvision_v2",
    **dict.fromkeys(("Canvases", "JointTransform"), "forebay.torch.images.canvases"),
    "LetterboxModule": "forebay.torch.images.letterbox_module",
    **dict.fromkeys(("Loader", "change_weights"), "forebay.torch.loader"),
    "PreferenceBatch": "forebay.torch.preference_batch",
    "LoaderStatistics": "forebay.feeding.statistics",
    **dict.fromkeys(("Ingredient", "Mixture"), "forebay.feeding.mixture"),
    "open_mixture": "forebay.feeding.mixture_file",
    "derive_on_device": "forebay.torch.on_device",
    **dict.fromkeys(("masks_on_device", "normalize_on_device"), "forebay.torch.images.on_device"),
    **dict.fromkeys(("Present", "Split", "Where"), "forebay.feeding.selection"),
    "Schedule": "forebay.torch.schedule",
    **dict.fromkeys(("BatchTable", "show_batch"), "forebay.torch.batches"),
    "Stream": "forebay.feeding.stream",
    **dict.fromkeys(("TorchFeatures", "features"), "forebay.torch.distill.timed_features"),
    "transformers_inputs": "forebay.torch.attention.block_mask",
}
__all__ = [
    "AspectBucket", "BatchTable", "BlockMaskCache", "BlockMaskStatistics", "BucketLoader", "CacheDataset", "Canvases",
    "Coins", "Collate", "Dequantized", "Filled", "Growth", "ImageBatch", "Ingredient", "JointTransform", "JointV2",
    "Leak", "LetterboxModule", "Loader", "LoaderStatistics", "Located", "Mixture",
    "PackedSelfAttention", "Padded", "PaddingLeak", "Plan", "PreferenceBatch", "Present", "RandomResizedCrop", "Ranks",
    "RowReader", "Schedule", "ShuffleQuality", "Split", "StoredBatch", "Stream", "Table", "Timed", "TokenBatch",
    "TorchFeatures", "Transform", "View", "Where", "Window", "aspect_buckets", "causal_block_mask", "change_weights",
    "current_ranks", "derive_on_device", "document_block_mask", "document_leaks", "features", "image_block_mask",
    "masks_on_device", "move_mask", "normalize_on_device", "open_mixture", "padding_leaks", "prefix_block_mask",
    "show_batch", "transformers_inputs", "usual_collate",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'forebay.torch' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return list(__all__)
