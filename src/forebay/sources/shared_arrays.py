"""Arrays that one process of a machine makes and the others map: workers need not index a manifest again.

<temporary folder>/forebay-<user>/<hash of what they are made from>.bin    lengths, arrays, a hash of all

The process that made a file removes it when it ends. One that was killed leaves it: the next that needs the same finds
it, and one that nobody has used for a day is removed by whoever uses another.
"""

import mmap
import os
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import xxhash
from numpy.typing import DTypeLike

from forebay.columns import Array

_SUM_BYTES = 8
KEPT_SECONDS = 24 * 3600.0  # a map of a file that is removed stays as it is


def shared_arrays(
    made_from: str, dtypes: Sequence[DTypeLike], make: Callable[[], Sequence[Array]]
) -> tuple[Array, ...]:
    """The arrays of `make`, mapped if a process of this user has made them; made and shared otherwise."""
    folder = _own_folder()
    if folder is None:
        return tuple(make())
    path = os.path.join(folder, f"{xxhash.xxh3_128_hexdigest(made_from.encode())}.bin")
    _remove_unused(folder)
    found = _mapped(path, dtypes)
    if found is not None:
        with suppress(OSError):
            os.utime(path)
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
        with open(path, "rb") as file:
            held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None
    content = np.frombuffer(held, np.uint8)
    body, head = content[:-_SUM_BYTES], 8 * len(dtypes)
    if len(body) < head or xxhash.xxh3_64_digest(body.data) != content[-_SUM_BYTES:].tobytes():
        return None
    if hasattr(mmap, "MADV_DONTNEED"):
        held.madvise(mmap.MADV_DONTNEED)  # pages that were only hashed need no memory
    found, start = list[Array](), head
    for dtype, length in zip(dtypes, body[:head].view(np.uint64).tolist(), strict=True):
        stop = start + length * np.dtype(dtype).itemsize
        if stop > len(body):
            return None
        found.append(body[start:stop].view(dtype))
        start = stop
    return tuple(found) if start == len(body) else None


def _remove_unused(folder: str) -> None:
    """Remove what processes that were killed have left; also a file that one of them had not finished."""
    with suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > KEPT_SECONDS:
                    os.unlink(entry.path)


def _remove(path: str, maker: int) -> None:
    if os.getpid() == maker:  # not in a fork
        with suppress(OSError):
            os.unlink(path)
