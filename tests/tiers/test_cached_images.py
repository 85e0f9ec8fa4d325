"""Rows read through the tiers are what decoding afresh gives; whatever a tier has that is not, is never served."""

import errno
import gc
import json
import os
import pickle
import re
import shutil
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
from tests.tiers.pictures import RECIPE, assert_same_rows, fresh_rows, write_picture, write_pictures

import forebay as fb
from forebay.errors import ImageUnreadable, SourceChanged, SourceInvalid, TierUnusable
from forebay.tiers import CachedImages, TierWarning, verify_tier, warm
from forebay.tiers.environment import KEY_BYTES, KEY_CHECK, unusable
from forebay.tiers.tier_value import encode_value, peek_value


@pytest.fixture
def source(tmp_path: Path) -> fb.Source:
    return fb.sources.images(write_pictures(tmp_path / "pictures"))


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def filled(source: fb.Source, tier: Path, **options) -> CachedImages:
    """Images whose rows are all in the tier; nothing is open."""
    images = CachedImages(source, RECIPE, l2=tier, **options)
    images.read(range(len(images)))
    images.close()
    return images


def change(tier: Path, how) -> int:
    """Write another value under every key, as `how(key, value)` says; how many there are."""
    values = values_in(tier)
    with lmdb.open(str(tier), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key, how(key, value))
    return len(values)


def remove_key_check(tier: Path) -> None:
    with lmdb.open(str(tier), map_size=1 << 26) as environment, environment.begin(write=True) as transaction:
        assert transaction.delete(KEY_CHECK)


def values_in(tier: Path) -> dict[bytes, bytes]:
    """What a tier that nobody has open holds, read without us."""
    with lmdb.open(str(tier), map_size=1 << 26) as environment, environment.begin() as transaction:
        return {bytes(key): bytes(value) for key, value in transaction.cursor() if len(key) == KEY_BYTES}


def test_a_fresh_row_an_l1_hit_and_an_l2_hit_are_bit_for_bit_what_the_recipe_makes(source, tier):
    with CachedImages(source, RECIPE, l2=tier) as images:
        every = range(len(images))
        expected = fresh_rows(source, images.recipe)
        assert images.recipe.tags == ("tag-0", "tag-1", "tag-2")
        assert_same_rows(images.read(every), expected)
        assert_same_rows(images.read(every), expected)
        found = images.statistics()
        assert (found.misses, found.l1_hits, found.l2_hits) == (12, 12, 0)
    assert found.l1_bytes > found.made_bytes == sum(map(len, values_in(tier).values()))
    with CachedImages(source, RECIPE, l2=tier) as images:
        assert_same_rows(images.read(every), expected)
        assert_same_rows(list(images), expected)
        found = images.statistics()
        assert (found.misses, found.l2_hits, found.l1_hits) == (0, 12, 12)
        assert found.l2_read_bytes > 0
    with CachedImages(source, RECIPE, l1=0) as images:
        assert_same_rows([images[index] for index in every], expected)
        assert images.statistics().l1_values == 0


def test_a_manifest_and_parquet_are_read_through_tiers_too(source, tier, tmp_path):
    files = sorted((tmp_path / "pictures").glob("*.png"))
    lines = (json.dumps({"path": f"pictures/{file.name}", "tags": ["listed"]}) for file in files)
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    for name, some in (("a", files[:7]), ("b", files[7:])):
        table = pa.table({"image": [file.read_bytes() for file in some], "tags": [["kept", name]] * len(some)})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=3)
    for other in (
        fb.sources.image_manifest(tmp_path / "list.jsonl"),
        fb.sources.parquet_images(tmp_path / "a.parquet", tmp_path / "b.parquet"),
    ):
        with CachedImages(other, RECIPE, l1=0, l2=tier) as images:
            expected = fresh_rows(other, images.recipe)
            order = [11, 3, 7, 0, 6, *range(12)]
            for _ in range(2):
                assert_same_rows(images.read(order), [expected[index] for index in order])
                images.flush()
            assert (images.statistics().misses, images.statistics().l2_hits) == (12, 12)


def test_it_is_a_sequence(source, tier):
    with CachedImages(source, RECIPE, l2=tier) as images:
        assert len(images) == 12
        assert_same_rows([images[-1], images[np.int64(3)]], images.read([11, 3]))
        assert_same_rows(images.read([3, 3]), [images[3], images[3]])
        for wrong in (12, -13):
            with pytest.raises(IndexError, match="of 12"):
                images[wrong]
        row = images[3]
        row["pixels"] = None
        assert images[3]["pixels"] is not None
        assert bytes(images[3]["id"]) == b"00003.png"


@pytest.mark.parametrize("recipe", [RECIPE, fb.ImageRecipe(size=32, storage="jpeg"), fb.ImageRecipe(size=16, tags=())])
def test_recipes_share_a_tier_and_find_only_their_own_rows(source, tier, recipe):
    filled(source, tier)
    with CachedImages(source, recipe, l2=tier) as images:
        assert_same_rows(images.read(range(12)), fresh_rows(source, images.recipe))
        assert images.statistics().l2_hits == (12 if recipe is RECIPE else 0)


def test_sources_with_files_of_one_name_size_and_time_share_a_tier_and_find_only_their_own_rows(tmp_path, tier):
    for folder, seed in (("a", 1), ("b", 2)):
        path = write_picture(tmp_path / folder / "0.bmp", seed, (20, 20))
        os.utime(path, ns=(0, 0))
    for folder in ("a", "b"):
        source = fb.sources.images(tmp_path / folder)
        with CachedImages(source, RECIPE, l2=tier) as images:
            assert_same_rows(images.read([0]), fresh_rows(source, images.recipe))
            assert images.statistics().misses == 1


@pytest.mark.parametrize("l1", [0, "256MB"])
def test_a_changed_image_or_sidecar_is_never_served_as_it_was(source, tier, tmp_path, l1):
    folder = tmp_path / "pictures"
    recipe = fb.ImageRecipe(size=32, tags=("tag-0", "other"))
    with CachedImages(source, recipe, l1=l1, l2=tier) as images:
        before = images.read([0, 1, 2])
        images.flush()
        write_picture(folder / "00000.png", 77)
        (folder / "00001.json").write_text('{"tags": ["other"]}')
        after = images.read([0, 1, 2])
        assert_same_rows(after, fresh_rows(source, recipe)[:3])
        assert not np.array_equal(after[0]["pixels"], before[0]["pixels"])
        assert after[1]["tags"].tolist() == [1]
        assert images.statistics().misses == 4  # the pixels of an image whose sidecar was edited are kept


def test_a_bmp_rewritten_at_once_with_the_same_size_is_never_served_as_it_was(tmp_path, tier):
    path = write_picture(tmp_path / "p" / "0.bmp", 0, (20, 20))
    source = fb.sources.images(tmp_path / "p")
    with CachedImages(source, RECIPE, l2=tier) as images:
        for seed in range(1, 6):
            write_picture(path, seed, (20, 20))
            assert_same_rows([images[0]], fresh_rows(source, images.recipe))


class WatchedSource:
    """A source that notes when it is read, and may do something then."""

    def __init__(self, source: fb.Source, then=lambda: None) -> None:
        self._source, self._then = source, then
        self.read_at: list[int] = []

    def __getattr__(self, name: str):
        return getattr(self._source, name)

    def read(self, part):
        self.read_at.append(time.time_ns())
        found = list(self._source.read(part))
        self._then()
        return found


def test_a_file_is_read_when_its_time_cannot_be_given_to_other_content_any_more(tmp_path):
    """The clock of files goes in steps: two contents in one step would have one name."""
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


def test_a_source_that_is_not_looked_at_again_leaves_nothing_wrong_in_the_tier(tmp_path, tier):
    path = write_picture(tmp_path / "p" / "0.bmp", 0, (20, 20))
    source, long_ago = fb.sources.images(tmp_path / "p"), (10**18, 10**18)
    os.utime(path, ns=long_ago)
    expected = fresh_rows(source, RECIPE)
    with CachedImages(source, RECIPE, l2=tier, check_source="open") as images:
        write_picture(path, 1, (20, 20))
        with pytest.raises(SourceChanged, match="changed since the source was listed"):
            images[0]
    write_picture(path, 0, (20, 20))
    os.utime(path, ns=long_ago)
    with CachedImages(source, RECIPE, l2=tier) as images:
        assert_same_rows([images[0]], expected)


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path, tier):
    path = write_picture(tmp_path / "p" / "0.png", 0)
    seeds = iter([1, 2])
    plain = fb.sources.images(tmp_path / "p")
    source = WatchedSource(plain, then=lambda: [write_picture(path, seed) for seed in [*seeds][:1]])
    with CachedImages(source, RECIPE, l2=tier) as images:
        assert_same_rows([images[0]], fresh_rows(plain, images.recipe))
        assert len(source.read_at) == 2
    with CachedImages(plain, RECIPE, l2=tier) as images:
        assert_same_rows([images[0]], fresh_rows(plain, images.recipe))
        assert images.statistics().l2_hits == 1
    endless = WatchedSource(plain, then=lambda: write_picture(path, time.time_ns() % 1000))
    with pytest.raises(SourceChanged, match="while it is read"):
        CachedImages(endless, RECIPE, l2=None)[0]


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        ("checksum", lambda key, value: value[:-20] + bytes([value[-20] ^ 4]) + value[-19:]),
        ("format", lambda key, value: value[: len(value) // 2]),
        ("format", lambda key, value: pickle.dumps({"pixels": np.zeros(3)})),
        ("format", lambda key, value: b""),
        ("shape", None),
        ("identity", None),
    ],
)
def test_a_bad_value_is_a_counted_and_reported_miss_that_is_made_again_and_replaced(source, tier, reason, how):
    images = filled(source, tier)
    sound = values_in(tier)
    values = list(sound.values())
    identities = {key: peek_value(value)[0] for key, value in sound.items()}
    if reason == "identity":  # each the value of another
        how = lambda key, value: values[(values.index(value) + 1) % len(values)]  # noqa: E731
    elif reason == "shape":  # sound but for the box
        row = {**images[0], "box": np.array([0, 0, 1, 1], np.int32)}
        images.close()
        how = lambda key, value: encode_value(identities[key], row)  # noqa: E731
    assert change(tier, how) == 12
    expected = fresh_rows(source, images.recipe)
    with pytest.warns(TierWarning, match=r"not served: .*made again and replaced") as told:
        assert_same_rows(images.read(range(12)), expected)
    assert len(told) == 1
    found = images.statistics()
    assert (found.l2_hits, found.misses, found.bad) == (0, 12, {reason: 12})
    images.close()
    assert values_in(tier) == sound


def test_a_flip_in_the_file_of_a_tier_never_changes_a_row(tmp_path, tier):
    """In the pages that hold the value, at some of its bytes; `test_tier_value` flips every bit of one."""
    write_picture(tmp_path / "p" / "0.png", 0, (6, 5))
    source = fb.sources.images(tmp_path / "p")
    images = filled(source, tier)
    expected = fresh_rows(source, images.recipe)
    [value] = values_in(tier).values()
    whole = (tier / "data.mdb").read_bytes()
    start = whole.index(value)
    for position in range(start, start + len(value), 13):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        (tier / "data.mdb").write_bytes(flipped)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            images = CachedImages(source, RECIPE, l2=tier)
            assert_same_rows(images.read([0]), expected)
            assert sum(images.statistics().bad.values()) == 1
            images.close()


def test_with_a_key_only_what_was_tagged_with_it_is_served(source, tier, monkeypatch):
    filled(source, tier)
    monkeypatch.setenv("FOREBAY_HMAC_KEY", "a secret")
    with CachedImages(source, RECIPE, l2=tier) as images:
        with pytest.warns(TierWarning, match="carries no tag"):
            rows = images.read(range(12))
        assert images.statistics().bad == {"untagged": 12}
    with CachedImages(source, RECIPE, l2=tier) as images:
        assert_same_rows(images.read(range(12)), rows)
        assert images.statistics().l2_hits == 12
    tagged = values_in(tier)

    monkeypatch.setenv("FOREBAY_HMAC_KEY", "another")
    with pytest.raises(TierUnusable, match=r"tagged with another FOREBAY_HMAC_KEY; set FOREBAY_HMAC_KEY to that key"):
        CachedImages(source, RECIPE, l2=tier)[0]
    with pytest.raises(TierUnusable, match="another FOREBAY_HMAC_KEY"):
        verify_tier(str(tier))
    remove_key_check(tier)  # as a tier of an earlier version has none
    with pytest.raises(TierUnusable, match="another FOREBAY_HMAC_KEY"):
        CachedImages(source, RECIPE, l2=tier)[0]
    assert values_in(tier) == tagged
    monkeypatch.delenv("FOREBAY_HMAC_KEY")
    with CachedImages(source, RECIPE, l2=tier) as images:
        with pytest.warns(TierWarning, match="set FOREBAY_HMAC_KEY"):
            assert_same_rows(images.read(range(12)), rows)
        assert images.statistics().bad == {"key-needed": 12}
    assert values_in(tier) == tagged  # who has no key does not replace what those with one rely on


def test_an_image_that_is_none_raises_with_its_name_or_is_left_out_and_counted(source, tier, tmp_path):
    images = CachedImages(source, RECIPE, l2=tier)
    tolerant = CachedImages(source, RECIPE, l2=tier, unreadable="skip")
    (tmp_path / "pictures" / "00003.png").write_bytes(b"<html>")
    (tmp_path / "pictures" / "00005.png").unlink()
    with pytest.raises(ImageUnreadable, match=r"\(not-an-image\): '00003.png'"):
        images[3]
    with pytest.raises(ImageUnreadable, match=r"\(not-found\): '00005.png'"):
        images.read([2, 5])
    assert images.statistics().failures == {"not-an-image": 1, "not-found": 1}
    images.close()
    with tolerant as images:
        listed = images.read(range(len(images)))
        assert [bytes(row["id"]).decode() for row in listed] == [
            f"{number:05d}.png" for number in range(12) if number not in (3, 5)
        ]
        assert images.statistics().failures == {"not-an-image": 1, "not-found": 1}


def test_trouble_with_the_disk_is_no_property_of_an_image_and_leaves_none_out(source):
    def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    images = CachedImages(WatchedSource(source, then=fail), RECIPE, unreadable="skip")
    with pytest.raises(OSError, match="Too many open files"):
        images.read([0, 1])
    assert images.statistics().failures == {}


def test_what_is_counted_when_the_queue_is_full_and_dropping_is_asked_for(source, tier):
    with CachedImages(source, RECIPE, l1=0, l2=tier, queue_bytes=1, when_full="drop") as images:
        images[0]
        images.flush()
        with images._opened.l2.environment.writing([]):  # nobody else writes meanwhile
            assert len(images.read(range(1, 12))) == 11
            assert images.statistics().dropped == {"queue full": 10}
        images.flush()
        found = images.statistics()
        assert (found.written, found.dropped) == (2, {"queue full": 10})
    assert len(values_in(tier)) == found.written


def test_by_default_reading_waits_for_the_writer_and_nothing_is_dropped(source, tier):
    with CachedImages(source, RECIPE, l1=0, l2=tier, queue_bytes=1) as images:
        images.read(range(12))
        images.flush()
        assert (images.statistics().written, images.statistics().dropped) == (12, {})
        assert images.statistics().queue_bytes == 0


def test_threads_and_files_begin_with_the_first_use_and_are_gone_when_it_is_closed(source, tier):
    before = (threading.active_count(), _open_files(tier))
    images = CachedImages(source, RECIPE, l2=tier)
    assert not tier.exists()
    images.read(range(3))
    assert threading.active_count() == before[0] + 1
    images.close()
    assert (threading.active_count(), _open_files(tier)) == before
    images.close()
    assert_same_rows(images.read([0]), fresh_rows(source, images.recipe)[:1])
    assert threading.active_count() == before[0]  # nothing to write: no thread
    del images
    gc.collect()
    assert (threading.active_count(), _open_files(tier)) == before


def _open_files(tier: Path) -> int:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(str(tier)) for link in links if os.path.lexists(link))


def test_two_in_one_process_share_a_tier_and_the_second_closes_it(source, tier):
    one, other = CachedImages(source, RECIPE, l2=tier), CachedImages(source, fb.ImageRecipe(size=16), l2=tier)
    one.read(range(12))
    one.flush()
    assert len(other.read(range(12))) == 12
    one.close()
    assert _open_files(tier)
    with pytest.raises(TierUnusable, match="choose the same"):
        CachedImages(source, RECIPE, l2=tier, max_bytes="1GB")[0]
    other.close()
    assert not _open_files(tier)
    assert len(values_in(tier)) == 24


def test_many_threads_read_at_once(source, tier):
    expected = fresh_rows(source, CachedImages(source, RECIPE).recipe)
    failed: list[BaseException] = []
    with CachedImages(source, RECIPE, l1="20kB", l2=tier) as images:

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
        found = images.statistics()
    assert not failed
    assert found.l1_hits + found.l2_hits + found.misses == 6 * 5 * 12
    assert 0 < found.l1_bytes <= 20_000


def test_a_folder_that_can_hold_no_tier_is_refused(source, tier, tmp_path):
    with lmdb.open(str(tier)) as foreign, foreign.begin(write=True) as transaction:
        transaction.put(b"somebody", b"else")
    with pytest.raises(TierUnusable, match="forebay did not make"):
        CachedImages(source, RECIPE, l2=tier)[0]
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "data.mdb").write_bytes(b"junk" * 10_000)
    with pytest.raises(TierUnusable, match="forebay did not make"):
        CachedImages(source, RECIPE, l2=tmp_path / "junk")[0]
    (tmp_path / "junk" / "users").touch()
    with pytest.warns(TierWarning, match="is damaged"):
        CachedImages(source, RECIPE, l2=tmp_path / "junk")[0]


def test_what_is_no_folder_or_no_bound_for_a_tier_is_refused_in_a_line(source, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TierUnusable, match="File exists; choose another folder"):
        CachedImages(source, RECIPE, l2=tmp_path / "file")[0]
    for max_bytes in (0, 4096):
        with pytest.raises(TierUnusable, match=f"max_bytes is {max_bytes:,}, too little for a row; give 32,768"):
            CachedImages(source, RECIPE, l2=tmp_path / "tier", max_bytes=max_bytes)[0]
    with pytest.raises(TierUnusable, match="File exists"):
        warm(source, RECIPE, tmp_path / "file")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"when_full": "dropp"}, "when_full must be 'wait' or 'drop' (got 'dropp'); did you mean 'drop'?"),
        ({"unreadable": "Raise"}, "unreadable must be 'raise' or 'skip' (got 'Raise')"),
        ({"check_source": "always"}, "check_source must be 'read' or 'open' (got 'always')"),
        ({"l2": ""}, "l2 is empty"),
        ({"source": "photos"}, "a source is needed"),
        ({"recipe": fb.RawRecipe()}, "such as fb.ImageRecipe"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_at_once(source, wrong, said):
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        CachedImages(**{"source": source, "recipe": RECIPE, **wrong})


def test_without_lmdb_the_line_that_installs_it_is_said():
    code = "import sys; sys.modules['lmdb'] = None; import forebay as fb; fb.CachedImages"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'forebay[images]'" in ran.stderr


def test_a_network_file_system_is_refused_by_name(source, tmp_path, monkeypatch):
    class Mount:
        mountpoint, fstype = str(tmp_path), "nfs4"

    monkeypatch.setattr("psutil.disk_partitions", lambda all: [Mount])
    with pytest.raises(TierUnusable, match=r"\(nfs4, mounted at '.*'\).*disk of this machine"):
        CachedImages(source, RECIPE, l2=tmp_path / "tier")[0]
    Mount.fstype = "fuse.sshfs"
    with pytest.raises(TierUnusable, match="sshfs"):
        CachedImages(source, RECIPE, l2=tmp_path / "tier")[0]
    Mount.fstype = "xfs"
    with CachedImages(source, RECIPE, l2=tmp_path / "tier") as images:
        images[0]


def test_a_source_whose_samples_have_no_numbers_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("line\n")
    with pytest.raises(SourceInvalid, match="one by one"):
        CachedImages(fb.sources.lines(tmp_path / "a.txt"), RECIPE)


@pytest.mark.parametrize(
    "changed",
    [
        {"tags": ("tag-2", "tag-0")},
        {"tags": ()},
        {"chunk_bytes": 1 << 20},
        {"codec": "zstd", "level": "max"},
        {"quality": 50},
        {"min_tag_count": 2},
        {"tag_key": "other"},
        {"tag_separator": "-"},
        {"max_pixels": 10**6},
    ],
)
def test_a_field_that_makes_no_pixel_finds_the_same_rows_with_its_own_tags(source, tier, changed):
    filled(source, tier)
    with CachedImages(source, fb.ImageRecipe(size=32, **changed), l1=0, l2=tier) as images:
        assert_same_rows(images.read(range(12)), fresh_rows(source, images.recipe))
        assert (images.statistics().l2_hits, images.statistics().misses) == (12, 0)
    assert len(values_in(tier)) == 12


def test_one_image_with_a_new_tag_is_one_miss(source, tier, tmp_path):
    filled(source, tier)
    write_picture(tmp_path / "pictures" / "99999.png", 99)
    (tmp_path / "pictures" / "99999.json").write_text('{"tags": ["new", "tag-2"]}')
    with CachedImages(source, RECIPE, l1=0, l2=tier) as images:
        assert images.recipe.tags == ("tag-2", "tag-0", "tag-1", "new")
        assert_same_rows(images.read(range(13)), fresh_rows(source, images.recipe))
        assert (images.statistics().l2_hits, images.statistics().misses) == (12, 1)


def test_a_row_of_a_larger_image_than_the_recipe_allows_is_a_failure_though_the_tier_has_it(source, tier):
    filled(source, tier)
    with CachedImages(source, fb.ImageRecipe(size=32, max_pixels=100), l2=tier, unreadable="skip") as images:
        assert [bytes(row["id"]).decode() for row in images.read(range(12))] == ["00006.png"]
        assert images.statistics().failures == {"too-large": 11}


def test_a_data_set_that_is_moved_finds_its_rows_once_their_content_is_compared(source, tier, tmp_path):
    filled(source, tier)
    shutil.copytree(tmp_path / "pictures", tmp_path / "elsewhere")
    copied = fb.sources.images(tmp_path / "elsewhere")
    for compared in (12, 0):
        with CachedImages(copied, RECIPE, l1=0, l2=tier) as images:
            assert_same_rows(images.read(range(12)), fresh_rows(copied, images.recipe))
            found = images.statistics()
            assert (found.l2_hits, found.misses, found.compared) == (12, 0, compared)
    assert verify_tier(str(tier)).sound


@pytest.mark.parametrize("l1", [0, "256MB"])
@pytest.mark.parametrize("replaced", [False, True])
def test_other_content_of_the_same_size_whose_time_was_put_back_is_never_served_as_it_was(tmp_path, tier, l1, replaced):
    """`cp -p` and `rsync -t` do that: only ctime and inode tell."""
    path = write_picture(tmp_path / "p" / "0.bmp", 0, (20, 20))
    os.utime(path, ns=(10**18, 10**18))
    source = fb.sources.images(tmp_path / "p")
    with CachedImages(source, RECIPE, l1=l1, l2=tier) as images:
        images[0]
        images.flush()
        write_picture(tmp_path / "new.bmp" if replaced else path, 1, (20, 20))
        if replaced:
            os.replace(tmp_path / "new.bmp", path)
        os.utime(path, ns=(10**18, 10**18))
        assert_same_rows([images[0]], fresh_rows(source, images.recipe))
    with CachedImages(source, RECIPE, l2=tier) as images:
        assert_same_rows([images[0]], fresh_rows(source, images.recipe))
        assert images.statistics().l2_hits == 1
    sidecar = path.with_suffix(".json")
    recipe = fb.ImageRecipe(size=32, tags=("a", "b"))
    with CachedImages(source, recipe, l1=l1, l2=tier) as images:
        for tag in "ab":
            sidecar.write_text(f'{{"tags": ["{tag}"]}}')
            os.utime(sidecar, ns=(10**18, 10**18))
            assert images[0]["tags"].tolist() == ["ab".index(tag)]
            images.flush()


def test_parquet_that_was_written_anew_with_its_time_put_back_is_read_again(tmp_path, tier):
    path = tmp_path / "a.parquet"
    for seed in (0, 1):
        pictures = [write_picture(tmp_path / f"{number}.bmp", 2 * number + seed, (9, 9)) for number in range(3)]
        pq.write_table(pa.table({"image": [one.read_bytes() for one in pictures]}), path, compression="none")
        os.utime(path, ns=(10**18, 10**18))
        source = fb.sources.parquet_images(path)
        with CachedImages(source, RECIPE, l2=tier) as images:
            assert_same_rows(images.read(range(3)), fresh_rows(source, images.recipe))
            assert images.statistics().misses == 3


def test_parquet_that_was_copied_with_its_time_finds_its_rows_once_their_content_is_compared(tmp_path, tier):
    pictures = [write_picture(tmp_path / f"{number}.bmp", number, (9, 9)) for number in range(3)]
    (tmp_path / "one").mkdir()
    pq.write_table(pa.table({"image": [one.read_bytes() for one in pictures]}), tmp_path / "one" / "a.parquet")
    filled(fb.sources.parquet_images(tmp_path / "one"), tier)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    source = fb.sources.parquet_images(tmp_path / "other")
    for compared in (3, 0):
        with CachedImages(source, RECIPE, l2=tier) as images:
            assert_same_rows(images.read(range(3)), fresh_rows(source, images.recipe))
            found = images.statistics()
            assert (found.l2_hits, found.misses, found.compared) == (3, 0, compared)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_need_not_be_emptied(tmp_path, number):
    said = str(unusable(str(tmp_path), OSError(number, os.strerror(number))))
    assert f"{os.strerror(number)}; its locks are files, also for readers: make it writable" in said
    assert "empty" not in said
