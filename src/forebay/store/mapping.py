"""Mapping a file without keeping a descriptor for it.

The `mmap` module keeps a descriptor per map (until Python 3.13), so a cache of thousands of chunks would run into
`ulimit -n`. Where the C library offers `mmap`, it is called directly; the map goes when the last view of it does.
"""

import ctypes
import mmap
import os
import sys
import weakref

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_file(descriptor: int) -> memoryview:
    """A read-only view of all bytes of a file; the descriptor may be closed afterwards."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return memoryview(b"")
    if _libc is None or sys.platform not in ("linux", "darwin"):
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map a file of {size:,} bytes: {os.strerror(code)}")
    array = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(array, _libc.munmap, address, size).atexit = False
    return memoryview(array).cast("B").toreadonly()
