"""The frames of a Zstandard file, found by their headers: the decompressor takes a file that was cut off as it is.

frame      header │ block │ block │ … │ last block │ checksum, if the header says so
block      3 bytes: last? 1 bit, type 2 bits, size 21 bits, then its content (one byte, if it is one byte repeated)
skippable  magic 0x184D2A5?, 4 bytes of size, content
"""

from typing import BinaryIO

import zstandard

_HEADER_BYTES = 18  # the longest there is
_MAGIC = 0xFD2FB528
_SKIPPABLE = 0x184D2A50
_REPEATED_BYTE = 1


def ends_whole(file: BinaryIO, size: int) -> bool:
    """Whether the first `size` bytes of a file are frames to their last byte."""
    position = 0
    while position < size:
        end = _frame_end(file, position, size)
        if end is None or end > size:
            return False
        position = end
    return True


def _frame_end(file: BinaryIO, position: int, size: int) -> int | None:
    file.seek(position)
    header = file.read(min(_HEADER_BYTES, size - position))
    magic = int.from_bytes(header[:4], "little")
    if len(header) < 8:
        return None
    if magic & ~0xF == _SKIPPABLE:
        return position + 8 + int.from_bytes(header[4:8], "little")
    if magic != _MAGIC:
        return None
    try:
        parameters = zstandard.get_frame_parameters(header)
        position += zstandard.frame_header_size(header)
    except zstandard.ZstdError:
        return None
    end = _last_block_end(file, position, size)
    return None if end is None else end + 4 * parameters.has_checksum


def _last_block_end(file: BinaryIO, position: int, size: int) -> int | None:
    while position + 3 <= size:
        file.seek(position)
        block = int.from_bytes(file.read(3), "little")
        last, kind, content = block & 1, block >> 1 & 3, block >> 3
        position += 3 + (1 if kind == _REPEATED_BYTE else content)
        if last:
            return position
    return None
