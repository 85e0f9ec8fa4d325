"""Downloading a file: resumed where it broke off, checked against size and hash, moved into place when it is whole."""

import os

import httpx2

from forebay.hub.arrival import Arrival
from forebay.hub.content_range import begins_at
from forebay.hub.hub_file import HubFile

PART = ".part"


def part_path(path: str) -> str:
    return path + PART


def download(file: HubFile, path: str) -> None:
    """Have a file at `path`. One process at a time may: see `forebay.hub.spool`."""
    with Arrival(part_path(path), file.listed, file.what) as arrival:
        file.patiently(_Fetching(file, arrival).attempt, lambda: arrival.size)
    os.replace(part_path(path), path)


class _Fetching:
    """The tries at one file. The tag of the first answer is remembered: pieces of two versions are not put together."""

    def __init__(self, file: HubFile, arrival: Arrival) -> None:
        self._file, self._arrival = file, arrival
        self._tag: str | None = None

    def attempt(self) -> None:
        if self._arrival.size < self._file.size:
            self._ask_for_rest()
        self._arrival.check()

    def _ask_for_rest(self) -> None:
        headers = {"range": f"bytes={self._arrival.size}-"} if self._arrival.size else {}
        with self._file.ask(headers) as response:
            self._check_tag(response)
            begin = begins_at(response, self._arrival.size, self._file.size)
            if begin is None:
                raise self._arrival.refused(f"HTTP {response.status_code} does not give byte {self._arrival.size:,}")
            known = self._arrival.size - begin
            for piece in response.iter_raw():
                self._arrival.add(piece[known:])
                known = max(0, known - len(piece))

    def _check_tag(self, response: httpx2.Response) -> None:
        tag, known = response.headers.get("etag"), self._tag
        if tag and known and tag != known:
            self._tag = ""  # one that changes more than once says nothing; the hash decides
            raise self._arrival.refused(f"its ETag changed from {known} to {tag} while it was downloaded")
        self._tag = tag if known is None else known
