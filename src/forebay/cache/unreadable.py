"""Files of a source that cannot be read: raised at the first, or passed over and listed, as the caller wants."""

import os
from collections.abc import Sequence

from forebay.errors import SourceUnreadable
from forebay.source import Source, SourceFile

SHOWN_FILES = 20


class Unreadable:
    """What was found so far: `found` is path -> why. Unless files may be skipped, the first one is raised."""

    def __init__(self, skip: bool = False) -> None:
        self.skip = skip
        self.found: dict[str, str] = {}

    def without(self, files: Sequence[SourceFile]) -> list[SourceFile]:
        return [file for file in files if file.path not in self.found]

    def take_listed(self, source: Source, files: Sequence[SourceFile]) -> None:
        """Note the files of which the listing itself says that they cannot be read."""
        listed = [file for file in files if file.problem]
        self.found |= {file.path: file.problem for file in listed}
        if listed and not (self.skip and self.without(files)):
            root = source.describe().get("root", "")
            raise SourceUnreadable(os.path.join(root, listed[0].path), listed[0].problem)

    def take(self, error: SourceUnreadable, files: Sequence[SourceFile]) -> None:
        """Note the file that an error names; raise it where that is not allowed, or where no other file is left."""
        path = named_in(error, [file.path for file in files])
        if not self.skip or path is None or path in self.found:
            raise error
        self.found[path] = error.problem
        if not self.without(files):
            raise error


def named_in(error: SourceUnreadable, paths: Sequence[str]) -> str | None:
    """Which of some paths an error is about: it may name it with the folder that it is in."""
    return next((path for path in paths if error.path == path or error.path.endswith(f"/{path}")), None)


def unreadable_note(found: dict[str, str]) -> tuple[str, ...]:
    """One line for a report, none where all could be read."""
    if not found:
        return ()
    shown = "; ".join(f"'{path}': {why}" for path, why in list(found.items())[:SHOWN_FILES])
    left = len(found) - SHOWN_FILES
    more = f"; and {left:,} more, which `forebay status --json` lists" if left > 0 else ""
    return (f"{len(found):,} file(s) could not be read and were left out: {shown}{more}",)
