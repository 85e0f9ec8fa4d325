"""Decoded images by key, filled on demand: memory (L1), an LMDB that processes share (L2), then the source."""

from forebay.row_cache.cached_images import CachedImages
from forebay.row_cache.lmdb_file import clear
from forebay.row_cache.statistics import RowCacheStatistics, RowCacheWarning

__all__ = ["CachedImages", "RowCacheStatistics", "RowCacheWarning", "clear"]
