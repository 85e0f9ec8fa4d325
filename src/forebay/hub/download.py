"""Download files: interrupted downloads resume, size and hash are checked, complete files are moved into place.

Also byte-range reads, which cannot be checked against the hash of the file: use them for planning only, never for data
that goes into a cache. And file locks, by which processes share downloads.

{folder}/<hash>         a complete, checked file
{folder}/<hash>.part    a partial download, in progress or interrupted
{folder}/<hash>.lock    locked exclusively to download or remove the file, shared to read it

A killed process leaves its file or part file; the next process that needs it resumes. `sweep` removes files that no
process used for a day, `clear` complete files without a reader. Only regular files with these names are touched, never
through a link; other files in the folder are left alone.

The files of a model on the hub: downloaded once, checked, and cached on disk.

{folder}/models/<hash>                       a complete, checked file
{folder}/model-folders/<name>/<commit>/…     links to these files under their names in the commit
"""

import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

import httpx2

from forebay.errors import DiskFull, DownloadCorrupt, HubNotFound, HubUnreachable
from forebay.hub.http import RetryPolicy, TransientError, begins_at
from forebay.hub.repository import HubFile, RemoteFile, Repository

_LARGEST_RANGE = 512 << 20  # bytes; an untrusted Parquet footer states how much to read


def read_range(file: HubFile, start: int, stop: int) -> bytes:
    """The bytes from `start` to `stop`; an interrupted read resumes where it stopped."""
    stop = min(stop, file.size)
    if stop - start > _LARGEST_RANGE:
        problem = f"its footer or a column takes {stop - start:,} bytes, more than the limit of {_LARGEST_RANGE:,}"
        raise HubNotFound(file.what, problem, "download the file and build from it")
    body = bytearray()

    def attempt() -> bytes:
        begin = start + len(body)
        with file.get({"range": f"bytes={begin}-{stop - 1}"}) as response:
            found = begins_at(response, begin, file.size)
            if found is None:
                problem = f"HTTP {response.status_code} does not return byte {begin:,} of {file.size:,}"
                raise TransientError(problem, final=DownloadCorrupt(file.what, problem))
            known = begin - found
            for piece in response.iter_raw():
                body.extend(piece[known : known + stop - start - len(body)])
                known = max(0, known - len(piece))
                if len(body) == stop - start:  # a server without ranges would continue
                    break
        if len(body) < stop - start:
            raise TransientError(f"it ended after {len(body):,} of {stop - start:,} bytes")
        return bytes(body)

    return file.with_retries(attempt, lambda: len(body)) if stop > start else b""


class RangeFile(io.RawIOBase):
    """A seekable file on the hub; each read is one request."""

    def __init__(self, file: HubFile) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._file.size if size is None or size < 0 else self._position + size
        piece = read_range(self._file, self._position, stop)
        self._position += len(piece)
        return piece


_NOT_OURS = "it is a link or not a regular file, so forebay did not create it; remove it"
_NO_LOCKS = "its file system does not support locks; pass --spool with a folder on another one, or move HF_HOME there"


class FileLock:
    """A file lock, shared or exclusive. The exclusive holder may remove the file."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def shared(cls, path: str) -> "FileLock":
        """Wait for a shared lock."""
        while True:
            descriptor = _open_locked(path, fcntl.LOCK_SH)
            if _is_at(descriptor, path):
                return cls(path, descriptor)
            os.close(descriptor)  # removed while waiting; another process may have created a new one

    @classmethod
    def if_free(cls, path: str) -> "FileLock | None":
        """An exclusive lock, None if another process holds the lock."""
        try:
            descriptor = _open_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if _is_at(descriptor, path):
            return cls(path, descriptor)
        os.close(descriptor)
        return None

    def share(self) -> None:
        """Change an exclusive lock to a shared one. This is not atomic: the lock may be free for a moment."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def make_exclusive(self) -> bool:
        """Change a shared lock to an exclusive one; if another process holds it, release it and return False.

        Tries twice: of two processes that call this at once, the second attempt of the later one succeeds.
        """
        for _ in range(2):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            else:
                return _is_at(self._descriptor, self.path)
        return False

    def remove(self) -> None:
        os.unlink(self.path)

    def close(self) -> None:
        os.close(self._descriptor)


def open_own(path: str, flags: int) -> int:
    """A descriptor of a regular file, created if missing; a link or a special file is rejected."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise FileExistsError(errno.EEXIST, _NOT_OURS, path) from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise FileExistsError(errno.EEXIST, _NOT_OURS, path)


def _open_locked(path: str, how: int) -> int:
    descriptor = open_own(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        raise OSError(error.errno, _NO_LOCKS, path) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


_BLOCK = 1 << 20


class PartialDownload(AbstractContextManager["PartialDownload"]):
    """The part file of one download. `size` is the number of bytes on disk and hashed."""

    def __init__(self, path: str, file: RemoteFile, what: str) -> None:
        self._file, self._what, self._path = file, what, path
        self._out = open(path, "a+b", buffering=0, opener=open_own)  # noqa: SIM115 — closed by `__exit__`
        self.size = 0
        self._hash = content_hash(file)
        try:
            self._resume()
        except BaseException:
            self._out.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def add(self, piece: bytes) -> None:
        if self.size + len(piece) > self._file.size:
            raise self.reject(f"it is longer than the {self._file.size:,} bytes listed")
        view = memoryview(piece)
        while view:
            view = view[self._out.write(view) :]
        self._hash.update(piece)
        self.size += len(piece)

    def restart(self) -> None:
        """Discard the bytes received so far."""
        self._out.truncate(0)
        self.size = 0
        self._hash = content_hash(self._file)

    def check(self) -> None:
        """Raise `TransientError` unless the file is complete and matches its hash; wrong bytes are discarded."""
        if self.size < self._file.size:
            raise TransientError(f"it ended after {self.size:,} of {self._file.size:,} bytes")
        found = self._hash.hexdigest()
        if found != self._file.identity:
            raise self.reject(f"its hash is {found}, but {self._file.identity} is listed")

    def reject(self, problem: str) -> TransientError:
        """Discard the bytes; the error to raise, which becomes `DownloadCorrupt` if retries do not help."""
        self.restart()
        return TransientError(problem, final=DownloadCorrupt(self._what, problem))

    def _resume(self) -> None:
        if os.fstat(self._out.fileno()).st_size > self._file.size:
            self._out.truncate(0)
        self._out.seek(0)
        while piece := self._out.read(_BLOCK):
            self._hash.update(piece)
            self.size += len(piece)


def content_hash(file: RemoteFile) -> "hashlib._Hash":
    """The hash that the hub lists for a file: SHA-256, or the SHA-1 of a git blob."""
    if file.sha256:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def is_sound(path: str, file: RemoteFile) -> bool:
    """Whether a file on disk has the listed size and hash."""
    if os.path.getsize(path) != file.size:
        return False
    running = content_hash(file)
    with open(path, "rb", buffering=0) as content:
        while piece := content.read(_BLOCK):
            running.update(piece)
    return running.hexdigest() == file.identity


PART = ".part"


def part_path(path: str) -> str:
    return path + PART


def download(file: HubFile, path: str) -> None:
    """Download a file to `path`. One process at a time: see `forebay.hub.download`."""
    with PartialDownload(part_path(path), file.listed, file.what) as partial:
        file.with_retries(_Fetch(file, partial).attempt, lambda: partial.size)
    os.replace(part_path(path), path)


class _Fetch:
    """The attempts at one file. Remembers the first ETag, so that pieces of two versions are not joined."""

    def __init__(self, file: HubFile, partial: PartialDownload) -> None:
        self._file, self._partial = file, partial
        self._tag: str | None = None

    def attempt(self) -> None:
        if self._partial.size < self._file.size:
            self._request_rest()
        self._partial.check()

    def _request_rest(self) -> None:
        headers = {"range": f"bytes={self._partial.size}-"} if self._partial.size else {}
        with self._file.get(headers) as response:
            self._check_tag(response)
            begin = begins_at(response, self._partial.size, self._file.size)
            if begin is None:
                raise self._partial.reject(f"HTTP {response.status_code} does not return byte {self._partial.size:,}")
            known = self._partial.size - begin
            for piece in response.iter_raw():
                self._partial.add(piece[known:])
                known = max(0, known - len(piece))

    def _check_tag(self, response: httpx2.Response) -> None:
        tag, known = response.headers.get("etag"), self._tag
        if tag and known and tag != known:
            self._tag = ""  # an ETag that changes twice is meaningless; the hash decides
            raise self._partial.reject(f"its ETag changed from {known} to {tag} while it was downloaded")
        self._tag = tag if known is None else known


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


_TOKENIZER = "tokenizer.json"
_TOKENIZERS = "tokenizers"  # their folder in the disk cache
_QUICK = 10.0  # seconds to check whether a cached tokenizer is still the newest


def tokenizer_json(
    name: str,
    revision: str | None = None,
    *,
    folder: str | None = None,
    endpoint: str | None = None,
    patience: RetryPolicy | None = None,
) -> bytes:
    """The bytes of a model's `tokenizer.json`, checked; without a network, the newest cached ones."""
    repository = Repository(name, "model", endpoint, folder, patience or RetryPolicy())
    commit = newest_commit(repository, revision, _TOKENIZERS)
    file = repository.listing(commit).file(_TOKENIZER)
    if file is None:
        advice = "save one with the `tokenizers` library and pass its path"
        raise HubNotFound(f"the tokenizer of {repository.what}", f"it has no file '{_TOKENIZER}'", advice)
    spooled = acquire(HubFile(repository, commit, file), repository.place(_TOKENIZERS))
    try:
        with open(spooled.path, "rb") as content:
            return content.read()
    finally:
        spooled.release()


def newest_commit(repository: Repository, revision: str | None, files: str) -> str:
    """The commit of a revision; if the hub does not answer quickly, the last known one if `files` are cached."""
    known = repository.last_commit(revision)
    if known is None or not os.path.exists(repository.place(files)):
        return repository.commit(revision)
    quick = replace(repository.patience, retries=0, timeout=min(_QUICK, repository.patience.timeout))
    try:
        return replace(repository, patience=quick).commit(revision)
    except HubUnreachable:
        return known


_FILES, _FOLDERS = "models", "model-folders"


def model_files(
    name: str,
    path: str,
    wanted: tuple[str, ...],
    *,
    folder: str | None = None,
    endpoint: str | None = None,
    patience: RetryPolicy | None = None,
) -> str:
    """The local path of a model's folder or file; of a folder, only files that end in one of `wanted`."""
    repository = Repository(name, "model", endpoint, folder, patience or RetryPolicy())
    commit = newest_commit(repository, None, _FILES)
    listed = [file for file in repository.listing(commit).files if _belongs(file, path, wanted)]
    if not listed:
        what = f"'{path}' of {repository.what}" if path else repository.what
        raise HubNotFound(what, "it has no such file, or no weights as .safetensors", "check the name of the folder")
    place = os.path.join(repository.place(_FOLDERS), name.replace("/", "--"), commit)
    for file in listed:
        _link(HubFile(repository, commit, file), repository.place(_FILES), os.path.join(place, file.path))
    return os.path.join(place, path) if path else place


def _belongs(file: RemoteFile, path: str, wanted: tuple[str, ...]) -> bool:
    """Whether a file is at `path`, or directly in the folder `path` with a wanted suffix."""
    inside, name = os.path.split(file.path)
    return file.path == path or (inside == path.rstrip("/") and name.endswith(wanted))


def _link(file: HubFile, files: str, place: str) -> None:
    spooled = acquire(file, files)
    try:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        _link_to(os.path.abspath(spooled.path), place)
    finally:
        spooled.release()


def _link_to(target: str, place: str) -> None:
    """Make a link; one with another target (another hub has the same commit) is replaced."""
    if os.path.islink(place):
        if os.readlink(place) == target:
            return
        aside = f"{place}.{secrets.token_hex(4)}"
        os.symlink(target, aside)
        os.replace(aside, place)
        return
    try:
        os.symlink(target, place)
    except FileExistsError:  # made by another process, or not a link
        if not os.path.islink(place):
            raise
