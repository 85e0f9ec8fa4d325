"""How `huggingface_hub` talks to a hub for forebay: token, timeout, length of responses, retries.

The library has one HTTP client per process and never gets the token from us. Hooks on its client are active during
`with_retries` only:

request     the user's token, if the request goes to the host that the user named; the timeout
response    a busy hub (429, 5xx) ends the attempt; a body that is longer than expected is cut off with an error
"""

import ipaddress
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session, parse_ratelimit_headers

from forebay.errors import ForebayError, SourceNotFound, SourceUnreadable, StoreUnavailable
from forebay.store.retries import RetryPolicy, awaited, note_answer, report_retry

T = TypeVar("T")
# Malformed JSON is a ValueError, JSON of another shape a TypeError, KeyError or AttributeError.
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_CONNECT_SECONDS = 20.0
_TRANSIENT = frozenset({408, 425, 429, *range(500, 600)})
_LONGEST_MESSAGE = 300  # characters of an error message of the hub
_CLEAR_TEXT = "its address is not encrypted, so your token would be sent in clear text"


@dataclass(frozen=True, slots=True)
class Request:
    """Requests to a hub. `is_named`: the user passed the address in this process, so it gets the token.

    Each response has at most `limit` bytes. One that must arrive within the timeout as a whole `is_small`.
    """

    address: str
    what: str
    policy: RetryPolicy
    limit: int
    is_named: bool
    is_small: bool = False

    def token(self) -> str | None:
        token = get_token() if self.is_named and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else None
        if token and not _keeps_secrets(self.address):
            advice = "use https://, or send no token: unset HF_TOKEN, run `hf auth logout`"
            raise not_found(self.what, _CLEAR_TEXT, advice)
        return token

    def unreachable(self, cause: str) -> StoreUnavailable:
        hint = "check the network, set HF_ENDPOINT to a mirror, or use local files"
        message = f"the hub at {self.address} returned no usable answer for {self.what}: {cause}"
        return StoreUnavailable(message, hint=hint)


@dataclass(slots=True)
class TransientError(Exception):
    """An error that a retry may fix. `asked` is the pause in seconds that the hub requested."""

    problem: str
    asked: float | None = None
    final: ForebayError | None = None
    is_reached: bool = True


_EXPECTED = (TransientError, OSError, RuntimeError, httpx2.RequestError, httpx2.InvalidURL, *_MALFORMED)


def not_found(what: str, problem: str, hint: str) -> SourceNotFound:
    return SourceNotFound(f"cannot get {what} from the hub: {problem}", hint=hint)


def unreadable(what: str, problem: str) -> SourceUnreadable:
    message = f"the download of {what} does not match what the hub lists: {problem}"
    return SourceUnreadable(message, hint="try again without a proxy or mirror, or use local files")


def wrong_bytes(what: str, problem: str) -> TransientError:
    """An error that becomes `SourceUnreadable` if retries do not help."""
    return TransientError(problem, final=unreadable(what, problem))


def with_retries(attempt: Callable[[], T], request: Request) -> T:
    """Call `attempt`, which uses `huggingface_hub`, until it succeeds or fails too often."""
    failures, policy = 0, request.policy
    while True:
        try:
            with awaited(request.address), _hooks(request):
                return attempt()
        except ForebayError:
            raise
        except _EXPECTED as raised:
            error = _sorted_error(raised, request)
            if not isinstance(error, TransientError):
                raise error from raised
        failures += 1
        retries = policy.retries if error.is_reached else policy.retries_of(request.address)
        if failures > retries:
            raise error.final or request.unreachable(f"{error.problem} ({failures} attempts)") from error
        if not error.is_reached:
            report_retry(request.address, error.problem, failures + 1, retries + 1)
        time.sleep(policy.wait(failures, error.asked))


_active: ContextVar[tuple[Request, str | None] | None] = ContextVar("_active", default=None)


@contextmanager
def _hooks(request: Request) -> Iterator[None]:
    hooks = get_session().event_hooks
    if _before not in hooks["request"]:
        hooks["request"].append(_before)
        hooks["response"].append(_after)
    previous = _active.set((request, request.token()))
    try:
        yield
    finally:
        _active.reset(previous)


def _before(sent: httpx2.Request) -> None:
    active = _active.get()
    if active is None:
        return
    request, token = active
    address = httpx2.URL(request.address)
    if address.scheme == "https" and sent.url.scheme != "https":
        raise request.unreachable(f"it redirects to {str(sent.url)[:200]}, which is not encrypted")
    seconds = request.policy.timeout
    sent.extensions["timeout"] = httpx2.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS)).as_dict()
    sent.headers["accept-encoding"] = "identity"
    sent.headers.pop("authorization", None)
    if token and (sent.url.scheme, sent.url.netloc) == (address.scheme, address.netloc):
        sent.headers["authorization"] = f"Bearer {token}"


def _after(response: httpx2.Response) -> None:
    active = _active.get()
    if active is None:
        return
    request, status = active[0], response.status_code
    note_answer(request.address)
    if status in _TRANSIENT:
        raise TransientError(f"HTTP {status} {response.reason_phrase}", asked=_asked_wait(response.headers))
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise request.unreachable("its response is compressed, which was not requested")
    assert isinstance(response.stream, httpx2.SyncByteStream)
    response.stream = _Limited(response.stream, request)


class _Limited(httpx2.SyncByteStream):
    """The body of a response, until it is too long or takes too long."""

    def __init__(self, stream: httpx2.SyncByteStream, request: Request) -> None:
        self._stream, self._request, self._started = stream, request, time.monotonic()

    def __iter__(self) -> Iterator[bytes]:
        left, request = self._request.limit, self._request
        for piece in self._stream:
            left -= len(piece)
            if left < 0:
                raise wrong_bytes(request.what, f"its response is longer than {request.limit:,} bytes")
            if request.is_small and time.monotonic() - self._started > request.policy.timeout:
                raise TransientError(f"its response took longer than {request.policy.timeout:g} seconds")
            yield piece

    def close(self) -> None:
        self._stream.close()


def _sorted_error(error: Exception, request: Request) -> Exception:
    """A `TransientError` or the error to raise, for an error of `huggingface_hub` or its HTTP client."""
    if type(error) is ValueError and isinstance(error.__cause__, Exception):
        error = error.__cause__  # `hf_hub_download(force_download=True)` hides it
    if isinstance(error, TransientError):
        return error
    if isinstance(error, HfHubHTTPError):
        return _status_error(error.response, request)
    if isinstance(error, OfflineModeIsEnabled | httpx2.UnsupportedProtocol | httpx2.TooManyRedirects):
        return request.unreachable(str(error))
    if isinstance(error, httpx2.RequestError):
        is_reached = not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
        return TransientError(f"{type(error).__name__}: {error}", is_reached=is_reached)
    if isinstance(error, OSError) and error.errno is not None:
        return error  # of the local disk
    if isinstance(error, OSError | RuntimeError) and not isinstance(error, RecursionError):
        return TransientError(str(error).partition("\n")[0])  # a body that is too short; errors of Xet
    return request.unreachable(f"its response is malformed: {error}")


def _status_error(response: httpx2.Response, request: Request) -> Exception:
    status, code = response.status_code, response.headers.get("x-error-code")
    problem = response.headers.get("x-error-message", "")[:_LONGEST_MESSAGE] or f"HTTP {status}"
    # Storage behind the hub rejects an expired signed address; the hub signs a new one on retry.
    if status == 416 or (status in (401, 403) and response.url.netloc != httpx2.URL(request.address).netloc):
        return TransientError(problem)
    if status not in (401, 403, 404, 410):
        return request.unreachable(problem)
    login = "if it is private or gated, run `hf auth login`, or set HF_TOKEN"
    advice = {
        "GatedRepo": "it is gated: accept its terms on its page, then run `hf auth login`, or set HF_TOKEN",
        "RevisionNotFound": "check the revision: a branch, a tag or a commit",
        "EntryNotFound": "check the name of the file",
    }.get(code or "", login if status == 403 else f"check the name; {login}")
    return not_found(request.what, problem, advice)


def _asked_wait(headers: Mapping[str, str]) -> float | None:
    """The pause that a busy hub requests, in seconds; None if it requests none."""
    after = headers.get("retry-after", "")
    if re.fullmatch("[0-9]{1,9}", after):
        return float(after)
    try:
        limit = parse_ratelimit_headers(headers)
    except ValueError:  # a number of thousands of digits
        return None
    return float(limit.reset_in_seconds) if limit and not limit.remaining else None


def is_address(endpoint: str) -> bool:
    """Whether a text is a valid HTTP address of a hub, without a password."""
    try:
        parts = urlsplit(endpoint)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        return False


def _keeps_secrets(address: str) -> bool:
    """True for an address that is safe for a token: HTTPS, or this machine."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    try:
        return parts.scheme == "https" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
