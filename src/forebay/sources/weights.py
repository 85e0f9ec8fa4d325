"""How much a compressed file holds, judged for little: the size it states, held against the beginning of it.

A gzip file states the size of its last member at its end, a Zstandard frame that of itself at its beginning. Either
is the size of the file if it was written in one go; where it does not fit with how well the beginning is compressed,
the beginning alone is asked. The answer depends on the file only.
"""

import io
import zlib
from functools import lru_cache

import zstandard

from forebay.errors import SourceUnreadable
from forebay.source import SourceFile
from forebay.sources.zstd_frames import whole_blocks

_JUDGED_SHARE = 200  # one part in so many is read,
_LEAST_JUDGED = 4 * 1024
_MOST_JUDGED = 256 * 1024
_FITS = 1.6  # two members of one size, of which one is stated, are a factor of 2 off
_PIECE = 1 << 20
_GZIP = 31  # to zlib: with gzip's header and trailer


@lru_cache(maxsize=1 << 16)
def stream_weight(path: str, file: SourceFile) -> int:
    """About how many bytes a compressed file holds."""
    with open(path, "rb", buffering=0) as raw:
        head = raw.read(min(max(file.size // _JUDGED_SHARE, _LEAST_JUDGED), _MOST_JUDGED))
        raw.seek(max(0, file.size - 4))
        trailer = raw.read(4)
    try:
        if path.endswith(".gz"):
            judged, stated = _gzip_ratio(head) * file.size, int.from_bytes(trailer, "little")
        else:
            judged, stated = _zstd_ratio(head) * file.size, _zstd_content_size(head)
    except (zlib.error, zstandard.ZstdError) as error:
        raise SourceUnreadable(path, str(error)) from error
    return stated if judged / _FITS < stated < judged * _FITS else int(judged)


def _gzip_ratio(head: bytes) -> float:
    """Bytes that come out for every byte that goes in."""
    taken, made = len(head), 0
    inflate = zlib.decompressobj(_GZIP)
    while head:
        made += len(inflate.decompress(head, _PIECE))
        head = inflate.unconsumed_tail
        if inflate.eof and inflate.unused_data:
            head, inflate = inflate.unused_data.lstrip(b"\0"), zlib.decompressobj(_GZIP)
    return made / max(1, taken)


def _zstd_ratio(head: bytes) -> float:
    whole = whole_blocks(head) or len(head)
    made = 0
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(head[:whole]), read_across_frames=True) as reader:
        while piece := reader.read(_PIECE):
            made += len(piece)
    return made / max(1, whole)


def _zstd_content_size(head: bytes) -> int:
    size: int = zstandard.frame_content_size(head) if head else 0
    return size
