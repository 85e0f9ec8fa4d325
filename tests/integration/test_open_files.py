"""Many chunks, few open files."""

from pathlib import Path

import pytest
from tests.helpers.layer_recipes import stored_cache
from tests.helpers.option_pairs import more
from tests.integration.test_processes import NUMBERED, numbered_chunks, run

import forebay as fb


@pytest.mark.parametrize("chunks", [2600, *more(5000)])
def test_thousands_of_chunks_are_read_with_256_open_files(tmp_path: Path, chunks: int) -> None:
    root = tmp_path / "cache"
    stored_cache(fb.LocalStore(root), NUMBERED, numbered_chunks(chunks, 1))
    rows, _, files, *_ = run("few-files", root, 256).split()
    assert int(rows) == chunks
    assert int(files) < 50, "maps need no open files"
