"""A store in a bucket: S3 and compatible services, Google Cloud Storage, Azure, or the memory of this process.

The outcome of a create request can be unclear. The client retries some requests, a reply can be lost after the server
has acted, and a service may answer "conflict" although nothing was written:

    put ──▶ yes, or "exists" to the first request ──▶ done
     └────▶ anything else ──▶ whose object is there?  mine ──▶ created     another's ──▶ not created
                                                      none ──▶ put again

Every object has the name of its write and the SHA-256 of its bytes as metadata. The first says whose it is, the second
lets a whole value be checked where it arrives.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

from forebay.errors import StoreFull, StoreRefused, StoreUnavailable
from forebay.store.base import BadCopy, Buffer, Entry, Expected, Missing, Store, check_key, is_key
from forebay.store.bucket_client import VARIABLES, endpoint, exceptions, first_line, open_client, parse_url
from forebay.store.bucket_errors import REQUEST_ERRORS, check_lasting, is_certain, is_out_of_range, unreached
from forebay.store.object_bodies import MOST_BYTES, SHA256, WRITER, Download, Upload, upload_minutes
from forebay.store.owners import is_left_behind, is_temporary, temporary_name
from forebay.store.retries import RetryPolicy, awaited, note_answer, report_retry

READ_BYTES = 1 << 30  # of one object that is read into memory without a range; a chunk is viewed, not read
STALLED_SECONDS = 30.0  # without a byte, until a download is resumed
RETRIES = RetryPolicy(retries=5, first_wait=0.25, longest_wait=8)  # of doubtful requests and downloads that break off
PIECE_BYTES = 8 << 20
PROBES = ".uploads/"  # objects by which a service is tried
MOST_ENTRIES = 4_000_000  # of a cache: a listing that is sorted in memory
MOST_LISTED = 100_000_000  # objects of one listing
PAGE_ENTRIES = 1000
LISTING_SECONDS = 300.0  # without a page, after all retries of its requests
_honors_conditions: set[str] = set()  # addresses that were probed in this process
T = TypeVar("T")


class _Process:
    """The client's threads do not survive a fork, and a lock of it may be held forever in the child."""

    used = forked = False


def _forked() -> None:
    _Process.forked = _Process.forked or _Process.used


os.register_at_fork(after_in_child=_forked)


class ObjectStore(Store):
    """Keys are objects below a prefix of a bucket. Credentials come from the environment, as `obstore` reads it."""

    def __init__(self, url: str, probed: bool = False) -> None:
        self.scheme, self._bucket, self._prefix = parse_url(url)
        self.address = f"{self.scheme}://{self._bucket}" + (f"/{self._prefix}" if self._prefix else "")
        self._service = endpoint(self.scheme) or f"{self.scheme}://{self._bucket}"
        self._writers: dict[int, Any] = {}  # by minutes
        if probed:
            _honors_conditions.add(self.address)
            note_answer(self._service)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        check_key(self.address, key)
        if stop is not None and start >= stop:
            self._meta(key)
            return b""
        if start == 0:
            value = self._whole(key, READ_BYTES + 1 if stop is None else stop)
            if stop is None and len(value) > READ_BYTES:
                problem = f"'{key}' has more than {READ_BYTES:,} bytes, too many to read into memory at once"
                raise StoreRefused(
                    f"'{self.address}' cannot be used as a store: {problem}",
                    hint="read it in ranges, or check who wrote it",
                )
            return bytes(value)
        return bytes(self._fetch(key, start, stop)[0].view())

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        check_key(self.address, key)
        if expect is None:
            return self._whole(key, None)
        for _ in range(2):
            value = self._whole(key, expect.size + 1)
            problem = mismatch(value, expect)
            if not problem:
                return value
        raise BadCopy(key, problem)

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        check_key(self.address, key)
        if self.address not in _honors_conditions:
            self._probe()
        upload = Upload(self.address, key, data)
        return self._create(upload)

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        check_key(self.address, key)
        upload = Upload(self.address, key, data)
        if if_etag is None:
            self._retried("write", key, lambda: self._put(upload, "overwrite"))
            return True
        for failures in _attempts():
            meta = self._meta_or_none(key)
            if meta is None or _etag(meta) != if_etag:
                return self._writer_of(key) == upload.writer  # changed by an earlier round, or by another writer
            try:
                self._put(upload, {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None})
                return True
            except exceptions.PreconditionError:
                continue
            except REQUEST_ERRORS as error:
                self._refuse_or_wait(error, "write", key, failures)
        raise self._unavailable("replace", key, f"{RETRIES.retries + 1} attempts failed")

    def entries(self, prefix: str) -> Iterator[Entry]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(self.address, folder)
        below = (entry for entry in self._listed(folder, MOST_ENTRIES) if entry.key.startswith(prefix))
        yield from sorted((one for one in below if is_key(one.key) and not is_temporary(one.key)), key=_key)

    def folders(self, prefix: str) -> list[str]:
        folder = prefix.rstrip("/")
        if folder:
            check_key(self.address, folder)
        listed = self._retried("list", folder, lambda: self._reader.list_with_delimiter(folder or None))
        names = (path.rpartition("/")[2] for path in listed["common_prefixes"])
        return sorted(name for name in names if is_key(name))

    def head(self, key: str) -> Entry | None:
        check_key(self.address, key)
        meta = self._meta_or_none(key)
        return None if meta is None else _entry(key, meta)

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        check_key(self.address, key)
        if if_etag is not None:
            meta = self._meta_or_none(key)
            if meta is None or _etag(meta) != if_etag:
                return
        with suppress(Missing):
            self._retried("delete", key, lambda: self._reader.delete(key))

    def leftovers(self) -> Iterator[Entry]:
        return (entry for entry in self._listed(PROBES, MOST_ENTRIES) if is_left_behind(entry.key, entry.written))

    def fetch(self, key: str, start: int, stop: int) -> tuple[bytes, str]:
        """A range and the etag of any object of the bucket, also of one whose name a cache would not use."""
        body, meta, _ = self._fetch(key, start, stop)
        return bytes(body.view()), "" if meta is None else _etag(meta)

    def stat(self, key: str) -> Entry | None:
        """As `head`, for any object of the bucket."""
        meta = self._meta_or_none(key)
        return None if meta is None else _entry(key, meta)

    def walk(self, prefix: str) -> Iterator[Entry]:
        """Every object below a prefix, as the service lists them, while the listing arrives: millions need no memory.

        A listing that repeats itself, or has more than `MOST_LISTED` objects, raises `StoreRefused`.
        """
        return self._listed(prefix, MOST_LISTED)

    def _listed(self, prefix: str, most: int) -> Iterator[Entry]:
        last, is_sorted, count = "", True, 0
        firsts: set[str] = set()  # the first key of every page: pages that repeat come back to one of them
        for failures in _attempts():
            self._check_process()
            try:
                pages = self._reader.list(prefix or None, offset=last or None, chunk_size=PAGE_ENTRIES)
                while (page := self._asked(self._next_page, pages, prefix)) is not None:
                    for meta in page:
                        is_sorted, last, count = is_sorted and last < meta["path"], meta["path"], count + 1
                        if count > most:
                            self._refuse_listing(prefix, f"has more than {most:,} objects")
                        yield _entry(last, meta)
                    if page and page[0]["path"] in firsts:
                        self._refuse_listing(prefix, f"repeats '{page[0]['path'][:80]}'")
                    firsts.update(meta["path"] for meta in page[:1])
                return
            except REQUEST_ERRORS as error:
                # A listing that is not sorted cannot be resumed after its last key.
                self._refuse_or_wait(error, "list", prefix, failures if is_sorted else RETRIES.retries + 1)

    def _next_page(self, pages: Any, prefix: str) -> Any | None:
        """The next page of a listing, None at its end.

        The client asks for the next page until it has an object, and cannot be interrupted; so it runs in a thread.
        """
        results: list[Any] = []
        thread = threading.Thread(target=_take_page, args=(pages, results), name="forebay-listing", daemon=True)
        thread.start()
        thread.join(LISTING_SECONDS)
        if not results:
            what = f"list '{prefix}'" if prefix else "list the objects"
            raise StoreUnavailable(
                f"cannot {what} in '{self.address}': no page with an object came in {LISTING_SECONDS:g} s",
                hint="check the network and try again",
            )
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    def _refuse_listing(self, prefix: str, problem: str) -> None:
        where = f"the listing of '{prefix}'" if prefix else "its listing"
        raise StoreRefused(
            f"'{self.address}' cannot be used as a store: {where} {problem}",
            hint="check the service, or name a part of the bucket",
        )

    def document(self) -> Mapping[str, Any]:
        return {**super().document(), "arguments": self._arguments()}

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, self._arguments()

    def _arguments(self) -> tuple[str, bool]:
        """Return constructor arguments for another process: the address, and whether it was probed already."""
        if self.scheme == "memory":
            raise TypeError("memory:// lives in one process and cannot be sent to another; use a bucket, or workers=0")
        return self.address, self.address in _honors_conditions

    @cached_property
    def _reader(self) -> Any:
        # `timeout` covers a whole request with its body, so it only bounds what `read_timeout` cannot see.
        return self._client({"read_timeout": f"{STALLED_SECONDS}s", "timeout": "24h"})

    def _writer(self, size: int) -> Any:
        """A client for uploads of this size. It has no `read_timeout`, which would run while the body is sent."""
        minutes = upload_minutes(size)
        if minutes not in self._writers:
            self._writers[minutes] = self._client({"timeout": f"{60 * minutes}s"})
        return self._writers[minutes]

    def _client(self, timeouts: dict[str, str]) -> Any:
        _Process.used = True
        return open_client(self.scheme, self._bucket, self._prefix, timeouts)

    def _whole(self, key: str, stop: int | None) -> memoryview:
        """The value up to `stop`, compared with the SHA-256 it was written with.

        One that differs is fetched again; if it then is the same, the object itself is damaged, and the caller will
        find out.
        """
        before = ""
        for _ in _attempts():
            body, meta, attributes = self._fetch(key, 0, stop)
            value, written = body.view(), attributes.get(SHA256)
            if written is None or len(value) < meta["size"]:
                break
            digest = hashlib.sha256(value).hexdigest()
            if digest in (written, before):
                break
            before = digest
        return value

    def _fetch(self, key: str, start: int, stop: int | None) -> tuple[Download, Any, Any]:
        """A range with the object's metadata; a body that breaks off or stalls is resumed where it ended."""
        value, meta, attributes, is_empty = Download(key), None, {}, False
        for failures in _attempts():
            self._check_process()
            at = start + len(value)
            options: dict[str, Any] = {} if meta is None else {"if_match": meta["e_tag"]}
            if stop is not None and not is_empty:
                options["range"] = (at, stop)
            elif at:
                options["range"] = {"offset": at}
            try:
                got = self._asked(self._reader.get, key, options=options)
                meta, attributes = got.meta, dict(got.attributes)
                end = meta["size"] if stop is None else min(stop, meta["size"])
                self._check_size(key, end - start)
                for piece in got.stream(min_chunk_size=PIECE_BYTES):
                    value.add(piece)
                    if start + len(value) >= end:
                        break
            except exceptions.PreconditionError:  # replaced while it was fetched
                value, meta = Download(key), None
                continue
            except REQUEST_ERRORS as error:
                if is_out_of_range(error):  # it ends before
                    if start:
                        return value, meta, attributes
                    is_empty = True  # and has no range: ask for all of it
                    continue
                self._refuse_or_wait(error, "read", key, failures)
                continue
            if start + len(value) >= end:
                value.cut(end - start)
                return value, meta, attributes
        raise self._unavailable("read", key, f"the body broke off {RETRIES.retries + 1} times")

    def _check_size(self, key: str, size: int) -> None:
        """Reject values larger than any that this store writes."""
        if size > MOST_BYTES:
            problem = f"'{key}' has {size:,} bytes, and forebay writes at most {MOST_BYTES:,} into one object"
            raise StoreRefused(
                f"'{self.address}' cannot be used as a store: {problem}", hint="check who wrote it, and move it away"
            )

    def _create(self, upload: Upload) -> bool:
        """Whether the object under the key is that of this upload, after as many attempts as it takes to know."""
        in_doubt = False
        for failures in _attempts():
            try:
                self._put(upload, "create")
                return True
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                if not in_doubt and is_certain(error):
                    return False
            except REQUEST_ERRORS as error:
                self._refuse_or_wait(error, "create", upload.key, 0)
            in_doubt = True
            owns = self._owns(upload)
            if owns is not None:
                return owns
            time.sleep(RETRIES.wait(failures))
        raise self._unavailable("create", upload.key, f"{RETRIES.retries + 1} attempts failed")

    def _owns(self, upload: Upload) -> bool | None:
        """Whether this upload wrote the object; None if there is none yet, or if it is not whole yet."""
        meta = self._meta_or_none(upload.key)
        if meta is None:
            return None
        if self._writer_of(upload.key) != upload.writer:
            return False
        return meta["size"] == upload.size or None

    def _probe(self) -> None:
        """Refuse a service that overwrites an object which must not be overwritten."""
        key = f"{PROBES}{temporary_name()}"
        try:
            first, second = (self._create(Upload(self.address, key, [text])) for text in (b"first", b"second"))
        finally:
            with suppress(OSError):
                self.delete(key)
        if not first or second:
            raise StoreRefused(
                f"'{self.address}' cannot be used as a store: it ignores `If-None-Match: *`, so two "
                "builders could overwrite each other's chunks",
                hint="use one that honors conditional writes, or build into a folder and upload that with its own tool",
            )
        _honors_conditions.add(self.address)

    def _put(self, upload: Upload, mode: Any) -> None:
        self._check_process()
        options = {"mode": mode, "use_multipart": False, "attributes": upload.attributes}
        self._asked(self._writer(upload.size).put, upload.key, upload.body, **options)

    def _meta_or_none(self, key: str) -> Any | None:
        try:
            return self._meta(key)
        except Missing:
            return None

    def _meta(self, key: str) -> Any:
        return self._retried("read", key, lambda: self._reader.head(key))

    def _writer_of(self, key: str) -> str:
        """The name of the write that made an object, empty if it has none or does not exist."""
        with suppress(Missing):
            got = self._retried("read", key, lambda: self._reader.get(key, options={"head": True}))
            return str(got.attributes.get(WRITER, ""))
        return ""

    def _retried(self, what: str, key: str, act: Callable[[], T]) -> T:
        for failures in _attempts():
            self._check_process()
            try:
                return self._asked(act)
            except REQUEST_ERRORS as error:
                self._refuse_or_wait(error, what, key, failures)
        raise self._unavailable(what, key, f"{RETRIES.retries + 1} attempts failed")

    def _asked(self, act: Callable[..., T], *arguments: Any, **options: Any) -> T:
        with awaited(self._service):
            answer = act(*arguments, **options)
        note_answer(self._service)
        return answer

    def _check_process(self) -> None:
        if _Process.forked:
            raise StoreRefused(
                f"'{self.address}' cannot be used as a store: this process was forked from one that had "
                "already used a bucket, where the client would hang",
                hint="start workers with multiprocessing_context='spawn' or 'forkserver', or fill a tier before the "
                "fork (`forebay tier fill`)",
            )

    def _refuse_or_wait(self, error: Exception, what: str, key: str, failures: int) -> None:
        """Raise unless the error may pass; wait if it may."""
        if isinstance(error, (StoreUnavailable, StoreFull)):
            raise error
        check_lasting(error, what, key, self.address)
        problem = unreached(error)
        if not problem:
            note_answer(self._service)
        retries = RETRIES.retries_of(self._service)
        if failures > retries:
            if not problem:
                raise self._unavailable(what, key, first_line(error)) from error
            advice = f"check the network and the endpoint in {VARIABLES[self.scheme]}, and try again"
            raise self._unavailable(what, key, f"no answer from {self._service}: {problem}", advice) from error
        report_retry(self._service, problem, failures + 1, retries + 1)
        time.sleep(RETRIES.wait(failures))

    def _unavailable(
        self, what: str, key: str, problem: str, hint: str = "check the network and try again"
    ) -> StoreUnavailable:
        return StoreUnavailable(f"cannot {what} '{key}' in '{self.address}': {problem}", hint=hint)


def mismatch(value: Buffer, expect: Expected) -> str:
    """The difference from the expected value; empty if there is none."""
    if len(value) != expect.size:
        return f"it has {len(value):,} bytes, {expect.size:,} were published"
    digest = hashlib.sha256(value).digest()
    published = f"{expect.sha256.hex()} was published"
    return "" if digest == expect.sha256 else f"its SHA-256 is {digest.hex()}, {published}"


def _attempts() -> range:
    return range(1, RETRIES.retries + 2)


def _entry(key: str, meta: Any) -> Entry:
    return Entry(key, meta["size"], _etag(meta), meta["last_modified"].timestamp())


def _etag(meta: Any) -> str:
    """An etag in the form of a listing: Azure quotes etags everywhere else."""
    return str(meta["e_tag"] or meta["version"] or meta["last_modified"]).strip('"')


def _take_page(pages: Any, results: list[Any]) -> None:
    try:
        results.append(next(pages, None))
    except REQUEST_ERRORS as error:  # raised again by the thread that waits for the page
        results.append(error)


def _key(entry: Entry) -> str:
    return entry.key
