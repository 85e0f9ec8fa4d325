"""Chunks that lie with every sum and digest right are refused when they are opened, before anything is read by them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import pytest
import zstandard
from tests.helpers.cache_files import chunk_path
from tests.helpers.forged_caches import Change, Draft, ending, forge, list_again, read_in_a_process
from tests.helpers.layer_recipes import layered_cache
from tests.helpers.processes import PythonProcess

import forebay as fb
from forebay.errors import ChunkCorrupt, IndexCorrupt

CODECS = ["none", "lz4", "zstd"]
READ_TWO_ROWS = """
import json, sys
import forebay as fb
cache = fb.open_cache(sys.argv[1])
try:
    print(json.dumps({"rows": [bytes(row).hex() for row in cache.read([5, len(cache) - 1], ["data"])["data"]]}))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "text": str(error)}))
"""


def built(tmp_path: Path, codec: str, rows: int = 300) -> Path:
    """Chunks of some hundred rows, "row 0", "row 1", …"""
    (tmp_path / "source.txt").write_bytes(b"".join(b"row %d\n" % number for number in range(rows)))
    recipe = fb.RawRecipe(codec=codec, chunk_bytes=1 << 10, rows_per_block=16)  # type: ignore[arg-type]
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "source.txt"), recipe, workers=0)
    return tmp_path / "cache"


def offsets(change: Callable[[Any], None]) -> Change:
    def changed(draft: Draft) -> None:
        numbers = draft.numbers("data.offsets").astype(np.int64)
        change(numbers)
        draft.put("data.offsets", numbers.view(np.uint64))

    return changed


@pytest.mark.parametrize("shift", [5000, -5000])
@pytest.mark.parametrize("codec", CODECS)
def test_a_row_outside_of_its_chunk_is_never_read(tmp_path: Path, codec: str, shift: int) -> None:
    """Row 5 is said to be somewhere before or behind the values of its chunk."""

    def outside(numbers: Any) -> None:
        numbers[5:7] = numbers[-1] + shift, numbers[-1] + shift + 20

    root = built(tmp_path, codec)
    forge(root, offsets(outside))
    process = PythonProcess("-c", READ_TWO_ROWS, str(root))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    answer = json.loads(out)
    assert answer.get("error") == "ChunkCorrupt", f"bytes from elsewhere in memory were served: {answer}"
    assert "the offsets of column 'data' do not rise" in answer["text"]
    assert f"chunk 0 of layer 'raw' in '{root}'" in answer["text"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda numbers: numbers.__setitem__(0, 1), "do not rise from 0"),
        (lambda numbers: numbers.__setitem__(slice(4, 6), numbers[5:3:-1].copy()), "do not rise from 0"),
        (lambda numbers: numbers.__setitem__(-1, 2**62), "rise to 4,611,686,018,427,387,904"),
    ],
)
def test_offsets_that_do_not_rise_are_refused_at_every_open(
    tmp_path: Path, codec: str, change: Callable[[Any], None], problem: str
) -> None:
    root = built(tmp_path, codec)
    forge(root, offsets(change))
    answer = ending(root)
    assert answer.get("error") == "ChunkCorrupt"
    assert problem in answer["text"]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("edges", [[1, 2], [0, 0], [5, 3], [0, 2**63], [2**64 - 1, 2**64 - 1]])
def test_block_edges_that_do_not_rise_are_refused_at_every_open(tmp_path: Path, codec: str, edges: list[int]) -> None:
    def change(draft: Draft) -> None:
        numbers = draft.numbers("data.blocks")
        numbers[0], numbers[-1] = edges
        draft.put("data.blocks", numbers)

    root = built(tmp_path, codec)
    forge(root, change)
    answer = ending(root)
    assert answer.get("error") == "ChunkCorrupt"
    assert "the block edges of column 'data' do not rise from 0" in answer["text"]


def test_an_index_that_ends_elsewhere_than_was_published_is_refused(tmp_path: Path) -> None:
    root = built(tmp_path, "none")
    forge(root, lambda draft: None, head_size=4096)
    answer = ending(root)
    assert answer["error"] == "ChunkCorrupt"
    assert "not at 4,096 as was published" in answer["text"]


@pytest.mark.parametrize("head_size", [0, -1, 2**62])
def test_a_head_that_cannot_be_is_refused(tmp_path: Path, head_size: int) -> None:
    root = built(tmp_path, "none")
    forge(root, lambda draft: None, head_size=head_size)
    assert ending(root)["error"] in ("ChunkCorrupt", "IndexCorrupt")


@pytest.mark.parametrize(("rows", "error"), [(2**38, ChunkCorrupt), (2**62, IndexCorrupt)])
def test_rows_that_a_generation_invents_take_no_memory(tmp_path: Path, rows: int, error: type[Exception]) -> None:
    root = built(tmp_path, "none")
    data = chunk_path(root, "raw", 0).read_bytes()
    list_again(root, "raw", 0, data, rows=rows)
    with pytest.raises(error):
        fb.open_cache(root).read([0])


def test_presence_bits_of_rows_that_a_generation_invents_take_no_memory(tmp_path: Path) -> None:
    """The rows of a chunk are counted only once it is open: 2**31 of them are listed, and are not there."""
    root = layered_cache(tmp_path)
    for layer in ("numbers", "length"):
        data = chunk_path(root, layer, 0).read_bytes()
        list_again(root, layer, 0, data, rows=2**31, head_size=2**20, size=2**21)
    script = """
import resource, sys, forebay as fb
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    fb.open_cache(sys.argv[1]).read([0], ["length.present"])
except Exception as error:
    print(type(error).__name__)
"""
    out, err = PythonProcess("-c", script, str(root)).communicate()
    assert out == "ChunkCorrupt\n", err


def test_presence_bits_are_zeros_and_ones(tmp_path: Path) -> None:
    def change(draft: Draft) -> None:
        tag, shape, data = draft.tensors["present"]
        draft.tensors["present"] = (tag, shape, b"\x05" + data[1:])

    root = layered_cache(tmp_path)
    forge(root, change, "length")
    answer = ending(root)
    assert answer.get("error") == "ChunkCorrupt", "numpy would count this row five times"
    assert "block 0 of column 'present'" in answer["text"]
    assert "booleans that are neither 0 nor 1" in answer["text"]
    (bad,) = fb.verify(root, full=True).bad
    assert "booleans that are neither 0 nor 1" in bad.problem


@pytest.mark.parametrize("leaf", ["\ud800", 10**30, [[[[]]]], None, 1.5])
def test_metadata_of_any_kind_is_refused_by_the_name_of_the_chunk(tmp_path: Path, leaf: Any) -> None:
    def change(draft: Draft) -> None:
        draft.metadata["columns"][0]["name"] = leaf

    root = built(tmp_path, "none")
    forge(root, change)
    answer = ending(root)
    assert answer["error"] == "ChunkCorrupt"
    assert f"chunk 0 of layer 'raw' in '{root}'" in answer["text"]


def test_a_large_header_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    def change(draft: Draft) -> None:
        draft.metadata["statistics"] = {"bytes": [[]] * 3_000_000}

    root = built(tmp_path, "none")
    forge(root, change)
    answer = read_in_a_process(root)
    assert "the limit of 8,388,608" in answer["text"]
    assert answer["megabytes"] < 50


def bomb(codec: str, megabytes: int) -> Change:
    """The first block of `data` decodes to many zeros, which are said to be its first row."""
    zeros = bytes(megabytes << 20)
    packed = zstandard.compress(zeros) if codec == "zstd" else lz4.block.compress(zeros, store_size=False)

    def change(draft: Draft) -> None:
        numbers, edges = draft.numbers("data.offsets"), draft.numbers("data.blocks")
        _, _, data = draft.tensors["data"]
        data = packed + data[int(edges[1]) :]
        grown = np.uint64(len(zeros)) - numbers[16]
        numbers[1:17] = len(zeros)
        numbers[17:] += grown
        edges[1:] += np.uint64(len(packed)) - edges[1]
        draft.put("data.offsets", numbers)
        draft.put("data.blocks", edges)
        draft.tensors["data"] = ("U8", [len(data)], data)

    return change


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_block_above_the_limit_is_refused_with_the_way_to_raise_it(tmp_path: Path, codec: str) -> None:
    root = built(tmp_path, codec)
    forge(root, bomb(codec, 400))
    answer = read_in_a_process(root)
    size = 400 << 20
    assert answer["error"] == "ChunkCorrupt"
    assert f"decodes to {size:,} bytes at once; max_block_bytes is 268,435,456" in answer["text"]
    assert f"pass max_block_bytes={size} to open_cache" in answer["text"]
    assert answer["megabytes"] < 150
    (bad,) = fb.verify(root, full=True).bad
    assert "max_block_bytes is 268,435,456" in bad.problem


def test_the_limit_of_a_block_can_be_raised_and_lowered(tmp_path: Path) -> None:
    root = built(tmp_path, "zstd")
    forge(root, bomb("zstd", 2))
    assert len(fb.open_cache(root)[0]["data"]) == 2 << 20
    with pytest.raises(ChunkCorrupt):
        fb.open_cache(root, max_block_bytes=1 << 20)[0]
    with pytest.raises(ChunkCorrupt):
        next(iter(fb.open_cache(root, max_block_bytes=1 << 20).chunks()))
    with pytest.raises(ValueError, match=r"max_block_bytes must be a whole number of at least 1 \(got 0\)"):
        fb.open_cache(root, max_block_bytes=0)


@pytest.mark.slow
def test_blocks_that_are_small_one_by_one_are_not_decoded_all_at_once(tmp_path: Path) -> None:
    """Thirty blocks of 64 MB from 200 kB: one row is read, a whole chunk is refused."""
    (tmp_path / "source.txt").write_bytes(b"x\n" * 30)
    recipe = fb.RawRecipe(codec="zstd", rows_per_block=1)
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "source.txt"), recipe, workers=0)
    size, packed = 64 << 20, zstandard.compress(bytes(64 << 20))

    def change(draft: Draft) -> None:
        draft.put("data.offsets", np.arange(31, dtype=np.uint64) * np.uint64(size))
        draft.put("data.blocks", np.arange(31, dtype=np.uint64) * np.uint64(len(packed)))
        draft.tensors["data"] = ("U8", [30 * len(packed)], 30 * packed)

    forge(tmp_path / "cache", change)
    cache = fb.open_cache(tmp_path / "cache")
    assert len(cache[29]["data"]) == size
    with pytest.raises(ChunkCorrupt, match=r"decodes to 2,013,265,920 bytes at once"):
        next(cache.chunks())
    script = "import sys, forebay as fb; print(fb.verify(sys.argv[1], full=True).bad[0].problem)"
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); {script}"
    out, err = PythonProcess("-c", limited, str(tmp_path / "cache")).communicate(timeout=600)
    assert "its content does not match its content digest" in out, err


def test_the_first_read_of_a_compressed_ragged_column_keeps_to_the_memory_allowed(tmp_path: Path) -> None:
    """Sixty-four rows in as many blocks of 3 MB each; one row of every block is asked for."""
    rows, size = 64, 50_000
    with open(tmp_path / "source.txt", "wb") as file:
        for number in range(rows * 64):
            file.write((b"%d" % number).ljust(size - 1, b".") + b"\n" if number % 64 < 60 else b"short\n")
    source = fb.sources.lines(tmp_path / "source.txt")
    fb.build(tmp_path / "cache", source, fb.RawRecipe(codec="lz4", level="fast", chunk_bytes=16 << 20), workers=0)
    script = """
import sys
import numpy as np
import forebay as fb
from tests.helpers.forged_caches import peak_megabytes
cache = fb.open_cache(sys.argv[1], memory=16 << 20)
before = peak_megabytes()
rows = cache.read(np.arange(63, len(cache), 64), ["data"])["data"]
assert [bytes(row) for row in rows] == [b"short"] * 64
print(peak_megabytes() - before)
"""
    out, err = PythonProcess("-c", script, str(tmp_path / "cache")).communicate(timeout=600)
    assert int(out or "999999") < 90, f"{out} megabytes, where 16 are allowed for blocks {err}"


def test_a_map_that_changes_after_it_was_opened_gives_no_bytes_from_elsewhere(tmp_path: Path) -> None:
    """Somebody writes into the file while it is mapped: the addresses are compared again before they are used."""
    for codec in CODECS:
        folder = tmp_path / codec
        folder.mkdir()
        root = built(folder, codec)
        cache = fb.open_cache(root)
        cache.read([0, len(cache) - 1])
        path = chunk_path(root, "raw", 0)
        start = cache._readers.maps_of("raw").get(0).tensors["data.offsets"].start
        with open(path, "r+b") as file:
            file.seek(start + 5 * 8)
            file.write(np.array([2**40, 2**40 + 8], np.uint64).tobytes())
        with pytest.raises(ChunkCorrupt, match="a row of column 'data' reaches outside it"):
            cache.read([5])
        with pytest.raises(ChunkCorrupt, match="a row of column 'data' reaches outside it"):
            next(cache.views([5], "data"))


@pytest.mark.parametrize("other", [{"chunk": 7}, {"layer": "other"}])
def test_a_chunk_that_says_it_is_another_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    root = built(tmp_path, "none")
    forge(root, lambda draft: draft.metadata.update(other))
    with pytest.raises(ChunkCorrupt, match="its file is chunk"):
        fb.open_cache(root).read([0])


def test_a_chunk_of_fewer_rows_than_were_published_is_refused(tmp_path: Path) -> None:
    root = built(tmp_path, "none")
    rows = int(fb.open_cache(root).chunk_starts[1])
    forge(root, lambda draft: None, rows=rows + 1)
    with pytest.raises(ChunkCorrupt, match=f"with {rows} rows; {rows + 1} were published"):
        fb.open_cache(root).read([0])


def test_a_pipe_in_place_of_a_chunk_is_an_error_at_once(tmp_path: Path) -> None:
    root = built(tmp_path, "none")
    path = chunk_path(root, "raw", 0)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ChunkCorrupt, match="it is a named pipe, not a regular file"):
        fb.open_cache(root).read([0])
