"""What the verbs advise leads out of the state that they describe, and never from one to the other and back."""

import os
from pathlib import Path

import pytest
from tests.cli.running import run
from tests.layer_recipes import LengthLayer, LineRecipe, flip, number_cache, tree, write_lines

import forebay as fb
from forebay.errors import RecipeMismatch, SourceChanged


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache of raw lines in several chunks."""
    folder = tmp_path / "raw"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text("".join(f"{name} {number:04}\n" for number in range(40)))
    run(
        "build",
        "raw",
        folder / "*.txt",
        "--into",
        tmp_path / "cache",
        "--workers",
        0,
        "--chunk-rows",
        20,
        "--codec",
        "none",
    )
    return tmp_path / "cache"


def advised(output: str) -> list[str]:
    """The command after `next:`."""
    return output.rpartition("next: forebay ")[2].split()


@pytest.mark.parametrize("place", ["data", "head"])
def test_damage_of_an_edited_file_is_refreshed_not_repaired_and_verified_in_turn(root: Path, place: str) -> None:
    """With a damaged head, nobody knows what the chunk was made from before its rows are made again."""
    path, chunk = root.parent / "raw/a.txt", root / "layers/raw/000000.safetensors"
    path.write_text(path.read_text().replace("a 0003", "a 9999"))
    data = chunk.read_bytes().index(b"a 0003")
    flip(chunk, data if place == "data" else 4100)
    repaired = run("repair", root, "--workers", 0, code=1)
    assert "changed while it was read" not in repaired.out + repaired.err
    assert advised(repaired.out) == ["refresh", str(root)]
    assert "run `forebay refresh" in " ".join(repaired.out.split())
    tried = []
    for _ in range(4):
        command = advised(run("verify", root, code=None).out)
        if command[0] == "peek":
            break
        tried.append(command[0])
        after = run(*command, "--workers", 0, code=None)
        if "next: forebay refresh" in after.out:
            run(*advised(after.out))
    assert tried == (["refresh"] if place == "data" else ["repair", "repair"])
    run("verify", root, "--full")
    rows = fb.open_cache(root)
    assert bytes(rows[3]["data"]) == b"a 9999"


def test_damage_of_another_file_is_repaired_after_the_refresh(root: Path) -> None:
    path = root.parent / "raw/a.txt"
    path.write_text(path.read_text().replace("a 0003", "a 9999"))
    flip(root / "layers/raw/000003.safetensors", 4100)
    for verb in ("refresh", "repair"):
        command = advised(run("verify", root, code=1).out)
        assert command[0] == verb
        run(*command)
    run("verify", root, "--full")


def test_a_refresh_of_what_is_not_published_yet_advises_to_build(root: Path) -> None:
    for file in [*(root / "generations").iterdir(), *(root / "layers/raw").glob("0*.safetensors")]:
        file.unlink()
    assert advised(run("refresh", root, "--workers", 0).out) == ["build", str(root)]
    (root.parent / "raw/a.txt").write_text("other\n" * 9)
    shown = run("refresh", root, "--workers", 0).out
    assert "nothing published yet" in shown
    run(*advised(shown))
    run("verify", root)


def test_a_changed_source_of_which_nothing_was_made_leaves_the_root_free(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 20)
    root, source = tmp_path / "cache", fb.sources.lines(tmp_path / "raw")

    def edited(progress: fb.Progress) -> None:
        if progress.phase == "planning" and progress.done == progress.total:
            write_lines(tmp_path / "raw/a.txt", 100, 7)

    with pytest.raises(SourceChanged, match=r"nothing was made of it yet, and nothing is left at .*: build it again"):
        fb.build(root, source, LineRecipe(), workers=0, on_progress=edited)
    assert not [path for path in root.rglob("*") if path.is_file()]
    assert fb.build(root, source, LineRecipe(scale=2.0), workers=0).rows == 7


def test_a_build_that_was_stopped_before_its_first_chunk_binds_nothing_once_the_source_changed(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    for file in [*(root / "generations").iterdir(), *(root / "layers/numbers").glob("0*.safetensors")]:
        file.unlink()
    write_lines(tmp_path / "raw/a.txt", 50, 3)
    with pytest.raises(SourceChanged, match="nothing is left at"):
        fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0)
    assert fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0).rows == 13


def test_what_was_made_stays_when_the_source_changes(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    before = tree(root)
    write_lines(tmp_path / "raw/a.txt", 50, 3)
    with pytest.raises(SourceChanged, match="run `forebay refresh"):
        fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0)
    assert tree(root) == before


def test_status_names_new_files_and_the_command_that_adds_them(root: Path) -> None:
    assert not fb.status(root, check_source=True).new
    for name in ("c.txt", "other.log"):
        (root.parent / "raw" / name).write_text("c 0001\n")
    (root.parent / "raw/empty.txt").touch()
    assert fb.status(root, check_source=True).new == ("c.txt",)
    assert not fb.status(root).new  # the names in a cache are not followed into folders unasked
    shown = run("status", root, "--check-source").out
    assert "new source files, not in the cache" in shown
    assert advised(shown) == ["grow", str(root), str(root.parent / "raw/c.txt")]
    run(*advised(shown), "--workers", 0)
    assert not fb.status(root, check_source=True).new
    assert fb.status(root, source=fb.sources.lines(root.parent / "raw/other.log")).new == ("other.log",)


def test_files_that_match_the_first_pattern_are_still_new_after_growing_by_another(root: Path) -> None:
    (root.parent / "more.txt").write_text("more\n")
    run("grow", root, root.parent / "more.txt", "--workers", 0)
    (root.parent / "raw/c.txt").write_text("c 0001\n")
    assert fb.status(root, check_source=True).new == ("c.txt",)
    assert fb.summarize(root).source["patterns"] == ["*.txt", "../more.txt"]


def test_status_counts_chunks_before_it_names_them(root: Path) -> None:
    os.truncate(root / "layers/raw/000000.safetensors", 4100)
    (root / "layers/raw/000002.safetensors").unlink()
    shown = run("status", root, code=1).out
    assert "suspect  1 chunk: 0" in shown
    assert "lost     1 chunk: 2" in shown
    assert "suspect" not in run("gaps", root).out


def test_clean_names_what_only_older_generations_list(root: Path) -> None:
    path = root.parent / "raw/a.txt"
    path.write_text(path.read_text().replace("a 0003", "a 9999"))
    run("refresh", root, "--workers", 0)
    report = fb.clean(root)
    assert report.kept_generations == 1
    assert report.kept_bytes == (root / "layers/raw/000000.safetensors").stat().st_size
    shown = run("clean", root).out
    assert "1 older generation, " in shown
    assert advised(shown) == ["clean", str(root), "--keep-generations", "1"]
    freed = run(*advised(shown)).out
    assert "next:" not in freed
    assert "older generation" not in run("clean", root).out


def test_only_a_layer_above_the_base_can_be_replaced(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    fb.build(root, None, LengthLayer(), workers=0)
    with pytest.raises(RecipeMismatch, match=r"`forebay build .*, build into a new root, or delete this one$") as base:
        fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(scale=9.0), workers=0)
    assert "--replace" not in str(base.value)
    with pytest.raises(RecipeMismatch, match=r"replace the layer \(`--replace length`"):
        fb.build(root, None, LengthLayer(times=9), workers=0)


def test_a_source_of_another_kind_is_named_in_a_build_too(root: Path) -> None:
    told = run("build", "raw", root.parent / "raw", "--unit", "files", "--into", root, "--workers", 0, code=1).err
    assert "was built from a source of kind 'lines', and this one is of kind 'files'; pass a source of kind" in told
    assert "grow" not in told


def write_documents(path: Path, field: str, count: int = 200) -> Path:
    path.write_text("".join(f'{{"{field}": "{path.stem} document {number:04}"}}\n' for number in range(count)))
    return path


def pack(tmp_path: Path, *limits: str) -> Path:
    """Build a cache of documents of two files that are named one by one."""
    files = [write_documents(tmp_path / f"{name}.jsonl", "text") for name in "ab"]
    flags = ("--tokenizer", "gpt2", "--sequence-length", 64, "--chunk-size", 8, "--workers", 0)
    run("build", "tokens", *files, "--into", tmp_path / "packed", *flags, *limits)
    return tmp_path / "packed"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return pack(tmp_path)


def test_a_named_file_that_is_gone_is_dropped_and_blocks_nothing(packed: Path) -> None:
    (packed.parent / "b.jsonl").unlink()
    run("build", packed, "--workers", 0)
    run("refresh", packed, "--drop-missing", "--workers", 0)
    run("build", packed, "--workers", 0)
    run("verify", packed)
    cache = fb.open_cache(packed)
    assert all("b document" not in cache.text(row) for row in range(len(cache)))


def test_one_wrong_file_beside_a_good_one_is_not_added(packed: Path) -> None:
    wrong, good = (write_documents(packed.parent / f"{name}.jsonl", name) for name in ("body", "text"))
    before = tree(packed)
    said = run("grow", packed, wrong, good, "--workers", 0, code=1).err
    assert "of the new data failed" in said
    assert "body.jsonl@0" in said
    assert tree(packed) == before
    run("grow", packed, good, "--workers", 0)


def test_a_file_whose_later_part_is_wrong_is_left_out_as_the_error_says(packed: Path) -> None:
    mixed = write_documents(packed.parent / "mixed.jsonl", "text")
    wrong = write_documents(packed.parent / "wrong.jsonl", "body", 2000)
    mixed.write_text(mixed.read_text() + wrong.read_text())
    said = run("grow", packed, mixed, "--workers", 0, code=1).err
    assert f"move it away and run `forebay refresh {packed} --drop-missing`" in said
    assert "the cache reads its source as jsonl (text='text'): pass files like that" in said
    assert "--text" not in said  # which `grow` has not
    mixed.unlink()
    run("refresh", packed, "--drop-missing", "--workers", 0)
    run("build", packed, "--workers", 0)
    run("verify", packed)


def test_a_refresh_past_the_limit_of_failures_fails_again(tmp_path: Path) -> None:
    root, path = pack(tmp_path, "--max-failures", "10%"), tmp_path / "b.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line.replace("text", "body") if number < 60 else line for number, line in enumerate(lines)))
    for _ in range(2):
        assert "the limit is 10.00%" in run("refresh", root, "--workers", 0, code=1).err


def test_a_refresh_of_an_unfinished_cache_advises_to_build_the_rest(tmp_path: Path) -> None:
    path, root = tmp_path / "a.txt", tmp_path / "cache"
    path.write_text("".join(f"a {number:04}\n" for number in range(60)))
    run("build", "raw", path, "--into", root, "--workers", 0, "--chunk-rows", 20, "--end-chunk", 0)
    path.write_text(path.read_text().replace("a 0003", "a 9999"))
    assert advised(run("refresh", root, "--workers", 0).out) == ["build", str(root)]
    assert run("build", root, "--workers", 0).out.count("next: ") == 1
    assert run("verify", root).code == 0


def test_growing_tells_what_is_new_from_what_the_cache_holds(root: Path) -> None:
    path = root.parent / "c.txt"
    path.write_text("c\n" * 7)
    shown = " ".join(run("grow", root, path, "--workers", 0).out.split())
    assert "rows 7 new, 87 in the cache" in shown


def test_a_cache_that_can_only_be_in_memory_is_not_advised() -> None:
    assert "--into" not in run("status", "memory://x", code=1).err
