"""A store in a bucket: S3 and what speaks its protocol, Google Cloud Storage, Azure, or the memory of this process.

Creating an object is not a clean yes or no. The client retries some requests by itself, a reply can be lost after the
server has acted, and a service may answer "conflict" although nothing was written:

    put ──▶ yes, or "exists" to the first request ──▶ done
     └────▶ anything else ──▶ whose object is there?  mine ──▶ created     another's ──▶ not created
                                                      none ──▶ put again

Every object carries the name of its write and the SHA-256 of its bytes as metadata. The first says whose it is, the
second lets a whole value be checked where it arrives. A large value is sent in parts and then copied. Where a service
can only copy in parts, too, the copy has no metadata, and its bytes say whose it is: of two writers of equal bytes,
both may then get True, which is as good.
"""

import hashlib
import logging
import os
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import IO, Any, TypeVar

import xxhash

from forebay.errors import LibraryMissing, StoreFull, StoreRefused, StoreUnavailable
from forebay.first_answer import FIRST_ATTEMPTS, awaited, has_answered, note_answer, report_retry
from forebay.store.base import (
    IN_MEMORY_BYTES,
    BadCopy,
    Buffer,
    Entry,
    Expected,
    Missing,
    Store,
    check_key,
    is_full,
    is_key,
    is_left_behind,
    is_temporary,
    temporary_name,
)
from forebay.store.bucket_client import (
    ASIDE,
    MOST_BYTES,
    NOWHERE,
    PART_BYTES,
    PARTS_AT_ONCE,
    PARTS_FROM_BYTES,
    SHA256,
    TO_LOG_IN,
    VARIABLES,
    WRITER,
    Upload,
    copy_ways,
    endpoint,
    first_line,
    open_client,
    parse_url,
    upload_minutes,
)
from forebay.store.local import map_file

try:
    from obstore import exceptions
except ModuleNotFoundError as missing:
    raise LibraryMissing("obstore", "reading and writing buckets", "remote") from missing

READ_BYTES = 1 << 30  # of one object that is read into memory without a range; a chunk is viewed, not read
STALLED_SECONDS = 30.0  # without a byte, until a download is resumed
ROUNDS = 6  # of a request whose outcome is in doubt, or of a download that breaks off
PIECE_BYTES = 8 << 20
MOST_ENTRIES = 4_000_000  # of a cache: a listing that is sorted in memory
MOST_LISTED = 100_000_000  # objects of one listing
PAGE_ENTRIES = 1000
LISTING_SECONDS = 300.0  # without a page, after all retries of its requests
_honours_conditions: set[str] = set()  # addresses that were probed in this process
_ways_to_copy: dict[str, str | None] = {}  # address -> the way that a probe in this process found, None: there is none
_unanswered_probes: dict[str, int] = {}  # address -> probes of copies in this process that errors left open
_log = logging.getLogger("forebay")
T = TypeVar("T")


class _Process:
    """The client's threads do not survive a fork, and its locks may be taken for ever in the child."""

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
        self._writers: dict[tuple[int, str], Any] = {}
        if probed:
            _honours_conditions.add(self.address)
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
                raise StoreRefused(self.address, problem, "read it in ranges, or check who wrote it")
            return bytes(value)
        return bytes(self._fetch(key, start, stop)[0].view())

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        check_key(self.address, key)
        problem: str | None = ""
        for _ in range(2 if expect else 1):
            value = self._whole(key, None if expect is None else expect.size + 1)
            problem = mismatch(value, expect)
            if problem is None:
                return value
        raise BadCopy(key, problem or "")

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        check_key(self.address, key)
        if self.address not in _honours_conditions:
            self._probe()
        upload = Upload(self.address, key, data)
        if upload.size >= PARTS_FROM_BYTES and (copying := self._way_to_copy()) is not None:
            return self._create_in_parts(upload, copying)
        return self._create(upload)

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        check_key(self.address, key)
        upload = Upload(self.address, key, data)
        if if_etag is None:
            self._retried("write", key, lambda: self._put(upload, "overwrite"))
            return True
        for pause in _pauses():
            meta = self._meta_or_none(key)
            if meta is None or _etag(meta) != if_etag:
                return self._writer_of(key) == upload.writer  # changed by an earlier round, or by somebody else
            try:
                self._put(upload, {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None})
                return True
            except exceptions.PreconditionError:
                continue
            except Exception as error:
                self._refuse_or_wait(error, "write", key, pause)
        raise StoreUnavailable(self.address, f"replace '{key}'", f"{ROUNDS} attempts failed")

    def entries(self, prefix: str) -> Iterator[Entry]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(self.address, folder)
        found = (entry for entry in self._listed(folder, MOST_ENTRIES) if entry.key.startswith(prefix))
        yield from sorted((one for one in found if is_key(one.key) and not is_temporary(one.key)), key=_key)

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
        return (entry for entry in self._listed(ASIDE, MOST_ENTRIES) if is_left_behind(entry.key, entry.written))

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
        for pause in _pauses():
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
            except Exception as error:
                # A listing that is not sorted cannot be resumed after its last key.
                self._refuse_or_wait(error, "list", prefix, pause if is_sorted else _PAUSES[-1])

    def _next_page(self, pages: Any, prefix: str) -> Any | None:
        """The next page of a listing, None at its end.

        The client asks for the next page until it has an object, and cannot be interrupted; so it runs in a thread.
        """
        found: list[Any] = []
        thread = threading.Thread(target=_take_page, args=(pages, found), name="forebay-listing", daemon=True)
        thread.start()
        thread.join(LISTING_SECONDS)
        if not found:
            what = f"list '{prefix}'" if prefix else "list the objects"
            raise StoreUnavailable(self.address, what, f"no page with an object came in {LISTING_SECONDS:g} s")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _refuse_listing(self, prefix: str, problem: str) -> None:
        where = f"the listing of '{prefix}'" if prefix else "its listing"
        raise StoreRefused(self.address, f"{where} {problem}", "check the service, or name a part of the bucket")

    def document(self) -> Mapping[str, Any]:
        return {**super().document(), "arguments": self._arguments()}

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, self._arguments()

    def _arguments(self) -> tuple[str, bool]:
        """Return constructor arguments for another process: the address, and whether it was probed already."""
        if self.scheme == "memory":
            raise TypeError("memory:// lives in one process and cannot be sent to another; use a bucket, or workers=0")
        return self.address, self.address in _honours_conditions

    @cached_property
    def _reader(self) -> Any:
        # `timeout` covers a whole request with its body, so it only bounds what `read_timeout` cannot see.
        return self._client({"read_timeout": f"{STALLED_SECONDS}s", "timeout": "24h"})

    def _writer(self, size: int, copying: str = "") -> Any:
        """A client for uploads of this size. It has no `read_timeout`, which would run while the body is sent."""
        kind = (upload_minutes(size), copying)
        if kind not in self._writers:
            self._writers[kind] = self._client({"timeout": f"{60 * kind[0]}s"}, copying)
        return self._writers[kind]

    def _client(self, timeouts: dict[str, str], copying: str = "") -> Any:
        _Process.used = True
        return open_client(self.scheme, self._bucket, self._prefix, timeouts, copying)

    def _whole(self, key: str, stop: int | None) -> memoryview:
        """The value up to `stop`, compared with the SHA-256 it was written with.

        One that differs is fetched again; if it then is the same, the object itself is damaged, and the caller will
        find out.
        """
        before = ""
        for _ in range(ROUNDS):
            body, meta, attributes = self._fetch(key, 0, stop)
            value, written = body.view(), attributes.get(SHA256)
            if written is None or len(value) < meta["size"]:
                break
            found = hashlib.sha256(value).hexdigest()
            if found in (written, before):
                break
            before = found
        return value

    def _fetch(self, key: str, start: int, stop: int | None) -> tuple["_Body", Any, Any]:
        """A range with the object's metadata; a body that breaks off or stalls is resumed where it ended."""
        value, meta, attributes, is_empty = _Body(key), None, {}, False
        for pause in _pauses():
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
                value, meta = _Body(key), None
                continue
            except Exception as error:
                if _status(error) == 416 or "Wanted range starting at" in str(error):  # it ends before
                    if start:
                        return value, meta, attributes
                    is_empty = True  # and has no range: ask for all of it
                    continue
                self._refuse_or_wait(error, "read", key, pause)
                continue
            if start + len(value) >= end:
                value.cut(end - start)
                return value, meta, attributes
        raise StoreUnavailable(self.address, f"read '{key}'", f"the body broke off {ROUNDS} times")

    def _check_size(self, key: str, size: int) -> None:
        """Refuse to fetch what is larger than anything that this store writes."""
        if size > MOST_BYTES:
            problem = f"'{key}' has {size:,} bytes, and forebay writes at most {MOST_BYTES:,} into one object"
            raise StoreRefused(self.address, problem, "check who wrote it, and move it away")

    def _create(self, upload: Upload) -> bool:
        return self._created(upload, lambda: self._put(upload, "create"))

    def _create_in_parts(self, upload: Upload, copying: str) -> bool:
        if self._meta_or_none(upload.key) is not None:  # nothing is sent for nothing
            return False
        aside = f"{ASIDE}{temporary_name()}"
        try:
            self._retried("write", upload.key, lambda: self._put_parts(upload, aside))
            return self._created(upload, lambda: self._put_in_place(upload, aside, copying))
        finally:
            with suppress(OSError):
                self.delete(aside)

    def _created(self, upload: Upload, put: Callable[[], None]) -> bool:
        """Whether the object under the key is that of this upload, after as many attempts as it takes to know."""
        in_doubt = False
        for pause in _pauses():
            try:
                put()
                return True
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                if not in_doubt and _is_certain(error):
                    return False
            except Exception as error:
                self._refuse_or_wait(error, "create", upload.key, 0)
            in_doubt = True
            there = self._owner(upload)
            if there is not None:
                return there
            time.sleep(pause)
        raise StoreUnavailable(self.address, f"create '{upload.key}'", f"{ROUNDS} attempts failed")

    def _owner(self, upload: Upload) -> bool | None:
        """Whether this upload wrote the object; None if there is none yet, or if it is still being copied."""
        meta = self._meta_or_none(upload.key)
        if meta is None:
            return None
        writer, has_its_size = self._writer_of(upload.key), meta["size"] == upload.size
        if writer:
            return (has_its_size or None) if writer == upload.writer else False
        if not has_its_size:  # of a service that drops metadata
            return False
        with suppress(Missing):
            return self._has_bytes(upload)
        return None

    def _has_bytes(self, upload: Upload) -> bool | None:
        """Whether the object has the bytes of an upload: without metadata, one read may be wrong and two must agree."""
        before = None
        for _ in range(ROUNDS):
            found = hashlib.sha256(self._fetch(upload.key, 0, None)[0].view()).digest()
            if found == before:
                return found == upload.sha256
            before = found
        return None

    def _probe(self) -> None:
        """Refuse a service that overwrites an object which must not be overwritten."""
        key = f"{ASIDE}{temporary_name()}"
        try:
            first, second = (self._create(Upload(self.address, key, [text])) for text in (b"first", b"second"))
        finally:
            with suppress(OSError):
                self.delete(key)
        if not first or second:
            raise StoreRefused(
                self.address,
                "it ignores `If-None-Match: *`, so two builders could overwrite each other's chunks",
                "use one that honours conditional writes, or build into a folder and upload that with its own tool",
            )
        _honours_conditions.add(self.address)

    def _way_to_copy(self) -> str | None:
        """How the service copies an object only if the other key is new; None to send large chunks whole.

        Errors of a moment leave it open: the next chunk asks again, but not for ever where they last.
        """
        if self.address not in _ways_to_copy:
            is_open = False
            for way in copy_ways(self.scheme):
                found = self._probe_copy(way)
                if found:
                    _ways_to_copy[self.address] = way
                    return way
                is_open |= found is None
            probes = _unanswered_probes[self.address] = _unanswered_probes.get(self.address, 0) + is_open
            if is_open and probes < _PROBES:
                return None
            _ways_to_copy[self.address] = None
            problem = f"did not answer {probes} probes of copies" if is_open else "cannot copy an object"
            _log.warning("%s %s on condition, so large chunks are sent whole, not in parts", self.address, problem)
        return _ways_to_copy[self.address]

    def _probe_copy(self, copying: str) -> bool | None:
        """Whether a copy on condition is refused and changes nothing; None where errors hide the answer.

        A conflict may mean anything, so one refusal of that kind is not enough.
        """
        first, other, copy = (f"{ASIDE}{temporary_name()}" for _ in range(3))
        refusals = refusals_of_a_new_key = 0
        try:
            for key in (first, other):
                self._create(Upload(self.address, key, [key.encode()]))
            for pause in _pauses():
                source = other if self._meta_or_none(copy) else first
                try:
                    self._copy(source, copy, 0, copying)
                    if source == other:
                        return False  # it has overwritten
                    continue
                except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                    refusals += source == other
                    if refusals == _REFUSALS or (refusals and _is_certain(error)):
                        return self._has_bytes(Upload(self.address, copy, [first.encode()]))
                    refusals_of_a_new_key += source == first and _is_certain(error)
                    if refusals_of_a_new_key == _REFUSALS_OF_A_NEW_KEY:
                        return False  # it refuses whatever is copied on condition
                except (exceptions.BaseError, OSError) as error:
                    if not _may_pass(error):  # it does not know this request
                        return False
                time.sleep(pause * random.random())
            return None
        except Missing:
            return False
        finally:
            for key in (first, other, copy):
                with suppress(OSError):
                    self.delete(key)

    def _put_parts(self, upload: Upload, aside: str) -> None:
        client = self._writer(PART_BYTES * PARTS_AT_ONCE)
        options = {"use_multipart": True, "chunk_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
        try:
            client.put(aside, upload.pieces(), attributes=upload.attributes, **options)
        except FileNotFoundError as error:  # also the answer to the end of an upload that is sent twice
            meta = self._meta_or_none(aside)
            if meta is None or meta["size"] != upload.size:
                raise OSError("the service does not find the parts that were sent") from error

    def _put_in_place(self, upload: Upload, aside: str, copying: str) -> None:
        """Copy what is aside to its key if that is new; an `OSError` leaves in doubt whether it was."""
        try:
            self._copy(aside, upload.key, upload.size, copying)
        except FileNotFoundError as error:  # also the answer to the end of a copy that is sent twice
            raise OSError("the service does not find what it should copy") from error
        meta = self._meta_or_none(upload.key)
        if meta is None or meta["size"] != upload.size:  # Azure may copy after it has answered
            raise OSError("the service has not finished copying")

    def _copy(self, source: str, key: str, size: int, copying: str) -> None:
        self._check_process()
        self._asked(self._writer(size, copying).copy, source, key, overwrite=False)

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
        for pause in _pauses():
            self._check_process()
            try:
                return self._asked(act)
            except Exception as error:
                self._refuse_or_wait(error, what, key, pause)
        raise StoreUnavailable(self.address, f"{what} '{key}'", f"{ROUNDS} attempts failed")

    def _asked(self, act: Callable[..., T], *arguments: Any, **options: Any) -> T:
        with awaited(self._service):
            answer = act(*arguments, **options)
        note_answer(self._service)
        return answer

    def _check_process(self) -> None:
        if _Process.forked:
            raise StoreRefused(
                self.address,
                "this process was forked from one that had already used a bucket, where the client would hang",
                "start workers with multiprocessing_context='spawn' or 'forkserver', or read through a tier or a copy",
            )

    def _refuse_or_wait(self, error: Exception, what: str, key: str, pause: float) -> None:
        """Raise unless the error may pass; wait if it may."""
        if isinstance(error, (StoreRefused, StoreUnavailable, StoreFull, Missing)):
            raise error
        self._refuse(error, what, key)
        if not isinstance(error, (exceptions.BaseError, OSError)):
            raise error
        unreached = _not_reached(error)
        if not unreached:
            note_answer(self._service)
        if pause >= (_PAUSES if has_answered(self._service) else _PAUSES[:FIRST_ATTEMPTS])[-1]:
            if not unreached:
                raise StoreUnavailable(self.address, f"{what} '{key}'", first_line(error)) from error
            cause = f"no answer from {self._service}: {unreached}"
            advice = f"check the network and the endpoint in {VARIABLES[self.scheme]}, and try again"
            raise StoreUnavailable(self.address, f"{what} '{key}'", cause, advice) from error
        if pause:
            report_retry(self._service, unreached, _PAUSES.index(pause) + 2, FIRST_ATTEMPTS)
        time.sleep(pause * random.random())

    def _refuse(self, error: Exception, what: str, key: str) -> None:
        """Raise what an error means, where it means anything but "try again"."""
        text, status, variables = str(error), _status(error), VARIABLES.get(self.scheme, "")
        problem = advice = ""
        if _NO_BUCKET.search(text) or (status == 404 and what in ("list", "create", "write")):
            kind = "container" if self.scheme == "az" else "bucket"
            problem, advice = f"there is no {kind} '{self._bucket}'", "create it, or check the name and the endpoint"
        elif isinstance(error, FileNotFoundError):
            raise Missing(key) from error
        elif _NO_ROOM.search(text) or status == 507:
            raise StoreFull(self.address, key, first_line(error)) from error
        elif NOWHERE.removeprefix("http://") + "," in text or status in (302, 303, 307, 308):
            problem = "the server at its endpoint redirects to a host that you did not name"
            advice = f"set the endpoint in {variables} to the host that serves the bucket"
        elif _OTHER_REGION.search(text) or status == 301:
            named = _REGION.search(text)
            problem = "the bucket is in another region"
            advice = f"set AWS_REGION={named[1] or named[2]}" if named else "set AWS_REGION to the region of the bucket"
        elif _NO_CREDENTIALS.search(text):
            problem, advice = "no credentials were found", TO_LOG_IN[self.scheme]
        elif _NOT_ALLOWED.search(text) or isinstance(error, _DENIED):
            doing = "write to" if what in ("create", "write", "delete") else "read"
            problem = f"the credentials do not allow to {doing} it"
            advice = f"ask for that permission, or check {variables} in the environment"
        elif "BadScheme" in text:
            problem, advice = "its endpoint is not HTTPS", "set AWS_ALLOW_HTTP=true if you trust the network"
        elif status == 501 or isinstance(error, exceptions.NotSupportedError):
            problem = "the service does not support conditional writes"
            advice = "use one that honours `If-None-Match: *`, or build into a folder and upload that with its own tool"
        elif isinstance(error, (exceptions.InvalidPathError, ValueError)):
            problem, advice = f"the key {key[:80]!r} is not accepted", "keys are relative names with / between them"
        if problem:
            raise StoreRefused(self.address, problem, advice) from error


class _Body:
    """The bytes of an answer as they arrive: in memory, or in a file without a name when there are many."""

    def __init__(self, key: str) -> None:
        self._key, self._memory, self._size = key, bytearray(), 0
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return self._size

    def add(self, piece: Any) -> None:
        try:
            if self._file is None and self._size + len(piece) > IN_MEMORY_BYTES:
                self._file = tempfile.TemporaryFile(prefix="forebay-", buffering=0)  # noqa: SIM115, see __del__
                _write_all(self._file, self._memory)
                self._memory = bytearray()
            if self._file is None:
                self._memory += piece
            else:
                _write_all(self._file, piece)
        except OSError as error:
            if not is_full(error):
                raise
            problem = "the folder of temporary files is full; set TMPDIR to another, or read through a tier"
            raise StoreFull(tempfile.gettempdir(), self._key, problem) from error
        self._size += len(piece)

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def cut(self, size: int) -> None:
        """Drop what is beyond a size."""
        if self._size > size:
            del self._memory[size:]
            if self._file is not None:
                self._file.truncate(size)
            self._size = size

    def view(self) -> memoryview:
        return memoryview(self._memory).toreadonly() if self._file is None else map_file(self._file.fileno())


def mismatch(value: Buffer, expect: Expected | None) -> str | None:
    """How a value differs from what is expected, None if it does not."""
    if expect is None:
        return None
    if len(value) != expect.size:
        return f"it has {len(value):,} bytes, {expect.size:,} were published"
    if expect.sha256 is not None:
        found = hashlib.sha256(value).digest()
        return None if found == expect.sha256 else f"its SHA-256 is {found.hex()}, {expect.sha256.hex()} was published"
    if expect.head is not None and xxhash.xxh3_128_digest(memoryview(value)[: expect.head[0]]) != expect.head[1]:
        return f"its first {expect.head[0]:,} bytes disagree with their digest"
    return None


_REFUSALS = 3  # of copies, none of them certain, that say together that a service honours the condition
_REFUSALS_OF_A_NEW_KEY = 2  # certain ones: the first may be of a copy that appears later
_PROBES = 2  # of copies that errors leave open, until large chunks are sent whole without another
_PAUSES = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0)
_DENIED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)
_UNREACHED = {
    "kind: ConnectionRefused": "connection refused",
    "dns error": "its host name is not known",
    "kind: Timeout": "no connection in time",
    "kind: Connect": "no connection",
}
_STATUS = re.compile(r"status code: (\d{3})|status: (\d{3})")
_RETRIED = re.compile(r"after \d+ retries")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist|specified container does not exist")
_NO_ROOM = re.compile(r"QuotaExceeded|InsufficientStorage|EntityTooLarge|StorageFull|XMinioStorageFull")
_OTHER_REGION = re.compile(
    r"PermanentRedirect|AuthorizationHeaderMalformed|IllegalLocationConstraint|configured region"
)
_REGION = re.compile(r"expecting '([a-z0-9-]{1,40})'|<Region>([a-z0-9-]{1,40})</Region>")
_NO_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|/latest/api/token|/latest/meta-data|computeMetadata|metadata\.google\.internal"
    r"|metadata/identity|NoCredential|MissingCredential"
)
_NOT_ALLOWED = re.compile(r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed|AuthorizationF")


def _pauses() -> tuple[float, ...]:
    return _PAUSES[:ROUNDS]


def _is_certain(error: Exception) -> bool:
    """Whether "it exists" is the answer to the only request that was sent, and not a conflict of two in flight."""
    return _RETRIED.search(str(error)) is None and _status(error) in (None, 412)


def _may_pass(error: Exception) -> bool:
    """Whether the same request may have another answer: after errors of the service or of the line.

    "Not found" is also the answer to the end of a copy in parts that is sent twice.
    """
    if isinstance(error, (StoreRefused, exceptions.NotSupportedError, *_DENIED)):
        return False
    status = _status(error)
    return status is None or status in (404, 408, 409, 429) or (status >= 500 and status != 501)


def _status(error: Exception) -> int | None:
    found = _STATUS.search(str(error))
    return int(found[1] or found[2]) if found else None


def _entry(key: str, meta: Any) -> Entry:
    return Entry(key, meta["size"], _etag(meta), meta["last_modified"].timestamp())


def _etag(meta: Any) -> str:
    """As a listing has it: Azure quotes an etag everywhere else."""
    return str(meta["e_tag"] or meta["version"] or meta["last_modified"]).strip('"')


def _take_page(pages: Any, found: list[Any]) -> None:
    try:
        found.append(next(pages, None))
    except Exception as error:
        found.append(error)


def _write_all(file: IO[bytes], data: Any) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _key(entry: Entry) -> str:
    return entry.key


def _not_reached(error: Exception) -> str:
    """Why no connection was made, empty if one was."""
    return next((why for sign, why in _UNREACHED.items() if sign in str(error)), "")
