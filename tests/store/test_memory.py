"""A store in memory."""

import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.store import MemoryStore


def test_it_does_not_travel_to_another_process():
    with pytest.raises(TypeError, match=r"lives in one process.*workers=0"):
        pickle.dumps(MemoryStore())


@pytest.mark.parametrize("change", ["delete", "replace"])
def test_listing_goes_on_while_another_thread_adds_or_deletes(change):
    store, listing = MemoryStore(), threading.Event()
    for number in range(3000):
        store.create(f"{number:04d}", [b"x"])

    def change_all():
        for number in range(3000):
            if change == "delete":
                store.delete(f"{number:04d}")
            else:
                store.replace(f"new/{number:04d}", [b"y"])
                listing.wait(0.001)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            changing = pool.submit(change_all)
            while not changing.done():
                listing.set()
                keys = [entry.key for entry in store.entries("")]
                assert keys == sorted(keys)
            changing.result()
    finally:
        sys.setswitchinterval(interval)
