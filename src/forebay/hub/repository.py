"""A repository on the hub: the commit of a revision, the files of a commit, byte ranges of a file."""

import hashlib
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec
from huggingface_hub import HfApi, cached_assets_path, constants, hf_hub_url
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import get_session, hf_raise_for_status, validate_repo_id
from huggingface_hub.utils.tqdm import silent_tqdm

from forebay.hub.session import Request, is_address, not_found, unreadable, with_retries
from forebay.store.retries import RetryPolicy
from forebay.store.seekable_file import SeekableFile

# A name from a hub must not lead out of a folder: files are downloaded under their names.
_Path = Annotated[str, msgspec.Meta(pattern=r"\A(?:(?!\.{1,2}(?:/|\Z))[^/\0]+(?:/(?!\Z)|\Z))+\Z", max_length=4096)]
_Sha = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")]  # SHA-1 or SHA-256
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LARGEST_README = 4 << 20
_LARGEST_RANGE = 512 << 20  # bytes; an untrusted Parquet footer states how much to read
_LARGEST_ANSWER = 16 << 20
_MOST_PAGES, _MOST_FILES = 1_000, 1_000_000
Kind = Literal["dataset", "model"]
T = TypeVar("T")


class RemoteFile(msgspec.Struct, frozen=True):
    """A file in the listing of the hub. `identity` is its SHA-256 if it is large (LFS), otherwise its git blob hash."""

    path: _Path
    size: _Size
    identity: _Sha

    def new_hash(self) -> "hashlib._Hash":
        if len(self.identity) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class Repository:
    """A data set or a model by name. `folder` is where downloads are cached.

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
        """Call `attempt`, a hub request, with retries; each response may have `limit` bytes."""
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
            if not _COMMIT.fullmatch(info.sha or ""):
                raise ValueError(f"{str(info.sha)[:80]!r} is not a commit")
            return str(info.sha)

        return self.request(attempt, f"revision '{name}' of {self.what}", _LARGEST_ANSWER, is_small=True)

    def files(self, commit: str) -> tuple[RemoteFile, ...]:
        """The files of a commit, sorted by name."""
        what = f"commit '{commit}' of {self.what}"
        if not _COMMIT.fullmatch(commit):
            raise not_found(what, "that is not a commit", "pass 40 hex digits")
        files: dict[str, RemoteFile] = {}
        cursor = ""
        for _ in range(_MOST_PAGES):
            page, cursor = self._page(commit, cursor, what)
            files.update((file.path, file) for file in page)
            if not cursor:
                return tuple(files[path] for path in sorted(files))
            if len(files) > _MOST_FILES:
                break
        most = f"{_MOST_PAGES:,} pages or {_MOST_FILES:,} files"
        raise not_found(what, f"its listing has more than {most}", "use local files")

    def _page(self, commit: str, cursor: str, what: str) -> tuple[list[RemoteFile], str]:
        """A page of a listing, and the cursor of the next. `HfApi.list_repo_tree` would follow it to any host."""
        url = f"{self.address}/api/{self.kind}s/{self.name}/tree/{commit}"

        def attempt() -> tuple[list[RemoteFile], str]:
            response = get_session().get(url, params={"recursive": "true", **({"cursor": cursor} if cursor else {})})
            hf_raise_for_status(response)
            following = parse_qs(urlsplit(response.links.get("next", {}).get("url", "")).query)
            entries = msgspec.json.decode(response.content, type=list[dict[str, Any]])
            return [_file(entry) for entry in entries if entry["type"] == "file"], following.get("cursor", [""])[0]

        return self.request(attempt, what, _LARGEST_ANSWER, is_small=True)

    def cache_folder(self, name: str) -> str:
        """A folder of the disk cache."""
        return os.path.join(self.folder or cached_assets_path("forebay", "hub"), name)


def _file(entry: dict[str, Any]) -> RemoteFile:
    large = entry.get("lfs") or entry
    return msgspec.convert({"path": entry["path"], "size": large["size"], "identity": large["oid"]}, RemoteFile)


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit."""

    repository: Repository
    commit: str
    listed: RemoteFile

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
        size = self.listed.size
        if size > _LARGEST_README:
            problem = f"it has {size:,} bytes, more than the limit of {_LARGEST_README:,}"
            raise not_found(self.what, problem, "use local files")
        content, digest = self.read(0, size), self.listed.new_hash()
        digest.update(content)
        if digest.hexdigest() != self.listed.identity:
            problem = f"its hash is {digest.hexdigest()}, but {self.listed.identity} is listed"
            raise unreadable(self.what, problem)
        return content.decode("utf-8", "replace")


class RangeFile(SeekableFile):
    """A seekable file on the hub; each read is one request."""

    def __init__(self, file: HubFile) -> None:
        super().__init__(file.listed.size)
        self._file = file

    def read(self, size: int | None = -1) -> bytes:
        stop = self.size if size is None or size < 0 else min(self.position + size, self.size)
        piece = self._file.read(self.position, stop)
        self.position += len(piece)
        return piece
