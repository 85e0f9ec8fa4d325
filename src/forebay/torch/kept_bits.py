"""The bits of a selection in a file: mapped, not held. Pickled, the name of the file travels, not the bits."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from forebay.errors import Damaged, SelectionLost
from forebay.format.layout import FORMAT_VERSION
from forebay.format.sealed import seal, unseal
from forebay.order.selection import Bits, BitSelection
from forebay.store.base import Missing
from forebay.store.local import LocalStore

_own_folders: dict[int, str] = {}  # by process, so that a forked one neither uses nor removes its parent's


class KeptSelection(BitSelection):
    """A selection whose bits lie in a file."""

    def __init__(self, folder: str, key: str) -> None:
        try:
            view = LocalStore(folder).map(key)
        except Missing as error:
            raise SelectionLost(os.path.join(folder, key)) from error
        metadata, arrays = unseal(view, folder, key, "selection")
        super().__init__(arrays["bits"], metadata["rows"])
        self._address = (folder, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return (KeptSelection, self._address)


def keep_bits(folder: str | None, key: str, rows: int, make: Callable[[], Bits]) -> KeptSelection:
    """The selection that a folder has under this key, made now if it has none that is sound.

    Without a folder it goes into one that is this process's own and is removed when it ends.
    """
    place = os.path.abspath(folder) if folder is not None else _own_folder()
    try:
        return KeptSelection(place, key)
    except (SelectionLost, Damaged):
        metadata = {"format_version": FORMAT_VERSION, "type": "selection", "rows": rows}
        LocalStore(place).replace(key, seal(metadata, {"bits": make()}))
    return KeptSelection(place, key)


def _own_folder() -> str:
    process = os.getpid()
    if process not in _own_folders:
        _own_folders[process] = tempfile.mkdtemp(prefix="forebay-selections-")
        atexit.register(_remove, process)
    return _own_folders[process]


def _remove(process: int) -> None:
    if process == os.getpid():
        with suppress(FileNotFoundError):  # temporary folders may be swept by others
            shutil.rmtree(_own_folders.pop(process))
