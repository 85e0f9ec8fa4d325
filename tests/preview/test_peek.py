"""`fb.peek` and `fb.contact_sheet`: what the command line shows, as records and a picture."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.cli.running import build_lines, build_tokens, run
from tests.helpers.image_caches import image_cache, sample_id, write_pictures

import forebay as fb
from forebay.preview.peek import RowReader


def test_packed_tokens_are_peeked_at_as_documents(tmp_path: Path):
    root, source = build_tokens(tmp_path, ["first text", "second text"])
    (row,) = fb.peek(root).shown
    assert [piece.text for piece in row.pieces] == ["first text", "second text"]
    assert [piece.source for piece in row.pieces] == ["", ""]
    (row,) = fb.peek(root, [-1], source=fb.sources.jsonl(source)).shown
    assert [piece.source for piece in row.pieces] == ["a.jsonl@0", "a.jsonl@23"]
    (row,) = fb.peek(root, columns=["seq_lens"]).shown
    assert row.columns["seq_lens"].values == [3, 3]


def test_a_forged_row_without_tokens_is_read(tmp_path: Path):
    root, _ = build_tokens(tmp_path, ["a text"])
    columns = {
        "tokens": np.zeros(0, np.uint16),
        "seq_lens": np.zeros(0, np.int32),
        "documents": np.zeros((0, 2), np.uint32),
    }
    row = RowReader(fb.open_cache(root)).row(0, 0, 0, columns)
    assert (row.utilization, row.padding, row.tokens) == (0, 0, [])


def test_rows_are_a_count_or_a_list_of_numbers(tmp_path: Path):
    root, _ = build_lines(tmp_path)
    for rows, numbers in ((2, [0, 1]), (1000, list(range(60))), ([7, -1, 7], [7, 59, 7]), (np.array([4]), [4])):
        assert [row.row for row in fb.peek(root, rows).shown] == numbers
    assert len(fb.peek(fb.open_cache(root)).shown) == 3
    with pytest.raises(IndexError, match=r"there is no row 60; .* has 60 rows"):
        fb.peek(root, [60])


def test_a_contact_sheet_is_the_one_that_the_command_line_draws(tmp_path: Path):
    (tmp_path / "photos").mkdir()
    cache = image_cache(tmp_path / "cache", write_pictures(tmp_path / "photos"))
    assert [image.id for image in fb.peek(cache, [2, 0]).shown] == [sample_id(2), sample_id(0)]
    run("peek", cache.root, "--png", tmp_path / "sheet.png", "--row", 2, "--row", 0)
    sheet = fb.contact_sheet(cache, [2, 0])
    assert sheet.tobytes() == Image.open(tmp_path / "sheet.png").tobytes()
    wide, high = fb.contact_sheet(tmp_path / "cache", 1).size
    assert sheet.size == (2 * wide - 10, high)


def test_only_images_are_drawn(tmp_path: Path):
    root, _ = build_lines(tmp_path)
    with pytest.raises(ValueError, match=r"holds raw, not images; fb\.peek shows its rows"):
        fb.contact_sheet(root)
