"""A store in a folder. Values are written beside their name, synced, and linked into place.

A temporary name says which process writes it, so that `leftovers` can tell what a dead one left behind.
"""

import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from forebay.store.base import Buffer, Entry
from forebay.store.mapping import map_file
from forebay.store.owner import Owner, this_host, this_process

_TEMPORARY = ".tmp-"
_BUFFERS_AT_ONCE = 512  # systems take 1,024
_LARGE_BUFFER = 1 << 20
_FOREIGN_LEFTOVER_SECONDS = 24 * 3600


class LocalStore:
    """Keys are paths below a folder, which may be shared between machines."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.address = os.fspath(path)
        self._root = os.path.abspath(self.address)

    def map(self, key: str) -> memoryview:
        descriptor = self._open(key)
        try:
            return map_file(descriptor)
        finally:
            os.close(descriptor)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        descriptor = self._open(key)
        with open(descriptor, "rb", buffering=0) as file:
            file.seek(start)
            if stop is None:
                return file.readall()
            return _read_exactly(file.fileno(), start, stop)

    def create(self, key: str, data: Sequence[Buffer]) -> bool:
        final = self._path(key)
        temporary = self._write_aside(final, data)
        try:
            created = _link(temporary, final)
        finally:
            os.unlink(temporary)
        _sync_folder(os.path.dirname(final))
        return created

    def replace(self, key: str, data: Sequence[Buffer]) -> None:
        final = self._path(key)
        temporary = self._write_aside(final, data)
        try:
            os.replace(temporary, final)
        except OSError:
            os.unlink(temporary)
            raise
        _sync_folder(os.path.dirname(final))

    def keys(self, prefix: str) -> Iterator[Entry]:
        folder, _, _ = prefix.rpartition("/")
        for entry in self._walk(folder):
            if entry.key.startswith(prefix) and not _is_temporary(entry.key):
                yield entry

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(key))

    def leftovers(self) -> Iterator[Entry]:
        for entry in self._walk(""):
            if _is_temporary(entry.key) and self._is_leftover(entry.key):
                yield entry

    def free_bytes(self) -> int | None:
        folder = Path(self._root)
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _path(self, key: str) -> str:
        return os.path.join(self._root, *key.split("/"))

    def _open(self, key: str) -> int:
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise KeyError(key) from error
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise KeyError(key)
        return descriptor

    def _write_aside(self, final: str, data: Sequence[Buffer]) -> str:
        folder = os.path.dirname(final)
        _make_folder(folder)
        temporary = os.path.join(folder, f"{_TEMPORARY}{this_process()}-{secrets.token_hex(4)}")
        try:
            with open(temporary, "xb", buffering=0) as file:
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        return temporary

    def _walk(self, folder: str) -> Iterator[Entry]:
        try:
            with os.scandir(os.path.join(self._root, folder)) as scan:
                found = sorted(scan, key=lambda item: item.name + "/" if item.is_dir() else item.name)
        except (FileNotFoundError, NotADirectoryError):
            return
        for item in found:
            key = f"{folder}/{item.name}" if folder else item.name
            if item.is_dir():
                yield from self._walk(key)
            else:
                with suppress(FileNotFoundError):
                    yield Entry(key, item.stat().st_size)

    def _is_leftover(self, key: str) -> bool:
        name = key.rpartition("/")[2]
        owner = Owner.parse(name.removeprefix(_TEMPORARY).rpartition("-")[0])
        if owner is not None and owner.host == this_host():
            return owner.is_dead()
        with suppress(FileNotFoundError):
            return time.time() - os.stat(self._path(key)).st_mtime > _FOREIGN_LEFTOVER_SECONDS
        return False


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(_TEMPORARY)


def _read_exactly(descriptor: int, start: int, stop: int) -> bytes:
    pieces = []
    while start < stop:
        piece = os.pread(descriptor, stop - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _write_all(descriptor: int, data: Sequence[Buffer]) -> None:
    """Write small buffers together with the large one behind them.

    What is written in one go is cached in large pieces, and is then mapped with few page faults.
    """
    waiting: list[memoryview] = []
    for buffer in data:
        if len(buffer):
            waiting.append(memoryview(buffer).cast("B"))
        if len(waiting) == _BUFFERS_AT_ONCE or sum(map(len, waiting[-1:])) >= _LARGE_BUFFER:
            _write_together(descriptor, waiting)
            waiting = []
    _write_together(descriptor, waiting)


def _write_together(descriptor: int, rest: list[memoryview]) -> None:
    while rest:
        written = os.writev(descriptor, rest)
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]


def _make_folder(folder: str) -> None:
    """Make a folder and those above it, each synced into its parent so that it survives a power cut."""
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    _sync_folder(parent)


def _link(temporary: str, final: str) -> bool:
    """Give a file its name; False where the name is taken by another.

    A network file system may carry out a link, lose its answer and be asked again: a second name is success.
    """
    try:
        os.link(temporary, final)
    except FileExistsError:
        return os.stat(temporary).st_nlink > 1
    return True


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
