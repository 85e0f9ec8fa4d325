"""Growing a cache by what it cannot read adds nothing, says why, and leaves the cache as it was."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.layer_recipes import LineRecipe, number_cache, tree

import forebay as fb
from forebay.cli.main import cli
from forebay.errors import ChunkFailed, NothingMade, TooManyFailures
from forebay.recipe import Rows
from forebay.source import Sample

WRONG = {
    "text": b"hello world\n" * 300,
    "picture": b"\xff\xd8\xff\xe0\n" * 20,
    "field": b"".join(json.dumps({"body": f"document {number}"}).encode() + b"\n" for number in range(200)),
    "few": b'{"body": "one"}\n{"body": "two"}\n',
}
RECIPE = LineRecipe(chunk_rows=8)
GOOD = b'{"text": "words"}\n' * 5


class Forgetful(LineRecipe, frozen=True, kw_only=True):
    """The same recipe, on a machine whose libraries read no sample."""

    def make(self, samples: Iterable[Sample]) -> Rows:
        return LineRecipe.make(self, [Sample(sample.id, b"x") for sample in samples])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=64)
    fb.build(tmp_path / "cache", fb.sources.jsonl(tmp_path / "a.jsonl"), recipe, workers=0)
    return tmp_path / "cache"


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    return done.exit_code, done.output


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_adds_nothing_and_the_right_one_can_be_added_later(root: Path, name: str) -> None:
    before, path = tree(root), root.parent / "b.jsonl"
    path.write_bytes(WRONG[name])
    with pytest.raises(
        NothingMade, match=r"of the new data failed .*e\.g\. 'b\.jsonl@0'.*nothing was added to"
    ) as caught:
        fb.grow(root, fb.sources.jsonl(path), workers=0)
    assert "reads its source as jsonl (text='text'): pass files like that" in str(caught.value)
    assert "--text" not in str(caught.value), "growing has no such option"
    assert tree(root) == before
    path.write_bytes(GOOD)
    assert fb.grow(root, fb.sources.jsonl(path), workers=0).failures == 0
    assert fb.build(root, fb.sources.jsonl(root.parent), fb.TokenRecipe(tokenizer="gpt2", sequence_length=64)).made == 0
    assert fb.verify(root, full=True).sound


def test_what_may_fail_wholly_is_added(root: Path) -> None:
    (root.parent / "b.jsonl").write_bytes(WRONG["few"])
    report = fb.grow(root, fb.sources.jsonl(root.parent / "b.jsonl"), workers=0, max_failures=1.0)
    assert (report.made, report.failures) == (1, 2)


def test_data_appended_to_a_known_file_is_tried_where_it_begins(root: Path) -> None:
    before = tree(root)
    with open(root.parent / "a.jsonl", "ab") as file:
        file.write(WRONG["few"])
    with pytest.raises(NothingMade, match=r"all 2 trial sample\(s\) of the new data failed"):
        fb.grow(root, fb.sources.jsonl(root.parent / "a.jsonl"), workers=0)
    assert tree(root) == before


@pytest.mark.parametrize("name", ["notes.txt", "photo.jpg", "table.parquet.gz"])
def test_a_file_of_another_format_is_refused_by_its_suffix(root: Path, name: str) -> None:
    before = tree(root)
    (root.parent / name).write_bytes(GOOD)
    code, output = run("grow", root, root.parent / name, "--workers", 0)
    assert code == 1
    text = " ".join(output.split())
    assert f"{name}' ends in .{name.split('.')[1]}, and" in text
    assert "was built from jsonl files (.jsonl, .ndjson, .json); pass files of that format" in text
    assert tree(root) == before


def test_a_suffix_that_the_cache_was_built_from_is_not_refused(tmp_path: Path) -> None:
    for name in ("a.dat", "b.dat", "noend"):
        (tmp_path / name).write_bytes(GOOD)
    root, options = tmp_path / "cache", ("--tokenizer", "gpt2", "--workers", 0)
    assert run("build", "tokens", tmp_path / "a.dat", "--format", "jsonl", "--into", root, *options)[0] == 0
    for name in ("b.dat", "noend"):
        assert run("grow", root, tmp_path / name, "--workers", 0)[0] == 0
    assert fb.summarize(root).source_files == 3


def test_new_data_of_which_the_first_chunk_fails_is_taken_back(tmp_path: Path) -> None:
    """The trial finds good samples, but the build stops before it makes a row of them."""
    root = number_cache(tmp_path, chunk_rows=8)
    before, path, source = tree(root), tmp_path / "raw/c.txt", fb.sources.lines(tmp_path / "raw")
    path.write_bytes(b"x\n" * 200 + b"000021\n" * 40)
    with pytest.raises(ChunkFailed, match=r"samples of chunk 3 failed .*; nothing was added to '"):
        fb.grow(root, source, recipe=RECIPE, workers=0)
    assert tree(root) == before
    path.write_bytes(b"000021\n" * 3)
    assert fb.grow(root, source, recipe=RECIPE, workers=0).rows == 23
    assert fb.verify(root, full=True).sound


def test_a_chunk_that_fails_behind_good_ones_is_left_out_as_the_error_says(tmp_path: Path) -> None:
    root = number_cache(tmp_path, chunk_rows=8)
    path, source = tmp_path / "raw/c.txt", fb.sources.lines(tmp_path / "raw")
    path.write_bytes(b"000021\n" * 40 + b"x\n" * 200)
    for _ in range(2):
        with pytest.raises(
            ChunkFailed, match=r"are kept at .*; to leave the file out, move it away and run `"
        ) as caught:
            fb.grow(root, source, recipe=RECIPE, workers=0)
    assert f"`forebay refresh {root} --drop-missing`" in str(caught.value)
    path.unlink()
    fb.refresh(root, source=source, recipes={"numbers": RECIPE}, workers=0, drop_missing=True)
    (tmp_path / "raw/d.txt").write_bytes(b"000022\n" * 3)
    assert fb.grow(root, source, recipe=RECIPE, workers=0).rows == 23
    assert fb.build(root, source, RECIPE, workers=0).made == 0
    assert fb.status(root, source=source).complete
    assert fb.verify(root, full=True).sound


def test_the_limit_of_a_build_holds_for_growing_and_refreshing(tmp_path: Path) -> None:
    path, source, kept = tmp_path / "raw/a.txt", fb.sources.lines(tmp_path / "raw"), {"numbers": RECIPE}
    root = tmp_path / "cache"
    path.parent.mkdir()
    path.write_bytes(b"000001\n" * 30 + b"x\n")
    fb.build(root, source, RECIPE, workers=0, max_failures=1)
    more = tmp_path / "raw/b.txt"
    more.write_bytes(b"000002\n" * 30)
    fb.grow(root, source, recipe=RECIPE, workers=0)
    more.write_bytes(b"x\nx\n" + b"000002\n" * 30)
    with pytest.raises(TooManyFailures, match="the limit is 1"):
        fb.refresh(root, source=source, recipes=kept, workers=0)
    (tmp_path / "raw/c.txt").write_bytes(b"000003\n" * 3)
    with pytest.raises(TooManyFailures):
        fb.grow(root, source, recipe=RECIPE, workers=0)
    assert fb.grow(root, source, recipe=RECIPE, workers=0, max_failures=3).failures == 3
    assert fb.refresh(root, source=source, recipes=kept, workers=0).generation is not None  # as `grow` was told
    fb.grow(root, source, recipe=RECIPE, workers=0, max_failures=5)  # also where nothing is new
    assert fb.open_cache(root).generation.max_failures == 5


@pytest.mark.parametrize("failing", [3, 5])
def test_a_small_chunk_that_fails_wholly_stops_a_build_from_four_samples_on(tmp_path: Path, failing: int) -> None:
    (tmp_path / "a.txt").write_bytes(b"000001\n" * 25 + b"x00001\n" * failing)
    source, recipe = fb.sources.lines(tmp_path / "a.txt"), LineRecipe(chunk_rows=4)
    if failing < 4:
        assert fb.build(tmp_path / "cache", source, recipe, workers=0).failures == failing
        return
    with pytest.raises(ChunkFailed, match="all 5 samples of chunk 5 failed"):
        fb.build(tmp_path / "cache", source, recipe, workers=0)
    assert len(fb.open_cache(tmp_path / "cache")) == 25
    assert fb.build(tmp_path / "cache", source, recipe, workers=0, max_failures=5).failures == 5


def test_that_all_may_fail_is_not_kept(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    (tmp_path / "a.txt").write_bytes(b"000001\n" * 3)
    fb.build(root, fb.sources.lines(tmp_path / "a.txt"), RECIPE, workers=0, max_failures=1.0)
    (tmp_path / "b.txt").write_bytes(b"x\n")
    with pytest.raises(NothingMade):
        fb.grow(root, fb.sources.lines(tmp_path / "b.txt"), recipe=RECIPE, workers=0)


def test_a_repair_does_not_replace_rows_by_nothing(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    chunk = root / "layers/numbers/000001.safetensors"
    chunk.unlink()
    report = fb.repair(root, recipe=Forgetful(), workers=0)
    assert not report.replaced
    assert "all samples of chunk 1 fail now (4 × no-number, e.g. " in report.failed["layers/numbers/000001.safetensors"]
    assert not chunk.exists()
    assert not fb.repair(root, recipe=LineRecipe(), workers=0).failed
