"""Compression of one block of bytes. The same bytes in give the same bytes out, for one version of a library."""

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
# The most that a stored block of so many bytes can hold, in each format.
_MOST_BYTES: dict[Codec, Callable[[int], int]] = {
    "none": lambda stored: stored,
    "lz4": lambda stored: min(255 * stored, 0x7E000000),
    "zstd": lambda stored: (stored // 4 + 1) * 128 * 1024,
}
MAX_BLOCK_BYTES = 256 << 20  # of one compressed block, decoded, unless the caller allows more
_thread = threading.local()  # a zstd context serves one thread at a time


class CodecError(Exception):
    """A block that does not decompress to what it should; the caller knows which block it was."""


class BlockOverLimit(CodecError):
    """A block that may well decompress, but to more bytes than the caller allows."""

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"it decodes to {size:,} bytes, more than the {limit:,} that are allowed")


def compressor(codec: Codec, level: Level) -> Callable[[Buffer], Buffer]:
    """A function from the bytes of a block to what is stored of it."""
    if codec == "zstd":
        return zstandard.ZstdCompressor(level=_ZSTD_LEVELS[level]).compress
    if codec == "lz4":
        return lambda block: lz4.block.compress(block, store_size=False, **_LZ4_MODES[level])
    return lambda block: block


def decompress(codec: Codec, block: Buffer, size: int, limit: int = MAX_BLOCK_BYTES) -> Buffer:
    """The `size` bytes that a stored block holds; no memory is taken for a block that cannot hold them."""
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
    # The library allocates what the frame announces, not what it is asked for, so the announcement is checked first.
    if zstandard.frame_content_size(block) != size:
        raise CodecError("its frame announces another size")
    if not hasattr(_thread, "zstd"):
        _thread.zstd = zstandard.ZstdDecompressor()
    unpacked: bytes = _thread.zstd.decompress(block, max_output_size=size)
    return unpacked


def library_versions() -> dict[str, str]:
    """What shapes compressed bytes, for the record in a generation."""
    return {"zstd": ".".join(map(str, zstandard.ZSTD_VERSION)), "lz4": lz4.library_version_string()}
