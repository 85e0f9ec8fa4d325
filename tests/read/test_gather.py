"""Gathering items by address from many places in memory."""

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.columns import Array
from forebay.read.gather import AddressWindow

FAR = 1 << 36  # where nothing of this process is
BYTE = np.dtype(np.uint8)


def window(item_bytes: int, *arrays: Array) -> AddressWindow:
    made = AddressWindow(item_bytes)
    for array in arrays:
        made.include(array.ctypes.data, array.nbytes)
    return made


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 90)), max_size=30))
def test_items_come_from_wherever_they_are_overlapping_or_not(item_bytes: int, places: list[tuple[int, int]]) -> None:
    arrays = [np.random.default_rng(seed).integers(0, 256, 100, np.uint8) for seed in range(3)]
    addresses = np.array([arrays[which].ctypes.data + at for which, at in places], np.int64)
    found = window(item_bytes, *arrays).gather(addresses, BYTE, (item_bytes,))
    expected = [arrays[which][at : at + item_bytes].tolist() for which, at in places]
    assert found.dtype == np.uint8
    assert found.shape == (len(places), item_bytes)
    assert found.tolist() == expected


def test_nothing_is_gathered_from_nowhere() -> None:
    assert AddressWindow(8).gather(np.empty(0, np.int64), BYTE, (8,)).shape == (0, 8)
    assert AddressWindow(0).gather(np.zeros(5, np.int64), BYTE, (0,)).shape == (5, 0)


def test_what_is_gathered_is_a_copy() -> None:
    array = np.arange(8, dtype=np.uint8)
    found = window(4, array).gather(np.array([array.ctypes.data], np.int64), BYTE, (4,))
    found[:] = 9
    assert array.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_items_too_far_apart_for_one_array_are_gathered_all_the_same() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    item = 1 << 17
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(FAR, 2 * item, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    try:
        low = np.frombuffer((ctypes.c_ubyte * (2 * item)).from_address(address), np.uint8)
        low[:] = 7
        high = np.frombuffer(mmap.mmap(-1, 2 * item), np.uint8)
        high[:] = 9
        if abs(high.ctypes.data - address) * item < 2**62:
            pytest.skip("this system maps everything close together")
        found = window(item, low, high).gather(
            np.array([high.ctypes.data, address, address + 5], np.int64), BYTE, (item,)
        )
        assert found.shape == (3, item)
        assert [set(row.tolist()) for row in found] == [{9}, {7}, {7}]
    finally:
        libc.munmap(address, 2 * item)
