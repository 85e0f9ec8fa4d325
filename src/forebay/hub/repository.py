"""A repository on the hub: the commit of a revision, the files of a commit, byte ranges of a file.

A commit never changes, so its listing is requested once and cached on disk:

{folder}/commits/…     the last known commit of a revision
{folder}/listings/…    the files of a commit
"""

import hashlib
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Literal, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec
from huggingface_hub import HfApi, cached_assets_path, constants, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import get_session, hf_raise_for_status, validate_repo_id
from huggingface_hub.utils.tqdm import silent_tqdm

from forebay.errors import Damaged
from forebay.hub.session import Request, RetryPolicy, is_address, not_found, unreadable, with_retries
from forebay.store import LocalStore, Missing

# A name from a hub must not lead out of a folder: files are downloaded under their names.
_Path = Annotated[str, msgspec.Meta(pattern=r"\A(?:(?!\.{1,2}(?:/|\Z))[^/\0]+(?:/(?!\Z)|\Z))+\Z", max_length=4096)]
_Sha1 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
_COMMIT = re.compile(r"[0-9a-f]{40}")
_README = "README.md"
_LARGEST_README = 4 << 20
_LARGEST_RANGE = 512 << 20  # bytes; an untrusted Parquet footer states how much to read
_LARGEST_ANSWER = 16 << 20
_MOST_PAGES, _MOST_ENTRIES = 1_000, 1_000_000
Kind = Literal["dataset", "model"]
T = TypeVar("T")


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

    def new_hash(self) -> "hashlib._Hash":
        if self.sha256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


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

    def file(self) -> RemoteFile:
        if self.lfs is None:
            return RemoteFile(self.path, self.size, self.oid)
        return RemoteFile(self.path, self.lfs.size, self.oid, self.lfs.oid)


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
        return (self.endpoint or constants.ENDPOINT).rstrip("/")

    @property
    def gets_token(self) -> bool:
        return self.is_named or self.address == constants.ENDPOINT.rstrip("/")

    @property
    def what(self) -> str:
        return f"the {'data set' if self.kind == 'dataset' else self.kind} '{self.name}'"

    def request(self, attempt: Callable[[], T], what: str, limit: int, is_small: bool = False) -> T:
        """Call `attempt`, which asks the hub, with retries; each response may have `limit` bytes."""
        if not is_address(self.address):
            raise not_found(self.what, f"'{self.address}' is not an address", "pass one like https://host")
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            hint = "write it as 'organization/name'"
            raise not_found(self.what, "that is not a repository name", hint) from error
        return with_retries(attempt, Request(self.address, what, self.patience, limit, self.gets_token, is_small))

    def commit(self, revision: str | None = None) -> str:
        """The commit of a branch, a tag or a commit; by default of the main branch."""
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        name = revision or "main"

        def attempt() -> str:
            api = HfApi(endpoint=self.address, token=False)
            info = api.repo_info(self.name, repo_type=self.kind, revision=name, expand=["sha"])  # type: ignore[arg-type]
            return msgspec.convert(info.sha, _Sha1)

        commit = self.request(attempt, f"revision '{name}' of {self.what}", _LARGEST_ANSWER, is_small=True)
        self.remember("commits", name, commit.encode())
        return commit

    def last_commit(self, revision: str | None = None) -> str | None:
        """The last known commit of a revision, from the disk cache."""
        known = self.recall("commits", revision or "main") or b""
        return known.decode() if re.fullmatch(_COMMIT.pattern.encode(), known) else None

    def listing(self, commit: str) -> RepositoryListing:
        """The files of a commit, from memory, disk or the hub."""
        return _listing(self, commit)

    def recall(self, kind: str, name: str) -> bytes | None:
        """The content that `remember` stored in the disk cache; None if it is missing or damaged."""
        try:
            digest, _, content = LocalStore(self.cache_folder(kind)).read(self.key(name)).partition(b"\n")
        except (Missing, Damaged):  # a pipe or a folder has its name
            return None
        return content if digest == hashlib.sha256(content).hexdigest().encode() else None

    def remember(self, kind: str, name: str, content: bytes) -> None:
        digest = hashlib.sha256(content).hexdigest().encode()
        LocalStore(self.cache_folder(kind)).replace(self.key(name), [digest, b"\n", content], durable=False)

    def cache_folder(self, name: str) -> str:
        """A folder of the disk cache."""
        return os.path.join(self.folder or cached_assets_path("forebay", "hub"), name)

    def key(self, name: str) -> str:
        """The name of a file of the disk cache."""
        key = "\n".join((self.address, self.kind, self.name, name))
        return hashlib.sha256(key.encode()).hexdigest()[:16]


@lru_cache(maxsize=16)
def _listing(repository: Repository, commit: str) -> RepositoryListing:
    if not _COMMIT.fullmatch(commit):
        what = f"commit '{commit}' of {repository.what}"
        raise not_found(what, "that is not a commit", "pass 40 hex digits")
    stored = repository.recall("listings", commit)
    try:
        if stored is not None:
            return msgspec.json.decode(stored, type=RepositoryListing)
    except msgspec.DecodeError:
        pass  # written by another version: request it again
    listing = _request_listing(repository, commit)
    repository.remember("listings", commit, msgspec.json.encode(listing))
    return listing


def _request_listing(repository: Repository, commit: str) -> RepositoryListing:
    """The files of a commit. `HfApi.list_repo_tree` has no timeout, and follows pages to any host."""
    url = f"{repository.address}/api/{repository.kind}s/{repository.name}/tree/{commit}"
    what = f"commit {commit} of {repository.what}"
    entries: dict[str, _TreeEntry] = {}
    cursor: list[str] | None = []
    pages = 0

    def attempt() -> tuple[list[_TreeEntry], list[str] | None]:
        response = get_session().get(url, params={"recursive": "true", **({"cursor": cursor[0]} if cursor else {})})
        hf_raise_for_status(response)
        following = parse_qs(urlsplit(response.links.get("next", {}).get("url", "")).query)
        page = msgspec.json.decode(response.content, type=list[_TreeEntry])
        if "cursor" in following and (not page or any(entry.path in entries for entry in page)):
            raise ValueError("a page of its listing has no new entries")
        return page, following.get("cursor")

    while cursor is not None:
        page, cursor = repository.request(attempt, what, _LARGEST_ANSWER, is_small=True)
        entries |= {entry.path: entry for entry in page}
        pages += 1
        if cursor and (pages >= _MOST_PAGES or len(entries) > _MOST_ENTRIES):
            most = f"{_MOST_PAGES:,} pages or {_MOST_ENTRIES:,} entries"
            raise not_found(what, f"it has more than {most}", "use local files")
    files = tuple(entries[path].file() for path in sorted(entries) if entries[path].type == "file")
    listing = RepositoryListing(files)
    readme = listing.file(_README)
    return RepositoryListing(files, HubFile(repository, commit, readme).text() if readme else "")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit."""

    repository: Repository
    commit: str
    listed: RemoteFile

    @property
    def size(self) -> int:
        return self.listed.size

    @property
    def what(self) -> str:
        return f"'{self.listed.path}' of {self.repository.what}"

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`. No hash covers them: use them for planning only."""
        if stop - start > _LARGEST_RANGE:
            problem = f"its footer or a column takes {stop - start:,} bytes, more than the limit of {_LARGEST_RANGE:,}"
            raise not_found(self.what, problem, "download the file and build from it")
        owner = self.repository
        url = hf_hub_url(
            owner.name, self.listed.path, repo_type=owner.kind, revision=self.commit, endpoint=owner.address
        )

        def attempt() -> bytes:
            body, headers = io.BytesIO(), {"Range": f"bytes={start}-{stop - 1}"}
            http_get(url, body, headers=headers, expected_size=stop - start, tqdm_class=silent_tqdm)
            return body.getvalue()

        return owner.request(attempt, self.what, stop - start) if stop > start else b""

    def text(self) -> str:
        """The whole file, checked, as text."""
        if self.size > _LARGEST_README:
            problem = f"it has {self.size:,} bytes, more than the limit of {_LARGEST_README:,}"
            raise not_found(self.what, problem, "use local files")
        content, digest = self.read(0, self.size), self.listed.new_hash()
        digest.update(content)
        if digest.hexdigest() != self.listed.identity:
            problem = f"its hash is {digest.hexdigest()}, but {self.listed.identity} is listed"
            raise unreadable(self.what, problem)
        return content.decode("utf-8", "replace")
