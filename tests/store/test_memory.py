"""A store in memory."""

import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.store import MemoryStore


def test_it_does_not_travel_to_another_process():
    with pytest.raises(TypeError, match=r"lives in one process.*workers=0"):
        pickle.dumps(MemoryStore())


def test_listing_goes_on_while_other_threads_add_and_delete():
    store = MemoryStore()
    for number in range(200):
        store.create(f"stays/{number:03d}", [b"x"])

    def churn(thread):
        for turn in range(300):
            store.replace(f"comes-and-goes/{thread}/{turn}", [b"x"])
            store.delete(f"comes-and-goes/{thread}/{turn}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            churning = [pool.submit(churn, thread) for thread in range(3)]
            while not all(one.done() for one in churning):
                assert len([entry for entry in store.keys("") if entry.key.startswith("stays/")]) == 200
            for one in churning:
                one.result()
    finally:
        sys.setswitchinterval(interval)
