"""Files of the hub while they are read: downloaded whole, held by the processes that read them, then removed.

{folder}/<hash>         a file that is whole and checked
{folder}/<hash>.part    what has come of it, by a download under way or a killed one
{folder}/<hash>.lock    held alone by who downloads or removes, shared by who reads

A killed process leaves its file, or a part of it; the next who wants it goes on with it. `sweep` removes what nobody
took up within a day, `clear` what is whole and held by nobody. Only names of this table are touched, only where they
are regular files, and never through a link: whatever else lies in the folder stays.
"""

import errno
import os
import re
import shutil
import stat
import time
from contextlib import suppress

from forebay.errors import DiskFull
from forebay.hub.download import PART, FileLock, download, is_sound, part_path
from forebay.hub.repository import HubFile, RemoteFile

_LOCK = ".lock"
_OURS = re.compile(rf"([0-9a-f]{{40}}|[0-9a-f]{{64}})(?:{re.escape(PART)})?")
_FORGOTTEN_SECONDS = 24 * 3600.0
_PAUSE = 0.05


class Held:
    """A file of the hub on this disk, kept there until every holder lets go."""

    def __init__(self, path: str, lock: FileLock) -> None:
        self.path = path
        self._lock = lock

    def remove(self) -> None:
        """Remove the file, unless another process reads it: then that one does."""
        try:
            if self._lock.alone():
                _unlink(self.path)
                self._lock.remove()
        finally:
            self._lock.close()

    def keep(self) -> None:
        """Let go and leave the file for later."""
        self._lock.close()


def take(file: HubFile, folder: str) -> Held:
    """Have a file of the hub in a folder; where another process is at it, wait and have the same."""
    os.makedirs(folder, exist_ok=True)
    if os.path.islink(folder):
        raise NotADirectoryError(errno.ENOTDIR, "it is a link, and downloads are kept in a folder of forebay", folder)
    path = os.path.join(folder, file.listed.identity)
    while True:
        lock = FileLock.shared(path + _LOCK)  # waits while another downloads
        try:
            if _is_whole(path, file.listed) or (lock.alone() and _downloaded(file, path, lock)):
                return Held(path, lock)
        except BaseException:
            lock.close()
            raise
        lock.close()
        time.sleep(_PAUSE)  # another is about to download it


def sweep(folder: str) -> None:
    """Remove what dead processes left and nobody took up."""
    for path in _places(folder):
        if _is_forgotten(path):
            _remove_unheld(path, part_path(path))


def clear(folder: str) -> None:
    """Remove every whole file that nobody holds; parts stay, to be gone on with."""
    for path in _places(folder):
        if _is_regular(path):
            _remove_unheld(path)


def _places(folder: str) -> set[str]:
    """Where files of ours are, whole or in part."""
    names = os.listdir(folder) if os.path.isdir(folder) and not os.path.islink(folder) else []
    ours = ((name, _OURS.fullmatch(name)) for name in names)
    return {os.path.join(folder, found[1]) for name, found in ours if found and _is_regular(os.path.join(folder, name))}


def _is_regular(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _is_whole(path: str, file: RemoteFile) -> bool:
    if not _is_regular(path) or not is_sound(path, file):
        return False
    os.utime(path)  # so that nobody takes it for forgotten
    return True


def _downloaded(file: HubFile, path: str, lock: FileLock) -> bool:
    """Download a file, alone, then share it; False where somebody removed it before it was shared."""
    try:
        download(file, path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = os.path.dirname(path)
        raise DiskFull(folder, file.size, shutil.disk_usage(folder).free) from error
    lock.share()
    return os.path.exists(path)


def _remove_unheld(path: str, *others: str) -> None:
    try:
        lock = FileLock.if_free(path + _LOCK)
    except FileExistsError:
        return  # the lock's name is not a lock of ours
    if lock is None:
        return
    try:
        for leftover in filter(_is_regular, (path, *others)):
            _unlink(leftover)
        lock.remove()
    finally:
        lock.close()


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _is_forgotten(path: str) -> bool:
    times = []
    for leftover in (path, part_path(path)):
        with suppress(FileNotFoundError):
            times.append(os.lstat(leftover).st_mtime)
    return bool(times) and time.time() - max(times) > _FORGOTTEN_SECONDS
