"""Rows read through L1 and L2 equal freshly decoded ones; stale and damaged rows are made again."""

import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.row_cache.pictures import RECIPE, assert_same_rows, fresh_rows, write_picture, write_pictures

import forebay as fb
from forebay.errors import SourceChanged, StoreRefused
from forebay.images.tags import ImageUnreadable
from forebay.row_cache import CachedImages, RowCacheWarning, clear
from forebay.row_cache.values import BadRow, decode_row, encode_row
from forebay.source import samples_of


@pytest.fixture
def source(tmp_path: Path) -> fb.Source:
    return fb.sources.images(write_pictures(tmp_path / "pictures"))


@pytest.fixture
def l2(tmp_path: Path) -> Path:
    return tmp_path / "rows"


def filled(source: fb.Source, l2: Path, **options) -> CachedImages:
    """Images whose rows are all in L2; nothing is open."""
    images = CachedImages(source, RECIPE, l2=l2, **options)
    images.fill()
    images.close()
    return images


def values_in(l2: Path) -> dict[bytes, bytes]:
    with lmdb.open(str(l2), map_size=1 << 26) as environment, environment.begin() as transaction:
        return {bytes(key): bytes(value) for key, value in transaction.cursor()}


def replace_values(l2: Path, change) -> int:
    values = values_in(l2)
    with lmdb.open(str(l2), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key, change(key, value))
    return len(values)


def test_fresh_rows_l1_hits_and_l2_hits_are_equal(source, l2):
    with CachedImages(source, RECIPE, l2=l2) as images:
        every = range(len(images))
        expected = fresh_rows(source, images.recipe)
        assert images.recipe.tags == ("tag-0", "tag-1", "tag-2")
        assert_same_rows(images.read(every), expected)
        assert_same_rows(images.read(every), expected)
        statistics = images.statistics()
        assert (statistics.misses, statistics.l1_hits, statistics.l2_hits, statistics.l2_written) == (12, 12, 0, 12)
        assert statistics.hit_rate == 0.5
    with CachedImages(source, RECIPE, l2=l2) as images:
        assert_same_rows(images.read(every), expected)
        assert_same_rows(list(images), expected)
        statistics = images.statistics()
        assert (statistics.misses, statistics.l2_hits, statistics.l1_hits) == (0, 12, 12)
    assert statistics.l2_read_bytes == sum(map(len, values_in(l2).values()))
    with CachedImages(source, RECIPE, l1=0) as images:
        assert_same_rows([images[index] for index in every], expected)
        assert images.statistics().l1_rows == 0


def test_manifests_and_parquet_are_read_through_the_row_cache(source, l2, tmp_path):
    files = sorted((tmp_path / "pictures").glob("*.png"))
    lines = (json.dumps({"path": f"pictures/{file.name}", "tags": ["listed"]}) for file in files)
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    for name, some in (("a", files[:7]), ("b", files[7:])):
        table = pa.table({"image": [file.read_bytes() for file in some], "tags": [["parquet", name]] * len(some)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
    for other in (
        fb.sources.image_manifest(tmp_path / "list.jsonl"),
        fb.sources.parquet_images(tmp_path / "a.parquet", tmp_path / "b.parquet"),
    ):
        with CachedImages(other, RECIPE, l1=0, l2=l2) as images:
            expected = fresh_rows(other, images.recipe)
            order = [11, 3, 7, 0, 6, *range(12)]
            for _ in range(2):
                assert_same_rows(images.read(order), [expected[index] for index in order])
            assert (images.statistics().misses, images.statistics().l2_hits) == (12, 12)


def test_it_is_a_sequence_of_read_only_rows(source, l2):
    with CachedImages(source, RECIPE, l2=l2) as images:
        assert len(images) == 12
        assert_same_rows([images[-1], images[np.int64(3)]], images.read([11, 3]))
        assert_same_rows(images.read([3, 3]), [images[3], images[3]])
        for wrong in (12, -13):
            with pytest.raises(IndexError, match="12 samples"):
                images[wrong]
        row = images[3]
        with pytest.raises(ValueError, match="read-only"):
            row["pixels"][:] = 0
        row["pixels"] = None
        assert images[3]["pixels"] is not None
        assert bytes(images[3]["id"]) == b"00003.png"


@pytest.mark.parametrize("recipe", [RECIPE, fb.ImageRecipe(size=32, storage="jpeg"), fb.ImageRecipe(size=16, tags=())])
def test_recipes_that_share_an_l2_get_only_their_own_rows(source, l2, recipe):
    filled(source, l2)
    with CachedImages(source, recipe, l2=l2) as images:
        assert_same_rows(images.read(range(12)), fresh_rows(source, images.recipe))
        assert images.statistics().l2_hits == (12 if recipe is RECIPE else 0)


@pytest.mark.parametrize("changed", [{"tags": ("tag-2", "tag-0")}, {"tags": ()}, {"codec": "zstd"}, {"tag_key": "x"}])
def test_another_vocabulary_or_codec_uses_the_same_rows(source, l2, changed):
    filled(source, l2)
    with CachedImages(source, fb.ImageRecipe(size=32, **changed), l1=0, l2=l2) as images:
        assert_same_rows(images.read(range(12)), fresh_rows(source, images.recipe))
        assert (images.statistics().l2_hits, images.statistics().misses) == (12, 0)


def test_one_new_image_with_a_new_tag_is_one_miss(source, l2, tmp_path):
    filled(source, l2)
    write_picture(tmp_path / "pictures" / "99999.png", 99)
    (tmp_path / "pictures" / "99999.json").write_text('{"tags": ["new", "tag-2"]}')
    with CachedImages(source, RECIPE, l1=0, l2=l2) as images:
        assert images.recipe.tags == ("tag-2", "tag-0", "tag-1", "new")
        assert_same_rows(images.read(range(13)), fresh_rows(source, images.recipe))
        assert (images.statistics().l2_hits, images.statistics().misses) == (12, 1)


def test_folders_with_equal_names_sizes_and_times_do_not_share_rows(tmp_path, l2):
    for folder, seed in (("a", 1), ("b", 2)):
        path = write_picture(tmp_path / folder / "0.bmp", seed, (20, 20))
        os.utime(path, ns=(0, 0))
    for folder in ("a", "b", "a"):
        source = fb.sources.images(tmp_path / folder)
        with CachedImages(source, RECIPE, l2=l2) as images:
            assert_same_rows(images.read([0]), fresh_rows(source, images.recipe))
    assert len(values_in(l2)) == 2


@pytest.mark.parametrize("l1", [0, "256MB"])
def test_a_changed_image_or_sidecar_is_a_miss_and_replaces_the_stale_row(source, l2, tmp_path, l1):
    folder = tmp_path / "pictures"
    recipe = fb.ImageRecipe(size=32, tags=("tag-0", "other"))
    with CachedImages(source, recipe, l1=l1, l2=l2) as images:
        before = images.read([0, 1, 2])
        write_picture(folder / "00000.png", 77)
        (folder / "00001.json").write_text('{"tags": ["other"]}')
        after = images.read([0, 1, 2])
        assert_same_rows(after, fresh_rows(source, recipe)[:3])
        assert not np.array_equal(after[0]["pixels"], before[0]["pixels"])
        assert after[1]["tags"].tolist() == [1]
        assert (images.statistics().misses, images.statistics().stale) == (5, 2)
    assert len(values_in(l2)) == 3
    with CachedImages(source, recipe, l2=l2) as images:
        images.read([0, 1, 2])
        assert images.statistics().l2_hits == 3


@pytest.mark.parametrize("l1", [0, "256MB"])
@pytest.mark.parametrize("replaced", [False, True])
def test_other_content_with_the_same_size_and_mtime_is_never_served_as_before(tmp_path, l2, l1, replaced):
    """`cp -p` and `rsync -t` do that: only ctime and inode differ."""
    path = write_picture(tmp_path / "p" / "0.bmp", 0, (20, 20))
    os.utime(path, ns=(10**18, 10**18))
    source = fb.sources.images(tmp_path / "p")
    with CachedImages(source, RECIPE, l1=l1, l2=l2) as images:
        images[0]
        write_picture(tmp_path / "new.bmp" if replaced else path, 1, (20, 20))
        if replaced:
            os.replace(tmp_path / "new.bmp", path)
        os.utime(path, ns=(10**18, 10**18))
        assert_same_rows([images[0]], fresh_rows(source, images.recipe))


class WatchedSource:
    """A source that records when it is read and may then do something."""

    def __init__(self, source: fb.Source, then=lambda: None) -> None:
        self._source, self._then = source, then
        self.read_at: list[int] = []

    def __getattr__(self, name: str):
        return getattr(self._source, name)

    def read(self, part, *, digest=None, preview=False):
        self.read_at.append(time.time_ns())
        samples = list(samples_of(self._source, part))
        self._then()
        return samples


def test_a_file_is_read_only_after_the_clock_step_of_its_mtime(tmp_path):
    path = write_picture(tmp_path / "p" / "0.bmp", 0, (20, 20))
    source = WatchedSource(fb.sources.images(tmp_path / "p"))
    images = CachedImages(source, RECIPE)
    for seed in range(3):
        write_picture(path, seed, (20, 20))
        images[0]
        assert source.read_at[-1] - path.stat().st_mtime_ns >= 20_000_000
    sidecar = path.with_suffix(".json")
    for tag in "abc":
        sidecar.write_text(f'{{"tags": ["{tag}"]}}')
        images[0]
        assert source.read_at[-1] - sidecar.stat().st_mtime_ns >= 20_000_000


def test_check_source_open_raises_for_a_file_that_changed_after_listing(tmp_path, l2):
    path = write_picture(tmp_path / "p" / "0.bmp", 0, (20, 20))
    source = fb.sources.images(tmp_path / "p")
    os.utime(path, ns=(10**18, 10**18))
    with CachedImages(source, RECIPE, l2=l2, check_source="open") as images:
        write_picture(path, 1, (20, 20))
        with pytest.raises(SourceChanged):
            images[0]
    assert values_in(l2) == {}


def test_a_file_that_changes_while_it_is_read_is_an_error_and_nothing_is_stored(tmp_path, l2):
    path = write_picture(tmp_path / "p" / "0.png", 0)
    plain = fb.sources.images(tmp_path / "p")
    source = WatchedSource(plain, then=lambda: write_picture(path, time.time_ns() % 1000))
    with CachedImages(source, RECIPE, l2=l2) as images, pytest.raises(SourceChanged, match="while it was read"):
        images[0]
    assert values_in(l2) == {}


def flipped(value: bytes) -> bytes:
    return value[:-100] + bytes([value[-100] ^ 4]) + value[-99:]


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("damaged", lambda key, value: flipped(value)),
        ("damaged", lambda key, value: value[: len(value) // 2]),
        ("damaged", lambda key, value: pickle.dumps({"pixels": np.zeros(3)})),
        ("damaged", lambda key, value: b""),
        ("shape", None),
        ("identity", None),
    ],
)
def test_a_bad_row_is_a_counted_miss_with_one_warning_and_is_replaced(source, l2, reason, change):
    images = filled(source, l2)
    sound = values_in(l2)
    values = list(sound.values())
    columns = {column.name: column for column in RECIPE.columns() if column.name != "tags"}
    if reason == "identity":  # each the value of another
        change = lambda key, value: values[(values.index(value) + 1) % len(values)]  # noqa: E731
    elif reason == "shape":

        def change(key, value):
            stored = decode_row(value, columns, None)
            return encode_row(stored.identity, {**stored.row, "box": np.zeros(5, np.int32)}, None)

    assert replace_values(l2, change) == 12
    expected = fresh_rows(source, images.recipe)
    with pytest.warns(RowCacheWarning, match=r"not served: .*made again and replaced") as warned:
        assert_same_rows(images.read(range(12)), expected)
    assert len(warned) == 1
    statistics = images.statistics()
    assert (statistics.l2_hits, statistics.misses, statistics.bad) == (0, 12, {reason: 12})
    images.close()
    assert values_in(l2) == sound


@pytest.mark.parametrize("key", [None, b"a key"])
def test_a_flip_of_any_byte_of_a_value_is_detected(source, l2, key):
    images = filled(source, l2)
    columns = {column.name: column for column in RECIPE.columns() if column.name != "tags"}
    stored = decode_row(min(values_in(l2).values(), key=len), columns, None)
    value = encode_row(stored.identity, stored.row, key)
    assert_same_rows([decode_row(value, columns, key).row], [stored.row])
    for position in [*range(400), *range(4000, len(value))]:
        wrong = bytearray(value)
        wrong[position] ^= 1 << (position % 8)
        with pytest.raises(BadRow):
            decode_row(bytes(wrong), columns, key)
    images.close()


def test_with_a_key_only_rows_with_its_tag_are_served(source, l2, monkeypatch):
    filled(source, l2)
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "a secret of 32 bytes or some more")
    for l2_hits in (0, 12):
        with CachedImages(source, RECIPE, l2=l2) as images, warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert_same_rows(images.read(range(12)), fresh_rows(source, images.recipe))
            assert images.statistics().l2_hits == l2_hits
            assert images.statistics().bad == ({} if l2_hits else {"key": 12})
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "another secret of 32 bytes or more")
    with CachedImages(source, RECIPE, l2=l2) as images:
        with pytest.warns(RowCacheWarning):
            rows = images.read(range(12))
        assert_same_rows(rows, fresh_rows(source, images.recipe))
        assert images.statistics().bad == {"key": 12}


def test_an_unreadable_image_raises_with_its_name_or_is_skipped_and_counted(source, l2, tmp_path):
    images = CachedImages(source, RECIPE, l2=l2)
    tolerant = CachedImages(source, RECIPE, l2=l2, unreadable="skip")
    (tmp_path / "pictures" / "00003.png").write_bytes(b"<html>")
    (tmp_path / "pictures" / "00005.png").unlink()
    with pytest.raises(ImageUnreadable, match=r"'00003.png'"):
        images[3]
    with pytest.raises(ImageUnreadable, match=r"'00005.png'"):
        images.read([2, 5])
    assert images.statistics().failures == {"not-an-image": 1, "not-found": 1}
    images.close()
    with tolerant as images:
        rows = images.read(range(len(images)))
        names = [f"{number:05d}.png" for number in range(12) if number not in (3, 5)]
        assert [bytes(row["id"]).decode() for row in rows] == names
        assert images.statistics().failures == {"not-an-image": 1, "not-found": 1}


def open_files(l2: Path) -> int:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(str(l2)) for link in links if os.path.lexists(link))


def test_files_are_opened_at_first_use_and_closed_with_the_last_user(source, l2):
    one, other = CachedImages(source, RECIPE, l2=l2), CachedImages(source, fb.ImageRecipe(size=16), l2=l2)
    assert not l2.exists()
    one.read(range(12))
    other.read(range(12))
    one.close()
    assert open_files(l2)
    other.close()
    other.close()
    assert not open_files(l2)
    assert len(values_in(l2)) == 24
    assert_same_rows(one.read([0]), fresh_rows(source, one.recipe)[:1])
    one.close()


def test_many_threads_read_at_once(source, l2):
    expected = fresh_rows(source, CachedImages(source, RECIPE).recipe)
    failed: list[BaseException] = []
    with CachedImages(source, RECIPE, l1="20kB", l2=l2) as images:

        def read(seed: int) -> None:
            try:
                order = np.random.default_rng(seed).permutation(12).tolist()
                for _ in range(5):
                    assert_same_rows(images.read(order), [expected[index] for index in order])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statistics = images.statistics()
    assert not failed
    assert statistics.l1_hits + statistics.l2_hits + statistics.misses == 6 * 5 * 12
    assert 0 < statistics.l1_bytes <= 20_000


def test_a_folder_of_somebody_else_is_rejected_and_left_alone(source, l2, tmp_path):
    with lmdb.open(str(l2)) as foreign, foreign.begin(write=True) as transaction:
        transaction.put(b"somebody", b"else")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "notes.txt").write_text("mine")
    for folder in (l2, tmp_path / "junk"):
        with pytest.raises(StoreRefused, match="is not empty"):
            CachedImages(source, RECIPE, l2=folder)[0]
        with pytest.raises(StoreRefused, match="is not a row cache"):
            clear(folder)
    assert values_in(l2) == {b"somebody": b"else"}
    (tmp_path / "file").touch()
    with pytest.raises(StoreRefused, match="File exists"):
        CachedImages(source, RECIPE, l2=tmp_path / "file")[0]


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "users"])
def test_nothing_is_written_through_a_link(source, l2, tmp_path, name):
    filled(source, l2)
    (tmp_path / "precious").write_bytes(b"mine")
    (l2 / name).unlink()
    (l2 / name).symlink_to(tmp_path / "precious")
    with pytest.raises(StoreRefused, match=rf"'{name}' .* is not a regular file"):
        CachedImages(source, RECIPE, l2=l2)[0]
    assert (tmp_path / "precious").read_bytes() == b"mine"


def test_clear_deletes_the_rows_unless_they_are_in_use(source, l2):
    images = filled(source, l2)
    images[0]
    with pytest.raises(StoreRefused, match="in use"):
        clear(l2)
    images.close()
    assert clear(l2) > 12 * 1000
    images[0]
    assert (images.statistics().misses, images.statistics().l2_hits) == (1, 0)
    images.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"unreadable": "Raise"}, "unreadable must be 'raise' or 'skip' (got 'Raise')"),
        ({"check_source": "always"}, "check_source must be 'read' or 'open' (got 'always')"),
        ({"l2": ""}, "l2 is empty"),
        ({"source": "photos"}, "source must be a Source"),
        ({"recipe": fb.RawRecipe()}, "such as fb.ImageRecipe"),
    ],
)
def test_wrong_arguments_are_rejected_by_the_constructor(source, wrong, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        CachedImages(**{"source": source, "recipe": RECIPE, **wrong})


def test_without_lmdb_the_error_has_the_install_command():
    code = "import sys; sys.modules['lmdb'] = None; import forebay as fb; fb.CachedImages"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'forebay[images]'" in ran.stderr


def test_a_network_file_system_is_rejected(source, tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.store.tier_folder.file_system", lambda path: "nfs4")
    with pytest.raises(StoreRefused, match=r"network file system \(nfs4\)"):
        CachedImages(source, RECIPE, l2=tmp_path / "rows")[0]
