"""GET requests to the hub: retries, ranges, and which errors are transient.

A token is sent only to an endpoint that the user named in this process, and only over HTTPS or to this machine. A few
redirects are followed, without the token, but never from the internet into this machine or its network.
"""

import ipaddress
import random
import re
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import __version__, constants, get_token
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import get_session, parse_ratelimit_headers

from forebay.errors import ForebayError, HubNotFound, HubUnreachable
from forebay.first_answer import FIRST_ATTEMPTS, awaited, has_answered, note_answer, report_retry

T = TypeVar("T")
_LONGEST_ASKED = 600.0  # the hub's rate limit window is five minutes; longer waits are capped
_ADVANCE = 1 << 20  # an attempt that received this many new bytes does not count as a failure


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries with growing pauses; an attempt fails after `timeout` seconds without a byte."""

    retries: int = 5
    timeout: float = 300.0
    first_wait: float = 0.5
    longest_wait: float = 30.0

    def wait(self, failures: int, asked: float | None) -> float:
        """The pause after n failures in a row: what the hub asked for, or exponential back-off with jitter."""
        if asked is not None:
            return min(asked, _LONGEST_ASKED) + random.uniform(0, self.first_wait)
        return min(self.longest_wait, self.first_wait * 2.0 ** (failures - 1)) * random.uniform(0.5, 1)


class TransientError(Exception):
    """An error that a retry may fix. `asked` is the pause in seconds that the hub requested."""

    def __init__(
        self, problem: str, asked: float | None = None, final: ForebayError | None = None, is_reached: bool = True
    ) -> None:
        self.problem, self.asked, self.final, self.is_reached = problem, asked, final, is_reached
        super().__init__(problem)


def with_retries(
    attempt: Callable[[], T], patience: RetryPolicy, endpoint: str, what: str, arrived: Callable[[], int] = lambda: 0
) -> T:
    """Call `attempt` until it succeeds or fails too often in a row; `arrived` returns the bytes received so far."""
    failures, most = 0, arrived()
    while True:
        try:
            with awaited(endpoint):
                return attempt()
        except TransientError as error:
            failures = 1 if arrived() >= most + _ADVANCE else failures + 1
            most = max(most, arrived())
            is_new = not error.is_reached and not has_answered(endpoint)
            retries = min(patience.retries, FIRST_ATTEMPTS - 1) if is_new else patience.retries
            if failures > retries:
                tries = f"{error.problem} ({failures} attempts)"
                raise error.final or HubUnreachable(endpoint, what, tries) from error
            if is_new:
                report_retry(endpoint, error.problem, failures + 1, retries + 1)
            time.sleep(patience.wait(failures, error.asked))


_CONNECT_SECONDS = 20.0
_TRANSIENT = frozenset({408, 425, 429, *range(500, 600)})
_LARGEST_ANSWER = 16 << 20
_MOST_REDIRECTS = 5
_USER_AGENT = f"forebay; hf_hub/{__version__}"
_SECONDS = re.compile(r"[0-9]{1,9}")  # ASCII only: `isdigit` accepts "²", and `float` does not
_LONGEST_MESSAGE = 300  # characters of an error message of the hub
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_CLEAR_TEXT = "its address is not encrypted, so your token would be sent in clear text"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a hub, and whether the user named it in this process: only then is a token sent."""

    address: str
    is_named: bool = True


def address(endpoint: str | None) -> str:
    """The address of the hub: as passed, or from HF_ENDPOINT."""
    return (endpoint or constants.ENDPOINT).rstrip("/")


def is_address(endpoint: str) -> bool:
    """Whether a text is a valid HTTP address of a hub.

    >>> is_address("https://hub.example/mirror"), is_address("file:///etc/passwd"), is_address("http://a:b@c")
    (True, False, False)
    """
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        return False


@contextmanager
def get(
    url: str, patience: RetryPolicy, endpoint: Endpoint, what: str, headers: Mapping[str, str] | None = None
) -> Iterator[httpx2.Response]:
    """A response whose body is not read yet: 200, or 206 or 416 for a range. Raises `TransientError`."""
    timeout = httpx2.Timeout(patience.timeout, connect=min(patience.timeout, _CONNECT_SECONDS))
    own = {"user-agent": _USER_AGENT, "accept-encoding": "identity", **_token_for(endpoint), **(headers or {})}
    if "authorization" in own and not _keeps_secrets(url):
        advice = "use https://, or send no token: unset HF_TOKEN, run `hf auth logout`"
        raise HubNotFound(what, _CLEAR_TEXT, advice)
    try:
        with ExitStack() as answers:
            response = _followed(httpx2.Request("GET", url), own, timeout, endpoint.address, what, answers)
            _check(response, endpoint.address, what)
            yield response
    except (OfflineModeIsEnabled, httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        raise HubUnreachable(endpoint.address, what, str(error)) from error
    except httpx2.RequestError as error:
        is_reached = not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
        raise TransientError(f"{type(error).__name__}: {error}", is_reached=is_reached) from error


def fetch(
    url: str, patience: RetryPolicy, endpoint: Endpoint, what: str, largest: int = _LARGEST_ANSWER
) -> tuple[bytes, Mapping[str, str]]:
    """A small body, whole, and its headers."""

    def attempt() -> tuple[bytes, Mapping[str, str]]:
        started = time.monotonic()
        with get(url, patience, endpoint, what) as response:
            body = bytearray()
            for piece in response.iter_raw():
                body += piece
                if len(body) > largest:
                    raise HubUnreachable(endpoint.address, what, f"its response is longer than {largest:,} bytes")
                if time.monotonic() - started > patience.timeout:
                    raise TransientError(f"its response took longer than {patience.timeout:g} seconds")
            return _decoded(bytes(body), response, endpoint.address, what, largest), response.headers

    return with_retries(attempt, patience, endpoint.address, what)


def _followed(
    first: httpx2.Request, headers: Mapping[str, str], timeout: httpx2.Timeout, hub: str, what: str, answers: ExitStack
) -> httpx2.Response:
    """The response after a few redirects. The client drops the token on a redirect to another origin."""
    session = get_session()
    request = session.build_request("GET", first.url, headers=dict(headers), timeout=timeout)
    for _ in range(_MOST_REDIRECTS + 1):
        response = session.send(request, stream=True, follow_redirects=False)
        note_answer(hub)
        answers.callback(response.close)
        if response.next_request is None:
            return response
        request = response.next_request
        if not _may_redirect(str(first.url), str(request.url)):
            raise HubUnreachable(hub, what, f"it redirects to {str(request.url)[:200]}, which is not allowed")
    raise HubUnreachable(hub, what, f"it redirects more than {_MOST_REDIRECTS} times")


def _token_for(endpoint: Endpoint) -> dict[str, str]:
    """The header with the user's token. `build_hf_headers` could send requests, so it is not used."""
    token = get_token() if endpoint.is_named and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else None
    return {"authorization": f"Bearer {token}"} if token else {}


def _keeps_secrets(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" or _is_this_machine(parts.hostname or "")


def _is_this_machine(host: str) -> bool:
    """Whether a host is this machine by its name alone: what names resolve to may change before they are used."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _may_redirect(first: str, then: str) -> bool:
    """Whether a redirect is allowed: not from HTTPS to HTTP, and not from the internet into this machine or network.

    >>> _may_redirect("https://8.8.8.8/a", "https://9.9.9.9/b"), _may_redirect("https://8.8.8.8/a", "http://9.9.9.9/b")
    (True, False)
    >>> _may_redirect("https://8.8.8.8/a", "https://169.254.169.254/latest/meta-data")
    False
    """
    if not is_address(then) or (urlsplit(first).scheme == "https" and urlsplit(then).scheme != "https"):
        return False
    return not _is_inside(urlsplit(then).hostname or "") or _is_inside(urlsplit(first).hostname or "")


def _is_inside(host: str) -> bool:
    """Whether a host is this machine or on its network, by the addresses it has here.

    Spellings such as 127.1 and 0x7f000001 are addresses too. Hosts that only a proxy knows have none: it decides.
    """
    try:
        return _resolves_inside(host)
    except (OSError, ValueError):
        return _is_this_machine(host.rstrip("."))


@lru_cache(maxsize=256)  # of answers; a lookup that failed is tried again
def _resolves_inside(host: str) -> bool:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]
    return any(not _carried(address).is_global for address in addresses)


def _carried(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The IPv4 address that an IPv6 address stands for, else the address itself."""
    if not isinstance(address, ipaddress.IPv6Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _decoded(body: bytes, response: httpx2.Response, hub: str, what: str, largest: int) -> bytes:
    """The decoded body. Identity was requested, but some proxies use gzip; it may expand to `largest` bytes."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise HubUnreachable(hub, what, f"its response has the encoding '{encoding}', which was not requested")
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        plain = decoder.decompress(body, largest + 1)
    except zlib.error as error:
        raise TransientError(f"its response cannot be decompressed: {error}") from error
    if len(plain) > largest:
        raise HubUnreachable(hub, what, f"its response is longer than {largest:,} bytes when decompressed")
    if not decoder.eof:
        raise TransientError("its compressed response is incomplete")
    return plain


def _check(response: httpx2.Response, endpoint: str, what: str) -> None:
    status = response.status_code
    if status == 200 or (status in (206, 416) and "range" in response.request.headers):
        return
    elsewhere = response.url.netloc != httpx2.URL(endpoint).netloc
    # Storage behind the hub rejects an expired signed address; the hub signs a new one on retry.
    if status in _TRANSIENT or (elsewhere and status in (401, 403)):
        raise TransientError(f"HTTP {status} {response.reason_phrase}", asked=_asked_wait(response.headers))
    problem = (
        response.headers.get("x-error-message", "")[:_LONGEST_MESSAGE] or f"HTTP {status} {response.reason_phrase}"
    )
    if status in (401, 403, 404, 410):
        raise HubNotFound(what, problem, _advice(response.headers.get("x-error-code"), status))
    raise HubUnreachable(endpoint, what, problem)


def _advice(code: str | None, status: int) -> str:
    if code == "GatedRepo":
        return "it is gated: accept its terms on its page, then run `hf auth login`, or set HF_TOKEN"
    if code == "RevisionNotFound":
        return "check the revision: a branch, a tag or a commit"
    if code == "EntryNotFound":
        return "check the name of the file"
    login = "if it is private or gated, run `hf auth login`, or set HF_TOKEN"
    return login if status == 403 else f"check the name; {login}"


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """The pause that a busy hub requests, in seconds; None if it requests none."""
    after = headers.get("retry-after", "").strip()
    try:
        if _SECONDS.fullmatch(after):
            return float(after)
        if after:
            return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
        limit = parse_ratelimit_headers(headers)
    except (ValueError, OverflowError):
        return None
    return float(limit.reset_in_seconds) if limit and not limit.remaining else None


_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-[0-9]{1,19}/([0-9]{1,19}|\*)")


def begins_at(response: httpx2.Response, asked: int, size: int) -> int | None:
    """The offset of the first byte of a response: `asked`, or 0 from a server without ranges; None if it is invalid."""
    if response.status_code == 200:
        return 0
    found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if found is None or int(found[1]) != asked or found[2] not in ("*", str(size)):
        return None
    return asked
