"""Bytes by key: where a cache rests."""

from forebay.store.base import Buffer, Entry, Missing, Store
from forebay.store.local import LocalStore
from forebay.store.memory import MemoryStore
from forebay.store.opening import open_store

__all__ = ["Buffer", "Entry", "LocalStore", "MemoryStore", "Missing", "Store", "open_store"]
