"""Benchmark data that later runs find again."""

import shutil
from collections.abc import Callable
from pathlib import Path

PIECE = 16 << 20


def prepared(folder: Path, inputs: str, make: Callable[[Path], object]) -> Path:
    """The folder that `make` fills; a marker file records that it is complete, and its inputs."""
    marker = folder.with_name(f"{folder.name}.complete")
    if not (marker.exists() and marker.read_text() == inputs):
        marker.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make(folder)
        marker.write_text(inputs)
    return folder


def into_memory(folder: Path) -> None:
    """Read every file once, so that it is in the page cache."""
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        with open(path, "rb", buffering=0) as file:
            while file.read(PIECE):
                pass
