"""Damaged files of a source: one ends a build with its name, or all are passed over and listed."""

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


def four_files(folder: Path) -> fb.Source:
    for name, keep in (("a.jsonl.gz", 1), ("b.jsonl.gz", 0.7), ("c.jsonl.gz", 1), ("d.jsonl.gz", 0.4)):
        write_gz(folder, name, keep=keep)
    return fb.sources.jsonl(folder)


def test_without_the_option_the_first_damaged_file_is_named_with_the_way_past_it(tmp_path):
    with pytest.raises(SourceUnreadable, match=r"(?s)[bd]\.jsonl\.gz.*--skip-unreadable"):
        fb.build(tmp_path / "cache", four_files(tmp_path / "data"), RECIPE, workers=0)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_files_are_passed_over_and_all_are_listed(tmp_path, workers):
    source, root = four_files(tmp_path / "data"), tmp_path / "cache"
    report = fb.build(root, source, RECIPE, workers=workers, skip_unreadable=True)
    assert report.samples == 100
    (note,) = [note for note in report.notes if "could not be read" in note]
    assert note.startswith("2 file(s) could not be read and were left out: ")
    assert "b.jsonl.gz" in note
    assert "d.jsonl.gz" in note
    assert sorted(fb.status(root).unreadable) == ["b.jsonl.gz", "d.jsonl.gz"]
    assert fb.status(root).complete
    assert fb.verify(root, full=True).sound
    assert fb.build(root, source, RECIPE, workers=0).made == 0  # the same without the option: it is planned so


def test_a_file_that_was_repaired_is_appended_by_grow(tmp_path):
    source, root = four_files(tmp_path / "data"), tmp_path / "cache"
    fb.build(root, source, RECIPE, workers=0, skip_unreadable=True)
    write_gz(tmp_path / "data", "b.jsonl.gz")
    write_gz(tmp_path / "data", "e.jsonl.gz", keep=0.5)
    with pytest.raises(SourceUnreadable, match=r"e\.jsonl\.gz"):
        fb.update(root, source, workers=0)
    report = fb.update(root, source, workers=0, skip_unreadable=True)
    assert report.samples == 150
    assert sorted(fb.status(root).unreadable) == ["d.jsonl.gz", "e.jsonl.gz"]


def test_a_source_without_a_file_that_can_be_read_is_an_error(tmp_path):
    write_gz(tmp_path / "data", "a.jsonl.gz", keep=0.5)
    with pytest.raises(SourceUnreadable, match=r"a\.jsonl\.gz"):
        fb.build(tmp_path / "cache", fb.sources.jsonl(tmp_path / "data"), RECIPE, workers=0, skip_unreadable=True)


def test_an_estimate_and_the_command_line_go_past_damaged_files_too(tmp_path):
    four_files(tmp_path / "data")
    (tmp_path / "data/e.jsonl.gz").write_bytes(b"no gzip")
    words = ["tokens", str(tmp_path / "data"), "--tokenizer", "gpt2", "--skip-unreadable"]
    done = CliRunner().invoke(cli, ["estimate", *words])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(cli, ["build", *words, "--into", str(tmp_path / "cache"), "--workers", "0"])
    assert done.exit_code == 0, done.output
    assert "3 file(s) could not be read and were left out" in " ".join(done.output.split())
    shown = CliRunner().invoke(cli, ["status", str(tmp_path / "cache")]).output
    assert "unreadable source files, skipped" in shown


def test_a_parquet_file_whose_pages_are_damaged_is_a_failure_of_its_parts(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b"):
        table = pa.table({"text": [f"{name} {number} some words" for number in range(200)]})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=50, write_page_checksum=True)
    stored = bytearray((folder / "b.parquet").read_bytes())
    stored[60:80] = bytes(20)
    (folder / "b.parquet").write_bytes(stored)
    source, root = fb.sources.parquet(folder), tmp_path / "cache"
    report = fb.build(root, source, RECIPE, workers=0, skip_unreadable=True)
    left_out = fb.status(root).unreadable | {one.sample: one.reason for one in fb.status(root).failed_samples}
    assert any("b.parquet" in name for name in left_out)
    assert report.rows
    assert fb.verify(root, full=True).sound


def test_a_file_whose_damage_is_found_when_its_chunk_is_made_is_one_failure_of_that_chunk(tmp_path):
    folder, root = tmp_path / "data", tmp_path / "cache"
    folder.mkdir()
    for name in ("a", "b"):
        table = pa.table({"text": [f"{name} {number} some words" for number in range(800)]})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=40, use_dictionary=False, compression="none")
    at = pq.read_metadata(folder / "b.parquet").row_group(13).column(0).data_page_offset
    stored = bytearray((folder / "b.parquet").read_bytes())
    stored[at : at + 10] = bytes(10)
    (folder / "b.parquet").write_bytes(stored)
    source = fb.sources.parquet(folder)
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=16, chunk_rows=60)
    with pytest.raises(BuildFailed, match=r"(?s)1 chunk\(s\) .*b\.parquet.*--skip-unreadable"):
        fb.build(root, source, recipe, workers=0)
    report = fb.build(root, source, recipe, workers=0, skip_unreadable=True)
    (failed,) = fb.status(root).failed_samples
    assert (failed.sample.partition("@")[0], failed.reason) == ("b.parquet", "unreadable")
    assert (report.made, report.failures) == (1, 1)
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
def test_broken_links_and_pipes_are_unreadable_files_that_can_be_passed_over(tmp_path, kind):
    make, suffix = SOURCES[kind]
    with_broken_links(tmp_path / "data", suffix)
    source, root = make(tmp_path / "data"), tmp_path / "cache"
    recipe = RECIPE if kind == "parquet" else fb.RawRecipe()
    with pytest.raises(SourceUnreadable, match=rf"(?s)b\.{suffix}.*a link to nothing.*--skip-unreadable"):
        fb.build(root, source, recipe, workers=0)
    assert not root.exists()
    report = fb.build(root, source, recipe, workers=0, skip_unreadable=True)
    (note,) = [note for note in report.notes if "could not be read" in note]
    assert note.startswith("3 file(s) could not be read and were left out: ")
    assert "it is a link that leads back to itself" in note
    assert "it is not a regular file" in note
    assert "3 file(s) could not be read" in str(fb.estimate(source, recipe, skip_unreadable=True).notes)
    assert fb.build(root, source, recipe, workers=0).made == 0
    assert fb.verify(root, source=source, full=True).stale == {}
    assert fb.status(root, source=source).stale == {}


def test_a_broken_link_that_leads_to_a_file_later_is_appended_by_grow(tmp_path):
    with_broken_links(tmp_path / "data", "jsonl")
    source, root = fb.sources.jsonl(tmp_path / "data"), tmp_path / "cache"
    before = fb.build(root, source, RECIPE, workers=0, skip_unreadable=True).samples
    (tmp_path / "data/nowhere").write_text('{"text": "more words"}\n' * 5)
    assert fb.update(root, source, recipe=RECIPE, workers=0, skip_unreadable=True).samples == before + 5


def test_a_broken_link_whose_name_would_not_be_read_is_only_counted(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text('{"text": "words"}\n' * 30)
    (tmp_path / "data/README").symlink_to("nowhere")
    command = ["build", "tokens", str(tmp_path / "data"), "--into", str(tmp_path / "cache"), "--workers", "0"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert "1 file was not read: no suffix 1" in result.output
