"""Downloading a file: resumed where it broke off, checked against size and hash, moved into place when it is whole."""

import os
import re

import httpx2

from forebay.hub.arrival import Arrival
from forebay.hub.asking import ask
from forebay.hub.listing import RemoteFile
from forebay.hub.patience import Patience, patiently

PART = ".part"
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


def part_path(path: str) -> str:
    return path + PART


def download(file: RemoteFile, url: str, path: str, patience: Patience, endpoint: str, what: str) -> None:
    """Have a file at `path`. One process at a time may: see `forebay.hub.spool`."""
    with Arrival(part_path(path), file, what) as arrival:
        fetching = _Fetching(file, url, arrival, patience, endpoint, what)
        patiently(fetching.attempt, patience, endpoint, what, lambda: arrival.size)
    os.replace(part_path(path), path)


class _Fetching:
    """The tries at one file. The tag of the first answer is remembered: pieces of two versions are not put together."""

    def __init__(
        self, file: RemoteFile, url: str, arrival: Arrival, patience: Patience, endpoint: str, what: str
    ) -> None:
        self._file, self._url, self._arrival = file, url, arrival
        self._patience, self._endpoint, self._what = patience, endpoint, what
        self._tag: str | None = None

    def attempt(self) -> None:
        if self._arrival.size < self._file.size:
            self._ask_for_rest()
        self._arrival.check()

    def _ask_for_rest(self) -> None:
        headers = {"range": f"bytes={self._arrival.size}-"} if self._arrival.size else {}
        with ask(self._url, self._patience, self._endpoint, self._what, headers) as response:
            self._check_tag(response)
            known = self._arrival.size - self._begins_at(response)
            for piece in response.iter_raw():
                self._arrival.add(piece[known:])
                known = max(0, known - len(piece))

    def _check_tag(self, response: httpx2.Response) -> None:
        tag, known = response.headers.get("etag"), self._tag
        if tag and known and tag != known:
            self._tag = ""  # one that changes more than once says nothing; the hash decides
            raise self._arrival.refused(f"its ETag changed from {known} to {tag} while it was downloaded")
        self._tag = tag if known is None else known

    def _begins_at(self, response: httpx2.Response) -> int:
        """Where the body of an answer begins in the file; 0 where the server knows no ranges."""
        if response.status_code == 200:
            return 0
        found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if response.status_code == 416 or found is None or int(found[1]) != self._arrival.size:
            raise self._arrival.refused(f"HTTP {response.status_code} does not give byte {self._arrival.size:,}")
        if found[2] not in ("*", str(self._file.size)):
            raise self._arrival.refused(f"it has {found[2]} bytes, {self._file.size} are listed")
        return int(found[1])
