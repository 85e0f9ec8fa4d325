"""Finding separators so that the answer does not depend on where the search began.

Separators are those that `bytes.split` finds from the beginning of the file, left to right. A separator may overlap
itself, as three newlines do in a run of four; so a search from the middle first goes back to where nothing overlaps:

    text        a \\n \\n \\n \\n b        separator \\n\\n\\n
    split       a └──────────┘ \\n b      the one that counts
    not         a \\n └──────────┘ b      what a search from the second newline would find
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

Block = bytes | bytearray

_BLOCK = 128 * 1024  # decoding is fastest while a block and what is made of it stay in the processor's cache
_LOOK = 4 * 1024  # the least that is read to find a separator; after a while, a fourth of what was read in vain
_MOST_LOOK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LongPiece:
    """A piece that was passed over, with its separator: how many bytes and newlines, and how long without it."""

    length: int
    newlines: int
    size: int

    def __len__(self) -> int:
        return self.length


def whole_pieces(
    read: Callable[[int], bytes], length: int, separator: bytes, limit: int = sys.maxsize
) -> Iterator[Block | LongPiece]:
    """The next `length` bytes in blocks that end behind a separator, and what is left.

    A piece of up to `limit` bytes comes whole; a longer one is passed over while it is read. Nothing here holds on to a
    block that was handed out: a long one is in memory once.
    """
    reach = len(separator) - 1
    held = bytearray()  # the beginning of a piece: no separator in it,
    seam = b""  # but perhaps the beginning of one at its end
    passed = newlines = 0  # of a piece that is too long, in place of `held`
    while length > 0 and (content := read(min(_BLOCK, length))):
        length -= len(content)
        if passed:
            end = (seam + content).find(separator) + len(separator) - len(seam)
            if end < len(separator) - len(seam):
                passed, newlines = passed + len(content), newlines + content.count(b"\n")
                seam = (seam + content)[-reach:] if reach else b""
                continue
            passed, newlines = passed + end, newlines + content.count(b"\n", 0, end)
            yield LongPiece(passed, newlines, passed - len(separator))
            content, seam, passed = content[end:], b"", 0
        end = last_end(seam + content, separator) - len(seam)
        if end > 0:
            full: list[Block] = [content[:end]]
            if held:
                held += full.pop()
                full, held = [held], bytearray()
            content, seam = content[end:], b""
            yield from _within(full, separator, limit)
        held += content
        seam = (seam + content)[-reach:] if reach else b""
        if len(held) > limit + len(separator):
            passed, newlines, held = len(held), held.count(b"\n"), bytearray()
    if passed:
        yield LongPiece(passed, newlines, passed)
    if held:
        full, held = [held], bytearray()
        yield from _within(full, separator, limit)


def _within(full: list[Block], separator: bytes, limit: int) -> Iterator[Block | LongPiece]:
    """The one block in a list, without pieces that are longer than the limit."""
    if len(full[0]) <= limit:
        yield full.pop()
        return
    block, begin = full.pop(), 0
    for start, stop in piece_bounds(block, separator):
        if stop - start > limit:
            if begin < start:
                yield block[begin:start]
            begin = min(stop + len(separator), len(block))
            yield LongPiece(begin - start, block.count(b"\n", start, begin), stop - start)
    if begin == 0:
        full.append(block)
        del block
        yield full.pop()
    elif begin < len(block):
        yield block[begin:]


def piece_bounds(block: Block, separator: bytes) -> Iterator[tuple[int, int]]:
    """Where the pieces of a block begin and end, their separators left out.

    >>> list(piece_bounds(b"one||two||", b"||"))
    [(0, 3), (5, 8)]
    """
    begin = 0
    while begin < len(block):
        end = block.find(separator, begin)
        end = end if end >= 0 else len(block)
        yield begin, end
        begin = end + len(separator)


def end_after(plain: BinaryIO, separator: bytes, start: int, at: int, limit: int = sys.maxsize) -> int | None:
    """Where the first separator that begins at `at` or later ends in a file, in which a piece begins at `start`.

    None where there is none, or none that begins before `limit`: nothing is looked for there.
    """
    cursor = _overlap_start_in(plain, separator, start, at)
    plain.seek(cursor)
    ahead = b""  # from `cursor` on
    while cursor < limit and (content := plain.read(min(max(_LOOK, (cursor - at) // 4), _MOST_LOOK))):
        ahead += content
        while (found := ahead.find(separator)) >= 0:
            cursor += found + len(separator)
            if cursor - len(separator) >= at:
                return cursor
            ahead = ahead[found + len(separator) :]
        passed = max(0, len(ahead) - len(separator) + 1)
        cursor, ahead = cursor + passed, ahead[passed:]
    return None


def _overlap_start_in(plain: BinaryIO, separator: bytes, start: int, at: int) -> int:
    """`overlap_start` for a place in a file, in which a piece begins at `start`."""
    if len(separator) == 1:
        return max(start, at)
    behind = _LOOK
    while True:
        low = max(start, at - behind)
        plain.seek(low)
        content = plain.read(max(0, at - low) + len(separator) - 1)
        found = overlap_start(content, separator, max(0, at - low))
        if low == start or found >= len(separator):
            return low + found
        behind *= 2


def first_end(content: Block, separator: bytes, at: int) -> int:
    """Where the first separator that begins at `at` or later ends, -1 where there is none.

    >>> first_end(b"a----b", b"---", 2)
    -1
    """
    cursor = overlap_start(content, separator, at)
    while 0 <= (found := content.find(separator, cursor)) < at:
        cursor = found + len(separator)
    return -1 if found < 0 else found + len(separator)


def last_end(content: bytes, separator: bytes) -> int:
    """Where the last separator ends, 0 where there is none.

    >>> last_end(b"a----b", b"---")
    4
    """
    found = content.rfind(separator)
    if found < 0:
        return 0
    cursor = overlap_start(content, separator, found)
    while (found := content.find(separator, cursor)) >= 0:
        cursor = found + len(separator)
    return cursor


def overlap_start(content: Block, separator: bytes, at: int) -> int:
    """The last place up to `at` that no separator, real or not, reaches across."""
    reach = len(separator) - 1
    while (found := content.find(separator, max(0, at - reach), at + reach)) >= 0 and found < at:
        at = found
    return at
