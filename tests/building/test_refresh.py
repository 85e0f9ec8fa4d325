"""Refreshing: changed source files are planned anew, and only their chunks are made again."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.layer_recipes import LengthLayer, LineRecipe, flip, layered_cache, number_cache, write_lines

import forebay as fb
from forebay.building.refresh_cache import amend_plan
from forebay.cache.catalog import Snapshot
from forebay.cache.plan import load_plan
from forebay.errors import ForebayError, LayerIncomplete, SourceChanged
from forebay.format import layout
from forebay.sources.jsonl import LineSource

BASE = LineRecipe()


class VersionedRecipe(LineRecipe, frozen=True, kw_only=True):
    """The same recipe, which names a library that shapes its bytes."""

    def versions(self) -> dict[str, str]:
        return {"reader": "1"}


class VersionedLayer(LengthLayer, frozen=True, kw_only=True):
    """The same layer, made with another library."""

    def versions(self) -> dict[str, str]:
        return {"model": "2"}


def refresh(root: Path, raw: Path, **options):
    recipes = {"numbers": BASE, "length": LengthLayer()}
    return fb.refresh(root, source=fb.sources.lines(raw), recipes=recipes, workers=0, **options)


def numbers(root: Path, **options) -> list[int]:
    cache = fb.open_cache(root, layers=["numbers"], **options)
    return cache.read(range(len(cache)), ["number"])["number"].tolist()


def edit(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


def expected(raw: Path) -> list[int]:
    return [int(line) for path in sorted(raw.iterdir()) for line in path.read_bytes().splitlines()]


def assert_clean(root: Path, raw: Path) -> None:
    source = fb.sources.lines(raw)
    status = fb.status(root, source=source)
    assert (status.stale, status.complete, status.needs_source) == ({}, True, False)
    report = fb.verify(root, source=source, full=True)
    assert report.sound
    assert (report.stale, report.gaps) == ({}, {})
    assert fb.build(root, source, BASE, workers=0).made == 0
    assert fb.grow(root, source, recipe=BASE, workers=0).made == 0
    assert fb.refresh(root, source=source, recipes={"numbers": BASE}, workers=0).chunks == ()


def test_an_edited_line_of_the_same_length_remakes_its_chunk_and_no_other(tmp_path: Path) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    before = {path.name: path.read_bytes() for path in (root / "layers/numbers").iterdir()}
    edit(raw / "a.txt", b"000004\n", b"000777\n")
    with pytest.raises(SourceChanged, match=f"run `forebay refresh {root}`"):
        fb.build(root, fb.sources.lines(raw), BASE, workers=0)
    report = refresh(root, raw)
    assert list(report.changed) == ["a.txt"]
    assert len(report.chunks) == 1
    assert (report.rows_before, report.rows) == (20, 20)
    after = {path.name: path.read_bytes() for path in (root / "layers/numbers").iterdir()}
    assert {name: after[name] for name in before} == before  # what older generations list is left alone
    assert sorted(after.keys() - before.keys()) == [f"{report.chunks[0]:06d}.r1.safetensors"]
    assert numbers(root) == expected(raw)
    assert 777 not in numbers(root, generation=report.generation - 1)
    assert_clean(root, raw)


@pytest.mark.parametrize(
    ("old", "new"), [(b"000004\n", b"04\n"), (b"000004\n", b""), (b"000000\n", b"0\n1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n")]
)
def test_lines_that_become_shorter_longer_more_or_fewer_move_the_cuts_of_their_file(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    planned = len(load_plan(fb.LocalStore(root)))
    edit(raw / "a.txt", old, new)
    report = refresh(root, raw)
    assert report.rows == len(expected(raw))
    assert numbers(root) == expected(raw)
    assert len(load_plan(fb.LocalStore(root))) == planned
    assert_clean(root, raw)


def test_what_comes_before_the_change_is_not_made_again(tmp_path: Path) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    edit(raw / "a.txt", b"000009\n", b"9\n")
    report = refresh(root, raw)
    assert 0 not in report.chunks
    assert numbers(root) == expected(raw)


def test_a_cache_is_refreshed_again_and_again_and_grows_in_between(tmp_path: Path) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    edit(raw / "a.txt", b"000003\n", b"3\n")
    refresh(root, raw)
    with open(raw / "b.txt", "ab") as file:
        file.write(b"000020\n000021\n")
    write_lines(raw / "c.txt", 30, 4)
    assert fb.grow(root, fb.sources.lines(raw), recipe=BASE, workers=0).rows == 26
    edit(raw / "a.txt", b"3\n", b"000333\n")
    edit(raw / "b.txt", b"000021\n", b"000000021\n")
    report = refresh(root, raw)
    assert sorted(report.changed) == ["a.txt", "b.txt"]
    assert sorted(numbers(root)) == sorted(expected(raw))
    assert fb.verify(root, source=fb.sources.lines(raw), full=True).sound
    assert_clean(root, raw)


def test_a_compressed_file_is_read_anew_as_a_whole(tmp_path: Path) -> None:
    raw, root = tmp_path / "raw", tmp_path / "cache"
    raw.mkdir()
    lines = [b"%06d\n" % number for number in range(20)]
    (raw / "a.txt.gz").write_bytes(gzip.compress(b"".join(lines), mtime=0))
    fb.build(root, fb.sources.lines(raw), BASE, workers=0)
    (raw / "a.txt.gz").write_bytes(gzip.compress(b"".join(lines[5:]), mtime=0))
    refresh(root, raw)
    assert numbers(root) == list(range(5, 20))
    assert_clean(root, raw)


@pytest.mark.parametrize(("name", "stored"), [("a.txt", bytes), ("a.txt.gz", gzip.compress)])
def test_a_line_that_was_unfinished_and_went_on_is_made_again(tmp_path: Path, name: str, stored) -> None:
    raw, root = tmp_path / "raw", tmp_path / "cache"
    raw.mkdir()
    (raw / name).write_bytes(stored(b"000001\n000002\n00000"))
    fb.build(root, fb.sources.lines(raw), BASE, workers=0)
    with open(raw / name, "ab") as file:
        file.write(stored(b"3\n000004\n"))
    with pytest.raises(SourceChanged, match="forebay refresh"):
        fb.grow(root, fb.sources.lines(raw), recipe=BASE, workers=0)
    if name == "a.txt":  # a compressed one is not read by what only reports
        assert fb.status(root, source=fb.sources.lines(raw)).grown == ()
    refresh(root, raw)
    assert numbers(root) == [1, 2, 3, 4]
    assert_clean(root, raw)


def test_files_that_only_look_different_are_known_again_and_not_hashed_any_more(tmp_path: Path) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    for path in raw.iterdir():
        os.utime(path, ns=(1, 1))
    report = refresh(root, raw)
    assert (report.touched, report.chunks, report.changed) == (2, (), {})
    store = fb.LocalStore(root)
    assert all(fb.sources.lines(raw).look(path).same_identity(file) for path, file in load_plan(store).files.items())
    assert_clean(root, raw)


def test_after_a_refresh_a_touched_source_is_compared_by_its_times_alone(tmp_path: Path, monkeypatch) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    hashed: list[str] = []
    digest = LineSource.digest
    monkeypatch.setattr(
        LineSource, "digest", lambda self, file, *ends: hashed.append(file.path) or digest(self, file, *ends)
    )
    for path in raw.iterdir():
        os.utime(path, ns=(1, 1))
    refresh(root, raw)
    (root / layout.SEEN).unlink()
    hashed.clear()
    assert fb.build(root, fb.sources.lines(raw), BASE, workers=0).notes == ()
    assert fb.grow(root, fb.sources.lines(raw), recipe=BASE, workers=0).notes == ()
    assert fb.status(root, source=fb.sources.lines(raw)).stale == {}
    assert hashed == []
    flip(raw / "a.txt", 3, 1)
    os.utime(raw / "a.txt", ns=(1, 1))  # the recorded size and mtime, and other content
    with pytest.raises(SourceChanged, match=r"'a\.txt' has other content"):
        fb.build(root, fb.sources.lines(raw), BASE, workers=0)


def test_files_that_are_gone_are_kept_unless_they_are_dropped(tmp_path: Path) -> None:
    root, raw = number_cache(tmp_path), tmp_path / "raw"
    (raw / "b.txt").unlink()
    source = fb.sources.lines(raw)
    report = fb.refresh(root, source=source, recipes={"numbers": BASE}, workers=0)
    assert (report.chunks, report.rows) == ((), 20)
    assert "1 planned file(s) are gone (the first is 'b.txt')" in report.notes[-1]
    report = fb.refresh(root, source=source, recipes={"numbers": BASE}, workers=0, drop_missing=True)
    assert report.dropped == ("b.txt",)
    assert numbers(root) == expected(raw)
    assert_clean(root, raw)
    write_lines(raw / "b.txt", 50, 3)  # a file of that name is a new one now
    assert fb.grow(root, fb.sources.lines(raw), recipe=BASE, workers=0).rows == 13


def test_a_chunk_that_needs_a_file_that_is_gone_is_not_made_without_it(tmp_path: Path) -> None:
    raw, root = tmp_path / "raw", tmp_path / "cache"
    write_lines(raw / "a.txt", 0, 2)
    write_lines(raw / "b.txt", 2, 2)
    fb.build(root, fb.sources.lines(raw), BASE, workers=0)
    (raw / "a.txt").unlink()
    edit(raw / "b.txt", b"000003\n", b"000009\n")
    with pytest.raises(ForebayError, match=r"files that are gone: 'a.txt'.*--drop-missing"):
        refresh(root, raw)
    assert refresh(root, raw, drop_missing=True).rows == 2
    assert numbers(root) == [2, 9]


def test_further_layers_follow_the_rows_they_were_made_from(tmp_path: Path) -> None:
    root, raw = layered_cache(tmp_path), tmp_path / "raw"
    old = fb.open_cache(root)
    edit(raw / "a.txt", b"000004\n", b"000777\n")
    report = refresh(root, raw)
    assert report.layers == {"length": report.chunks}
    assert report.missing == {}
    cache = fb.open_cache(root)
    rows = cache.read(range(20), ["number", "times"])
    present = rows["number"] % 4 != 3
    np.testing.assert_array_equal(rows["times"][present], 2 * rows["number"][present])
    assert old.read([4], ["times"])["times"].tolist() == [8]  # who pinned the older generation reads what it listed
    assert fb.verify(root, source=fb.sources.lines(raw), full=True).sound


def test_a_layer_made_again_is_recorded_with_the_libraries_of_its_own_recipe(tmp_path: Path) -> None:
    root, raw = layered_cache(tmp_path), tmp_path / "raw"
    edit(raw / "a.txt", b"000004\n", b"000777\n")
    recipes = {"numbers": VersionedRecipe(), "length": VersionedLayer()}
    fb.refresh(root, source=fb.sources.lines(raw), recipes=recipes, workers=0)
    recorded = fb.open_cache(root).generation.versions
    assert [(each.get("reader"), each.get("model")) for each in recorded] == [(None, None), ("1", None), (None, "2")]


def test_a_layer_that_cannot_be_made_here_is_missing_and_named(tmp_path: Path) -> None:
    root, raw = layered_cache(tmp_path), tmp_path / "raw"
    edit(raw / "a.txt", b"000004\n", b"000777\n")
    report = fb.refresh(root, source=fb.sources.lines(raw), recipes={"numbers": BASE}, workers=0)
    assert "no recipe of kind 'length'" in report.missing["length"]
    status = {layer.layer: layer.missing for layer in fb.status(root, source=fb.sources.lines(raw)).layers}
    assert status == {"numbers": (), "length": report.chunks}
    with pytest.raises(LayerIncomplete):  # never the new rows with what was made from the old ones
        fb.open_cache(root).read([4], ["number", "times"])
    assert fb.build(root, None, LengthLayer(), workers=0).made == 1
    rows = fb.open_cache(root).read([4], ["number", "times"])
    assert (rows["number"].tolist(), rows["times"].tolist()) == ([777], [1554])


def test_a_refresh_that_was_interrupted_is_finished_by_a_build(tmp_path: Path) -> None:
    root, raw = layered_cache(tmp_path), tmp_path / "raw"
    edit(raw / "a.txt", b"000004\n", b"000777\n")

    source = fb.sources.lines(raw)
    amend_plan(Snapshot.take(fb.LocalStore(root)), source)  # as far as a refresh that was killed early came
    status = fb.status(root, source=source)
    assert not status.complete
    assert numbers(root) != expected(raw)
    assert fb.verify(root, source=source).gaps.keys() == {"numbers", "length"}
    assert fb.build(root, None, LengthLayer(), workers=0).made == 0  # not from rows that are about to go
    assert fb.build(root, source, BASE, workers=0).made == 1
    assert numbers(root) == expected(raw)
    assert refresh(root, raw).layers.keys() == {"length"}
    assert fb.status(root, source=source).complete


def test_an_edited_sidecar_and_image_refresh_their_rows(tmp_path: Path) -> None:
    raw, root = tmp_path / "photos", tmp_path / "cache"
    raw.mkdir()
    for number in range(3):
        Image.new("RGB", (8 + number, 8), "red").save(raw / f"{number}.png")
        (raw / f"{number}.json").write_text(json.dumps({"tags": ["cat"] if number else ["dog"]}))
    fb.build(root, fb.sources.images(raw), fb.ImageRecipe(size=8, tags=("cat", "dog")), workers=0)
    (raw / "1.json").write_text(json.dumps({"tags": ["dog"]}))
    Image.new("RGB", (12, 12), "blue").save(raw / "2.png")
    report = fb.refresh(root, workers=0)
    assert sorted(report.changed) == ["1.json", "2.png"]
    assert fb.verify(root, full=True).sound
    assert fb.status(root).complete
