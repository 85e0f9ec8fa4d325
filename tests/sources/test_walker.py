"""Every source finds the same files in a tree of folders, links and odd names: each real file once."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled

from forebay import sources
from forebay.errors import SourceUnreadable

NAMES = st.sampled_from(["a", "b.x", "ä ö", "[1]", "-", "line\nbreak", "B.X"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda names: os.path.join(*names))
KINDS = {
    ".jsonl": sources.jsonl,
    ".txt": sources.text,
    ".jpg": sources.images,
    ".parquet": sources.parquet,
    ".JSON.GZ": sources.jsonl,
    ".bin": sources.files,
}


def make_tree(root: Path, folders: list[str], files: list[str], links: list[tuple[str, str]], suffix: str) -> None:
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{file}{suffix}").write_bytes(b"x")
    for name, target in links:
        place = root / name
        if not os.path.lexists(place) and place.parent.is_dir():
            place.symlink_to(os.path.relpath(root / target, place.parent))


@settings(max_examples=scaled(120), deadline=None)
@given(
    folders=st.lists(PATHS, max_size=6),
    files=st.lists(PATHS, min_size=1, max_size=6),
    links=st.lists(st.tuples(PATHS, PATHS), max_size=6),
    suffix=st.sampled_from(sorted(KINDS)),
)
def test_each_real_file_of_any_tree_is_found_once_by_every_source(folders, files, links, suffix):
    with TemporaryDirectory() as folder:
        root = Path(folder, "data")
        make_tree(root, folders, files, links, suffix)
        for name, _ in links:  # links to nothing are another test's
            place = root / name
            if place.is_symlink() and not place.exists():
                place.unlink()
        real = {str(path.resolve()) for path in root.rglob(f"*{suffix}") if path.is_file()}
        for pattern in (root, root / "**", root / "**" / f"*{suffix}"):
            found = [file.path for file in KINDS[suffix](pattern).files()]
            assert found == sorted(found)
            assert sorted(os.path.realpath(root / path) for path in found) == sorted(real)


@pytest.mark.parametrize("pattern", ["data", "data/**/*.txt", "data/**", "data/*/**/*.txt", "data/*"])
def test_a_link_that_leads_back_gives_no_file_again(tmp_path, pattern):
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "one.txt").write_text("one")
    (tmp_path / "data" / "a" / "loop").symlink_to(tmp_path / "data" / "a")
    (tmp_path / "data" / "0").symlink_to(tmp_path / "data" / "a")
    (tmp_path / "data" / "a" / "again.txt").symlink_to("one.txt")
    assert [file.path for file in sources.text(tmp_path / pattern, root=str(tmp_path)).files()] == ["data/a/one.txt"]


def test_folders_that_link_to_each_other_many_times_over_are_passed_once(tmp_path):
    for level in range(30):
        (tmp_path / f"{level}").mkdir()
        for name in "xyz":
            (tmp_path / f"{level}" / name).symlink_to(tmp_path / f"{level + 1}")
    (tmp_path / "30").mkdir()
    (tmp_path / "30" / "deep.txt").write_text("deep")
    for pattern in ("0", "0/**/*.txt", "0/**/x/**/deep.txt"):
        (found,) = sources.text(tmp_path / pattern).files()
        assert os.path.basename(found.path) == "deep.txt"


def test_a_file_is_named_by_its_own_path_and_else_by_the_first_link(tmp_path):
    for folder in ("data", "far"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "z.txt").write_text(folder)
    (tmp_path / "data" / "a.txt").symlink_to("z.txt")
    (tmp_path / "data" / "c.txt").symlink_to(tmp_path / "far" / "z.txt")
    (tmp_path / "data" / "b").symlink_to(tmp_path / "far")
    assert [file.path for file in sources.text(tmp_path / "data").files()] == ["b/z.txt", "z.txt"]


@pytest.mark.parametrize("hidden", [".a.txt", ".git/a.txt", "__pycache__/a.txt", "sub/.a.txt"])
def test_hidden_names_are_left_out_unless_they_are_named(tmp_path, hidden):
    for name in ("seen.txt", hidden):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a")
    for pattern in (tmp_path, tmp_path / "**", tmp_path / "**" / "*.txt"):
        assert [file.path for file in sources.text(pattern).files()] == ["seen.txt"]
    assert len(sources.text(tmp_path / hidden).files()) == 1


def test_suffixes_compare_in_any_case(tmp_path):
    for name in ("A.JSONL", "b.Json.GZ", "c.txt", "D.TXT.Zst", "e.PARQUET", "f.JpG"):
        (tmp_path / name).write_bytes(b"")
    assert [file.path for file in sources.jsonl(tmp_path).files()] == ["A.JSONL", "b.Json.GZ"]
    assert [file.path for file in sources.text(tmp_path).files()] == ["D.TXT.Zst", "c.txt"]
    assert [file.stream for file in sources.text(tmp_path).files()] == [True, False]
    assert [file.path for file in sources.parquet(tmp_path).files()] == ["e.PARQUET"]
    assert [file.path for file in sources.images(tmp_path).files()] == ["f.JpG"]


def test_what_is_left_out_is_counted_by_suffix(tmp_path):
    names = ("a.jsonl", "b.jsonl.br", "c.csv", "d.csv", "e.csv.gz", "LICENSE", ".hidden", "cache/x.safetensors")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "again.csv").symlink_to("c.csv")
    expected = {".br": 1, ".csv": 2, ".csv.gz": 1, "no suffix": 1}
    for pattern in (tmp_path, tmp_path / "*", tmp_path / "**"):
        assert sources.jsonl(pattern).listing(str(tmp_path / "cache")).left_out == expected
    assert sources.jsonl(tmp_path / "*.jsonl").listing().left_out == {}
    assert sources.jsonl(tmp_path / "*", tmp_path / "c.csv").listing(str(tmp_path / "cache")).left_out[".csv"] == 1
    assert sources.lines(tmp_path).listing().left_out == {}


def test_sidecars_of_images_are_not_left_out(tmp_path):
    for name in ("a.jpg", "a.json", "b.PNG", "b.txt", "c.webp", "c.webp.json", "alone.txt", "d.heic", "list.jsonl"):
        (tmp_path / name).write_bytes(b"")
    for pattern in (tmp_path, tmp_path / "*"):
        assert sources.images(pattern).listing().left_out == {".txt": 1, ".heic": 1, ".jsonl": 1}


@pytest.mark.parametrize("name", ["loop.txt", "nothing.txt"])
def test_a_link_that_leads_nowhere_is_listed_and_an_error_that_names_it_when_it_is_cut(tmp_path, name):
    (tmp_path / "loop.txt" if name == "loop.txt" else tmp_path / "x").symlink_to("loop.txt")
    (tmp_path / "nothing.txt" if name == "nothing.txt" else tmp_path / "y").symlink_to("nowhere")
    source = sources.text(tmp_path)
    (file,) = source.files()
    with pytest.raises(SourceUnreadable, match=name):
        list(source.cuts(file, 0, 100, 100))


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give up the right to read")
@pytest.mark.parametrize("pattern", ["", "**", "**/*.txt", "*", "*/*.txt"])
def test_a_folder_without_permission_is_an_error_for_folders_and_globs(pattern):
    with TemporaryDirectory() as folder:  # pytest's own folders are for their owner alone
        os.chmod(folder, 0o755)
        os.makedirs(f"{folder}/shut")
        Path(folder, "open.txt").write_text("a")
        Path(folder, "shut", "a.txt").write_text("a")
        os.chmod(f"{folder}/shut", 0)
        program = (
            "import os, sys; from forebay import sources\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "sources.text(sys.argv[1]).files()"
        )
        path = os.path.join(folder, pattern)
        ran = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=False)
        assert "PermissionError" in ran.stderr
        assert "shut" in ran.stderr
