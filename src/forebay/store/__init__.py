"""Bytes by key: the storage of a cache."""

from forebay.store.base import SCHEMES, BadCopy, Buffer, Entry, Expected, Missing, Root, Store, open_store
from forebay.store.local import LocalStore
from forebay.store.memory import MemoryStore

__all__ = [
    "SCHEMES", "BadCopy", "Buffer", "Entry", "Expected", "LocalStore", "MemoryStore", "Missing", "Root", "Store",
    "open_store",
]  # fmt: skip
