"""Files of the hub on this disk while they are read: downloaded whole, locked by their readers, then removed.

{folder}/<hash>         a complete, checked file
{folder}/<hash>.part    a partial download, in progress or interrupted
{folder}/<hash>.lock    locked exclusively to download or remove the file, shared to read it

A killed process leaves its file or part file; the next process that needs it resumes. `sweep` removes files that no
process used for a day, `clear` complete files without a reader. Only regular files with these names are touched, never
through a link; other files in the folder are left alone.
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


class SpooledFile:
    """A downloaded file, locked against removal until it is released."""

    def __init__(self, path: str, lock: FileLock) -> None:
        self.path = path
        self._lock = lock

    def remove(self) -> None:
        """Release the file and remove it, unless another process reads it: then that one removes it."""
        try:
            if self._lock.make_exclusive():
                _unlink(self.path)
                self._lock.remove()
        finally:
            self._lock.close()

    def release(self) -> None:
        """Release the file and leave it on disk."""
        self._lock.close()


def acquire(file: HubFile, folder: str) -> SpooledFile:
    """Download a file to a folder, or wait for the process that is downloading it."""
    os.makedirs(folder, exist_ok=True)
    if os.path.islink(folder):
        raise NotADirectoryError(errno.ENOTDIR, "it is a link; downloads need a folder", folder)
    path = os.path.join(folder, file.listed.identity)
    while True:
        lock = FileLock.shared(path + _LOCK)  # waits while another process downloads
        try:
            if _is_whole(path, file.listed) or (lock.make_exclusive() and _downloaded(file, path, lock)):
                return SpooledFile(path, lock)
        except BaseException:
            lock.close()
            raise
        lock.close()
        time.sleep(_PAUSE)  # another process is about to download it


def sweep(folder: str) -> None:
    """Remove files and part files of dead processes that were not used for a day."""
    for path in _places(folder):
        if _is_forgotten(path):
            _remove_unheld(path, part_path(path))


def clear(folder: str) -> None:
    """Remove every complete file without a reader; part files stay, to be resumed."""
    for path in _places(folder):
        if _is_regular(path):
            _remove_unheld(path)


def _places(folder: str) -> set[str]:
    """The paths of spooled files, complete or partial."""
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
    os.utime(path)  # so that `sweep` keeps it
    return True


def _downloaded(file: HubFile, path: str, lock: FileLock) -> bool:
    """Download a file under an exclusive lock, then share the lock; False if another process removed it in between."""
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
        return  # the lock file is a link or a special file
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
