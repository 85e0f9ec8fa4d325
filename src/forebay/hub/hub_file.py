"""One file of a repository at one commit: where it is, and how it is asked for."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import httpx2

from forebay.hub.asking import ask
from forebay.hub.listing import RemoteFile
from forebay.hub.patience import patiently
from forebay.hub.repository import Repository

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as a commit has it; what is asked of it is asked with the patience of its repository."""

    repository: Repository
    commit: str
    listed: RemoteFile

    @property
    def size(self) -> int:
        return self.listed.size

    @property
    def what(self) -> str:
        return f"'{self.listed.path}' of {self.repository.what}"

    def ask(self, headers: Mapping[str, str]) -> AbstractContextManager[httpx2.Response]:
        url = self.repository.url(self.commit, self.listed.path)
        return ask(url, self.repository.patience, self.repository.asked, self.what, headers)

    def patiently(self, attempt: Callable[[], T], arrived: Callable[[], int]) -> T:
        return patiently(attempt, self.repository.patience, self.repository.address, self.what, arrived)
