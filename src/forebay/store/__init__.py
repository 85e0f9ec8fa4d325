"""Bytes by key: the storage of a cache."""

from forebay.store.base import (
    SCHEMES,
    BadCopy,
    Buffer,
    Entry,
    Expected,
    MemoryStore,
    Missing,
    Root,
    Store,
    open_store,
)
from forebay.store.local import LocalStore

__all__ = [
    "SCHEMES", "BadCopy", "Buffer", "Entry", "Expected", "LocalStore", "MemoryStore", "Missing", "Root", "Store",
    "open_store",
]  # fmt: skip
