"""Arrays that one process of a machine makes and the others map: workers need not index a manifest again.

<temporary folder>/forebay-<user>/<hash of what they are made from>.bin    lengths, arrays, a hash of all

The process that made a file removes it when it ends. One that was killed leaves it, and the next that needs the same
finds it.
"""

import os
import stat
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import xxhash
from numpy.typing import DTypeLike

from forebay.columns import Array

_SUM_BYTES = 8


def shared_arrays(
    made_from: str, dtypes: Sequence[DTypeLike], make: Callable[[], Sequence[Array]]
) -> tuple[Array, ...]:
    """The arrays of `make`, mapped if a process of this user has made them; made and shared otherwise."""
    folder = _own_folder()
    if folder is None:
        return tuple(make())
    path = os.path.join(folder, f"{xxhash.xxh3_128_hexdigest(made_from.encode())}.bin")
    found = _mapped(path, dtypes)
    if found is not None:
        return found
    made = tuple(make())
    with suppress(OSError):  # a full disk
        _write(path, made)
        found = _mapped(path, dtypes)
    if found is None:
        return made
    weakref.finalize(found[0], _remove, path, os.getpid())
    return found


def _own_folder() -> str | None:
    """A folder that only this user can write to; None where there is none, and another user may have its name."""
    folder = os.path.join(tempfile.gettempdir(), f"forebay-{os.getuid()}")
    with suppress(OSError):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        status = os.lstat(folder)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return folder
    return None


def _write(path: str, arrays: Sequence[Array]) -> None:
    running = xxhash.xxh3_64()
    descriptor, aside = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with open(descriptor, "wb") as file:
            for array in (np.array([len(array) for array in arrays], np.uint64), *arrays):
                content = np.ascontiguousarray(array).data.cast("B") if len(array) else b""
                running.update(content)
                file.write(content)
            file.write(running.digest())
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def _mapped(path: str, dtypes: Sequence[DTypeLike]) -> tuple[Array, ...] | None:
    """The arrays of a file that is whole; None where it is not there, or anything else."""
    try:
        content = np.memmap(path, np.uint8, "r").view(np.ndarray)
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None
    body, head = content[:-_SUM_BYTES], 8 * len(dtypes)
    if len(body) < head or xxhash.xxh3_64_digest(body.data) != content[-_SUM_BYTES:].tobytes():
        return None
    found, start = list[Array](), head
    for dtype, length in zip(dtypes, body[:head].view(np.uint64).tolist(), strict=True):
        stop = start + length * np.dtype(dtype).itemsize
        if stop > len(body):
            return None
        found.append(body[start:stop].view(dtype))
        start = stop
    return tuple(found) if start == len(body) else None


def _remove(path: str, maker: int) -> None:
    if os.getpid() == maker:  # not in a fork
        with suppress(OSError):
            os.unlink(path)
