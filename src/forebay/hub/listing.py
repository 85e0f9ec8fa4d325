"""What a commit of a repository holds, as data."""

from typing import Annotated

import msgspec

# A file on this disk is named by its hash: nothing else may stand there.
_Sha1 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Size = Annotated[int, msgspec.Meta(ge=0)]


class RemoteFile(msgspec.Struct, frozen=True):
    """A file as the hub lists it. A large one (LFS) has a SHA-256, a small one the hash that git gives a blob."""

    path: str
    size: int
    blob: str
    sha256: str = ""

    @property
    def identity(self) -> str:
        """The hash of its content, in hexadecimal."""
        return self.sha256 or self.blob


class Listing(msgspec.Struct, frozen=True):
    """The files of a commit, sorted by name, and the text of its README."""

    files: tuple[RemoteFile, ...]
    readme: str = ""

    def file(self, path: str) -> RemoteFile | None:
        return next((file for file in self.files if file.path == path), None)


class _Lfs(msgspec.Struct):
    oid: _Sha256
    size: _Size


class _Entry(msgspec.Struct):
    type: str
    path: str
    oid: _Sha1
    size: _Size = 0
    lfs: _Lfs | None = None


def read_page(body: bytes) -> list[RemoteFile]:
    """The files among the entries of one page of the hub's answer."""
    return [_remote(entry) for entry in msgspec.json.decode(body, type=list[_Entry]) if entry.type == "file"]


def _remote(entry: _Entry) -> RemoteFile:
    if entry.lfs is None:
        return RemoteFile(entry.path, entry.size, entry.oid)
    return RemoteFile(entry.path, entry.lfs.size, entry.oid, entry.lfs.oid)
