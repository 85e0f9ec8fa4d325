"""From what a user names to a store."""

import os

from forebay.store.base import Store
from forebay.store.local import LocalStore

Root = str | os.PathLike[str] | Store


def open_store(root: Root) -> Store:
    """A folder's path becomes a local store; a store is taken as it is."""
    if isinstance(root, Store) and not isinstance(root, (str, os.PathLike)):
        return root
    return LocalStore(os.fspath(root))
