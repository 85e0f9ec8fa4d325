"""The frames of a Zstandard file, found by their headers: the decompressor takes a file that was cut off as it is.

frame      header │ block │ block │ … │ last block │ checksum, if the header says so
block      3 bytes: last? 1 bit, type 2 bits, size 21 bits, then its content (one byte, if it is one byte repeated)
skippable  magic 0x184D2A5?, 4 bytes of size, content
"""

import io
from collections.abc import Iterator
from typing import BinaryIO

import zstandard

_HEADER_BYTES = 18  # the longest there is
_LEAST_FRAME = 8
_MAGIC = 0xFD2FB528
_SKIPPABLE = 0x184D2A50
_REPEATED_BYTE = 1


def ends_whole(file: BinaryIO, size: int) -> bool:
    """Whether the first `size` bytes of a file are frames to their last byte."""
    end, whole = 0, True
    for end, whole in _boundaries(file, size):  # noqa: B007 — the last one is what counts
        pass
    return end == size and whole


def whole_blocks(head: bytes) -> int:
    """How much of the beginning of a file can be decompressed."""
    return max((end for end, _ in _boundaries(io.BytesIO(head), len(head))), default=0)


def _boundaries(file: BinaryIO, size: int) -> Iterator[tuple[int, bool]]:
    """Where blocks end, and whether the frame does too, as far as the file is whole."""
    position = 0
    while position + _LEAST_FRAME <= size:
        file.seek(position)
        header = file.read(min(_HEADER_BYTES, size - position))
        magic = int.from_bytes(header[:4], "little")
        if magic & ~0xF == _SKIPPABLE:
            ends = iter([(position + 8 + int.from_bytes(header[4:8], "little"), True)])
        elif magic == _MAGIC:
            ends = _block_ends(file, position, header, size)
        else:
            return
        last = False
        for position, last in ends:
            if position > size:
                return
            yield position, last
        if not last:
            return


def _block_ends(file: BinaryIO, position: int, header: bytes, size: int) -> Iterator[tuple[int, bool]]:
    try:
        checksum = 4 if zstandard.get_frame_parameters(header).has_checksum else 0
        position += zstandard.frame_header_size(header)
    except zstandard.ZstdError:
        return  # not even the header is whole
    last = False
    while not last and position + 3 <= size:
        file.seek(position)
        block = int.from_bytes(file.read(3), "little")
        last, kind, content = bool(block & 1), block >> 1 & 3, block >> 3
        position += 3 + (1 if kind == _REPEATED_BYTE else content) + (checksum if last else 0)
        yield position, last
