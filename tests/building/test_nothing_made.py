"""A build of which every sample fails is an error that says why and what to do, not an empty cache."""

import json

import pytest
from click.testing import CliRunner

import forebay as fb
from forebay.cli.main import cli
from forebay.errors import BuildFailed, ChunkFailed, NothingMade, SourceEmpty, SourceInvalid

RECIPE = fb.TokenRecipe(tokenizer="gpt2", sequence_length=64)


def lines(*objects: object) -> str:
    return "".join(f"{json.dumps(one)}\n" for one in objects)


def test_a_field_that_no_object_has_is_told_with_those_they_have(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(*({"id": number, "title": "a"} for number in range(30)), {"text": ""}))
    with pytest.raises(NothingMade) as caught:
        fb.build(tmp_path / "cache", fb.sources.jsonl(tmp_path / "a.jsonl"), RECIPE, workers=0)
    error, text = caught.value, str(caught.value)
    assert isinstance(error, BuildFailed)
    assert (error.failures, error.reason, error.count) == (31, "no-text", 30)
    assert "all 31 trial sample(s) failed (30 × no-text, e.g. " in text
    assert "e.g. 'a.jsonl@0': line 1: the object has no field 'text' (it has: id, title))" in text
    assert "--text" in text
    assert "trial sample" in text
    assert "--max-failures 100%" in text
    assert not (tmp_path / "cache").exists()
    assert "\n" not in text


def test_each_sample_that_planning_tries_is_counted_once(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(*({"body": f"{number} {'word ' * 200}"} for number in range(300))))
    source = fb.sources.jsonl(tmp_path / "a.jsonl")
    with pytest.raises(NothingMade) as caught:
        fb.build(tmp_path / "cache", source, RECIPE, workers=0)
    assert 0 < caught.value.failures <= 300


@pytest.mark.parametrize("indent", [None, 1])
def test_one_json_array_is_told_as_such_and_ends_the_command_with_an_error(tmp_path, indent):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=indent))
    words = [
        "build",
        "tokens",
        tmp_path / "a.json",
        "--into",
        tmp_path / "cache",
        "--tokenizer",
        "gpt2",
        "--workers",
        0,
    ]
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert done.exit_code == 1
    assert "it looks like one JSON array, not JSON lines" in " ".join(done.output.split())
    again = CliRunner().invoke(cli, words)
    assert again.exit_code == 1  # nothing is missing, and nothing is there


@pytest.mark.parametrize("max_failures", [None, 1.0, 3])
def test_the_right_field_works_on_the_root_of_a_build_that_made_nothing(tmp_path, max_failures):
    (tmp_path / "a.jsonl").write_text(lines(*[{"body": "words"}] * 9))
    root, read = tmp_path / "cache", fb.sources.jsonl
    with pytest.raises(BuildFailed):
        fb.build(root, read(tmp_path / "a.jsonl"), RECIPE, workers=0, max_failures=max_failures)
    assert not list(tmp_path.glob("cache/**/*.*"))
    assert fb.build(root, read(tmp_path / "a.jsonl", text="body"), RECIPE, workers=0).rows
    assert fb.verify(root, full=True).sound


def test_a_build_that_may_fail_wholly_and_does_leaves_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(*[{"body": "words"}] * 9))
    with pytest.raises(NothingMade):
        fb.build(tmp_path / "cache", fb.sources.jsonl(tmp_path / "a.jsonl"), RECIPE, workers=0, max_failures=1.0)
    assert list((tmp_path / "cache").rglob("*")) == []


def test_a_build_that_made_nothing_leaves_what_it_did_not_make(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(*[{"body": "words"}] * 9))
    (tmp_path / "cache/plan").mkdir(parents=True)
    (tmp_path / "cache/plan/notes.txt").write_text("mine")
    with pytest.raises(NothingMade):
        fb.build(tmp_path / "cache", fb.sources.jsonl(tmp_path / "a.jsonl"), RECIPE, workers=0, max_failures=1.0)
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["plan", "notes.txt"]


def test_a_root_that_has_rows_stays_bound_when_a_later_build_fails(tmp_path):
    source, good = fb.sources.jsonl(tmp_path / "a.jsonl"), lines(*[{"text": "words " * 40}] * 40)
    (tmp_path / "a.jsonl").write_text(good + lines(*[{"body": "words " * 40}] * 40))
    recipe, root = fb.TokenRecipe(tokenizer="gpt2", sequence_length=64, chunk_size=20), tmp_path / "cache"
    for _ in range(2):  # the same command does not succeed the second time
        with pytest.raises(ChunkFailed, match=r"samples of chunk \d failed .*it has: body.*refresh .* --drop-missing"):
            fb.build(root, source, recipe, workers=0)
    rows = len(fb.open_cache(root))
    allowed = fb.build(root, source, recipe, workers=0, max_failures=1.0)
    assert (allowed.rows, allowed.failures) == (rows, 40)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_chunk_of_which_all_samples_fail_stops_a_build_at_once(tmp_path, workers):
    good = [{"text": "words " * 40}] * 400
    (tmp_path / "a.jsonl").write_text(lines(*good, *[{"body": "words " * 40}] * 400, *good))
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=64, chunk_size=100)
    source = fb.sources.jsonl(tmp_path / "a.jsonl")
    with pytest.raises(ChunkFailed, match=r"× no-text.*--max-failures 100%"):
        fb.build(tmp_path / "cache", source, recipe, workers=workers)
    assert len(fb.open_cache(tmp_path / "cache"))  # what was made before is published
    seen = []
    report = fb.build(tmp_path / "cache", source, recipe, workers=workers, max_failures=1.0, on_progress=seen.append)
    assert report.failures == 400
    assert 0 < max(progress.failures for progress in seen) <= 400


def test_an_estimate_names_the_most_frequent_reason_and_fails_where_nothing_can_be_made(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(*[{"body": "words"}] * 40))
    found = fb.estimate(fb.sources.jsonl(tmp_path / "a.jsonl"), RECIPE)
    assert (found.failure_reason, found.all_failed) == ("no-text", True)
    assert "a.jsonl@" in found.failure_example
    done = CliRunner().invoke(cli, ["estimate", "tokens", str(tmp_path / "a.jsonl"), "--tokenizer", "gpt2"])
    assert done.exit_code == 1
    text = " ".join(done.output.split())
    assert "every trial sample failed, most as 'no-text'" in text
    assert "it has: body" in text
    assert "--text" in text
    (tmp_path / "b.jsonl").write_text(lines(*[{"body": "words"}] * 2, *[{"text": "words"}] * 40))
    found = fb.estimate(fb.sources.jsonl(tmp_path / "b.jsonl"), RECIPE)
    assert not found.all_failed
    assert found.failure_reason == "no-text"


def test_one_good_sample_is_enough_and_a_source_without_samples_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"body": "words"}, {"text": "words"}))
    assert fb.build(tmp_path / "one", fb.sources.jsonl(tmp_path / "a.jsonl"), RECIPE, workers=0).failures == 1
    for content in ("\n", ""):
        (tmp_path / "b.jsonl").write_text(content)
        with pytest.raises(SourceEmpty, match=r"nothing to build: .*name a source that has samples"):
            fb.build(tmp_path / "none", fb.sources.jsonl(tmp_path / "b.jsonl"), RECIPE, workers=0)
        assert not list(tmp_path.glob("none/**/*.*"))


def test_a_manifest_below_another_folder_is_told_how_to_name_it(tmp_path):
    (tmp_path / "all.jsonl").write_text(lines({"path": "a.png"}, {"path": "b.png"}))
    with pytest.raises(NothingMade, match=r"\(2 × not-found, e.g. .*'a\.png'.*\); name the folder .*--root"):
        fb.build(
            tmp_path / "cache", fb.sources.image_manifest(tmp_path / "all.jsonl"), fb.ImageRecipe(size=8), workers=0
        )


def test_a_failure_without_special_advice_is_told_with_its_example(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.png").write_bytes(b"<html>")
    with pytest.raises(NothingMade, match=r"× not-an-image, .*check that the samples are what the recipe reads"):
        fb.build(tmp_path / "cache", fb.sources.images(tmp_path / "photos"), fb.ImageRecipe(size=8), workers=0)


def test_a_cache_in_the_folder_of_its_whole_source_is_refused_and_leaves_nothing_there(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"text": "words"}))
    with pytest.raises(SourceInvalid, match=f"all of the source lies in '{tmp_path}', where the cache would be"):
        fb.build(tmp_path, fb.sources.jsonl(tmp_path), RECIPE, workers=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
