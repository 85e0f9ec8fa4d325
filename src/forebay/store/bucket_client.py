"""How a bucket is reached: its URL, its client, and the hosts that the client may ask.

No request goes to a host that the user did not name: the client would follow a redirect, and send a session token
along. Where an endpoint is set, every other host is therefore behind a proxy that does not exist.
"""

import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from forebay.errors import LibraryMissing, StoreRefused

try:
    from obstore import exceptions as exceptions
    from obstore.store import AzureStore, GCSStore, S3Store
    from obstore.store import MemoryStore as ProcessMemory
except ModuleNotFoundError as missing:
    raise LibraryMissing(
        "reading and writing buckets needs 'obstore', which is not installed",
        hint="pip install 'forebay[remote]'",
        extra="remote",
    ) from missing

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^/?#@]*)(?:/+([^?#]*))?")
_RETRIES = {
    "max_retries": 5,  # in silence; each of `object_store.RETRIES` begins anew
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
    "retry_timeout": timedelta(minutes=3),
}
_SERVICES: dict[str, Callable[..., Any]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
NOWHERE = "http://127.0.0.1:1"  # the proxy of hosts that the user did not name
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
    parts = _URL.fullmatch(url)
    prefix = (parts[3] or "").rstrip("/") if parts else ""
    if parts is None or not parts[2] or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
        shown = url.partition("?")[0].rpartition("@")[2]  # without what may be a secret
        raise StoreRefused(
            f"'{shown}' cannot be used as a store: it is not the URL of a bucket", hint="write it as s3://bucket/prefix"
        )
    return parts[1].lower(), parts[2], prefix


def endpoint(scheme: str) -> str | None:
    """The endpoint that the environment names."""
    return next(filter(None, (os.environ.get(name) for name in _ENDPOINTS.get(scheme, ()))), None)


def open_client(scheme: str, bucket: str, prefix: str, timeouts: Mapping[str, str]) -> Any:
    """An obstore client; memory:// clients of one name share their values in this process."""
    address = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
    if scheme == "memory":
        return _memories.setdefault(address, ProcessMemory())
    _check_endpoint(scheme, address)
    config = {"connect_timeout": "5s", **timeouts, **_only_named_hosts(scheme)}
    try:
        # As `config`, because `client_options` would hide what the environment says of the client.
        return _SERVICES[scheme](bucket, prefix=prefix or None, config=config, retry_config=_RETRIES)
    except (exceptions.BaseError, ValueError) as error:
        if "Account must be specified" in str(error):
            raise StoreRefused(
                f"'{address}' cannot be used as a store: no account is named", hint=TO_LOG_IN[scheme]
            ) from error
        raise StoreRefused(
            f"'{address}' cannot be used as a store: {first_line(error)}", hint=f"check {VARIABLES[scheme]}"
        ) from error


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def _check_endpoint(scheme: str, address: str) -> None:
    """Reject an endpoint that is not a URL: obstore would panic at the first request."""
    for name in _ENDPOINTS.get(scheme, ()):
        named = os.environ.get(name)
        if named and not re.match(r"https?://[^/]", named):
            problem = f"{name} is '{named}', which is not a URL"
            raise StoreRefused(
                f"'{address}' cannot be used as a store: {problem}",
                hint="write it as https://HOST or https://HOST:PORT",
            )


def _only_named_hosts(scheme: str) -> dict[str, str]:
    """Client options that allow only the hosts of the endpoint and of credentials.

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
