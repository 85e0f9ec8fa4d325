"""A repository on the hub: the commit of a revision, the files of a commit, their URLs.

A commit never changes, so its listing is requested once and cached on disk:

{folder}/commits/…     the last known commit of a revision
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
from forebay.hub.http import Endpoint, RetryPolicy, address, fetch, get, is_address, with_retries

# A name from a hub must not lead out of a folder: local files are named by hash, links by path.
_Path = Annotated[str, msgspec.Meta(pattern=r"\A(?:(?!\.{1,2}(?:/|\Z))[^/\0]+(?:/(?!\Z)|\Z))+\Z", max_length=4096)]
_Sha1 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
# What decoding untrusted JSON raises: bad UTF-8 is a ValueError, and so is an invalid address.
MALFORMED = (msgspec.DecodeError, ValueError, RecursionError)


class RemoteFile(msgspec.Struct, frozen=True):
    """A file in the listing of the hub. A large one (LFS) has a SHA-256, a small one only its git blob hash."""

    path: _Path
    size: _Size
    blob: _Sha1
    sha256: _Sha256 | Literal[""] = ""

    @property
    def identity(self) -> str:
        """The hash of its content, in hexadecimal."""
        return self.sha256 or self.blob


class RepositoryListing(msgspec.Struct, frozen=True):
    """The files of a commit, sorted by name, and the text of its README."""

    files: tuple[RemoteFile, ...]
    readme: str = ""

    def file(self, path: str) -> RemoteFile | None:
        return next((file for file in self.files if file.path == path), None)


class _Lfs(msgspec.Struct):
    oid: _Sha256
    size: _Size


class _TreeEntry(msgspec.Struct):
    type: str
    path: _Path
    oid: _Sha1
    size: _Size = 0
    lfs: _Lfs | None = None


def read_page(body: bytes) -> dict[str, RemoteFile | None]:
    """The entries of one page of a listing, by path; None for folders."""
    entries = msgspec.json.decode(body, type=list[_TreeEntry])
    return {entry.path: _remote(entry) if entry.type == "file" else None for entry in entries}


def _remote(entry: _TreeEntry) -> RemoteFile:
    if entry.lfs is None:
        return RemoteFile(entry.path, entry.size, entry.oid)
    return RemoteFile(entry.path, entry.lfs.size, entry.oid, entry.lfs.oid)


def cached_path(folder: str, *names: str) -> str:
    """The path of the cached fact about these names.

    >>> cached_path("/spool/listings", "HuggingFaceFW/fineweb-edu", "main")
    '/spool/listings/789d721ca3574786'
    """
    return os.path.join(folder, hashlib.sha256("\n".join(names).encode()).hexdigest()[:16])


def read_cached(path: str) -> bytes | None:
    """The content of a cached file, None if there is none or it is not what was written.

    Links, pipes and sockets are not read.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            stored = file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link or a socket
            raise
        return None
    digest, _, content = stored.partition(b"\n")
    return content if digest == _digest(content) else None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def write_cached(path: str, content: bytes) -> None:
    """Write a cached file atomically; if a folder has its name, write nothing."""
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
    """A data set or a model by name. `folder` is the disk cache.

    `is_named` is false if the endpoint comes from a file, like the plan of a cache: then no token is sent.
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
        """The commit of a branch, a tag or a commit; by default of the main branch."""
        self._check_name()
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        named = revision or "main"
        what = f"revision '{named}' of {self.what}"
        body, _ = fetch(self._api(f"revision/{quote(named, safe='')}", expand="sha"), self.patience, self.asked, what)
        try:
            sha = msgspec.json.decode(body, type=_Info).sha
        except MALFORMED as error:
            raise HubUnreachable(self.address, what, f"its response is malformed: {error}") from error
        write_cached(self._cached("commits", named), sha.encode())
        return sha

    def last_commit(self, revision: str | None = None) -> str | None:
        """The last known commit of a revision, from the disk cache."""
        known = read_cached(self._cached("commits", revision or "main"))
        found = known.decode("ascii", "replace") if known else ""
        return found if _COMMIT.fullmatch(found) else None

    def listing(self, commit: str) -> RepositoryListing:
        """The files of a commit, from memory, disk or the hub."""
        return _listing(self, commit)

    def recall(self, kind: str, name: str) -> bytes | None:
        """What `remember` stored in the disk cache; None where there is nothing, or it is damaged."""
        return read_cached(self._cached(kind, name))

    def remember(self, kind: str, name: str, content: bytes) -> None:
        write_cached(self._cached(kind, name), content)

    def url(self, commit: str, path: str) -> str:
        return hf_hub_url(self.name, path, repo_type=self.kind, revision=commit, endpoint=self.address)

    def place(self, name: str) -> str:
        """A folder of the disk cache."""
        return os.path.join(self.folder or cached_assets_path("forebay", "hub"), name)

    def fetch_listing(self, commit: str) -> RepositoryListing:
        """The files of a commit, from the hub."""
        self._check_name()
        if not _COMMIT.fullmatch(commit):
            raise HubNotFound(f"commit '{commit}' of {self.what}", "that is not a commit", "pass 40 hex digits")
        entries: dict[str, RemoteFile | None] = {}
        what = f"commit {commit} of {self.what}"
        page: dict[str, str] = {}
        for _ in range(_MOST_PAGES):
            url = self._api(f"tree/{commit}", recursive="true", expand="false", **page)
            found, following = self._fetch_page(url, what)
            if following is not None and (not found or found.keys() & entries.keys()):
                raise HubUnreachable(self.address, what, "a page of its listing has no new entries")
            entries |= found
            if following is None or len(entries) > _MOST_ENTRIES:
                break
            page = following
        if following is not None:
            most = f"{_MOST_PAGES:,} pages or {_MOST_ENTRIES:,} entries"
            raise HubUnreachable(self.address, what, f"its listing has more than {most}")
        files = sorted((file for file in entries.values() if file is not None), key=lambda file: file.path)
        return RepositoryListing(tuple(files), self._read_text(commit, _README) if entries.get(_README) else "")

    def _fetch_page(self, url: str, what: str) -> tuple[dict[str, RemoteFile | None], dict[str, str] | None]:
        body, headers = fetch(url, self.patience, self.asked, what)
        following = _NEXT_PAGE.search(headers.get("link", ""))
        try:
            # Only the cursor of the next page's URL is used, so that the token goes to no other host.
            cursor = parse_qs(urlsplit(following[1]).query).get("cursor") if following else None
            return read_page(body), {"cursor": cursor[0]} if cursor else None
        except MALFORMED as error:
            raise HubUnreachable(self.address, what, f"its response is malformed: {error}") from error

    def _read_text(self, commit: str, path: str) -> str:
        what = f"'{path}' of {self.what}"
        body, _ = fetch(self.url(commit, path), self.patience, self.asked, what, _LARGEST_README)
        return body.decode("utf-8", "replace")

    def _api(self, path: str, **parameters: str) -> str:
        return f"{self.address}/api/{self.kind}s/{self.name}/{path}?{urlencode(parameters)}"

    def _cached(self, folder: str, *names: str) -> str:
        return cached_path(self.place(folder), self.address, self.kind, self.name, *names)

    def _check_name(self) -> None:
        if not is_address(self.address):
            raise HubNotFound(self.what, f"'{self.address}' is not an address", "pass one like https://host")
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise HubNotFound(self.what, "that is not a repository name", "write it as 'organization/name'") from error


@lru_cache(maxsize=16)
def _listing(repository: Repository, commit: str) -> RepositoryListing:
    place = repository._cached("listings", commit)
    known = _decoded_listing(read_cached(place))
    if known is not None:
        return known
    listing = repository.fetch_listing(commit)
    write_cached(place, msgspec.json.encode(listing))
    return listing


def _decoded_listing(cached: bytes | None) -> RepositoryListing | None:
    """A cached listing, None if it is malformed: a crash of the machine may leave an empty file."""
    try:
        return None if cached is None else msgspec.json.decode(cached, type=RepositoryListing)
    except MALFORMED:
        return None


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit; requests use the retry policy of its repository."""

    repository: Repository
    commit: str
    listed: RemoteFile

    @property
    def size(self) -> int:
        return self.listed.size

    @property
    def what(self) -> str:
        return f"'{self.listed.path}' of {self.repository.what}"

    def get(self, headers: Mapping[str, str]) -> AbstractContextManager[httpx2.Response]:
        url = self.repository.url(self.commit, self.listed.path)
        return get(url, self.repository.patience, self.repository.asked, self.what, headers)

    def with_retries(self, attempt: Callable[[], T], arrived: Callable[[], int]) -> T:
        return with_retries(attempt, self.repository.patience, self.repository.address, self.what, arrived)
