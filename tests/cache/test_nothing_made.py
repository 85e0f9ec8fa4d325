"""A build of which every sample fails is an error that says why and what to do, not an empty cache."""

import json

import pytest
from click.testing import CliRunner

import forebay as fb
from forebay.cli.main import cli
from forebay.errors import BuildFailed, ForebayError, NothingMade, SourceInvalid

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
    assert "all 31 sample(s) failed, 30 as 'no-text'" in text
    assert "('a.jsonl@0': line 1: the object has no field 'text' (it has: id, title))" in text
    assert "--text" in text
    assert f"what is at '{tmp_path / 'cache'}' keeps to this source and recipe, delete it or choose another" in text
    assert "\n" not in text


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


def test_the_right_field_into_the_same_root_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"body": "words"}))
    with pytest.raises(NothingMade):
        fb.build(tmp_path / "cache", fb.sources.jsonl(tmp_path / "a.jsonl"), RECIPE, workers=0)
    with pytest.raises(ForebayError, match=r"was built from a source with text='text'.*build a new cache"):
        fb.build(tmp_path / "cache", fb.sources.jsonl(tmp_path / "a.jsonl", text="body"), RECIPE, workers=0)
    assert fb.build(tmp_path / "other", fb.sources.jsonl(tmp_path / "a.jsonl", text="body"), RECIPE, workers=0).rows


def test_one_good_sample_is_enough_and_a_source_without_samples_is_none_that_failed(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"body": "words"}, {"text": "words"}))
    assert fb.build(tmp_path / "one", fb.sources.jsonl(tmp_path / "a.jsonl"), RECIPE, workers=0).failures == 1
    (tmp_path / "b.jsonl").write_text("\n")
    assert fb.build(tmp_path / "none", fb.sources.jsonl(tmp_path / "b.jsonl"), RECIPE, workers=0).samples == 0


def test_a_manifest_below_another_folder_is_told_how_to_name_it(tmp_path):
    (tmp_path / "all.jsonl").write_text(lines({"path": "a.png"}, {"path": "b.png"}))
    with pytest.raises(NothingMade, match=r"2 as 'not-found' \(.*'a\.png'.*\); name the folder .*--root"):
        fb.build(
            tmp_path / "cache", fb.sources.image_manifest(tmp_path / "all.jsonl"), fb.ImageRecipe(size=8), workers=0
        )


def test_a_failure_without_advice_names_the_command_that_lists_the_others(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.png").write_bytes(b"<html>")
    with pytest.raises(NothingMade, match=f"see `forebay status {tmp_path / 'cache'}`"):
        fb.build(tmp_path / "cache", fb.sources.images(tmp_path / "photos"), fb.ImageRecipe(size=8), workers=0)


def test_a_cache_in_the_folder_of_its_whole_source_is_refused_and_leaves_nothing_there(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines({"text": "words"}))
    with pytest.raises(SourceInvalid, match=f"all of the source lies in '{tmp_path}', where the cache would be"):
        fb.build(tmp_path, fb.sources.jsonl(tmp_path), RECIPE, workers=0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
