"""Data that is made once and found again by later runs: what is whole has a mark beside it, which says made of what."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

PIECE = 16 << 20


def prepared(place: Path, made_of: str, make: Callable[[Path], object]) -> Path:
    """The folder that `make` fills: as a former run left it, if that was made of the same, and made to its end."""
    mark = place.with_name(f"{place.name}.complete")
    if not (mark.exists() and mark.read_text() == made_of):
        mark.unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        make(place)
        mark.write_text(made_of)
    return place


def into_memory(folder: Path) -> None:
    """Read every file once, so that all who are measured find theirs in the page cache."""
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while file.read(PIECE):
                pass
