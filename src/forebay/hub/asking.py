"""One question to the hub: a GET whose trouble is sorted into what may pass and what will not."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, get_session, parse_ratelimit_headers

from forebay.errors import HubNotFound, HubUnreachable
from forebay.hub.patience import Passing, Patience, patiently

_CONNECT_SECONDS = 20.0
_MAY_PASS = frozenset({408, 425, 429, *range(500, 600)})
_LARGEST_ANSWER = 64 << 20


def address(endpoint: str | None) -> str:
    """Where the hub is: as given, or as `huggingface_hub` has it from HF_ENDPOINT."""
    return (endpoint or constants.ENDPOINT).rstrip("/")


@contextmanager
def ask(
    url: str, patience: Patience, endpoint: str, what: str, headers: Mapping[str, str] | None = None
) -> Iterator[httpx2.Response]:
    """An answer whose body is still to be read: 200, or 206 or 416 to a range. Trouble, also later, is `Passing`.

    A redirect to another host goes without the token: the client drops it.
    """
    timeout = httpx2.Timeout(patience.timeout, connect=min(patience.timeout, _CONNECT_SECONDS))
    own = build_hf_headers(library_name="forebay", headers={"accept-encoding": "identity", **(headers or {})})
    try:
        with get_session().stream("GET", url, headers=own, timeout=timeout, follow_redirects=True) as response:
            _check(response, endpoint, what)
            yield response
    except (OfflineModeIsEnabled, httpx2.UnsupportedProtocol, httpx2.InvalidURL) as error:
        raise HubUnreachable(endpoint, what, str(error)) from error
    except httpx2.RequestError as error:
        raise Passing(f"{type(error).__name__}: {error}") from error


def fetch(url: str, patience: Patience, endpoint: str, what: str) -> tuple[bytes, Mapping[str, str]]:
    """A small body, whole, and the headers it came with."""

    def attempt() -> tuple[bytes, Mapping[str, str]]:
        with ask(url, patience, endpoint, what) as response:
            body = bytearray()
            for piece in response.iter_bytes():
                body += piece
                if len(body) > _LARGEST_ANSWER:
                    raise HubUnreachable(endpoint, what, f"its answer is longer than {_LARGEST_ANSWER:,} bytes")
            return bytes(body), response.headers

    return patiently(attempt, patience, endpoint, what)


def _check(response: httpx2.Response, endpoint: str, what: str) -> None:
    status = response.status_code
    if status == 200 or (status in (206, 416) and "range" in response.request.headers):
        return
    elsewhere = response.url.netloc != httpx2.URL(endpoint).netloc
    # Storage behind the hub refuses a signed address that is too old; the hub signs a new one when asked again.
    if status in _MAY_PASS or (elsewhere and status in (401, 403)):
        raise Passing(f"HTTP {status} {response.reason_phrase}", asked=_asked_wait(response.headers))
    problem = response.headers.get("x-error-message") or f"HTTP {status} {response.reason_phrase}"
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
    """The seconds to wait that a busy hub asks for."""
    limit = parse_ratelimit_headers(headers)
    after = headers.get("retry-after", "").strip()
    if after.isdigit():
        return float(after)
    if after:
        try:
            return max(0.0, parsedate_to_datetime(after).timestamp() - time.time())
        except ValueError:
            return None
    return float(limit.reset_in_seconds) if limit and not limit.remaining else None
