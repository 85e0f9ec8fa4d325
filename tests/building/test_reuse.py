"""A new cache that reuses the unchanged chunks of an old one."""

import contextlib
import os
import shutil

import pytest
from tests.helpers.builders import chunk_digests
from tests.helpers.dedup_cases import DistinctRecipe
from tests.helpers.obedient_recipes import LengthLayer

import forebay as fb
from forebay.cache.state import Index
from forebay.errors import ForebayError, KeyRefused, RecipeMismatch, SourceChanged
from forebay.format.tensors import VARIABLE
from forebay.store import LocalStore

NAMES = "abcdef"
RECIPE = fb.RawRecipe(chunk_bytes=100)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in NAMES:
        write(folder, name)
    return folder


def write(folder, name, text="line", count=20):
    (folder / f"{name}.txt").write_text("".join(f"{name} {text} {number:03d}\n" for number in range(count)))


def source_of(folder):
    return fb.sources.lines(str(folder / "*.txt"))


def build(root, data, recipe=RECIPE, **options):
    return fb.build(root, source_of(data), recipe, workers=0, **options)


def lines(root):
    cache = fb.open_cache(root)
    return sorted(bytes(cache[row]["data"]).decode() for row in range(len(cache)))


def expected_lines(data):
    return sorted(line for file in data.glob("*.txt") for line in file.read_text().splitlines())


def files_of(root):
    return {path.name: path for path in root.glob("layers/*/0*.safetensors")}


def test_reuse_links_unchanged_chunks_and_makes_the_others(tmp_path, data):
    build(tmp_path / "old", data)
    write(data, "c", "edited", 25)
    write(data, "g")
    (data / "e.txt").unlink()
    report = build(tmp_path / "new", data, reuse=tmp_path / "old")
    assert lines(tmp_path / "new") == expected_lines(data)
    old, new = files_of(tmp_path / "old"), files_of(tmp_path / "new")
    linked = [name for name, path in old.items() if path.samefile(new[name])]
    assert len(linked) == report.present > len(old) / 2
    assert report.built == len(new) - len(linked)
    assert fb.verify(tmp_path / "new", full=True).sound
    assert fb.status(tmp_path / "new", source=source_of(data)).complete
    assert build(tmp_path / "new", data).built == 0, "the same command without the option finds nothing to do"


def test_reuse_of_an_unchanged_source_makes_nothing(tmp_path, data):
    build(tmp_path / "old", data)
    report = build(tmp_path / "new", data, reuse=tmp_path / "old")
    assert report.built == 0
    assert chunk_digests(tmp_path / "new", "raw") == chunk_digests(tmp_path / "old", "raw")


def test_reuse_with_copy_shares_no_file_with_the_old_cache(tmp_path, data):
    build(tmp_path / "old", data)
    build(tmp_path / "new", data, reuse=tmp_path / "old", copy=True)
    old, new = files_of(tmp_path / "old"), files_of(tmp_path / "new")
    assert not any(path.samefile(new[name]) for name, path in old.items())
    shutil.rmtree(tmp_path / "old")
    assert lines(tmp_path / "new") == expected_lines(data)


def test_reuse_keeps_chunk_numbers_and_a_slice_without_files_has_no_rows(tmp_path, data):
    build(tmp_path / "old", data)
    for name in NAMES[1:]:
        write(data, name, "other")
    build(tmp_path / "new", data, reuse=tmp_path / "old")
    assert lines(tmp_path / "new") == expected_lines(data)
    table = Index.take(LocalStore(tmp_path / "new")).table("raw")
    assert table.chunks.tolist() == list(range(len(table)))
    assert 0 in table.rows.tolist()


def test_reuse_does_not_take_damaged_chunks(tmp_path, data):
    build(tmp_path / "old", data)
    damaged = files_of(tmp_path / "old")["000002.safetensors"]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    files_of(tmp_path / "old")["000003.safetensors"].unlink()
    report = build(tmp_path / "new", data, reuse=tmp_path / "old")
    assert report.built == 2
    assert lines(tmp_path / "new") == expected_lines(data)
    assert fb.verify(tmp_path / "new").sound


def test_reuse_of_a_grown_file_keeps_its_planned_part(tmp_path, data):
    build(tmp_path / "old", data)
    write(data, "f", count=60)
    report = build(tmp_path / "new", data, reuse=tmp_path / "old")
    assert report.present == len(files_of(tmp_path / "old"))
    assert lines(tmp_path / "new") == expected_lines(data)


def test_reuse_after_update_copies_every_segment(tmp_path, data):
    build(tmp_path / "old", data)
    write(data, "g")
    fb.update(tmp_path / "old", source_of(data), workers=0)
    write(data, "g", "edited")
    build(tmp_path / "new", data, reuse=tmp_path / "old")
    assert lines(tmp_path / "new") == expected_lines(data)
    assert len(Index.take(LocalStore(tmp_path / "new")).plan.segments) == 3


def test_reuse_takes_layers_whose_base_chunks_are_reused(tmp_path, data):
    build(tmp_path / "old", data)
    fb.build(tmp_path / "old", None, LengthLayer(every=1), layer="length", workers=0)
    write(data, "c", "edited")
    build(tmp_path / "new", data, reuse=tmp_path / "old")
    index = Index.take(LocalStore(tmp_path / "new"))
    reused = set(index.table("length").chunks.tolist())
    assert reused < set(index.table("raw").chunks.tolist())
    fb.build(tmp_path / "new", None, LengthLayer(every=1), layer="length", workers=0)
    state = fb.status(tmp_path / "new")
    assert state.complete
    assert fb.verify(tmp_path / "new", full=True).sound


def test_reuse_that_was_killed_is_finished_by_the_same_command(tmp_path, data, monkeypatch):
    build(tmp_path / "old", data)
    write(data, "c", "edited")

    class Killed(BaseException):
        pass

    class DyingStore(LocalStore):
        left = 0

        def create(self, key, data, **options):
            if not key.startswith(("claims/", "builders/")):
                DyingStore.left -= 1
                if DyingStore.left < 0:
                    raise Killed
            return super().create(key, data, **options)

    for left in range(8):
        root = tmp_path / f"new-{left}"
        DyingStore.left = left
        with contextlib.suppress(Killed):
            build(DyingStore(root), data, reuse=tmp_path / "old")
        build(root, data, reuse=tmp_path / "old")
        assert lines(root) == expected_lines(data)
        assert fb.verify(root).sound


def test_reuse_with_a_key_lists_chunks_under_that_key(tmp_path, data, monkeypatch):
    monkeypatch.setenv(VARIABLE, "a secret of sixteen bytes or more")
    build(tmp_path / "old", data)
    write(data, "c", "edited")
    report = build(tmp_path / "new", data, reuse=tmp_path / "old")
    assert report.present > 0
    assert lines(tmp_path / "new") == expected_lines(data)
    monkeypatch.setenv(VARIABLE, "another secret of sixteen bytes or more")
    with pytest.raises(KeyRefused):
        build(tmp_path / "third", data, reuse=tmp_path / "old")
    assert not os.path.exists(tmp_path / "third" / "cache.json")


def test_reuse_of_another_recipe_is_rejected(tmp_path, data):
    build(tmp_path / "old", data)
    with pytest.raises(RecipeMismatch, match="leave out --reuse"):
        build(tmp_path / "new", data, fb.RawRecipe(chunk_bytes=200), reuse=tmp_path / "old")
    assert not (tmp_path / "new" / "cache.json").exists()


def test_reuse_into_the_cache_itself_or_a_copy_is_rejected(tmp_path, data):
    build(tmp_path / "old", data)
    fb.copy(tmp_path / "old", tmp_path / "copy")
    for root in (tmp_path / "old", tmp_path / "copy"):
        with pytest.raises(ForebayError, match="itself or a copy of it"):
            build(root, data, reuse=tmp_path / "old")


def test_reuse_of_a_deduplicated_cache_is_rejected(tmp_path, data):
    recipe = DistinctRecipe(chunk_bytes=100)
    build(tmp_path / "old", data, recipe)
    with pytest.raises(ForebayError, match="duplicates"):
        build(tmp_path / "new", data, recipe, reuse=tmp_path / "old")


def test_an_edited_file_is_an_error_with_the_command_that_reuses(tmp_path, data):
    build(tmp_path / "old", data)
    write(data, "c", "edited")
    with pytest.raises(SourceChanged, match=r"--into NEW --reuse"):
        build(tmp_path / "old", data)
