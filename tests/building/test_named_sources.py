"""Sources as strings: paths, globs and lists of them, read as the command line reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.running import run

import forebay as fb
from forebay.errors import SourceInvalid
from forebay.source import Source

RECIPE = fb.TokenRecipe(sequence_length=16)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b"):
        rows = [json.dumps({"text": f"document {number} of {name}"}) for number in range(20)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_build_reads_a_glob_as_the_command_line_does(tmp_path: Path, data: Path) -> None:
    fb.build(tmp_path / "python", str(data / "*.jsonl"), RECIPE, workers=0)
    run("build", "tokens", data / "*.jsonl", "--into", tmp_path / "shell", "--sequence-length", 16, "-w", 0)
    python, shell = (fb.open_cache(tmp_path / name) for name in ("python", "shell"))
    assert python.text(0)[0] == "document 0 of a"
    assert python.generation.source == shell.generation.source
    assert python.generation.table("tokens").digests["sha256"].tolist() == (
        shell.generation.table("tokens").digests["sha256"].tolist()
    )


def test_a_list_of_paths_and_strings_is_one_source(tmp_path: Path, data: Path) -> None:
    fb.build(tmp_path / "cache", [data / "a.jsonl", str(data / "b.jsonl")], RECIPE, workers=0)
    assert fb.open_cache(tmp_path / "cache").generation.source["patterns"] == ["a.jsonl", "b.jsonl"]
    assert fb.estimate(str(data), RECIPE).rows == fb.dry_run(tmp_path / "new", [str(data)], RECIPE).estimate.rows


def test_the_kind_of_a_named_source_is_that_of_the_recipe(tmp_path: Path, data: Path) -> None:
    fb.build(tmp_path / "raw", str(data / "a.jsonl"), fb.RawRecipe(), workers=0)
    assert fb.open_cache(tmp_path / "raw").generation.source["kind"] == "lines"


def test_update_status_verify_and_repair_read_paths_as_the_cache_was_built(tmp_path: Path, data: Path) -> None:
    root, both = tmp_path / "cache", str(data / "*.jsonl")
    fb.build(root, fb.sources.jsonl(data / "a.jsonl"), RECIPE, workers=0)
    assert fb.status(root, source=both).new == ("b.jsonl",)
    assert fb.update(root, both, workers=0).built == 1
    assert fb.verify(root, source=both).source_checked
    next(iter(root.glob("layers/*/000001.safetensors"))).unlink()
    assert not fb.repair(root, source=both, workers=0).failed
    assert fb.verify(root).sound


@pytest.mark.parametrize(("source", "problem"), [(17, "got int"), (["a.jsonl", 3], "got list"), ({}, "got dict")])
def test_what_is_no_source_is_rejected(tmp_path: Path, data: Path, source: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=rf"source must be paths, .*fb.sources.jsonl.*\({problem}\)"):
        fb.build(tmp_path / "cache", source, RECIPE, workers=0)
    fb.build(tmp_path / "cache", str(data), RECIPE, workers=0)
    with pytest.raises(TypeError, match=problem):
        fb.update(tmp_path / "cache", source, workers=0)


def test_wrong_options_of_a_source_are_rejected() -> None:
    with pytest.raises(SourceInvalid, match="no field can be found by the name 5"):
        fb.sources.jsonl("data", text=5)  # type: ignore[arg-type]
    for files in (fb.sources.text, fb.sources.files):
        with pytest.raises(TypeError, match=r"suffixes is '.py'; pass a list: \['.py'\]"):
            files("data", suffixes=".py")


def test_an_empty_list_and_an_empty_path_are_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceInvalid, match="empty list"):
        fb.build(tmp_path / "cache", [], RECIPE, workers=0)
    for recipe in (RECIPE, fb.RawRecipe()):
        with pytest.raises(SourceInvalid, match="a path of the source is empty"):
            fb.build(tmp_path / "cache", "", recipe, workers=0)
    with pytest.raises(SourceInvalid, match="a path of the source is empty"):
        fb.sources.images("")


@pytest.mark.parametrize(
    "source",
    [
        lambda data: fb.sources.lines(data / "*.jsonl"),
        lambda data: fb.sources.text(data / "a.jsonl", suffixes=()),
        lambda data: fb.sources.files(data),
    ],
)
def test_json_lines_are_not_tokenized_as_text(tmp_path: Path, data: Path, source: Any) -> None:
    opened: Source = source(data)
    with pytest.raises(SourceInvalid, match=r"'a.jsonl' holds JSON lines[\s\S]*hint: .*fb.sources.jsonl"):
        fb.build(tmp_path / "cache", opened, RECIPE, workers=0)
    with pytest.raises(SourceInvalid, match="holds JSON lines"):
        fb.estimate(opened, RECIPE)
    assert not (tmp_path / "cache").exists()
