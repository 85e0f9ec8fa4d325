"""What a commit of a repository holds, as data."""

from typing import Annotated, Literal

import msgspec

# Nothing that a hub names may lead out of a folder: a file on this disk is named by its hash, a link by its path.
_Path = Annotated[str, msgspec.Meta(pattern=r"\A(?:(?!\.{1,2}(?:/|\Z))[^/\0]+(?:/(?!\Z)|\Z))+\Z", max_length=4096)]
_Sha1 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]

# What JSON of anyone raises when it is decoded: bad UTF-8 is a ValueError, and so is an address that is none.
NOT_UNDERSTOOD = (msgspec.DecodeError, ValueError, RecursionError)


class RemoteFile(msgspec.Struct, frozen=True):
    """A file as the hub lists it. A large one (LFS) has a SHA-256, a small one the hash that git gives a blob."""

    path: _Path
    size: _Size
    blob: _Sha1
    sha256: _Sha256 | Literal[""] = ""

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
    path: _Path
    oid: _Sha1
    size: _Size = 0
    lfs: _Lfs | None = None


def read_page(body: bytes) -> dict[str, RemoteFile | None]:
    """The entries of one page of the hub's answer by name; None for what is not a file."""
    entries = msgspec.json.decode(body, type=list[_Entry])
    return {entry.path: _remote(entry) if entry.type == "file" else None for entry in entries}


def _remote(entry: _Entry) -> RemoteFile:
    if entry.lfs is None:
        return RemoteFile(entry.path, entry.size, entry.oid)
    return RemoteFile(entry.path, entry.lfs.size, entry.oid, entry.lfs.oid)
