"""From what a user names to a store."""

import os

from forebay.errors import StoreRefused, is_url
from forebay.store.base import Store
from forebay.store.local import LocalStore

Root = str | os.PathLike[str] | Store


def open_store(root: Root) -> Store:
    """A folder's path becomes a local store; a store is taken as it is. A URL is refused: no store reads one."""
    if isinstance(root, Store) and not isinstance(root, (str, os.PathLike)):
        return root
    path = os.fspath(root)
    if is_url(path):
        raise StoreRefused(path, "it is a URL, and a cache lies in a folder", "pass the path of a folder")
    return LocalStore(path)
