"""Walk a source: its files, and where planning writes temporary files."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from forebay.cache.plan import Plan, load_plan
from forebay.errors import SourceUnreadable
from forebay.source import Listing, Source, SourceFile, not_read, source_unreadable
from forebay.store.base import Store


def check_readable(source: Source, files: Iterable[SourceFile]) -> None:
    """Raise if the listing could not read a file, such as a broken link."""
    for file in files:
        if file.problem:
            raise source_unreadable(os.path.join(source.describe().get("root", ""), file.path), file.problem)


def scratch_folder(store: Store) -> str | None:
    """Temp directory on the cache's file system, or None for the system default.

    It is never made for the purpose: a cache that is not there yet will be made in the folder above it.
    """
    root = store.local_path("")
    if root is None:
        return None
    folder = os.path.abspath(root)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _planned_files(source: Source, plan: Plan) -> Iterator[SourceFile]:
    """The planned files that exist, each looked up by name."""
    for planned in plan.files.table:
        try:
            yield source.look(planned.path)
        except FileNotFoundError:
            continue
        except (OSError, SourceUnreadable):  # a folder in its place, or no permission: the comparison reports it
            yield planned


class SourceListing:
    """A source and its files, listed by one walk, when first asked for.

    It says which files there are, and how each looked at that moment. A plan that is older can be compared with that;
    files that differ, and all files of a newer plan, are looked at again.
    """

    def __init__(self, source: Source, store: Store | None = None) -> None:
        self.source, self._store = source, store
        self.seconds = 0.0  # that it took

    @cached_property
    def _listing(self) -> Listing:
        started = time.perf_counter()
        try:
            if self._store is not None and not self.source.is_walked():
                return Listing(list(_planned_files(self.source, load_plan(self._store))), {})
            return self.source.listing(self._store.address if self._store else "")
        finally:
            self.seconds = time.perf_counter() - started

    @property
    def files(self) -> Sequence[SourceFile]:
        return self._listing.files

    @property
    def walked(self) -> Sequence[SourceFile]:
        """The files as they were listed; none where the source was not walked."""
        return self.files if self.source.is_walked() else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the source: how it reads its paths, and the number of unread files."""
        left_out = not_read(self._listing.left_out)
        return (*self.source.notes(self.walked), *([left_out] if left_out else []))

    @cached_property
    def apart(self) -> Sequence[SourceFile]:
        """The files, without those of the cache if it is in the same folder: it must not become part of itself."""
        root, folder = self.source.describe().get("root"), self._store.local_path("") if self._store else None
        if folder is None or root is None:
            return self.files
        own = os.path.abspath(folder) + os.sep
        paths = (os.path.normpath(os.path.join(root, file.path)) for file in self.files)
        if not any(path.startswith(own) for path in paths):
            return self.files
        return [file for file in self.files if not os.path.normpath(os.path.join(root, file.path)).startswith(own)]

    def weight(self) -> int:
        """The content of all files, in the unit of the source."""
        return sum(map(self.source.weight, self.files))
