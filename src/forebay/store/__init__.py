"""Bytes by key: the storage of a cache."""

import os

from forebay.errors import StoreRefused, is_url
from forebay.store.base import Buffer, Entry, Missing, Store
from forebay.store.local import LocalStore
from forebay.store.memory import MemoryStore

Root = str | os.PathLike[str] | Store


def open_store(root: Root) -> Store:
    """A `LocalStore` for a path; a store is returned unchanged. URLs are rejected: no store reads one."""
    if isinstance(root, Store) and not isinstance(root, (str, os.PathLike)):
        return root
    path = os.fspath(root)
    if is_url(path):
        raise StoreRefused(path, "it is a URL, but a cache is a folder", "pass the path of a folder")
    return LocalStore(path)


__all__ = ["Buffer", "Entry", "LocalStore", "MemoryStore", "Missing", "Store", "open_store"]
