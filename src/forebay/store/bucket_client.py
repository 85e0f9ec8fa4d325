"""How a bucket is reached: its URL, its client, and the hosts that the client may ask.

No request goes to a host that the user did not name: the client would follow a redirect, and send a session token
along. Where an endpoint is set, every other host is therefore behind a proxy that does not exist.

What is sent to a bucket, and how.

    small ──▶ one request, on condition that its key is new
    large ──▶ parts, into an object aside with a name of this process ──▶ copied to its key on the same condition

A part that breaks off is sent again, not all of a chunk. Whoever is killed in between leaves an object aside, which no
listing shows and `clean` removes.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from forebay.errors import LibraryMissing, StoreRefused
from forebay.store.base import Buffer

try:
    from obstore import exceptions
    from obstore.store import AzureStore, GCSStore, S3Store
    from obstore.store import MemoryStore as ProcessMemory
except ModuleNotFoundError as missing:
    raise LibraryMissing("obstore", "reading and writing buckets", "remote") from missing

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^/?#@]*)(?:/+([^?#]*))?")
_RETRIES = {
    "max_retries": 5,  # in silence; each of `ROUNDS` begins anew
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
    "retry_timeout": timedelta(minutes=3),
}
_SERVICES: dict[str, Callable[..., Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
NOWHERE = "http://127.0.0.1:1"  # the proxy of hosts that nobody named
_CREDENTIAL_HOSTS = (
    "169.254.0.0/16", "fd00::/8", "amazonaws.com", "amazonaws.com.cn", "googleapis.com", "metadata.google.internal",
    "microsoftonline.com", "microsoftonline.us", "chinacloudapi.cn",
)  # fmt: skip
_CREDENTIAL_URLS = (
    "AWS_METADATA_ENDPOINT", "AWS_ENDPOINT_URL_STS", "AWS_STS_ENDPOINT", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT", "AZURE_STORAGE_AUTHORITY_HOST", "AZURE_AUTHORITY_HOST",
    "IDENTITY_ENDPOINT", "MSI_ENDPOINT",
)  # fmt: skip
_KEYS = ("AWS_ACCESS_KEY_ID", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_SAS_KEY")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "PROXY_URL")
VARIABLES = {"s3": "AWS_*", "gs": "GOOGLE_*", "az": "AZURE_*"}
TO_LOG_IN = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as `aws configure export-credentials --format env` prints "
    "them for a profile",
    "gs": "set GOOGLE_SERVICE_ACCOUNT to the key file of a service account, or run `gcloud auth application-default "
    "login`",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_memories: dict[str, Any] = {}  # name -> what is in it


def parse_url(url: str) -> tuple[str, str, str]:
    """(scheme, bucket, prefix) of a URL, also of one from which a `Path` has taken a slash."""
    found = _URL.fullmatch(url)
    prefix = (found[3] or "").rstrip("/") if found else ""
    if found is None or not found[2] or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        shown = url.partition("?")[0].rpartition("@")[2]  # without what may be a secret
        raise StoreRefused(shown, "it is not the URL of a bucket", "write it as s3://bucket/prefix")
    return found[1].lower(), found[2], prefix


def endpoint(scheme: str) -> str | None:
    """The endpoint that the environment names."""
    return next(filter(None, (os.environ.get(name) for name in _ENDPOINTS.get(scheme, ()))), None)


def copy_ways(scheme: str) -> tuple[str, ...]:
    """How a service may be asked to copy on condition, the best way first: a copy in parts loses the metadata."""
    is_known = scheme != "s3" or os.environ.get("AWS_COPY_IF_NOT_EXISTS")
    return ("",) if is_known else ("header:if-none-match:*", "multipart")


def open_client(scheme: str, bucket: str, prefix: str, timeouts: Mapping[str, str], copying: str = "") -> Any:
    """A client of obstore; one of memory:// has what the others of its name in this process have.

    `copying` is one of `copy_ways`, for a client that copies.
    """
    address = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
    if scheme == "memory":
        return _memories.setdefault(address, ProcessMemory())
    _check_endpoint(scheme, address)
    config = {"connect_timeout": "5s", **timeouts, **_only_named_hosts(scheme)}
    if copying:
        config["copy_if_not_exists"] = copying
    try:
        # As `config`, because `client_options` would hide what the environment says of the client.
        return _SERVICES[scheme](bucket, prefix=prefix or None, config=config, retry_config=_RETRIES)
    except (exceptions.BaseError, ValueError) as error:
        if "Account must be specified" in str(error):
            raise StoreRefused(address, "no account is named", TO_LOG_IN[scheme]) from error
        raise StoreRefused(address, first_line(error), f"check {VARIABLES[scheme]}") from error


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def _check_endpoint(scheme: str, address: str) -> None:
    """Refuse an endpoint that is not a URL: obstore would end with a panic at the first request."""
    for name in _ENDPOINTS.get(scheme, ()):
        named = os.environ.get(name)
        if named and not re.match(r"https?://[^/]", named):
            problem = f"{name} is '{named}', which is not a URL"
            raise StoreRefused(address, problem, f"write it as https://{named.strip('/')}")


def _only_named_hosts(scheme: str) -> dict[str, str]:
    """Options of the client by which it reaches no host but those of the endpoint and of credentials.

    Empty where the environment names no endpoint, so that the service is the provider's own; or where it names a
    proxy, which decides instead.
    """
    named = [os.environ[name] for name in _ENDPOINTS[scheme] if os.environ.get(name)]
    if not named or any(os.environ.get(name) or os.environ.get(name.lower()) for name in _PROXIES):
        return {}
    urls = [*named, *(os.environ[name] for name in _CREDENTIAL_URLS if os.environ.get(name))]
    hosts = [host for host in (urlsplit(url).hostname for url in urls) if host]
    hosts += [] if any(os.environ.get(name) for name in _KEYS) else _CREDENTIAL_HOSTS
    return {"proxy_url": NOWHERE, "proxy_excludes": ",".join(hosts)}


WRITER, SHA256 = "forebaywriter", "forebaysha256"  # names of metadata that every service allows
ASIDE = ".uploads/"
MOST_BYTES = 5 << 30  # of one object, written or copied by one request: the limit of S3
SMALL_BYTES = 8 << 20  # of an upload that has to end in a minute; one that is n times as large has n minutes
PARTS_FROM_BYTES = 64 << 20  # most chunks are smaller, and parts and a copy cost four to seven requests more
PART_BYTES = 16 << 20  # S3 allows 10,000 parts of at least 5 MiB
PARTS_AT_ONCE = 4


class Upload:
    """Bytes to be put, with the name of this write: one for all of its attempts."""

    def __init__(self, address: str, key: str, data: Sequence[Buffer]) -> None:
        self.key, self._data = key, data
        self.size, self.writer = sum(memoryview(each).nbytes for each in data), secrets.token_hex(12)
        if self.size > MOST_BYTES:
            problem = f"'{key}' has {self.size:,} bytes, and one object has at most {MOST_BYTES:,}"
            raise StoreRefused(address, problem, "choose smaller chunks (`chunk_bytes` of the recipe)")
        digest = hashlib.sha256()
        for each in data:
            digest.update(each)
        self.sha256 = digest.digest()
        self.attributes = {WRITER: self.writer, SHA256: self.sha256.hex()}

    @cached_property
    def body(self) -> bytes:
        return b"".join(self._data)

    def pieces(self) -> Iterator[memoryview]:
        """The body in slices that are not copies: a large chunk is in memory once."""
        for each in filter(len, self._data):
            view = memoryview(each).cast("B")
            yield from (view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES))


def upload_minutes(size: int) -> int:
    """How long an upload may take: a power of two, so that few clients are needed, and at least 140 kB/s are sent.

    >>> [upload_minutes(size) for size in (0, SMALL_BYTES, SMALL_BYTES + 1, 1 << 30)]
    [1, 1, 2, 128]
    """
    return 1 << max(0, (size - 1) // SMALL_BYTES).bit_length()
