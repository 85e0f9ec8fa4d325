"""Read-only maps of files that keep no descriptor.

The `mmap` module keeps a descriptor per map (until Python 3.13), so a cache of thousands of chunks would exceed
`ulimit -n`; the C function is called directly instead.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_file(descriptor: int) -> memoryview:
    """A read-only view of a file; the descriptor may be closed afterwards."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return memoryview(b"")
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map a file of {size:,} bytes: {os.strerror(code)}")
    return np.asarray(_Map(address, size)).data


class _Map:
    """A read-only mapping exposed through the array interface; unmapped when the last view is freed.

    A ctypes array would create and keep a class for every size, and take three times the memory.
    """

    __slots__ = ("_address", "_size")

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._size,), "data": (self._address, True)}

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter exits, a thread may still be copying; the kernel unmaps when the process ends.
        if not ending():
            _libc.munmap(self._address, self._size)
