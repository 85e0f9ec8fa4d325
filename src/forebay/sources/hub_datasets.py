"""The source of a data set on the Hugging Face hub: its Parquet shards, one at a time.

planning    the footers and a few rows, by range reads          nothing is downloaded
building    a shard is downloaded whole into the spool, checked, read part by part, and removed

A shard is a stream: its parts go to one worker in order, so that it is downloaded once and a worker has one shard.
"""

import atexit
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from io import RawIOBase
from math import ceil
from typing import Annotated, Any, ClassVar, cast

import msgspec

from forebay.columns import Array
from forebay.fields import checked_number, checked_whole
from forebay.hub import (
    HubFile,
    RangeFile,
    RemoteFile,
    Repository,
    RetryPolicy,
    download,
    parquet_shards,
    scratch_folder,
    sweep,
)
from forebay.source import Part, PartDigest, Samples, Source, SourceFile, Unit, source_unreadable
from forebay.sources.opening import open_file
from forebay.sources.parquet_rows import ParquetRows, read_rows, row_cuts

_README = "README.md"
_JUDGED_SHARDS = 32
_FOOTERS_AT_ONCE = 16
SHARDS_FOLDER = "forebay-shards"  # inside --spool, so that other files there are never touched


_STATED = ("name", "subset", "split", "text", "revision", "endpoint")  # the rest belongs to this process


@dataclass(frozen=True, slots=True)
class HubSource(Source):
    """The column `text` of the shards of a subset and split, as they are at one commit.

    A sample's id is `file#row`. Downloaded shards are in the folder `forebay-shards` in `spool`, by default in the disk
    cache below HF_HOME.
    """

    kind: ClassVar[str] = "hub"
    unit: ClassVar[Unit] = "samples"
    read_by: ClassVar[tuple[str, ...]] = ("text",)
    files_grow: ClassVar[bool] = False
    remote: ClassVar[bool] = True
    reads_planned_files: ClassVar[bool] = True  # a commit never changes, and a shard is checked when it arrives

    name: str
    subset: str | None
    split: str
    text: str
    revision: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
    endpoint: str | None = None
    spool: str | None = None
    patience: RetryPolicy = field(default_factory=RetryPolicy)
    is_named: bool = True  # by the user in this process, not by a cache: only then is a token sent to its endpoint

    def describe(self) -> Mapping[str, Any]:
        return {"kind": self.kind, **{name: getattr(self, name) for name in _STATED}}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "HubSource":
        stated = {name: description[name] for name in _STATED if name in description}
        return msgspec.convert({**stated, "is_named": False}, cls)

    def files(self) -> list[SourceFile]:
        _planned_spools.add(self.folder)
        return [_source_file(shard) for shard in _data_set(self).shards]

    def look(self, path: str) -> SourceFile:
        return _source_file(self._remote(path))

    def weight(self, file: SourceFile) -> int:
        """The number of rows; with many shards, estimated from a few, because each takes several requests."""
        known = _data_set(self)
        if len(known.shards) <= _JUDGED_SHARDS:
            return known.rows(self._remote(file.path))
        return round(file.size * known.rows_per_byte)

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return row_cuts(_data_set(self).group_ends(self._remote(file.path)), start, first, every)

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        """The documents of some rows; a preview reads them by ranges, without downloading the shard."""
        remote = _planned(part.file)
        if preview:
            yield from read_rows(_remote_parquet(self, remote), self.text, part)
            return
        shard = _shard_at(self, remote)
        yield from read_rows(shard.rows, self.text, part)
        if part.stop == shard.rows.ends[-1]:
            release()

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        """The beginning of the hash that the hub lists for the whole file."""
        return _digest(self._remote(file.path))

    @property
    def repository(self) -> Repository:
        return Repository(self.name, "dataset", self.endpoint, patience=self.patience, is_named=self.is_named)

    @property
    def folder(self) -> str:
        """The folder of downloaded shards."""
        return os.path.join(self.spool, SHARDS_FOLDER) if self.spool else self.repository.cache_folder("shards")

    def _remote(self, path: str) -> RemoteFile:
        shard = _data_set(self).remotes.get(path)
        if shard is None:
            raise FileNotFoundError(f"'{path}' is not in {self.repository.what} at commit {self.revision}")
        return shard


def hub(
    name: str,
    subset: str | None = None,
    *,
    split: str = "train",
    text: str = "text",
    revision: str | None = None,
    spool: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
    download_retries: int = 5,
    download_timeout: float = 300.0,
) -> HubSource:
    """The documents of a data set on the Hugging Face hub: `hub("HuggingFaceFW/fineweb-edu", "sample-10BT")`.

    The revision (a branch, a tag or a commit; by default the main branch) is resolved now, and every builder reads that
    commit. A failed download is retried `download_retries` times; an attempt fails after `download_timeout` seconds
    without a byte.
    """
    checked_whole("download_retries", download_retries)
    checked_number("download_timeout", download_timeout)
    patience = RetryPolicy(download_retries, download_timeout)
    commit = Repository(name, "dataset", endpoint, patience=patience).commit(revision)
    folder = None if spool is None else os.path.abspath(spool)
    return HubSource(name, subset, split, text, commit, endpoint, folder, patience)


class _DataSet:
    """What this process has asked the hub about a source: each answer is kept."""

    def __init__(self, source: HubSource) -> None:
        self._source = source
        self._ends: dict[str, Array] = {}  # of the row groups of each shard whose footer was read

    @cached_property
    def remotes(self) -> dict[str, RemoteFile]:
        return {file.path: file for file in self._source.repository.files(self._source.revision)}

    @cached_property
    def shards(self) -> list[RemoteFile]:
        source, owner = self._source, self._source.repository
        has_readme = _README in self.remotes
        readme = HubFile(owner, source.revision, self.remotes[_README]).text() if has_readme else ""
        return parquet_shards(list(self.remotes.values()), readme, owner.what, source.subset, source.split)

    @cached_property
    def rows_per_byte(self) -> float:
        judged = self.shards[:: ceil(len(self.shards) / _JUDGED_SHARDS)]
        self._read_footers(judged)
        return sum(map(self.rows, judged)) / max(1, sum(shard.size for shard in judged))

    def rows(self, shard: RemoteFile) -> int:
        return int(self.group_ends(shard).max(initial=0))

    def group_ends(self, shard: RemoteFile) -> Array:
        """Where the row groups of a shard end. Also reads the footers of the next shards, which planning needs soon."""
        if shard.path not in self._ends:
            at = self.shards.index(shard) if shard in self.shards else len(self.shards)
            self._read_footers(self.shards[at : at + _FOOTERS_AT_ONCE])
        if shard.path not in self._ends:  # another try raises
            self._ends[shard.path] = _read_footer(self._source, shard)
        return self._ends[shard.path]

    def _read_footers(self, shards: Sequence[RemoteFile]) -> None:
        """Read footers at the same time: each takes some requests that depend on each other."""
        unread = [shard for shard in shards if shard.path not in self._ends]
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE, "forebay-footers") as pool:
            reading = {shard.path: pool.submit(_read_footer, self._source, shard) for shard in unread}
        self._ends |= {path: footer.result() for path, footer in reading.items() if footer.exception() is None}


@lru_cache(maxsize=8)
def _data_set(source: HubSource) -> _DataSet:
    return _DataSet(source)


def _read_footer(source: HubSource, shard: RemoteFile) -> Array:
    with closing(_opened_remotely(source, shard)) as rows:
        return rows.ends


@lru_cache(maxsize=4)
def _remote_parquet(source: HubSource, shard: RemoteFile) -> ParquetRows:
    """A shard on the hub, opened by its footer; a few are cached, because planning returns to them."""
    return _opened_remotely(source, shard)


def _opened_remotely(source: HubSource, shard: RemoteFile) -> ParquetRows:
    content = RangeFile(HubFile(source.repository, source.revision, shard))
    return ParquetRows(content, _source_file(shard), shard.path).check_text(source.text)


def _source_file(shard: RemoteFile) -> SourceFile:
    return SourceFile(path=shard.path, size=shard.size, etag=shard.identity, stream=True, digest=_digest(shard))


def _planned(file: SourceFile) -> RemoteFile:
    """A shard as the plan of a cache, which may be untrusted, names it."""
    try:
        return msgspec.convert({"path": file.path, "size": file.size, "identity": file.etag}, RemoteFile)
    except msgspec.ValidationError as error:
        raise source_unreadable(file.path, f"its name, size or hash in the plan is invalid: {error}") from error


def _digest(shard: RemoteFile) -> int:
    return int(shard.identity[:16], 16)


class _Shard:
    """The shard that this process has downloaded."""

    def __init__(self, source: HubSource, remote: RemoteFile) -> None:
        self.owner = (source, remote)
        sweep(source.folder)
        with ExitStack() as stack:
            folder = stack.enter_context(scratch_folder(source.folder))
            path = download(HubFile(source.repository, source.revision, remote), folder)
            content = cast(RawIOBase, open_file(path))
            self.rows = ParquetRows(content, _source_file(remote), remote.path).check_text(source.text)
            stack.callback(self.rows.close)
            self.remove = stack.pop_all().close


_at_hand: list[_Shard] = []
_planned_spools: set[str] = set()  # of sources that this process listed: a builder, not a worker


def _shard_at(source: HubSource, remote: RemoteFile) -> _Shard:
    """A downloaded shard. The old one is removed before a new one is downloaded."""
    if _at_hand and _at_hand[0].owner != (source, remote):
        release()
    if not _at_hand:
        _at_hand.append(_Shard(source, remote))
    return _at_hand[0]


def release() -> None:
    """Remove the downloaded shard."""
    while _at_hand:
        _at_hand.pop().remove()


@atexit.register
def leave_nothing() -> None:
    """When a builder exits, also remove the shards of its killed workers."""
    release()
    for folder in _planned_spools:
        sweep(folder)
