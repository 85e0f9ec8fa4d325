"""Damaged files of a source: the error includes the file, and the cache has no row of it."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import forebay as fb
from forebay.cli.main import cli
from forebay.errors import BuildFailed, SourceUnreadable
from forebay.sources import LineSource

RECIPE = fb.TokenRecipe(tokenizer="gpt2", sequence_length=64)


def write_gz(folder: Path, name: str, lines: int = 50, keep: float = 1.0) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"text": f"{name} {number} words"}) + "\n" for number in range(lines))
    stored = gzip.compress(text.encode())
    (folder / name).write_bytes(stored[: int(keep * len(stored))])


def test_a_damaged_file_ends_planning_and_is_added_once_it_is_fixed(tmp_path):
    root = tmp_path / "cache"
    write_gz(tmp_path / "data", "a.jsonl.gz")
    write_gz(tmp_path / "data", "b.jsonl.gz", keep=0.7)
    write_gz(tmp_path / "data", "c.jsonl.gz", keep=0.4)
    source = fb.sources.jsonl(tmp_path / "data")
    with pytest.raises(SourceUnreadable, match=r"[bc]\.jsonl\.gz") as caught:
        fb.build(root, source, RECIPE, workers=0)
    assert "leave it out" in caught.value.hint
    assert not root.exists()
    fb.build(root, fb.sources.jsonl(tmp_path / "data/a.jsonl.gz"), RECIPE, workers=0)
    write_gz(tmp_path / "data", "b.jsonl.gz")
    write_gz(tmp_path / "data", "c.jsonl.gz")
    assert fb.update(root, source, workers=0).samples == 150


def test_a_file_whose_damage_shows_when_its_chunk_is_made_fails_that_chunk_alone(tmp_path):
    folder, root = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    for name in ("a", "b"):
        table = pa.table({"text": [f"{name} {number} some words" for number in range(800)]})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=40, use_dictionary=False, compression="none")
    at = pq.read_metadata(folder / "b.parquet").row_group(13).column(0).data_page_offset
    stored = bytearray((folder / "b.parquet").read_bytes())
    stored[at : at + 10] = bytes(10)
    (folder / "b.parquet").write_bytes(stored)
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=16, chunk_rows=60)
    with pytest.raises(BuildFailed, match=r"(?s)1 chunk\(s\) .*b\.parquet"):
        fb.build(root, fb.sources.parquet(folder), recipe, workers=0)
    assert fb.open_cache(root).generation.chunks()
    assert fb.verify(root, full=True).sound


def test_a_compressed_file_that_is_damaged_while_it_is_planned_makes_no_cache(tmp_path):
    """Its cuts and its digest come from two readings: a change between them must not make one plan of both."""
    folder, root = tmp_path / "data", tmp_path / "cache"
    write_gz(folder, "a.jsonl.gz", lines=500)

    class Damaged(LineSource):
        def scanned(self, file):
            path = folder / "a.jsonl.gz"
            if not (tmp_path / "done").exists():
                (tmp_path / "done").touch()
                size = path.stat().st_size
                os.truncate(path, size // 2)
                os.truncate(path, size)
            return super().scanned(file)

    with pytest.raises(SourceUnreadable, match=r"a\.jsonl\.gz"):
        fb.build(root, Damaged(str(folder), ("*.jsonl.gz",)), fb.RawRecipe(chunk_bytes=4000), workers=0)
    assert not root.exists()


SOURCES = {
    "lines": (fb.sources.lines, "txt"),
    "files": (fb.sources.files, "txt"),
    "parquet": (fb.sources.parquet, "parquet"),
}


def with_broken_links(folder: Path, suffix: str) -> None:
    folder.mkdir()
    if suffix == "parquet":
        pq.write_table(pa.table({"text": [f"document {number}" for number in range(30)]}), folder / "a.parquet")
    else:
        (folder / f"a.{suffix}").write_text('{"text": "words"}\n' * 30)
    (folder / f"b.{suffix}").symlink_to("nowhere")
    (folder / f"c.{suffix}").symlink_to(f"c.{suffix}")
    os.mkfifo(folder / f"d.{suffix}")


@pytest.mark.parametrize("kind", SOURCES)
def test_broken_links_and_pipes_are_errors(tmp_path, kind):
    make, suffix = SOURCES[kind]
    with_broken_links(tmp_path / "data", suffix)
    recipe = RECIPE if kind == "parquet" else fb.RawRecipe()
    for name, problem in (("b", "a link to nothing"), ("c", "back to itself"), ("d", "not a regular file")):
        with pytest.raises(SourceUnreadable, match=rf"(?s){name}\.{suffix}.*{problem}"):
            fb.build(tmp_path / "cache", make(tmp_path / "data"), recipe, workers=0)
        (tmp_path / f"data/{name}.{suffix}").unlink()
    assert not (tmp_path / "cache").exists()


def test_a_broken_link_whose_name_would_not_be_read_is_only_counted(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text('{"text": "words"}\n' * 30)
    (tmp_path / "data/README").symlink_to("nowhere")
    command = ["build", "tokens", str(tmp_path / "data"), "--into", str(tmp_path / "cache"), "--workers", "0"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert "1 file was not read: no suffix 1" in result.output


def test_a_build_whose_samples_all_fail_names_the_reason_and_what_to_pass(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "words"}\n' * 30)
    source = fb.sources.jsonl(tmp_path / "a.jsonl")
    with pytest.raises(BuildFailed, match=r"30 × no-text, e\.g\. 'a\.jsonl@0'") as caught:
        fb.build(tmp_path / "cache", source, RECIPE, workers=0, max_failures=1.0)
    assert "--text" in caught.value.hint
