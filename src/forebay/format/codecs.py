"""Compress and decompress single blocks, deterministically for one version of a library."""

import threading
from collections.abc import Callable

import lz4.block
import zstandard

from forebay.columns import Codec, Level
from forebay.store.base import Buffer

_ZSTD_LEVELS: dict[Level, int] = {"fast": 1, "default": 3, "max": 19}
_LZ4_MODES: dict[Level, dict[str, object]] = {
    "fast": {"mode": "fast", "acceleration": 8},
    "default": {"mode": "default"},
    "max": {"mode": "high_compression", "compression": 12},
}
# The largest decoded size of a stored block, by codec and stored size.
_MOST_BYTES: dict[Codec, Callable[[int], int]] = {
    "none": lambda stored: stored,
    "lz4": lambda stored: min(255 * stored, 0x7E000000),
    "zstd": lambda stored: (stored // 4 + 1) * 128 * 1024,
}
MAX_BLOCK_BYTES = 256 << 20  # decoded size of one compressed block, unless the caller allows more
_thread = threading.local()  # a zstd context is not thread-safe


class CodecError(Exception):
    """A block does not decompress to the expected size. The caller adds which block."""


class BlockOverLimit(CodecError):
    """A block decompresses to more bytes than the caller allows."""

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"it decodes to {size:,} bytes, more than the limit of {limit:,}")


def compressor(codec: Codec, level: Level) -> Callable[[Buffer], Buffer]:
    """A function that compresses a block."""
    if codec == "zstd":
        return zstandard.ZstdCompressor(level=_ZSTD_LEVELS[level]).compress
    if codec == "lz4":
        return lambda block: lz4.block.compress(block, store_size=False, **_LZ4_MODES[level])
    return lambda block: block


def decompress(codec: Codec, block: Buffer, size: int, limit: int = MAX_BLOCK_BYTES) -> Buffer:
    """Decompress a block to `size` bytes; rejects an impossible size before allocating memory."""
    if not 0 <= size <= _MOST_BYTES[codec](len(block)):
        raise CodecError(f"{len(block):,} stored bytes cannot hold {size:,}")
    if codec != "none" and size > limit:
        raise BlockOverLimit(size, limit)
    try:
        raw = _decompress(codec, block, size)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
        raise CodecError(str(error)) from error
    if len(raw) != size:
        raise CodecError(f"it holds {len(raw):,} bytes, not {size:,}")
    return raw


def _decompress(codec: Codec, block: Buffer, size: int) -> Buffer:
    if codec == "none" or not size:
        return block if codec == "none" else b""
    if codec == "lz4":
        raw: bytes = lz4.block.decompress(block, uncompressed_size=size)
        return raw
    # The library allocates the size in the frame header, not `max_output_size`, so check it first.
    if zstandard.frame_content_size(block) != size:
        raise CodecError("its frame header states another size")
    if not hasattr(_thread, "zstd"):
        _thread.zstd = zstandard.ZstdDecompressor()
    unpacked: bytes = _thread.zstd.decompress(block, max_output_size=size)
    return unpacked


def library_versions() -> dict[str, str]:
    """The library versions that determine compressed bytes, recorded in a generation."""
    return {"zstd": ".".join(map(str, zstandard.ZSTD_VERSION)), "lz4": lz4.library_version_string()}
