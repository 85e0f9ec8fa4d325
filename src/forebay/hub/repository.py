"""A repository of the hub: the commit behind a revision, the files of a commit, their addresses.

A commit never changes, so what it holds is asked once and kept on disk:

{folder}/commits/…     the commit that a revision was last seen at
{folder}/listings/…    the files of a commit
"""

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Literal, TypeVar
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import httpx2
import msgspec
from huggingface_hub import cached_assets_path, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from forebay.errors import HubNotFound, HubUnreachable
from forebay.hub.http import Endpoint, RetryPolicy, address, ask, fetch, is_address, with_retries

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


def kept_path(folder: str, *names: str) -> str:
    """Where a fact about these names is kept.

    >>> kept_path("/spool/listings", "HuggingFaceFW/fineweb-edu", "main")
    '/spool/listings/789d721ca3574786'
    """
    return os.path.join(folder, hashlib.sha256("\n".join(names).encode()).hexdigest()[:16])


def read_kept(path: str) -> bytes | None:
    """What is kept, None where nothing is, or where it is not what was written.

    Only a regular file is read: a pipe would hang, a link lead elsewhere.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            stored = file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise
        return None
    digest, _, content = stored.partition(b"\n")
    return content if digest == _digest(content) else None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def keep(path: str, content: bytes) -> None:
    """Write aside, then move: a reader sees the whole fact or none. Where a folder has the name, nothing is kept."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    aside = f"{path}.{secrets.token_hex(4)}"
    try:
        with open(aside, "xb") as file:
            file.write(b"%s\n%s" % (_digest(content), content))
        os.replace(aside, path)
    except IsADirectoryError:
        os.unlink(aside)
    except BaseException:
        if os.path.exists(aside):
            os.unlink(aside)
        raise


_COMMIT = re.compile(r"[0-9a-f]{40}")
_NEXT_PAGE = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_README = "README.md"
_LARGEST_README = 4 << 20
_MOST_PAGES, _MOST_ENTRIES = 1_000, 1_000_000
Kind = Literal["dataset", "model"]


class _Info(msgspec.Struct):
    sha: Annotated[str, msgspec.Meta(pattern=rf"\A{_COMMIT.pattern}\Z")]


@dataclass(frozen=True, slots=True)
class Repository:
    """A data set or a model by its name. `folder` is where facts about it are kept.

    `is_named` is false where the endpoint comes from a file, as a cache's plan: no token is sent there.
    """

    name: str
    kind: Kind = "dataset"
    endpoint: str | None = None
    folder: str | None = None
    patience: RetryPolicy = field(default_factory=RetryPolicy)
    is_named: bool = True

    @property
    def address(self) -> str:
        return address(self.endpoint)

    @property
    def asked(self) -> Endpoint:
        return Endpoint(self.address, self.is_named or self.address == address(None))

    @property
    def what(self) -> str:
        return f"the {'data set' if self.kind == 'dataset' else self.kind} '{self.name}'"

    def commit(self, revision: str | None = None) -> str:
        """The commit behind a branch, a tag or a commit; of the main branch where none is named."""
        self._check_name()
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        named = revision or "main"
        what = f"revision '{named}' of {self.what}"
        body, _ = fetch(self._api(f"revision/{quote(named, safe='')}", expand="sha"), self.patience, self.asked, what)
        try:
            sha = msgspec.json.decode(body, type=_Info).sha
        except NOT_UNDERSTOOD as error:
            raise HubUnreachable(self.address, what, f"its answer is not the hub's: {error}") from error
        keep(self._kept("commits", named), sha.encode())
        return sha

    def last_commit(self, revision: str | None = None) -> str | None:
        """The commit that a revision was last seen at from this machine."""
        known = read_kept(self._kept("commits", revision or "main"))
        found = known.decode("ascii", "replace") if known else ""
        return found if _COMMIT.fullmatch(found) else None

    def listing(self, commit: str) -> Listing:
        """The files of a commit; asked once, then known."""
        return _listing(self, commit)

    def url(self, commit: str, path: str) -> str:
        return hf_hub_url(self.name, path, repo_type=self.kind, revision=commit, endpoint=self.address)

    def place(self, name: str) -> str:
        """A folder among all that is kept of the hub."""
        return os.path.join(self.folder or cached_assets_path("forebay", "hub"), name)

    def ask_listing(self, commit: str) -> Listing:
        """The files of a commit, from the hub."""
        self._check_name()
        if not _COMMIT.fullmatch(commit):
            raise HubNotFound(f"commit '{commit}' of {self.what}", "that is not a commit", "name one of 40 hex digits")
        entries: dict[str, RemoteFile | None] = {}
        what = f"commit {commit} of {self.what}"
        page: dict[str, str] = {}
        for _ in range(_MOST_PAGES):
            url = self._api(f"tree/{commit}", recursive="true", expand="false", **page)
            found, following = self._ask_page(url, what)
            if following is not None and (not found or found.keys() & entries.keys()):
                raise HubUnreachable(self.address, what, "a page of its listing brings nothing new")
            entries |= found
            if following is None or len(entries) > _MOST_ENTRIES:
                break
            page = following
        if following is not None:
            most = f"{_MOST_PAGES:,} pages or {_MOST_ENTRIES:,} entries"
            raise HubUnreachable(self.address, what, f"its listing has more than {most}")
        files = sorted((file for file in entries.values() if file is not None), key=lambda file: file.path)
        return Listing(tuple(files), self._read_text(commit, _README) if entries.get(_README) else "")

    def _ask_page(self, url: str, what: str) -> tuple[dict[str, RemoteFile | None], dict[str, str] | None]:
        body, headers = fetch(url, self.patience, self.asked, what)
        following = _NEXT_PAGE.search(headers.get("link", ""))
        try:
            # Only the cursor is taken from the address of the next page: the token goes to no other host.
            cursor = parse_qs(urlsplit(following[1]).query).get("cursor") if following else None
            return read_page(body), {"cursor": cursor[0]} if cursor else None
        except NOT_UNDERSTOOD as error:
            raise HubUnreachable(self.address, what, f"its answer is not the hub's: {error}") from error

    def _read_text(self, commit: str, path: str) -> str:
        what = f"'{path}' of {self.what}"
        body, _ = fetch(self.url(commit, path), self.patience, self.asked, what, _LARGEST_README)
        return body.decode("utf-8", "replace")

    def _api(self, path: str, **parameters: str) -> str:
        return f"{self.address}/api/{self.kind}s/{self.name}/{path}?{urlencode(parameters)}"

    def _kept(self, folder: str, *names: str) -> str:
        return kept_path(self.place(folder), self.address, self.kind, self.name, *names)

    def _check_name(self) -> None:
        if not is_address(self.address):
            raise HubNotFound(self.what, f"'{self.address}' is not an address", "name a hub as https://host")
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise HubNotFound(self.what, "that is no name there", "write it as 'organisation/name'") from error


@lru_cache(maxsize=16)
def _listing(repository: Repository, commit: str) -> Listing:
    place = repository._kept("listings", commit)
    known = _understood(read_kept(place))
    if known is not None:
        return known
    listing = repository.ask_listing(commit)
    keep(place, msgspec.json.encode(listing))
    return listing


def _understood(kept: bytes | None) -> Listing | None:
    """What was kept, None where a crash of the machine left no more than its name."""
    try:
        return None if kept is None else msgspec.json.decode(kept, type=Listing)
    except NOT_UNDERSTOOD:
        return None


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as a commit has it; what is asked of it is asked with the patience of its repository."""

    repository: Repository
    commit: str
    listed: RemoteFile

    @property
    def size(self) -> int:
        return self.listed.size

    @property
    def what(self) -> str:
        return f"'{self.listed.path}' of {self.repository.what}"

    def ask(self, headers: Mapping[str, str]) -> AbstractContextManager[httpx2.Response]:
        url = self.repository.url(self.commit, self.listed.path)
        return ask(url, self.repository.patience, self.repository.asked, self.what, headers)

    def with_retries(self, attempt: Callable[[], T], arrived: Callable[[], int]) -> T:
        return with_retries(attempt, self.repository.patience, self.repository.address, self.what, arrived)
