"""Estimate the decompressed size of a file from its stated size and its beginning; and hash stored bytes.

A gzip file states the size of its last member at its end, a Zstandard file may state that of its first frame at its
beginning. The stated size is used unless it is far less than the compression ratio of the beginning suggests. The
estimate depends on the file only.
"""

import io
import lzma
import zlib
from contextlib import suppress
from functools import lru_cache
from typing import BinaryIO, cast

import msgspec
import xxhash
import zstandard

from forebay.errors import SourceUnreadable
from forebay.source import SourceFile
from forebay.sources.compression import (
    MOST_WINDOW,
    Members,
    Packing,
    StoredBytes,
    format_of,
    head_cache,
    whole_blocks,
)
from forebay.sources.paths import full_path

_JUDGED_SHARE = 100  # 1/100 of a file is read
_LEAST_JUDGED = 16 * 1024
_MOST_JUDGED = 256 * 1024  # contains the first block of any file
_FITS = 1.6  # two equal members, one of which is stated, differ by a factor of 2
_MOST_RATIO = 1032  # the limit of deflate; more is not a size
_BLOCK_SORTED = 1 << 20  # contains the first block of a bzip2 file
_USUAL_RATIO = 4.0  # if the beginning is too short
_PIECE = 1 << 20
_MOST_MADE = 1 << 26  # limit for a beginning that expands very much
_GZIP = 31  # to zlib: with gzip's header and trailer


@lru_cache(maxsize=1 << 16)
def stream_weight(path: str, file: SourceFile) -> int:
    """The estimated decompressed size of a compressed file."""
    with open(path, "rb", buffering=0) as raw:
        stored = StoredBytes(raw, file.size, head_cache(path, file))
        head = stored.read(min(max(file.size // _JUDGED_SHARE, _LEAST_JUDGED), _MOST_JUDGED))
        try:
            ratio, stated = _estimate(format_of(path), raw, stored, head, file)
        except (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the disk, not of the content
            raise SourceUnreadable(path, str(error)) from error
    estimated = ratio * file.size
    return stated if estimated / _FITS < stated <= file.size * _MOST_RATIO else int(estimated)


def _estimate(packing: Packing, raw: BinaryIO, stored: StoredBytes, head: bytes, file: SourceFile) -> tuple[float, int]:
    match packing:
        case "gzip":
            return _estimate_gzip(raw, head, file)
        case "zstd":
            return _estimate_zstd(stored, head, file)
        case _:
            return _members_ratio(head + stored.read(max(0, _BLOCK_SORTED - len(head))), packing), 0


def _estimate_gzip(raw: BinaryIO, head: bytes, file: SourceFile) -> tuple[float, int]:
    """The compression ratio of the beginning, and the stated size."""
    raw.seek(max(0, file.size - 4))
    return _gzip_ratio(head), int.from_bytes(raw.read(4), "little")


def _estimate_zstd(stored: StoredBytes, head: bytes, file: SourceFile) -> tuple[float, int]:
    stated: int = zstandard.frame_content_size(head) if head else 0
    whole = whole_blocks(head)
    if not whole and stated < file.size:  # no size is stated, or only that of a part
        head += stored.read(_MOST_JUDGED)
        whole = whole_blocks(head)
    return _zstd_ratio(head[:whole]), stated


def _gzip_ratio(head: bytes) -> float:
    """Decompressed bytes per stored byte."""
    taken, made = len(head), 0
    inflate = zlib.decompressobj(_GZIP)
    while head and made < _MOST_MADE:
        made += len(inflate.decompress(head, _PIECE))
        head = inflate.unconsumed_tail
        if inflate.eof and inflate.unused_data:
            head, inflate = inflate.unused_data.lstrip(b"\0"), zlib.decompressobj(_GZIP)
    return made / max(1, taken)


def _zstd_ratio(blocks: bytes) -> float:
    made, decompressor = 0, zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    with decompressor.stream_reader(io.BytesIO(blocks), read_across_frames=True) as reader:
        while made < _MOST_MADE and (piece := reader.read(_PIECE)):
            made += len(piece)
    return made / max(1, len(blocks))


def _members_ratio(head: bytes, packing: Packing) -> float:
    reader, made = Members(cast(BinaryIO, io.BytesIO(head)), packing), 0
    with suppress(EOFError):  # the beginning ends anywhere
        while made < _MOST_MADE and (piece := reader.read(_PIECE)):
            made += len(piece)
    return made / len(head) if made else _USUAL_RATIO


_HASH_BYTES = 1 << 22


def estimated_size(root: str, file: SourceFile) -> int:
    """The size of a file; for a compressed file, its estimated decompressed size."""
    return stream_weight(full_path(root, file.path), file) if file.stream else file.size


def scanned(root: str, file: SourceFile) -> SourceFile:
    """A compressed file with its digest; other files unchanged."""
    return msgspec.structs.replace(file, digest=digest(root, file, 0, file.size)) if file.stream else file


def digest(root: str, file: SourceFile, start: int, stop: int) -> int:
    """A hash of a range of the stored bytes."""
    running = xxhash.xxh3_64()
    with open(full_path(root, file.path), "rb", buffering=0) as raw:
        raw.seek(start)
        while start < stop and (content := raw.read(min(_HASH_BYTES, stop - start))):
            running.update(content)
            start += len(content)
    value: int = running.intdigest()
    return value
