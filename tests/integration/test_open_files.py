"""Many chunks, few open files."""

from pathlib import Path

from tests.integration.test_processes import NUMBERED, numbered_chunks, run
from tests.layer_recipes import stored_cache

import forebay as fb


def test_five_thousand_chunks_are_read_with_256_open_files(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    stored_cache(fb.LocalStore(root), NUMBERED, numbered_chunks(5000, 1))
    rows, _, files, *_ = run("few-files", root, 256).split()
    assert int(rows) == 5000
    assert int(files) < 50, "maps need no open files"
