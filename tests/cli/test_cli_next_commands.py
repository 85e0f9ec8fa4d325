"""What the verbs advise leads out of the state that they describe, and never from one to the other and back."""

from pathlib import Path

import pytest
from tests.cli.running import run
from tests.helpers.layer_recipes import LengthLayer, LineRecipe, number_cache

import forebay as fb
from forebay.errors import RecipeMismatch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache of raw lines in several chunks."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text("".join(f"{name} {number:04}\n" for number in range(40)))
    words = ["--into", tmp_path / "cache", "--workers", 0, "--chunk-rows", 20, "--codec", "none"]
    run("build", "raw", folder / "*.txt", *words)
    return tmp_path / "cache"


def advised(output: str) -> list[str]:
    """The command after `next:`."""
    return output.rpartition("next: forebay ")[2].split()


def test_status_names_new_files_and_the_command_that_adds_them(root: Path) -> None:
    assert not fb.status(root, allow_network=True).new
    for name in ("c.txt", "other.log"):
        (root.parent / "raw" / name).write_text("c 0001\n")
    (root.parent / "raw/empty.txt").touch()
    assert fb.status(root, allow_network=True).new == ("c.txt",)
    assert not fb.status(root).new  # the names in a cache are not followed into folders unasked
    shown = run("status", root, "--allow-network").out
    assert "new source files, not in the cache" in shown
    assert advised(shown) == ["update", str(root), str(root.parent / "raw/c.txt")]
    run(*advised(shown), "--workers", 0)
    assert not fb.status(root, allow_network=True).new
    assert fb.status(root, source=fb.sources.lines(root.parent / "raw/other.log")).new == ("other.log",)


def test_files_that_match_the_first_pattern_are_still_new_after_growing_by_another(root: Path) -> None:
    (root.parent / "more.txt").write_text("more\n")
    run("update", root, root.parent / "more.txt", "--workers", 0)
    (root.parent / "raw/c.txt").write_text("c 0001\n")
    assert fb.status(root, allow_network=True).new == ("c.txt",)
    assert fb.info(root).source["patterns"] == ["*.txt", "../more.txt"]


def test_only_a_layer_above_the_base_can_be_replaced(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    fb.build(root, None, LengthLayer(), workers=0)
    with pytest.raises(RecipeMismatch, match=r"`forebay build .*, or build into a new folder$") as base:
        fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(scale=9.0), workers=0)
    assert "--replace" not in str(base.value)
    with pytest.raises(RecipeMismatch, match=r"replace the layer \(`--replace length`"):
        fb.build(root, None, LengthLayer(times=9), workers=0)


def test_a_source_of_another_kind_is_named_in_a_build_too(root: Path) -> None:
    told = run("build", "raw", root.parent / "raw", "--unit", "files", "--into", root, "--workers", 0, code=1).err
    assert (
        "was built from a source of kind 'lines', and this one is of kind 'files'\nhint: pass a source of kind" in told
    )
    assert "grow" not in told


def write_documents(path: Path, field: str, count: int = 200) -> Path:
    path.write_text("".join(f'{{"{field}": "{path.stem} document {number:04}"}}\n' for number in range(count)))
    return path


def pack(tmp_path: Path, *limits: str) -> Path:
    """Build a cache of documents of two files that are named one by one."""
    files = [write_documents(tmp_path / f"{name}.jsonl", "text") for name in "ab"]
    flags = ("--tokenizer", "gpt2", "--sequence-length", 64, "--chunk-rows", 8, "--workers", 0)
    run("build", "tokens", *files, "--into", tmp_path / "packed", *flags, *limits)
    return tmp_path / "packed"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return pack(tmp_path)


def test_update_with_a_wrong_file_publishes_nothing_and_clean_gives_it_up(packed: Path) -> None:
    wrong, good = (write_documents(packed.parent / f"{name}.jsonl", name) for name in ("body", "text"))
    rows = len(fb.open_cache(packed))
    shown = run("update", packed, wrong, good, "--workers", 0, code=1).err
    assert "body.jsonl@0" in shown
    assert f"`forebay clean {packed} --unpublished`" in shown
    assert len(fb.open_cache(packed)) == rows
    run("update", packed, good, "--workers", 0, code=1)  # the last segment has to be finished or given up
    run("clean", packed, "--unpublished")
    run("update", packed, good, "--workers", 0)
    assert len(fb.open_cache(packed)) > rows


def test_growing_tells_what_is_new_from_what_the_cache_holds(root: Path) -> None:
    path = root.parent / "c.txt"
    path.write_text("c\n" * 7)
    shown = " ".join(run("update", root, path, "--workers", 0).out.split())
    assert "rows 7 new, 87 in the cache" in shown


def test_a_cache_that_can_only_be_in_memory_is_not_advised() -> None:
    assert "--into" not in run("status", "memory://x", code=1).err
