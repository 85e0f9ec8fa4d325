"""Bytes by key: the storage of a cache."""

import os
import re
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points

from forebay.errors import StoreRefused, is_url, meant_url
from forebay.store.base import BadCopy, Buffer, Entry, Expected, Missing, Store
from forebay.store.local import LocalStore
from forebay.store.memory import MemoryStore

Root = str | os.PathLike[str] | Store
SCHEMES = dict.fromkeys(("s3", "gs", "az", "memory"), "forebay.store.object_store:ObjectStore")
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "wasb": "az"}

_PASSWORD = re.compile(r"(?<=/)[^/@]*:[^/@]*@")  # and its user, of a URL that an error shows


def open_store(root: Root) -> Store:
    """The store at a path or a URL; a store is returned unchanged.

    Schemes are those of `SCHEMES` and of the entry points in the group `forebay.stores`: callables that take the URL.
    """
    if isinstance(root, Store) and not isinstance(root, (str, os.PathLike)):
        return root
    path = os.fspath(root)
    if not is_url(path):
        return LocalStore(path)
    scheme = path.partition(":/")[0]
    known = {point.name: point.value for point in entry_points(group="forebay.stores")} | SCHEMES
    if scheme.lower() not in known:
        shown = _PASSWORD.sub("", path.partition("?")[0])
        rest = shown.partition(":/")[2]
        raise StoreRefused(shown, f"no store has the scheme '{scheme}'", _advice(scheme.lower(), rest, list(known)))
    if meant := meant_url(root):
        raise StoreRefused(path, "a URL has two slashes", f"did you mean {meant}? (a folder of that name is ./{path})")
    module, _, name = known[scheme.lower()].partition(":")
    store: Store = vars(import_module(module))[name](path)
    return store


def _advice(scheme: str, rest: str, known: list[str]) -> str:
    if scheme == "file":
        return f"pass the path '/{rest.lstrip('/')}'"
    meant = [_ALIASES[scheme]] if scheme in _ALIASES else get_close_matches(scheme, known, 1, 0.5)
    if meant:
        return f"did you mean {meant[0]}://{rest.lstrip('/')}?"
    return f"use a path, or one of {', '.join(f'{name}://' for name in sorted(known))}"


__all__ = [
    "BadCopy", "Buffer", "Entry", "Expected", "LocalStore", "MemoryStore", "Missing", "Store", "open_store",
]  # fmt: skip
