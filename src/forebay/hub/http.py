"""GET from the hub: retries, ranges, and which errors may pass.

A token is sent only to an endpoint that the user named in this process, and never in clear text but to this machine.
A redirect is followed without the token, a few times, and not to where only this machine or its network can go.
"""

import ipaddress
import random
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import __version__, constants, get_token
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import get_session, parse_ratelimit_headers

from forebay.errors import ForebayError, HubNotFound, HubUnreachable

T = TypeVar("T")
_LONGEST_ASKED = 600.0  # the hub counts requests over five minutes; who asks for more is not believed
_ADVANCE = 1 << 20  # a try that brought so many new bytes was no failure


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`retries` after a first try, each up to `timeout` seconds without a byte; longer pauses from try to try."""

    retries: int = 5
    timeout: float = 300.0
    first_wait: float = 0.5
    longest_wait: float = 30.0

    def wait(self, failures: int, asked: float | None) -> float:
        """The pause after so many failures in a row: what the hub asked for, or twice the last, less a random part."""
        if asked is not None:
            return min(asked, _LONGEST_ASKED) + random.uniform(0, self.first_wait)
        return min(self.longest_wait, self.first_wait * 2.0 ** (failures - 1)) * random.uniform(0.5, 1)


class TransientError(Exception):
    """Trouble that may pass. `asked` are the seconds that the hub wants to be left alone."""

    def __init__(self, problem: str, asked: float | None = None, final: ForebayError | None = None) -> None:
        self.problem, self.asked, self.final = problem, asked, final
        super().__init__(problem)


def with_retries(
    attempt: Callable[[], T], patience: RetryPolicy, endpoint: str, what: str, arrived: Callable[[], int] = lambda: 0
) -> T:
    """Try until it succeeds, or until it failed too often in a row; `arrived` tells how many bytes there are."""
    failures, most = 0, arrived()
    while True:
        try:
            return attempt()
        except TransientError as trouble:
            failures = 1 if arrived() >= most + _ADVANCE else failures + 1
            most = max(most, arrived())
            if failures > patience.retries:
                tries = f"{trouble.problem} ({failures} tries)"
                raise trouble.final or HubUnreachable(endpoint, what, tries) from trouble
            time.sleep(patience.wait(failures, trouble.asked))


_CONNECT_SECONDS = 20.0
_MAY_PASS = frozenset({408, 425, 429, *range(500, 600)})
_LARGEST_ANSWER = 16 << 20
_MOST_REDIRECTS = 5
_USER_AGENT = f"forebay; hf_hub/{__version__}"
_SECONDS = re.compile(r"[0-9]{1,9}")  # ASCII alone: `isdigit` takes "²" too, and `float` does not
_LONGEST_MESSAGE = 300  # characters of what a hub says of an error
_CLEAR_TEXT = "its address is not encrypted, and a token would be sent in clear text"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of a hub, and whether the user named it in this process: only then a token goes there."""

    address: str
    is_named: bool = True


def address(endpoint: str | None) -> str:
    """Where the hub is: as passed, or as `huggingface_hub` has it from HF_ENDPOINT."""
    return (endpoint or constants.ENDPOINT).rstrip("/")


def is_address(endpoint: str) -> bool:
    """Whether a hub can be asked there.

    >>> is_address("https://hub.example/mirror"), is_address("file:///etc/passwd"), is_address("http://a:b@c")
    (True, False, False)
    """
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        return False


@contextmanager
def ask(
    url: str, patience: RetryPolicy, endpoint: Endpoint, what: str, headers: Mapping[str, str] | None = None
) -> Iterator[httpx2.Response]:
    """An answer whose body is still to be read: 200, or 206 or 416 to a range. Raises `TransientError`."""
    timeout = httpx2.Timeout(patience.timeout, connect=min(patience.timeout, _CONNECT_SECONDS))
    own = {"user-agent": _USER_AGENT, "accept-encoding": "identity", **_token_for(endpoint), **(headers or {})}
    if "authorization" in own and not _keeps_secrets(url):
        advice = "name it with https://, or ask without a token: unset HF_TOKEN, run `hf auth logout`"
        raise HubNotFound(what, _CLEAR_TEXT, advice)
    try:
        with ExitStack() as answers:
            response = _followed(httpx2.Request("GET", url), own, timeout, endpoint.address, what, answers)
            _check(response, endpoint.address, what)
            yield response
    except (OfflineModeIsEnabled, httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        raise HubUnreachable(endpoint.address, what, str(error)) from error
    except httpx2.RequestError as error:
        raise TransientError(f"{type(error).__name__}: {error}") from error


def fetch(
    url: str, patience: RetryPolicy, endpoint: Endpoint, what: str, largest: int = _LARGEST_ANSWER
) -> tuple[bytes, Mapping[str, str]]:
    """A small body, whole, and the headers it came with."""

    def attempt() -> tuple[bytes, Mapping[str, str]]:
        started = time.monotonic()
        with ask(url, patience, endpoint, what) as response:
            body = bytearray()
            for piece in response.iter_raw():
                body += piece
                if len(body) > largest:
                    raise HubUnreachable(endpoint.address, what, f"its answer is longer than {largest:,} bytes")
                if time.monotonic() - started > patience.timeout:
                    raise TransientError(f"its answer took longer than {patience.timeout:g} seconds")
            return _decoded(bytes(body), response, endpoint.address, what, largest), response.headers

    return with_retries(attempt, patience, endpoint.address, what)


def _followed(
    first: httpx2.Request, headers: Mapping[str, str], timeout: httpx2.Timeout, hub: str, what: str, answers: ExitStack
) -> httpx2.Response:
    """The answer behind a few redirects. The client takes the token off a redirect to another origin."""
    session = get_session()
    request = session.build_request("GET", first.url, headers=dict(headers), timeout=timeout)
    for _ in range(_MOST_REDIRECTS + 1):
        response = session.send(request, stream=True, follow_redirects=False)
        answers.callback(response.close)
        if response.next_request is None:
            return response
        request = response.next_request
        if not _may_redirect(str(first.url), str(request.url)):
            raise HubUnreachable(hub, what, f"it redirects to {str(request.url)[:200]}, where it may not lead")
    raise HubUnreachable(hub, what, f"it redirects more than {_MOST_REDIRECTS} times")


def _token_for(endpoint: Endpoint) -> dict[str, str]:
    """The header with the user's token. `build_hf_headers` would also ask the hub for things of its own."""
    token = get_token() if endpoint.is_named and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else None
    return {"authorization": f"Bearer {token}"} if token else {}


def _keeps_secrets(url: str) -> bool:
    return urlsplit(url).scheme == "https" or _is_inside(url)


def _may_redirect(first: str, then: str) -> bool:
    """Not from an encrypted address to one that is not, and not from the internet into this machine or its network.

    >>> _may_redirect("https://hub.example/a", "https://storage.example/b")
    True
    >>> _may_redirect("https://hub.example/a", "http://storage.example/b")
    False
    >>> _may_redirect("https://hub.example/a", "https://169.254.169.254/latest/meta-data")
    False
    """
    if not is_address(then) or (urlsplit(first).scheme == "https" and urlsplit(then).scheme != "https"):
        return False
    return _is_inside(first, private=True) or not _is_inside(then, private=True)


def _is_inside(url: str, private: bool = False) -> bool:
    """Whether an address is of this machine, or, where `private` counts too, of its network."""
    host = urlsplit(url).hostname or ""
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return number.is_loopback or (private and not number.is_global)


def _decoded(body: bytes, response: httpx2.Response, hub: str, what: str, largest: int) -> bytes:
    """A body as it was meant. No encoding was asked for; gzip, which some proxies add, is taken within the bound."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise HubUnreachable(hub, what, f"its answer is encoded as '{encoding}', which nobody asked for")
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        plain = decoder.decompress(body, largest + 1)
    except zlib.error as error:
        raise TransientError(f"its answer cannot be decompressed: {error}") from error
    if len(plain) > largest:
        raise HubUnreachable(hub, what, f"its answer is longer than {largest:,} bytes when it is decompressed")
    if not decoder.eof:
        raise TransientError("its compressed answer breaks off")
    return plain


def _check(response: httpx2.Response, endpoint: str, what: str) -> None:
    status = response.status_code
    if status == 200 or (status in (206, 416) and "range" in response.request.headers):
        return
    elsewhere = response.url.netloc != httpx2.URL(endpoint).netloc
    # Storage behind the hub refuses a signed address that is too old; the hub signs a new one when asked again.
    if status in _MAY_PASS or (elsewhere and status in (401, 403)):
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
    """The seconds to wait that a busy hub asks for; None where it asks for nothing that can be read."""
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
    """Where it was asked for, or 0 from a server that knows no ranges; None where it is no answer to that."""
    if response.status_code == 200:
        return 0
    found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if found is None or int(found[1]) != asked or found[2] not in ("*", str(size)):
        return None
    return asked
