"""A repository on the hub: the commit of a revision, the files of a commit, their URLs.

A commit never changes, so its listing is requested once and cached on disk:

{folder}/commits/…     the last known commit of a revision
{folder}/listings/…    the files of a commit

Find the Parquet shards of a subset and a split of a data set.

They are listed in the `configs` of its README's head; otherwise the names of folders and files decide.
"""

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import httpx2
import msgspec
import yaml
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


_HEAD = re.compile(r"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
_CONVERTED = "refs/convert/parquet"
_LARGEST_HEAD = 1 << 20  # characters; the YAML parser takes seconds for that
_MOST_PATTERNS = 100_000  # of a split
_MOST_MATCHES = 4_000_000  # of a pattern with a path; half a minute
_WILD = re.compile(r"[*?\[]")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it comes without types
    """YAML without merge keys, which could expand a few lines to gigabytes."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        pass


def parquet_shards(listing: RepositoryListing, what: str, subset: str | None, split: str) -> list[RemoteFile]:
    """The shards, sorted by name."""
    shards = [file for file in listing.files if file.path.endswith(".parquet")]
    if not shards:
        raise HubNotFound(
            f"Parquet files of {what}", _kinds(listing), f"try the revision '{_CONVERTED}', which the hub makes"
        )
    configs = _configs(listing.readme, what)
    found = _by_config(shards, configs, what, subset, split) if configs else _by_name(shards, subset, split)
    if not found:
        wanted = f"split '{split}'" + (f" of subset '{subset}'" if subset else "")
        raise HubNotFound(
            f"{wanted} of {what}", "no Parquet file matches", f"there are: {_choices(shards, configs, subset)}"
        )
    return found


def _configs(readme: str, what: str) -> dict[str, dict[str, Any]]:
    """The subsets that a README describes, by name."""
    head = _HEAD.match(readme)
    if head and len(head[1]) > _LARGEST_HEAD:
        raise _unreadable(what, f"its head is longer than {_LARGEST_HEAD:,} characters")
    try:
        facts = yaml.load(head[1], _Loader) if head else None
    except RecursionError as error:
        raise _unreadable(what, "lists and objects in its head are nested too deeply") from error
    except (yaml.YAMLError, ValueError):  # an invalid date is a ValueError
        return {}  # fall back to the names of the files
    configs = facts.get("configs") if isinstance(facts, dict) else None
    known = [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []
    return {_scalar(config.get("config_name"), "default"): config for config in known if "data_files" in config}


def _unreadable(what: str, problem: str) -> HubNotFound:
    return HubNotFound(f"the subsets of {what}: README.md", problem, "download its files and build from those")


def _scalar(value: Any, otherwise: str = "") -> str:
    """A scalar as text; other values give `otherwise`, because lists of aliases could expand to gigabytes."""
    return str(value) if isinstance(value, str | int | float) else otherwise


def _by_config(
    shards: Sequence[RemoteFile], configs: dict[str, dict[str, Any]], what: str, subset: str | None, split: str
) -> list[RemoteFile]:
    name = _default(configs) if subset is None else subset
    if name is None:
        raise HubNotFound(what, "it has several subsets", f"choose one: {_listed(configs)}")
    if name not in configs:
        raise HubNotFound(f"subset '{name}' of {what}", "it does not exist", f"there are: {_listed(configs)}")
    patterns = _checked_patterns(configs[name], split, what)
    found = {pattern for pattern in patterns if not _WILD.search(pattern)}
    globs = [pattern for pattern in patterns if pattern not in found]
    if len(globs) * len(shards) > _MOST_MATCHES:
        raise _unreadable(what, f"{len(globs):,} patterns over {len(shards):,} files would take minutes to match")
    for pattern in globs:
        found.update(file.path for file in shards if matches(pattern, file.path))
    return [file for file in shards if file.path in found]


def _checked_patterns(config: dict[str, Any], split: str, what: str) -> list[str]:
    """The patterns of a split in a subset, once there are not too many: an alias repeats a list in a few characters."""
    folder = _scalar(config.get("data_dir")).strip("/")
    named = list(islice(_patterns(config["data_files"], split), _MOST_PATTERNS + 1))
    if len(named) > _MOST_PATTERNS:
        raise _unreadable(what, f"it names more than {_MOST_PATTERNS:,} files or patterns for split '{split}'")
    patterns = list(dict.fromkeys(f"{folder}/{pattern}".lstrip("/") for pattern in named))
    for pattern in patterns:
        if any("**" in part and part != "**" for part in pattern.split("/")):
            raise _unreadable(what, f"the pattern '{pattern[:100]}' is not valid: '**' must be a whole part of a path")
    return patterns


def matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a path: `*` within a folder, `**` over any number of them.

    Takes time proportional to both lengths for any pattern, because patterns come from a README.

    >>> matches("data/*/*", "data/en/0.parquet"), matches("data/*", "data/en/0.parquet")
    (True, False)
    >>> matches("data/**", "data/en/0.parquet"), matches("**/0.parquet", "0.parquet")
    (True, True)
    """
    names = path.split("/")
    reached = {0}  # numbers of names that the parts so far can match
    for part in pattern.split("/"):
        if part == "**":
            reached = set(range(min(reached, default=0), len(names) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(names) and _matcher(part)(names[at])}
    return len(names) in reached


@lru_cache(maxsize=256)
def _matcher(part: str) -> Any:
    return re.compile(translate(part)).match


def _default(configs: dict[str, dict[str, Any]]) -> str | None:
    marked = [name for name, config in configs.items() if config.get("default")]
    if marked or "default" in configs:
        return [*marked, "default"][0]
    return next(iter(configs)) if len(configs) == 1 else None


def _patterns(data_files: Any, split: str) -> Iterable[str]:
    """The patterns of a split; files without a split belong to `train`."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    for entry in entries:
        described = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = described.get("path", [])
        if described.get("split", "train") == split:
            yield from (_scalar(path).removeprefix("./") for path in (paths if isinstance(paths, list) else [paths]))


def _splits(data_files: Any) -> list[str]:
    entries = data_files if isinstance(data_files, list) else [data_files]
    named = (entry.get("split", "train") if isinstance(entry, dict) else "train" for entry in entries)
    return sorted({_scalar(split, "train") for split in named})


def _by_name(shards: Sequence[RemoteFile], subset: str | None, split: str) -> list[RemoteFile]:
    of_subset = [file for file in shards if subset is None or _has_word(file.path, subset)]
    of_split = [file for file in of_subset if _has_word(file.path, split)]
    if not of_split and split == "train" and not any(_has_word(file.path, word) for file in shards for word in _SPLITS):
        return of_subset
    return of_split


def _has_word(path: str, word: str) -> bool:
    """Whether a path contains a word between separators.

    >>> _has_word("en/train-00000-of-00002.parquet", "train"), _has_word("en/training.parquet", "train")
    (True, False)
    """
    return re.search(rf"(?:^|[/._-]){re.escape(word)}(?:[/._-]|$)", path) is not None


def _choices(shards: Sequence[RemoteFile], configs: dict[str, dict[str, Any]], subset: str | None) -> str:
    """The splits of a subset if a README names them, otherwise the folders of the shards."""
    name = _default(configs) if subset is None else subset
    if name in configs:
        return f"the splits {_listed(_splits(configs[name]['data_files']))}"
    return _listed(sorted({file.path.rpartition("/")[0] or file.path for file in shards}))


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
    return ", ".join(f"'{name}'" for name in shown[:12]) + more


def _kinds(listing: RepositoryListing) -> str:
    kinds = sorted({file.path.rpartition(".")[2] for file in listing.files if "." in file.path})
    return f"it only has files of type {_listed(kinds)}" if kinds else "it has no files"
