"""PyTorch loaders, datasets, attention masks and image batches for forebay caches.

Names are imported when they are first used: worker processes that only read a cache do not wait for torch's compiler,
which FlexAttention imports.
"""

from typing import TYPE_CHECKING

from forebay.exports import lazy_exports

try:
    import torch as _torch  # noqa: F401  # first, so that a missing torch gives the message below
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("forebay.torch needs PyTorch: pip install 'forebay[torch]'", name="torch") from missing
# fmt: off
# isort: off
if TYPE_CHECKING:
    from forebay.feeding.mixture import Ingredient as Ingredient, Mixture as Mixture
    from forebay.feeding.mixture_file import open_mixture as open_mixture
    from forebay.feeding.selection import Present as Present, Split as Split, Where as Where
    from forebay.feeding.statistics import LoaderStatistics as LoaderStatistics
    from forebay.feeding.stream import Growth as Growth, Ranks as Ranks, Stream as Stream
    from forebay.order.coins import Coins as Coins
    from forebay.order.window import ShuffleQuality as ShuffleQuality, Window as Window
    from forebay.read.rows import Located as Located, RowReader as RowReader, Table as Table
    from forebay.read.views import (
        Dequantized as Dequantized, Filled as Filled, Padded as Padded, Plan as Plan, View as View,
    )
    from forebay.teachers.feature_reader import Timed as Timed
    from forebay.torch.attention.block_mask import (
        causal_block_mask as causal_block_mask, document_block_mask as document_block_mask,
        image_block_mask as image_block_mask, prefix_block_mask as prefix_block_mask,
        transformers_inputs as transformers_inputs,
    )
    from forebay.torch.attention.leaks import (
        Leak as Leak, PaddingLeak as PaddingLeak, document_leaks as document_leaks, padding_leaks as padding_leaks,
    )
    from forebay.torch.attention.mask_cache import (
        BlockMaskCache as BlockMaskCache, BlockMaskStatistics as BlockMaskStatistics,
    )
    from forebay.torch.attention.packed_attention import PackedSelfAttention as PackedSelfAttention
    from forebay.torch.batches import BatchTable as BatchTable, show_batch as show_batch
    from forebay.torch.collate import (
        Collate as Collate, StoredBatch as StoredBatch, Transform as Transform, usual_collate as usual_collate,
    )
    from forebay.torch.dataset import CacheDataset as CacheDataset
    from forebay.torch.images.bucket_loader import BucketLoader as BucketLoader
    from forebay.torch.images.canvases import Canvases as Canvases, JointTransform as JointTransform
    from forebay.torch.images.crops import (
        AspectBucket as AspectBucket, RandomResizedCrop as RandomResizedCrop, aspect_buckets as aspect_buckets,
    )
    from forebay.torch.images.image_batch import ImageBatch as ImageBatch
    from forebay.torch.images.letterbox_module import LetterboxModule as LetterboxModule
    from forebay.torch.images.device_pixels import (
        masks_on_device as masks_on_device, normalize_on_device as normalize_on_device,
    )
    from forebay.torch.images.torchvision_v2 import JointV2 as JointV2
    from forebay.torch.loader import Loader as Loader, change_weights as change_weights
    from forebay.torch.on_device import derive_on_device as derive_on_device
    from forebay.torch.preference_batch import PreferenceBatch as PreferenceBatch
    from forebay.torch.ranks import current_ranks as current_ranks
    from forebay.torch.schedule import Schedule as Schedule
    from forebay.torch.token_batch import TokenBatch as TokenBatch
# fmt: on
# isort: on

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
