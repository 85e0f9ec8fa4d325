"""A tier grows as it is filled. At its bound, or on a full disk, writing ends with one warning and reading goes on."""

import os
import resource
import shutil
import subprocess
import threading
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.pictures import assert_same_rows, fresh_rows, write_picture
from tests.tiers.processes import FORK, run

import forebay as fb
from forebay.tiers import CachedImages, TierWarning, summarize_tier, verify_tier
from forebay.tiers.lmdb_tier import open_tier

MIB = 1 << 20
RECIPE = fb.ImageRecipe(size=256, tags=())  # 192 KiB a row


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> fb.Source:
    folder = tmp_path_factory.mktemp("of-full-tiers")
    for number in range(40):
        write_picture(folder / f"{number:03d}.bmp", number, (256, 256))
    return fb.sources.images(folder)


@pytest.fixture(scope="module")
def expected(source) -> list:
    return fresh_rows(source, RECIPE)


def test_the_map_grows_as_it_is_filled(source, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.tiers.lmdb_tier.FIRST_MAP_BYTES", MIB)
    with CachedImages(source, RECIPE, l1=0, l2=tmp_path) as images:
        assert images.statistics().written == 0  # the tier is open
        assert summarize_tier(str(tmp_path)).map_bytes == MIB
        images.read(range(40))
        images.flush()
        assert 8 * MIB <= summarize_tier(str(tmp_path)).map_bytes <= 32 * MIB
        assert (images.statistics().written, images.statistics().dropped) == (40, {})
        assert_same_rows(images.read(range(40)), expected)
        assert images.statistics().l2_hits == 40


def check_that_reading_goes_on(images: CachedImages, expected: list, why: str) -> int:
    """Writing ends once, with a warning that says why; what was written stays. How many rows that is."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            assert_same_rows(images.read(range(40)), expected)
            images.flush()
    [line] = [str(one.message) for one in told if issubclass(one.category, TierWarning)]
    assert why in line
    assert "what it has is still read" in line
    found = images.statistics()
    assert found.written > 2
    assert found.l2_hits == 2 * found.written
    [(reason, dropped)] = found.dropped.items()
    assert why in reason
    assert why in found.writing_off
    assert dropped + found.written + found.present == found.misses
    images.close()
    assert verify_tier(str(images.l2)).sound
    return found.written


def test_at_its_bound_a_tier_takes_what_fits_and_no_more(source, expected, tmp_path):
    images = CachedImages(source, RECIPE, l1=0, l2=tmp_path, max_bytes=2 * MIB)
    written = check_that_reading_goes_on(images, expected, "reached 2,097,152 bytes")
    assert 7 <= written <= 10
    assert (tmp_path / "data.mdb").stat().st_size <= 2 * MIB
    with CachedImages(source, RECIPE, l1=0, l2=tmp_path) as images:  # a larger bound, and it goes on
        images.read(range(40))
        images.flush()
        assert images.statistics().written == 40 - written


def test_a_tier_with_a_smaller_bound_than_before_keeps_what_it_has(source, expected, tmp_path):
    with CachedImages(source, RECIPE, l1=0, l2=tmp_path) as images:
        images.read(range(20))
    size = (tmp_path / "data.mdb").stat().st_size
    with CachedImages(source, RECIPE, l1=0, l2=tmp_path, max_bytes=MIB) as images:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TierWarning)
            assert_same_rows(images.read(range(40)), expected)
            images.flush()
        assert images.statistics().l2_hits == 20
    assert (tmp_path / "data.mdb").stat().st_size == size


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("no file system can be mounted here; a limit on file sizes stands for it below")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_on_a_full_disk_writing_ends_and_reading_goes_on_here_and_in_other_processes(source, expected, disk):
    images = CachedImages(source, RECIPE, l1=0, l2=disk / "tier")
    written = check_that_reading_goes_on(images, expected, "the disk is full")
    (disk / "filler").write_bytes(b"")
    with open(disk / "filler", "ab", buffering=0) as filler:
        while shutil.disk_usage(disk).free and filler.write(bytes(4096)):
            pass
    run(FORK, read_on_a_full_disk, source, expected, disk / "tier", written)
    (disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    with images:  # opened again, it writes again
        assert_same_rows(images.read(range(40)), expected)
        images.flush()
        assert summarize_tier(str(disk / "tier")).values == 40


def read_on_a_full_disk(source: fb.Source, expected: list, tier: Path, written: int) -> None:
    images = CachedImages(source, RECIPE, l1=0, l2=tier)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TierWarning)
        assert_same_rows(images.read(range(40)), expected)
    assert images.statistics().l2_hits == written


def test_a_file_that_may_not_grow_ends_writing_too(source, expected, tmp_path):
    run(FORK, write_under_a_limit, source, expected, tmp_path / "tier")
    with CachedImages(source, RECIPE, l1=0, l2=tmp_path / "tier") as images:
        assert_same_rows(images.read(range(40)), expected)
        assert images.statistics().l2_hits > 2


def write_under_a_limit(source: fb.Source, expected: list, tier: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIB, 2 * MIB))
    images = CachedImages(source, RECIPE, l1=0, l2=tier, queue_bytes="400kB")
    check_that_reading_goes_on(images, expected, "writing failed")


def test_a_tier_can_be_emptied_while_it_is_open_and_its_room_is_used_again(source, tmp_path):
    with CachedImages(source, RECIPE, l1=0, l2=tmp_path, max_bytes=10 * MIB) as images:
        for _ in range(3):
            images.read(range(40))
            images.flush()
            report = fb.tiers.clear_tier(str(tmp_path))
            assert (report.removed, report.in_use) == (40, True)
            assert summarize_tier(str(tmp_path)).values == 0
        assert images.statistics().dropped == {}
    assert fb.tiers.clear_tier(str(tmp_path)).in_use is False
    assert os.listdir(tmp_path) == ["users"]
    with pytest.raises(fb.errors.TierNotFound):
        open_tier(str(tmp_path), create=False)


def test_what_was_offered_is_flushed_whatever_is_offered_meanwhile(tmp_path):
    opened = open_tier(str(tmp_path))
    stop = threading.Event()

    def keep_offering() -> None:
        while not stop.is_set():
            opened.put(os.urandom(16), bytes(20_000), replaces=False, when_full="wait")

    offering, flushing = threading.Thread(target=keep_offering), threading.Thread(target=opened.writer.flush)
    offering.start()
    flushing.start()
    flushing.join(20)
    is_stuck = flushing.is_alive()
    stop.set()
    for thread in (offering, flushing):
        thread.join()
    opened.close()
    assert not is_stuck


def test_large_values_are_checked_a_few_at_a_time(tmp_path):
    opened = open_tier(str(tmp_path))
    for _ in range(40):
        opened.put(os.urandom(16), bytes(2 * MIB), replaces=False, when_full="wait")
    opened.writer.flush()
    tracemalloc.start()
    try:
        assert len(verify_tier(str(tmp_path)).bad) == 40
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    finally:
        tracemalloc.stop()
        opened.close()


def test_where_the_system_reserves_no_room_the_lock_file_is_written_in_full(source, tmp_path, monkeypatch):
    """macOS has no `posix_fallocate`."""
    monkeypatch.delattr(os, "posix_fallocate")
    with CachedImages(source, RECIPE, l2=tmp_path) as images:
        images[0]
    reserved = os.stat(tmp_path / "lock.mdb")
    assert reserved.st_size >= 64 << 10
    assert reserved.st_blocks * 512 >= 64 << 10
