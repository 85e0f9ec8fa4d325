"""Images from folders with sidecars, from manifests, from Parquet."""

import gzip
import io
import json
import os
import pickle
import stat
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.sources.written import read_all, write

import forebay as fb
from forebay import sources
from forebay.errors import SourceChanged, SourceNotFound, SourceUnreadable
from forebay.source import Annotated, Failure, Part, Sample, Source, samples_of
from forebay.sources import image_files, manifests
from forebay.sources.paths import look
from forebay.testing import SourceContract

RECIPE = fb.ImageRecipe(size=32)


def png(shade: int = 0, width: int = 8, height: int = 6) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), shade, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def put(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def given(source: Source) -> dict[str, Any]:
    """What a source gives, by id: the metadata of a sample, the reason of a failure."""
    return {
        one.id if isinstance(one, Sample) else one.sample: one.data.metadata if isinstance(one, Sample) else one.reason
        for one in read_all(source)
    }


def ids_in(cache: fb.Cache) -> list[str]:
    return [bytes(cache[row]["id"]).decode("utf-8", "surrogateescape") for row in range(len(cache))]


class TestImages(SourceContract):
    hashes = True
    suffix = ".jpg"
    test_bad_content_is_a_failure_with_an_id_and_a_reason_whatever_the_cuts = None

    def open_source(self, folder: Path) -> Source:
        return sources.images(folder)

    def samples_of(self, content: bytes) -> list[Any]:
        return [Annotated(content, {})]

    def test_a_file_that_grew_is_appended(self, folder: Path) -> None:
        """One file is one sample: what grew has changed, and there is nothing to append."""
        source = self.write(folder, {"a": b"12345"})
        (planned,) = source.files()
        (folder / "a.jpg").write_bytes(b"123456")
        assert list(source.cuts(source.files()[0], 1, 1, 1)) == []
        with pytest.raises(SourceChanged, match=r"'a\.jpg' has 6 bytes, 5 were planned"):
            list(samples_of(source, Part(planned, 0, 1)))


def test_a_folder_gives_all_images_below_it_by_name_and_nothing_else(tmp_path):
    names = ["b.JPG", "a.png", "deep/er/c.WebP", "deep/d.tiff", "e.Gif", "f.avif", "g.jpeg", "h.BMP"]
    put(
        tmp_path, {**dict.fromkeys(names, b"."), "notes.txt": "", ".hidden.png": b"", ".git/a.png": b"", "x.json": "{}"}
    )
    assert [file.path for file in sources.images(tmp_path).files()] == sorted(names)


def test_folder_without_images_says_what_it_has(tmp_path):
    put(tmp_path, {"odd/a.heic": b""})
    (tmp_path / "empty").mkdir()
    for name, problem in {
        "nowhere": "no file matches",
        "empty": "the folder has no files\nhint: check the path",
        "odd": r"no file there ends in.*\.webp",
    }.items():
        with pytest.raises(SourceNotFound, match=f"{name}': {problem}"):
            sources.images(tmp_path / name).files()


def test_a_sidecar_says_what_its_image_is_and_json_comes_before_text(tmp_path):
    put(
        tmp_path,
        {
            **dict.fromkeys(["a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg", "sub/a.jpg"], b"."),
            "a.json": '{"tags": ["cat"], "rating": 0.5, "more": {"deep": [1, null]}}',
            "b.jpg.json": "\ufeff{}",
            "b.json": '{"tags": ["not this one"]}',
            "c.txt": "cat, looking_left ,\nein Hund\r\n",
            "d.json": '{"n": 1}',
            "d.txt": "cat",
        },
    )
    source = sources.images(tmp_path)
    assert given(source) == {
        "a.jpg": {"tags": ["cat"], "rating": 0.5, "more": {"deep": [1, None]}},
        "b.jpg": {},
        "c.jpg": {"tags": ["cat", "looking_left", "ein Hund"]},
        "d.jpg": {"n": 1},
        "e.jpg": {},
        "sub/a.jpg": {},
    }
    assert list(source.annotations(source.files())) == list(given(source).values())


@pytest.mark.parametrize(
    "said",
    [b"", b"{tags: 1}", b'["cat"]', b'{"a": NaN}', b'{"a": "\xff"}', rb'{"a": "\ud800"}', b'{"a": ' + b"[" * 100_000],
    ids=["empty", "no json", "list", "nan", "no utf-8", "surrogate", "deep"],
)
def test_a_sidecar_that_is_no_json_object_fails_its_image_only(tmp_path, said):
    put(tmp_path, {"a.jpg": b".", "a.json": said, "b.jpg": b"."})
    (failure, sample) = read_all(sources.images(tmp_path))
    assert isinstance(failure, Failure)
    assert (failure.sample, failure.reason) == ("a.jpg", "bad-sidecar")
    assert "'a.json'" in failure.detail
    assert isinstance(sample, Sample)


def test_how_deep_a_stack_is_decides_nothing(tmp_path):
    """Somewhat less than Python's limit can be read from here and not from inside a deep program."""
    inner = "[" * 900 + "]" * 900
    put(tmp_path, {"a.png": png(), "a.json": f'{{"a": {inner}}}', "b.png": png()})
    put(tmp_path, {"list.jsonl": f'{{"path": "a.png", "a": {inner}}}\n{{"path": "b.png"}}\n'})
    for source in (sources.images(tmp_path), sources.image_manifest(tmp_path / "list.jsonl")):
        failure, sample = read_all(source)
        assert "more than 64 deep" in failure.detail
        manifests.open_lines.cache_clear()
        assert called_deep_inside(300, lambda source=source: read_all(source)) == [failure, sample]


def called_deep_inside(levels: int, function: Any) -> Any:
    return called_deep_inside(levels - 1, function) if levels else function()


def test_films_and_novels_are_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "MOST_BYTES", 50)
    put(tmp_path, {"film.jpg": b"." * 101, "fits.jpg": b"." * 100, "fits.txt": "x" * 50})
    put(tmp_path, {"novel.jpg": b".", "novel.txt": "x" * 51})
    film, fits, novel = read_all(sources.images(tmp_path, max_sample_bytes=100))
    assert (film.reason, film.detail) == ("too-large", "it has 101 bytes, more than max_sample_bytes 100")
    assert fits.data.metadata == {"tags": ["x" * 50]}
    assert (novel.reason, novel.detail) == ("bad-sidecar", "'novel.txt' is no sidecar: it has more than 50 bytes")


def test_links_and_things_that_are_no_files_are_failures_with_a_reason(tmp_path):
    put(tmp_path, {"good.png": png(), "sub/inside.png": png(), "said.png": png(), "pipe-said.png": png()})
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "nothing.png").symlink_to("nowhere.png")
    (tmp_path / "linked.png").symlink_to("good.png")
    (tmp_path / "said.json").symlink_to("nowhere.json")
    os.mkfifo(tmp_path / "pipe.png")
    os.mkfifo(tmp_path / "pipe-said.json")
    (tmp_path / "sub" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "sub" / "round").symlink_to(tmp_path / "sub", target_is_directory=True)
    expected = {
        "good.png": {},
        "loop.png": "symlink-loop",
        "nothing.png": "not-found",
        "pipe-said.png": "bad-sidecar",
        "pipe.png": "not-a-file",
        "said.png": "bad-sidecar",
        "sub/inside.png": {},
    }
    for pattern in (tmp_path, tmp_path / "**" / "*.png", tmp_path / "**"):
        source = sources.images(pattern)
        assert given(source) == expected
        assert [source.look(file.path) for file in source.files()] == source.files()
        assert len({source.digest(file, 0, 1) for file in source.files()}) > 4
    report = fb.build(tmp_path / "cache", sources.images(tmp_path), RECIPE, workers=0)
    assert (report.rows, report.failures) == (2, 5)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give up the right to read")
def test_a_file_without_permission_is_a_failure_and_so_is_its_sidecar():
    with TemporaryDirectory() as folder:  # pytest's own folders are for their owner alone
        data = put(Path(folder), {"a.png": png(), "b.png": png(), "b.json": "{}", "c.png": png()})
        data.chmod(0o755)
        for name in ("a.png", "b.json"):
            (data / name).chmod(0)
        source = sources.images(data)
        with unprivileged():
            assert given(source) == {"a.png": "unreadable", "b.png": "bad-sidecar", "c.png": {}}
            digests = [source.digest(file, 0, 1) for file in source.files()]
        allowed = [source.digest(file, 0, 1) for file in source.files()]
        assert [before == after for before, after in zip(digests, allowed, strict=True)] == [False, False, True]


class unprivileged:
    """For as long as it lasts, this process may read what everybody may."""

    def __enter__(self) -> None:
        os.seteuid(65534)

    def __exit__(self, *_: object) -> None:
        os.seteuid(0)


def test_a_name_of_any_bytes_comes_back_from_the_cache(tmp_path):
    odd = ["with space", "li\nne", "猫", "\u202egnp", "\udcff\udcfe", "star*[x]?", "$HOME", "a..b"]
    names = ["plain", *odd, "x" * 240]
    put(tmp_path / "data", {f"{name}.png": png() for name in names})
    put(tmp_path / "data", {f"{name}.json": json.dumps({"tags": ["t"]}) for name in names})
    fb.build(tmp_path / "cache", sources.images(tmp_path / "data"), RECIPE, workers=0)
    cache = fb.open_cache(tmp_path / "cache")
    assert ids_in(cache) == sorted(f"{name}.png" for name in names)
    assert cache[0]["tags"].tolist() == [0]


def test_new_files_are_appended_with_the_tags_of_the_cache(tmp_path):
    data = put(tmp_path / "data", {"b.png": png(), "b.json": '{"tags": ["cat", "dog"]}'})
    fb.build(tmp_path / "cache", sources.images(data), RECIPE, workers=0)
    put(data, {"a.png": png(), "a.json": '{"tags": ["bird", "dog"]}', "sub/c.png": png()})
    fb.update(tmp_path / "cache", sources.images(data), workers=0)
    cache = fb.open_cache(tmp_path / "cache")
    assert ids_in(cache) == ["b.png", "a.png", "sub/c.png"]
    assert cache.recipe("images").fields["tags"] == ["cat", "dog"]
    assert [cache[row]["tags"].tolist() for row in range(3)] == [[0, 1], [1], []]
    (layer,) = fb.info(tmp_path / "cache").layers
    assert layer.statistics["unknown_tags"] == 1


def test_a_changed_sidecar_is_named_and_one_that_was_only_touched_is_not(tmp_path):
    data = put(tmp_path / "data", {"a.png": png(), "a.json": '{"tags": ["cat"]}', "b.png": png()})
    fb.build(tmp_path / "cache", sources.images(data), RECIPE, workers=0)
    os.utime(data / "a.json", ns=(1, 1))
    fb.build(tmp_path / "cache", sources.images(data), RECIPE, workers=0)
    put(data, {"a.json": '{"tags": ["dog"]}'})
    with pytest.raises(SourceChanged, match=r"'a\.json' was edited, added or removed"):
        fb.build(tmp_path / "cache", sources.images(data), RECIPE, workers=0)
    with pytest.raises(SourceChanged, match=r"'a\.json' was edited, added or removed"):
        fb.update(tmp_path / "cache", sources.images(data), workers=0)
    os.rename(data / "a.json", data / "a.txt")
    put(data, {"a.txt": '{"tags": ["cat"]}'})
    with pytest.raises(SourceChanged, match=r"'a\.txt' was edited, added or removed"):
        fb.build(tmp_path / "cache", sources.images(data), RECIPE, workers=0)
    (data / "a.txt").unlink()
    put(data, {"a.json": '{"tags": ["cat"]}', "b.txt": "new"})
    with pytest.raises(SourceChanged, match=r"'b\.txt' was edited, added or removed"):
        fb.build(tmp_path / "cache", sources.images(data), RECIPE, workers=0)


def test_a_row_is_not_made_with_other_sidecars_than_were_planned(tmp_path):
    """Else what came since is not in the row, or what is changed back later is in it unnoticed."""
    data = put(tmp_path / "data", {"0.png": png(0), "1.png": png(1), "1.json": "{}"})
    recipe = fb.ImageRecipe(size=32, chunk_bytes=1, tags=())
    fb.build(tmp_path / "cache", sources.images(data), recipe, workers=0, start_chunk=0, end_chunk=0)
    (data / "1.json").rename(data / "1.txt")
    with pytest.raises(SourceChanged, match=r"'1\.png' has '1\.txt', but '1\.json' was planned"):
        fb.build(tmp_path / "cache", sources.images(data), recipe, workers=0)
    (data / "1.txt").unlink()
    with pytest.raises(SourceChanged, match=r"'1\.png' has no sidecar, but '1\.json' was planned"):
        fb.build(tmp_path / "cache", sources.images(data), recipe, workers=0)
    put(data, {"1.json": "{}"})
    assert fb.build(tmp_path / "cache", sources.images(data), recipe, workers=0).rows == 2


def test_a_manifest_gives_its_images_in_its_order_with_all_that_it_says(tmp_path):
    put(tmp_path, {"cats/a.png": png(), "b.png": png()})
    lines = '{"path": "cats/a.png", "tags": ["cat"], "n": 1}\n\n{"path": "./b.png"}'
    for name in ("list.jsonl", "list.jsonl.gz", "list.jsonl.zst"):
        source = sources.image_manifest(write(tmp_path, name, lines.encode()))
        assert list(given(source).items()) == [("cats/a.png", {"tags": ["cat"], "n": 1}), ("b.png", {})]
        assert list(source.annotations(source.files())) == list(given(source).values())
        assert [source.look(file.path) for file in source.files()] == source.files()
        assert pickle.loads(pickle.dumps(source)) == source
        assert fb.sources.ImageManifestSource.from_description(json.loads(json.dumps(source.describe()))) == source


def test_a_manifest_may_lie_elsewhere_and_name_its_field(tmp_path):
    put(tmp_path / "pictures", {"a.png": png()})
    manifest = write(tmp_path, "list.jsonl", b'\xef\xbb\xbf{"file": "a.png"}\n')
    source = sources.image_manifest(manifest, image="file", root=tmp_path / "pictures")
    assert given(source) == {"a.png": {}}


def test_lines_without_an_image_are_failures_and_nothing_outside_the_root_is_opened(tmp_path):
    put(tmp_path, {"secret.png": png(), "data/a.png": png(), "data/sub/b.png": png(), "data/c.txt": "."})
    os.mkfifo(tmp_path / "data" / "pipe.png")
    (tmp_path / "data" / "loop.png").symlink_to("loop.png")
    wrong = {
        '{"path": "../secret.png"}': "outside-root",
        '{"path": "sub/../../secret.png"}': "outside-root",
        json.dumps({"path": str(tmp_path / "secret.png")}): "outside-root",
        json.dumps({"path": str(tmp_path / "data" / "a.png")}): "duplicate",
        '{"path": "."}': "outside-root",
        '{"path": "nowhere.png"}': "not-found",
        '{"path": "c.txt/a.png"}': "not-found",
        json.dumps({"path": "x" * 5000}): "not-found",
        '{"path": "sub"}': "not-a-file",
        '{"path": "pipe.png"}': "not-a-file",
        '{"path": "loop.png"}': "symlink-loop",
        '{"path": ""}': "no-path",
        '{"path": "a\\u0000b.png"}': "no-path",
        '{"path": 7}': "no-path",
        '{"tags": []}': "no-path",
        "[1]": "bad-json",
        '{"path": ': "bad-json",
        '{"path": "\\ud800"}': "bad-json",
        '{"path": "sub/../a.png"}': "duplicate",
    }
    manifest = put(tmp_path / "data", {"list.jsonl": "\n".join(['{"path": "a.png"}', *wrong])}) / "list.jsonl"
    source = sources.image_manifest(manifest)
    first, *failures = read_all(source)
    assert isinstance(first, Sample)
    assert [one.reason for one in failures] == list(wrong.values())
    for number, one in enumerate(failures, 2):
        assert one.sample.startswith("list.jsonl@")
        assert f"line {number}: " in one.detail
    assert [source.look(file.path) for file in source.files()] == source.files()


@pytest.mark.slow
def test_a_manifest_of_nothing_but_mistakes_is_gone_through_at_once(tmp_path):
    """Lines held against each other one by one would take minutes here, and days for millions."""
    many = 20_000
    put(tmp_path, {"other.jsonl": '{"file": "a.png"}\n' * many, "same.jsonl": '{"path": "a.png"}\n' * many})
    put(tmp_path, {"a.png": png()})
    other, same = (sources.image_manifest(tmp_path / name) for name in ("other.jsonl", "same.jsonl"))
    assert {file.etag.partition("!")[2] for file in other.files()} == {"no-path"}
    assert [file.path for file in same.files()] == ["a.png", *(f"same.jsonl@{18 * line}" for line in range(1, many))]
    (failure,) = other.read(Part(other.files()[0], 0, 1))
    assert failure.detail == "line 1: there is no 'path' but 'file'; say which it is (--image, image=)"


def test_lines_are_counted_as_an_editor_counts_them_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "LONGEST_LINE", 64)
    long = json.dumps({"path": "a.png", "said": "x" * 64})
    put(tmp_path, {"a.png": png(), "list.jsonl": f'\n  \r\n{{"path": 7}}\n{long}\n{{"path": "a.png"}}\n\n'})
    number, bound, sample = read_all(sources.image_manifest(tmp_path / "list.jsonl"))
    assert number.detail.startswith("line 3: the field 'path' is 7")
    assert (bound.reason, bound.detail) == ("bad-json", f"line 4: it has {len(long)} bytes, more than 64")
    assert isinstance(sample, Sample)


def test_a_manifest_that_is_cut_short_under_a_reader_is_an_error_and_no_crash(tmp_path):
    put(tmp_path, {"a.png": png(), "list.jsonl": '{"path": "a.png"}\n' * 5000})
    status = look(str(tmp_path), "list.jsonl")
    lines = manifests.open_lines(str(tmp_path), str(tmp_path / "list.jsonl"), status, "path")
    os.truncate(tmp_path / "list.jsonl", 0)
    with pytest.raises(SourceChanged, match=r"'list\.jsonl' was truncated"):
        list(lines.named())


def test_an_image_is_read_with_the_line_it_was_planned_with_or_not_at_all(tmp_path):
    """Else a line that is changed before its chunk is made, and changed back after, leaves a stale row unnoticed."""
    old, new = ('{"path": "a.png"}\n{"path": "b.png", "n": N}\n'.replace("N", number) for number in "12")
    data = put(tmp_path / "data", {"a.png": png(0, 32, 32), "b.png": png(1, 32, 32), "list.jsonl": old})
    source, recipe = sources.image_manifest(data / "list.jsonl"), fb.ImageRecipe(size=32, chunk_bytes=1)
    fb.build(tmp_path / "cache", source, recipe, workers=0, start_chunk=0, end_chunk=0)
    put(data, {"list.jsonl": new})
    with pytest.raises(SourceChanged, match=r"'b\.png' has another line in 'list\.jsonl'"):
        fb.build(tmp_path / "cache", source, recipe, workers=0)
    put(data, {"list.jsonl": old})
    assert fb.build(tmp_path / "cache", source, recipe, workers=0).rows == 2


def test_a_manifest_grows_by_lines_and_by_images_that_appear(tmp_path):
    data = put(tmp_path / "data", {"a.png": png(), "list.jsonl": '{"path": "a.png"}\n{"path": "late.png"}\n'})
    source = sources.image_manifest(data / "list.jsonl")
    fb.build(tmp_path / "cache", source, RECIPE, workers=0)
    put(data, {"late.png": png(), "b.png": png()})
    with open(data / "list.jsonl", "a") as file:
        file.write('{"path": "b.png", "tags": ["cat"]}\n')
    report = fb.update(tmp_path / "cache", source, workers=0)
    assert ids_in(fb.open_cache(tmp_path / "cache")) == ["a.png", "late.png", "b.png"]
    assert report.failures == 1
    (data / "list.jsonl").write_text((data / "list.jsonl").read_text().replace('"cat"', '"dog"'))
    with pytest.raises(SourceChanged, match=r"'list\.jsonl@39' was edited, added or removed"):
        fb.update(tmp_path / "cache", source, workers=0)


def table(rows: int, **columns: pa.Array) -> pa.Table:
    return pa.table({"image": pa.array([png(row) for row in range(rows)], pa.binary()), **columns})


def stored(folder: Path, content: pa.Table, name: str = "a.parquet", rows_per_group: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    pq.write_table(content, folder / name, row_group_size=rows_per_group)
    return folder


def test_parquet_gives_a_sample_for_every_row_with_the_other_columns(tmp_path):
    said = {
        "tags": pa.array([["cat"], [], None], pa.list_(pa.string())),
        "rating": pa.array([0.5, float("nan"), None]),
        "taken": pa.array([1, 2, 3], pa.timestamp("s")),
        "facts": pa.array([{"n": 1}, {"n": 2}, None]),
    }
    source = sources.parquet_images(stored(tmp_path / "data", table(3, **said)))
    assert given(source) == {
        "a.parquet#0": {"tags": ["cat"], "rating": 0.5, "facts": {"n": 1}},
        "a.parquet#1": {"tags": [], "rating": None, "facts": {"n": 2}},
        "a.parquet#2": {"tags": None, "rating": None, "facts": None},
    }
    assert list(source.annotations(source.files())) == list(given(source).values())
    assert [one.data.content for one in read_all(source)] == [png(row) for row in range(3)]


def test_parquet_as_hugging_face_writes_images_and_rows_without_any(tmp_path):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [{"bytes": png(), "path": "a.png"}, {"bytes": None, "path": "b.png"}, None]
    source = sources.parquet_images(stored(tmp_path / "data", pa.table({"image": pa.array(values, kind)})))
    assert given(source) == {"a.parquet#0": {}, "a.parquet#1": "null", "a.parquet#2": "null"}


def test_a_change_in_any_column_of_parquet_is_another_digest(tmp_path):
    source = sources.parquet_images(stored(tmp_path / "data", table(3, n=pa.array([1, 2, 3]))))
    (before,) = source.files()
    digest = source.digest(before, 0, 3)
    stored(tmp_path / "data", table(3, n=pa.array([1, 2, 4])))
    assert source.digest(source.files()[0], 0, 3) != digest


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (pa.table({"picture": [b"."]}), "has no column 'image'.*'picture'.*--image"),
        (pa.table({"image": ["text"]}), "not bytes"),
        (pa.table([[b"."], [1], [2]], ["image", "n", "n"]), "has 2 columns 'n'.*rename"),
    ],
)
def test_parquet_without_images_says_what_it_has(tmp_path, table, problem):
    source = sources.parquet_images(stored(tmp_path / "data", table))
    with pytest.raises(SourceUnreadable, match=problem):
        read_all(source)


def test_each_source_builds_the_same_pixels_and_its_cache_knows_it_again(tmp_path):
    data = put(tmp_path / "data", {f"{n}.png": png(n) for n in range(5)})
    put(data, {"list.jsonl": "".join(f'{{"path": "{n}.png"}}\n' for n in range(5))})
    given_by = {
        "folder": sources.images(data),
        "manifest": sources.image_manifest(data / "list.jsonl"),
        "parquet": sources.parquet_images(stored(tmp_path / "shards", table(5))),
    }
    for name, source in given_by.items():
        fb.build(tmp_path / name, source, RECIPE, workers=0)
        cache = fb.open_cache(tmp_path / name)
        assert [cache[row]["pixels"][0] for row in range(5)] == list(range(5))
        (chunk,) = (tmp_path / name / "layers").glob("images.*/0*")
        chunk.chmod(stat.S_IRUSR | stat.S_IWUSR)
        chunk.unlink()
        fb.repair(tmp_path / name, workers=0)
        assert fb.verify(tmp_path / name).sound


def test_a_manifest_that_unpacks_to_very_much_is_refused(tmp_path, monkeypatch):
    put(tmp_path, {"list.jsonl.gz": gzip.compress(b'{"path": "a.png"}\n' * 5000)})
    monkeypatch.setattr(manifests, "MOST_UNPACKED", 50_000)
    monkeypatch.setattr(manifests, "_PIECE", 10_000)
    manifests.open_lines.cache_clear()
    with pytest.raises(SourceUnreadable, match="unpacks to more than 50,000 bytes; unpack it first"):
        sources.image_manifest(tmp_path / "list.jsonl.gz").files()


def test_with_labels_of_folders_the_tag_is_the_folder_and_nothing_else_changes(tmp_path: Path) -> None:
    for name in ("cat/1.png", "cat/old/2.png", "3.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "cat" / "1.json").write_text('{"tags": ["indoors"], "by": "me"}')
    plain, labeled = fb.sources.images(tmp_path), fb.sources.images(tmp_path, labels="folder")
    assert plain.files() == labeled.files()
    assert list(labeled.annotations(labeled.files())) == [
        {"tags": []},
        {"tags": ["cat"], "by": "me"},
        {"tags": ["old"]},
    ]
    assert "labels" not in plain.describe()
    for source in (plain, labeled):
        assert type(source).from_description(source.describe()) == source
        assert source.rebased(str(tmp_path.parent)).labels == source.labels
    with pytest.raises(ValueError, match="labels must be 'sidecar' or 'folder'"):
        fb.sources.images(tmp_path, labels="folders")


def test_the_stamp_of_an_image_changes_with_its_content_and_with_its_sidecar(tmp_path: Path) -> None:
    image, sidecar = tmp_path / "a.png", tmp_path / "a.json"
    image.write_bytes(b"x")
    sidecar.write_text("{}")
    source = fb.sources.images(tmp_path)
    [file] = source.files()
    stamps = [source.stamp(file)]
    for path in (image, sidecar):
        time.sleep(0.02)
        status = path.stat()
        path.write_bytes(path.read_bytes()[::-1])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert source.look("a.png").same_look(file)
        stamps.append(source.stamp(file))
    assert len(set(stamps)) == 3
