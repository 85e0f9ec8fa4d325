"""What has come of a file so far: bytes in `….part`, hashed as they come. A killed download goes on from there."""

import hashlib
import os
from contextlib import AbstractContextManager

from forebay.errors import DownloadCorrupt
from forebay.hub.listing import RemoteFile
from forebay.hub.locks import open_own
from forebay.hub.patience import Passing

_BLOCK = 1 << 20


class Arrival(AbstractContextManager["Arrival"]):
    """The part file of one download. `size` counts what is here and hashed."""

    def __init__(self, path: str, file: RemoteFile, what: str) -> None:
        self._file, self._what, self._path = file, what, path
        self._out = open(path, "a+b", buffering=0, opener=open_own)  # noqa: SIM115 — closed by `__exit__`
        self.size = 0
        self._hash = content_hash(file)
        try:
            self._take_up()
        except BaseException:
            self._out.close()
            raise

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def add(self, piece: bytes) -> None:
        if self.size + len(piece) > self._file.size:
            raise self.refused(f"it is longer than the {self._file.size:,} bytes listed")
        view = memoryview(piece)
        while view:
            view = view[self._out.write(view) :]
        self._hash.update(piece)
        self.size += len(piece)

    def restart(self) -> None:
        """Forget what came."""
        self._out.truncate(0)
        self.size = 0
        self._hash = content_hash(self._file)

    def check(self) -> None:
        """All is here and is what the hub lists; what is wrong is forgotten, what is short may go on."""
        if self.size < self._file.size:
            raise Passing(f"it ended after {self.size:,} of {self._file.size:,} bytes")
        found = self._hash.hexdigest()
        if found != self._file.identity:
            raise self.refused(f"its hash is {found}, {self._file.identity} is listed")

    def refused(self, problem: str) -> Passing:
        """What came is not the file: start over, and say so where that does not help."""
        self.restart()
        return Passing(problem, final=DownloadCorrupt(self._what, problem))

    def _take_up(self) -> None:
        if os.fstat(self._out.fileno()).st_size > self._file.size:
            self._out.truncate(0)
        self._out.seek(0)
        while piece := self._out.read(_BLOCK):
            self._hash.update(piece)
            self.size += len(piece)


def content_hash(file: RemoteFile) -> "hashlib._Hash":
    """The hash that the hub lists for a file: SHA-256, or SHA-1 with git's word in front."""
    if file.sha256:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def is_sound(path: str, file: RemoteFile) -> bool:
    """Whether a file on disk is what the hub lists."""
    if os.path.getsize(path) != file.size:
        return False
    running = content_hash(file)
    with open(path, "rb", buffering=0) as content:
        while piece := content.read(_BLOCK):
            running.update(piece)
    return running.hexdigest() == file.identity
