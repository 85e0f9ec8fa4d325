"""Numbers that are too many for memory, on disk for as long as a job needs them."""

import os
import tempfile
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import DTypeLike

from forebay.columns import Array
from forebay.format.tensors import as_bytes
from forebay.store.base import Store
from forebay.store.local import LocalStore


class Scratch(AbstractContextManager["Scratch"]):
    """A file that is appended to, then mapped. It has no name, so nothing of it is left, however the process ends.

    A map of it stays valid after it is closed.
    """

    def __init__(self, folder: str | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 — closed on exit

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, values: Array) -> None:
        self._file.write(as_bytes(values))

    def mapped(self, dtype: DTypeLike) -> Array:
        """All that was appended, as one array that can be written to."""
        self._file.flush()
        if self._file.tell() == 0:
            return np.empty(0, dtype)
        return np.memmap(self._file, dtype, "r+").view(np.ndarray)


def scratch_folder(store: Store) -> str | None:
    """A folder on the disk that the cache is on, None (the system's choice) where it is on none.

    It is never made for the purpose: a cache that is not there yet will be made in the folder above it.
    """
    if not isinstance(store, LocalStore):
        return None
    folder = os.path.abspath(store.address)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
