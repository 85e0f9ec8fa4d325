"""How much a file holds, estimated from its stated size and its beginning; and the digest of stored bytes.

A gzip file states the size of its last member at its end, a Zstandard file may state that of its first frame at its
beginning: all it holds if it was written in one go, and never more. Where it is far less than the beginning promises,
the beginning alone is asked. The answer depends on the file only.
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
    kept_beginning,
    whole_blocks,
)
from forebay.sources.paths import full_path

_JUDGED_SHARE = 100  # one part in so many is read,
_LEAST_JUDGED = 16 * 1024
_MOST_JUDGED = 256 * 1024  # which holds the first block of any file
_FITS = 1.6  # two members of one size, of which one is stated, are a factor of 2 off
_MOST_RATIO = 1032  # what deflate can do; more than that was not meant as a size
_BLOCK_SORTED = 1 << 20  # what the first block of a bzip2 file lies in
_USUAL_RATIO = 4.0  # where the beginning says nothing
_PIECE = 1 << 20
_MOST_MADE = 1 << 26  # enough of a beginning that unpacks to very much
_GZIP = 31  # to zlib: with gzip's header and trailer


@lru_cache(maxsize=1 << 16)
def stream_weight(path: str, file: SourceFile) -> int:
    """About how many bytes a compressed file holds."""
    with open(path, "rb", buffering=0) as raw:
        stored = StoredBytes(raw, file.size, kept_beginning(path, file))
        head = stored.read(min(max(file.size // _JUDGED_SHARE, _LEAST_JUDGED), _MOST_JUDGED))
        try:
            ratio, stated = _judge(format_of(path), raw, stored, head, file)
        except (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's, not the content's
            raise SourceUnreadable(path, str(error)) from error
    judged = ratio * file.size
    return stated if judged / _FITS < stated <= file.size * _MOST_RATIO else int(judged)


def _judge(packing: Packing, raw: BinaryIO, stored: StoredBytes, head: bytes, file: SourceFile) -> tuple[float, int]:
    match packing:
        case "gzip":
            return _judge_gzip(raw, head, file)
        case "zstd":
            return _judge_zstd(stored, head, file)
        case _:
            return _members_ratio(head + stored.read(max(0, _BLOCK_SORTED - len(head))), packing), 0


def _judge_gzip(raw: BinaryIO, head: bytes, file: SourceFile) -> tuple[float, int]:
    """How well the beginning is compressed, and the size that is stated."""
    raw.seek(max(0, file.size - 4))
    return _gzip_ratio(head), int.from_bytes(raw.read(4), "little")


def _judge_zstd(stored: StoredBytes, head: bytes, file: SourceFile) -> tuple[float, int]:
    stated: int = zstandard.frame_content_size(head) if head else 0
    whole = whole_blocks(head)
    if not whole and stated < file.size:  # nothing is stated, or no more than a part of it
        head += stored.read(_MOST_JUDGED)
        whole = whole_blocks(head)
    return _zstd_ratio(head[:whole]), stated


def _gzip_ratio(head: bytes) -> float:
    """Bytes that come out for every byte that goes in."""
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


def weigh(root: str, file: SourceFile) -> int:
    """How many bytes a file holds; of a stream, about how many."""
    return stream_weight(full_path(root, file.path), file) if file.stream else file.size


def scanned(root: str, file: SourceFile) -> SourceFile:
    """A stream with its digest, another file as it is."""
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
