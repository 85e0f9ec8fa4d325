"""A cache as a person asks it: slices and lists of rows, the text of a row, and where a row came from."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.running import build_lines, build_tokens, story
from tests.helpers.image_caches import image_cache, sample_id, write_pictures
from tests.helpers.token_caches import grow_cache, token_cache

import forebay as fb

STORIES = [story(number) for number in range(12)]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    root, _ = build_tokens(tmp_path_factory.mktemp("stories"), STORIES)
    return fb.open_cache(root)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    return fb.open_cache(token_cache(tmp_path_factory.mktemp("numbers"), 23))


@pytest.mark.parametrize(
    "rows",
    [
        slice(5, 8),
        slice(None),
        slice(-3, None),
        slice(20, 3, -4),
        slice(9, 9),
        [4, 4, 0],
        [-1, 3, -23],
        np.arange(3),
        [],
    ],
)
def test_a_slice_or_list_of_rows_is_what_indexing_a_list_gives(numbered: fb.Cache, rows: Any):
    numbers = np.arange(23)[rows if isinstance(rows, slice) else np.array(rows, np.int64)]
    found = numbered[rows]
    assert found["tokens"][:, 0].tolist() == numbers.tolist()
    assert len(found["seq_lens"]) == len(numbers)


def test_one_number_of_any_type_is_one_row(numbered: fb.Cache):
    for number in (7, np.int32(7), np.array(7), -16):
        assert numbered[number]["tokens"].shape == (8,)
        assert numbered[number]["tokens"][0] == 7


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([0, 23], IndexError, "there is no row 23; .* has 23 rows"),
        ([0, -24], IndexError, "there is no row -24; .* has 23 rows"),
        ("tokens", TypeError, r"cache\[17\]\['tokens'\]"),
        ([0.5], TypeError, "list of integers"),
        (np.ones(23, bool), TypeError, "list of integers"),
    ],
)
def test_what_names_no_row_is_refused_with_a_reason(
    numbered: fb.Cache, rows: Any, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        numbered[rows]


def test_the_text_of_all_rows_is_the_text_of_all_documents(tokens: fb.Cache):
    pieces: dict[tuple[int, int], dict[int, str]] = {}
    for row, name in enumerate(tokens.row_ids(range(len(tokens)))):
        documents = tokens[row]["documents"].tolist()
        for (document, offset), text in zip(documents, tokens.text(row), strict=True):
            pieces.setdefault((name.chunk, document), {})[offset] = text
    whole = ["".join(parts[offset] for offset in sorted(parts)) for parts in pieces.values()]
    assert sorted(whole) == sorted(STORIES)
    assert tokens.text(-1) == tokens.text(len(tokens) - 1)


def test_only_tokens_have_text(tmp_path: Path):
    root, _ = build_lines(tmp_path)
    with pytest.raises(TypeError, match="holds raw, not tokens; read the row itself"):
        fb.open_cache(root).text(0)


def test_a_row_of_lines_comes_from_its_sample(tmp_path: Path):
    root, source = build_lines(tmp_path)
    cache, begin = fb.open_cache(root), 0
    for row, line in enumerate(source.read_bytes().splitlines(keepends=True)):
        origin = cache.origin(row)
        assert (origin.sample, origin.files) == (f"a.jsonl@{begin}", ("a.jsonl",))
        assert fb.RowId(origin.chunk, origin.row) == cache.row_ids([row])[0]
        assert origin.parts[0].start <= begin < origin.parts[0].stop
        begin += len(line)


def test_an_image_comes_from_its_file(tmp_path: Path):
    (tmp_path / "photos").mkdir()
    cache = image_cache(tmp_path / "cache", write_pictures(tmp_path / "photos"))
    assert [cache.origin(row).files for row in range(3)] == [(sample_id(number),) for number in range(3)]


def test_a_packed_row_comes_from_the_files_of_its_chunk_in_the_pinned_generation(tmp_path: Path):
    first = fb.open_cache(token_cache(tmp_path, 23))
    grow_cache(tmp_path, 23, 5)
    assert first.origin(22).files == ("a.txt",)
    assert first.origin(22).sample == ""
    assert fb.open_cache(tmp_path / "cache").origin(-1).files == ("b0000023.txt",)
