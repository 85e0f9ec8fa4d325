"""A full disk stops a build with what is needed and what is free; what is published stays, a rerun goes on."""

import contextlib
import errno
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.helpers.builders import chunk_count, chunk_digests
from tests.helpers.dedup_cases import CountingSource, CountRecipe, sorting_in
from tests.helpers.layer_recipes import tree

import forebay as fb
from forebay.errors import StoreFull

MIB = 1 << 20


@dataclass
class Disk:
    """A disk that holds a few MiB, until it is enlarged."""

    root: Path
    enlarge: Callable[[], None]


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Iterator[Disk]:
    """A small tmpfs; where none can be mounted, writing that fails as on a full disk after 6 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True
    )
    if mounted and mounted.returncode == 0:
        try:
            yield Disk(
                folder / "cache", lambda: subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
            )
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
        return
    budget, write = [6 * MIB], os.writev

    def write_while_there_is_room(descriptor: int, data: list[memoryview]) -> int:
        if sum(map(len, data)) > budget[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        budget[0] -= sum(map(len, data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "writev", write_while_there_is_room)
    yield Disk(folder / "cache", lambda: budget.__setitem__(0, 1 << 40))


@pytest.fixture
def source(tmp_path) -> fb.Source:
    """16 MiB that do not compress."""
    noise = random.Random(0)
    (tmp_path / "source.txt").write_bytes(
        b"".join(noise.randbytes(4095).replace(b"\n", b" ") + b"\n" for _ in range(4096))
    )
    return fb.sources.lines(tmp_path / "source.txt")


RECIPE = fb.RawRecipe(codec="none", chunk_bytes=MIB)


def test_a_full_disk_stops_the_build_and_after_making_room_it_goes_on_to_the_same_bytes(tmp_path, disk, source):
    with pytest.raises(
        StoreFull, match=r"(?s)(are needed, .* are free|although .* are free).*run the same command"
    ) as caught:
        fb.build(disk.root, source, RECIPE, workers=0)
    present = chunk_count(disk.root)
    assert 3 <= present <= 7
    assert 8 * MIB < caught.value.facts["needed"] < 14 * MIB
    assert caught.value.facts["free"] < 8 * MIB or not os.path.ismount(disk.root.parent)
    assert not list(disk.root.rglob(".tmp-*"))
    assert fb.status(disk.root).claims == ()
    report = fb.verify(disk.root, full=True)
    assert (report.sound, report.chunks) == (True, present)

    disk.enlarge()
    again = fb.build(disk.root, source, RECIPE, workers=0)
    assert again.present == present
    fb.build(tmp_path / "elsewhere", source, RECIPE, workers=0)
    assert chunk_digests(disk.root) == chunk_digests(tmp_path / "elsewhere")
    assert fb.status(disk.root).complete


@pytest.mark.slow
def test_workers_that_find_the_disk_full_stop_the_build_too(tmp_path, disk, source):
    if not os.path.ismount(disk.root.parent):
        disk.enlarge()  # another process cannot be made to see a full disk; what is left is that this builds
        assert fb.build(disk.root, source, RECIPE, workers=2).built > 10
        return
    with pytest.raises(StoreFull):
        fb.build(disk.root, source, RECIPE, workers=2)
    assert fb.verify(disk.root).sound
    disk.enlarge()
    fb.build(disk.root, source, RECIPE, workers=2)
    assert fb.status(disk.root).complete


def test_a_disk_without_room_for_a_claim_or_a_generation_is_a_full_disk_too(tmp_path, disk, source):
    fb.build(disk.root, source, RECIPE, workers=0, end_chunk=2)
    filler = disk.root.parent / "filler"
    fill(filler)
    with pytest.raises(StoreFull) as caught:
        fb.build(disk.root, source, RECIPE, workers=0)
    assert caught.value.facts["needed"] > 8 * MIB
    assert fb.verify(disk.root).sound
    filler.unlink()
    disk.enlarge()
    fb.build(disk.root, source, RECIPE, workers=0)
    assert fb.status(disk.root).complete


def test_a_disk_that_fills_up_between_the_last_chunk_and_the_generation_says_so_and_loses_nothing(disk, source):
    filler = disk.root.parent / "filler"

    def fill_at_the_third(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done == 3 and not filler.exists():
            fill(filler)

    with pytest.raises(StoreFull):
        fb.build(disk.root, source, RECIPE, workers=0, on_progress=fill_at_the_third)
    assert chunk_count(disk.root) >= 3
    filler.unlink()
    disk.enlarge()
    assert fb.build(disk.root, source, RECIPE, workers=0).present >= 3
    assert fb.status(disk.root).complete


def test_a_disk_without_any_room_is_a_full_disk_before_the_first_file_and_before_the_last(disk, source):
    filler = disk.root.parent / "filler"
    fill(filler)
    with pytest.raises(StoreFull):
        fb.build(disk.root, source, RECIPE, workers=0)
    filler.unlink()
    disk.enlarge()

    fb.build(disk.root, source, RECIPE, workers=0)
    for path in (disk.root / "generations").iterdir():
        path.unlink()
    if os.path.ismount(disk.root.parent):
        fill(filler)
        with pytest.raises(StoreFull):
            fb.build(disk.root, source, RECIPE, workers=0)
        filler.unlink()
    assert fb.build(disk.root, source, RECIPE, workers=0).built == 0
    assert fb.status(disk.root).complete


def test_a_disk_too_small_for_the_first_chunk_says_how_much_is_needed(disk, source):
    with pytest.raises(StoreFull) as caught:
        fb.build(disk.root, source, fb.RawRecipe(codec="none", chunk_bytes=10 * MIB), workers=0)
    assert 14 * MIB < caught.value.facts["needed"] < 20 * MIB


def test_a_disk_that_holds_less_than_a_quarter_is_refused_before_the_source_is_read(disk, tmp_path, source):
    if shutil.disk_usage(disk.root.parent).total > 64 * MIB:
        pytest.skip("no small disk can be mounted here")
    (tmp_path / "more.txt").write_bytes((tmp_path / "source.txt").read_bytes() * 3)
    much = fb.sources.lines(tmp_path / "*.txt")
    with pytest.raises(StoreFull) as caught:
        fb.build(disk.root, much, RECIPE, workers=0)
    assert 60 * MIB < caught.value.facts["needed"] < 70 * MIB
    assert not disk.root.exists()
    assert fb.build(disk.root, much, RECIPE, workers=0, end_chunk=1).built == 2, "a part may be all that is wanted"


@pytest.mark.slow
def test_a_disk_without_room_to_sort_samples_is_a_full_disk_and_nothing_is_left_on_it(disk):
    if not os.path.ismount(disk.root.parent):
        pytest.skip("no file system can be mounted here")
    recipe = CountRecipe(period=1 << 40, chunk_bytes=800_000)
    with sorting_in(4 * MIB):
        fb.build(disk.root, CountingSource(10_000), recipe, workers=0)
        before = tree(disk.root.parent)
        with pytest.raises(StoreFull):
            fb.build(disk.root.parent / "another", CountingSource(350_000), recipe, workers=0)
        with pytest.raises(StoreFull):
            fb.update(disk.root, CountingSource(350_000), recipe=recipe, workers=0)
        assert tree(disk.root.parent) == before
        disk.enlarge()
        assert fb.update(disk.root, CountingSource(350_000), recipe=recipe, workers=0).rows == 350_000


def fill(path: Path) -> None:
    """Take all the room there is, to the last byte."""
    with open(path, "wb", buffering=0) as file:
        for size in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), bytes(size))
