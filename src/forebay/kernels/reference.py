"""The compiled loops in NumPy: their definition, the oracle of their tests, and their replacement without a
compiler. `_kernels.c` has the same functions with the same arguments; only it checks the sizes of its arguments.
"""

import ctypes
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]
Tables = tuple[Numbers, Numbers, int, Numbers, NDArray[np.uint8], int]
IGNORED_LABEL = -100
_HALF = np.uint64(32)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def gather(out: Array, addresses: Numbers, sizes: Numbers) -> None:
    """Copy `sizes[i]` bytes from each address to `out`, one item after the other."""
    target = out.ctypes.data
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, address, size)
        target += size


def permute(cells: Words, size: int, highs: int, lows: int, keys: Words) -> None:
    """Replace each cell by where a shuffle of `range(size)` puts it.

    A cell is (high, low) of a table of `highs × lows` cells. Rounds rotate each column by an amount hashed from its
    number, then each row likewise; a result that is not below `size` goes round again.
    """
    outside = np.arange(len(cells))
    while len(outside):
        high, low = np.divmod(cells[outside], np.uint64(lows))
        for number, key in enumerate(keys):
            if number % 2:
                low = _rotated(low, high, key, np.uint64(lows))
            else:
                high = _rotated(high, low, key, np.uint64(highs))
        cells[outside] = high * np.uint64(lows) + low
        outside = outside[cells[outside] >= size]


def _rotated(half: Words, other: Words, key: np.uint64, count: np.uint64) -> Words:
    """Rotate `half` by a share of `count` that is hashed from the other half: its upper 32 bits, scaled."""
    word = (other ^ key) * _FIRST
    word = (word ^ word >> _HALF) * _SECOND
    rotated: Words = half + ((word >> _HALF) * count >> _HALF)
    return np.where(rotated < count, rotated, rotated - count)


def locate_rows(chunks: Numbers, within: Numbers, rows: Numbers, starts: Numbers) -> bool:
    """Write the chunk of each row, and its number there; chunk c has the rows `starts[c]` to `starts[c + 1]`.

    Returns False if a row is in no chunk.
    """
    if len(rows) and not starts[0] <= rows.min() <= rows.max() < starts[-1]:
        return False
    chunks[:] = np.searchsorted(starts, rows, side="right") - 1
    within[:] = rows - starts[chunks]
    return True


def read_rows(out: Array, chunks: Numbers, within: Numbers, starts: Numbers | None, tables: Tables) -> bool:
    """Copy a part of each row, from byte `starts[i]` on, to `out`; return False if one must not be read.

    `tables` has the address and the bytes of each chunk's rows (0 where it is not mapped), the bytes from one row to
    the next, the first block of each chunk, a bit for every block that was checked, and the rows of a block.
    """
    bases, sizes, stride, first_blocks, checked, block_rows = tables
    if not len(chunks):
        return True
    if not ((chunks >= 0) & (chunks < len(bases)) & (within >= 0) & (within <= 2**61 // stride)).all():
        return False
    at, block, item = bases[chunks], first_blocks[chunks] + within // block_rows, out.nbytes // len(chunks)
    offsets = within * stride + (0 if starts is None else starts)
    last_blocks = np.minimum(first_blocks[chunks + 1], 8 * len(checked))
    inside = (at != 0) & (offsets >= within * stride) & (offsets + item <= sizes[chunks]) & (block < last_blocks)
    if not inside.all() or not (checked[block >> 3] >> (block & 7) & 1).all():
        return False
    gather(out, at + offsets, np.full(len(chunks), item))
    return True


def pack_tokens(
    tokens: Array,
    token_bytes: int,
    width: int,
    lengths: NDArray[np.int32],
    shifted: bool,
    wide: Numbers | None,
    labels: Numbers | None,
    positions: Numbers | None,
) -> bool:
    """Write int64 tokens, labels and positions `[rows, width]` of rows of documents; False if documents do not fit.

    tokens       5 6 7 8 9 0 0     lengths 3 2; the rest of a row is padding
    positions    0 1 2 0 1 0 1
    shifted      6 7 . 9 . . .     . = -100
    unshifted    . 6 7 . 9 . .
    """
    totals = lengths.sum(axis=1, dtype=np.int64)
    if (lengths < 0).any() or (totals > width).any():
        return False
    whole = np.column_stack([lengths, width - totals]).astype(np.int64)
    stops = np.repeat(np.cumsum(whole, axis=1).ravel(), whole.ravel()).reshape(-1, width)
    starts = np.repeat((np.cumsum(whole, axis=1) - whole).ravel(), whole.ravel()).reshape(-1, width)
    column, rows = np.arange(width), tokens.reshape(-1, width)
    if wide is not None:
        wide[...] = rows
    if positions is not None:
        positions[...] = column - starts
    if labels is not None:
        labels[...] = np.roll(rows, -1, axis=1) if shifted else rows
        labels[(column + 1 == stops if shifted else column == starts) | (column >= totals[:, None])] = IGNORED_LABEL
    return True


def mirror(out: Array, content: Array, width: int) -> None:
    """Reverse each line of `width` bytes."""
    out.reshape(-1, width)[:] = content.reshape(-1, width)[:, ::-1]


def paint(
    canvas: Array,
    size: tuple[int, int],
    content: Array,
    box: tuple[int, int, int, int],
    pad: Sequence[int],
) -> None:
    """Paint content `[3, lines, columns]` in its box on a canvas `[3, height, width]`, and padding around it."""
    left, top, columns, lines = box
    canvas[...] = np.array(pad, np.uint8)[:, None, None]
    canvas[:, top : top + lines, left : left + columns] = content


def paint_scaled(
    canvas: Array,
    size: tuple[int, int],
    content: Array,
    box: tuple[int, int, int, int],
    pad: Sequence[float],
    scale: Sequence[float],
    shift: Sequence[float],
) -> None:
    """The same on a canvas of float32: values · scale + shift."""
    left, top, columns, lines = box
    factors, offsets, padding = (np.array(each, np.float32)[:, None, None] for each in (scale, shift, pad))
    canvas[...] = padding
    canvas[:, top : top + lines, left : left + columns] = content.astype(np.float32) * factors + offsets


def token_places(
    begins: Numbers,
    ids: NDArray[np.uint32],
    skipped: NDArray[np.uint8],
    offsets: Numbers,
    flat: NDArray[np.uint8],
    text: bytes,
) -> bool:
    """Write where each token begins in a text; False unless the tokens, one behind the other, are the text.

    Token `id` is `flat[offsets[id]:offsets[id + 1]]`, without its first `skipped[i]` bytes.
    """
    lengths = offsets[ids.astype(np.int64) + 1] - offsets[ids] - skipped
    begins[:] = np.cumsum(lengths) - lengths
    values = np.arange(int(lengths.sum())) + np.repeat(offsets[ids] + skipped - begins, lengths)
    return flat[values].tobytes() == text


def best_fit(bins: Numbers, lengths: Numbers, capacity: int) -> None:
    """Write the bin of each item; lengths must not rise.

    An item goes into the bin with the least room that fits it; of several, into the one that has had this room longest;
    if none fits, into a new one.
    """
    queues: defaultdict[int, deque[int]] = defaultdict(deque)  # room -> the bins that have it
    rooms = opened = 0  # bit r of rooms is set if a bin has room r
    for item, length in enumerate(lengths.tolist()):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = queues[room].popleft()
            if not queues[room]:
                rooms &= ~(1 << room)
        else:
            room, number, opened = capacity, opened, opened + 1
        if left := room - length:
            queues[left].append(number)
            rooms |= 1 << left
        bins[item] = number


def copy_runs(out: Array, source: Array, targets: Numbers, starts: Numbers, lengths: Numbers) -> None:
    """Copy `source[start:start + length]` to `out[target:]` for each run; all are in bytes."""
    to, values = out.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8)
    for target, start, length in zip(targets.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        to[target : target + length] = values[start : start + length]


def frame_documents(
    out: Array, item_bytes: int, ids: NDArray[np.uint32], offsets: Numbers, begin: int, end: int
) -> None:
    """Write the ids of documents one after the other, each between the ids `begin` and `end`; -1 for none."""
    before, after = ([each] if each >= 0 else [] for each in (begin, end))
    inner = np.diff(offsets) + len(before) + len(after)
    stops = np.cumsum(inner)
    is_id = np.ones(len(out), np.bool_)
    if before:
        is_id[stops - inner], out[stops - inner] = False, before[0]
    if after:
        is_id[stops - 1], out[stops - 1] = False, after[0]
    out[is_id] = ids


def line_starts(block: bytes | bytearray, at: int) -> list[int] | None:
    """Return where JSON lines begin, the first at 0; a newline before `at` is not looked for.

    None unless each line ends with `}` and the next one begins with `{`.
    """
    starts, end, last = [0], block.find(b"\n", at), len(block) - 1
    while 0 <= end < last:
        if block[end - 1 : end + 2] != b"}\n{" and block[end - 2 : end + 2] != b"}\r\n{":
            return None
        starts.append(end + 1)
        end = block.find(b"\n", end + 1)
    return starts
