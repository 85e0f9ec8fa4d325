"""What a request must look like before a page or a record is served, and the headers of every answer.

method     GET or HEAD
Host       this machine: another name is a page that had its DNS name point here (DNS rebinding)
Origin     the same as Host, where a browser sends one; requests that a foreign page makes are refused
token      the first part of the path, where the server listens beyond this machine: http://node7:8765/k3J…/
"""

import hmac
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
)
_NOTEBOOKS = "http://localhost:* http://127.0.0.1:* https://localhost:*"


@dataclass(frozen=True)
class Guard:
    """Refuses what the viewer never needs."""

    hosts: frozenset[str]  # names that a request may ask for, besides addresses
    token: str = ""
    everywhere: bool = False  # listens beyond this machine: any numeric address may be asked for
    framed: bool = False  # a notebook on this machine may show the page

    def problem(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """The status and the reason of a refusal; None for a request that may pass. Names of headers are lower-case."""
        if method not in ("GET", "HEAD"):
            return 405, "the viewer only reads: use GET"
        host = headers.get("host", "")
        if not self._is_known(host):
            return 403, "this Host is not served here; open the address that `forebay view` printed"
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return 403, "pages of other origins may not read a cache"
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if foreign and headers.get("sec-fetch-mode") != "navigate":
            return 403, "pages of other sites may not read a cache"
        if self.token and not self._has_token(path):
            return 403, "the address lacks its token; open the whole address that `forebay view` printed"
        return None

    def without_token(self, path: str) -> str:
        return path[len(self.token) + 1 :] or "/" if self.token else path

    def headers(self) -> dict[str, str]:
        """The headers of every answer."""
        return {
            "content-security-policy": _POLICY.format(frames=_NOTEBOOKS if self.framed else "'none'"),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-store",
        }

    def _is_known(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            return False
        if name in self.hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.everywhere or address.is_loopback

    def _has_token(self, path: str) -> bool:
        first = path.split("/")[1] if path.startswith("/") else ""
        return hmac.compare_digest(first.encode(), self.token.encode()) and path.startswith(f"/{self.token}/")


def known_names(host: str) -> frozenset[str]:
    """The names under which a server that listens on `host` may be asked."""
    names: Iterable[str] = ["localhost"]
    if host != LOOPBACK:
        names = ["localhost", host, socket.gethostname(), socket.getfqdn()]
    return frozenset(name.lower() for name in names)
